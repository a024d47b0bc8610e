// Keys and values in eight bits; see sparse.cuh.
#include "chunk_attention/sparse.cuh"

// With 128 elements a head, `wide` takes 165 KiB of shared memory (sm_80, Orin, sm_90), the others at most 83 KiB.
#define SPARSE_ONE(E, name, format, kv, dim, suffix, split, keys, slots)                            \
    extern "C" __global__ void __launch_bounds__(256, 1) chunk_sparse_##suffix##_##name##_##kv##_##dim( \
        const __grid_constant__ SparseArguments<QuantizedRows<E, format, dim>::Pools> args) {       \
        sparse_chunk<QuantizedRows<E, format, dim>, split, keys, slots>(args);                      \
    }
#define SPARSE(E, name, format, kv)                           \
    SPARSE_ONE(E, name, format, kv, 128, wide_1, 1, 32, 5)    \
    SPARSE_ONE(E, name, format, kv, 128, narrow_1, 1, 16, 5)  \
    SPARSE_ONE(E, name, format, kv, 128, split_4, 4, 16, 5)   \
    SPARSE_ONE(E, name, format, kv, 64, wide_1, 1, 32, 4)     \
    SPARSE_ONE(E, name, format, kv, 64, split_4, 4, 32, 3)

SPARSE(F16, f16, Int8, i8)
SPARSE(BF16, bf16, Int8, i8)
SPARSE(F16, f16, E4M3, e4m3)
SPARSE(BF16, bf16, E4M3, e4m3)
