// Keys and values in the type of the queries; see dense.cuh.
#include "chunk_attention/dense.cuh"

#define DENSE(E, name, dim)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) chunk_dense_##name##_##dim(            \
        const __grid_constant__ DenseArguments<ExactRows<E, dim>::Pools> args) {                     \
        dense_chunk<ExactRows<E, dim>, false>(args);                                                 \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) chunk_dense_split_##name##_##dim(      \
        const __grid_constant__ DenseArguments<ExactRows<E, dim>::Pools> args) {                     \
        dense_chunk<ExactRows<E, dim>, true>(args);                                                  \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads) chunk_combine_##name##_##dim(             \
        const __grid_constant__ DenseArguments<ExactRows<E, dim>::Pools> args) {                     \
        combine<E, dim>(args);                                                                       \
    }

DENSE(F16, f16, 64)
DENSE(F16, f16, 128)
DENSE(BF16, bf16, 64)
DENSE(BF16, bf16, 128)
