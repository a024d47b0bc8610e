// Keys and values in 16 bits; see narrow.cuh.
#include "decode_attention/narrow.cuh"

// `one`: for a token that selects, alone in its step, whose context is short: more warps, which each take less.
// `many`: for many tokens that select, on devices whose multiprocessors have room for three such thread blocks.
#define NARROW(type, suffix, dim, stages, many_stages)                                           \
    extern "C" __global__ void __launch_bounds__(128, 2)                                         \
        narrow_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) {      \
        narrow<Unit<type, dim>, 4, stages>(batch, arena, args);                                  \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(128, 3)                                         \
        narrow_many_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) { \
        narrow<Unit<type, dim>, 4, many_stages, true>(batch, arena, args);                       \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 1)                                         \
        narrow_one_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) {  \
        narrow<Unit<type, dim>, 8, 2>(batch, arena, args);                                       \
    }

NARROW(F16, f16, 64, 4, 4)
NARROW(F16, f16, 128, 3, 2)
NARROW(BF16, bf16, 64, 4, 4)
NARROW(BF16, bf16, 128, 3, 2)
