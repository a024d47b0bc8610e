// Keys and values in eight bits; see dense.cuh.
#include "chunk_attention/dense.cuh"

#define DENSE(E, name, format, kv, dim)                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) chunk_dense_##name##_##kv##_##dim(     \
        const __grid_constant__ DenseArguments<WidenedRows<E, format, dim>::Pools> args) {         \
        dense_chunk<WidenedRows<E, format, dim>, false>(args);                                     \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) chunk_dense_split_##name##_##kv##_##dim( \
        const __grid_constant__ DenseArguments<WidenedRows<E, format, dim>::Pools> args) {         \
        dense_chunk<WidenedRows<E, format, dim>, true>(args);                                      \
    }
#define DENSE_OF(format, kv)                                                                         \
    DENSE(F16, f16, format, kv, 64)                                                                  \
    DENSE(F16, f16, format, kv, 128)                                                                 \
    DENSE(BF16, bf16, format, kv, 64)                                                                \
    DENSE(BF16, bf16, format, kv, 128)

DENSE_OF(Int8, i8)
DENSE_OF(E4M3, e4m3)
