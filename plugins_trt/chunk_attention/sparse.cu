// Keys and values in the type of the queries; see sparse.cuh.
#include "chunk_attention/sparse.cuh"

// With 128 elements a head, `wide` takes 192 KiB of shared memory (sm_90), `middle` 128 KiB (sm_80, Orin), the others
// at most 96 KiB (every sm_80 and later).
#define SPARSE_ONE(E, name, dim, suffix, split, keys, slots)                                                      \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                          \
        chunk_sparse_##suffix##_##name##_##dim(const __grid_constant__ SparseArguments<ExactRows<E, dim>::Pools> args) { \
        sparse_chunk<ExactRows<E, dim>, split, keys, slots>(args);                                                           \
    }
#define SPARSE(E, name)                                  \
    SPARSE_ONE(E, name, 128, wide_1, 1, 32, 3)           \
    SPARSE_ONE(E, name, 128, middle_1, 1, 16, 4)         \
    SPARSE_ONE(E, name, 128, narrow_1, 1, 16, 2)         \
    SPARSE_ONE(E, name, 128, split_4, 4, 16, 3)          \
    SPARSE_ONE(E, name, 64, wide_1, 1, 32, 4)            \
    SPARSE_ONE(E, name, 64, narrow_1, 1, 16, 3)          \
    SPARSE_ONE(E, name, 64, split_4, 4, 32, 3)

SPARSE(F16, f16)
SPARSE(BF16, bf16)
