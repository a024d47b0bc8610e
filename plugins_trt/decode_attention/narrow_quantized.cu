// Keys and values in eight bits; see narrow.cuh.
#include "decode_attention/narrow.cuh"

#define NARROW(type, suffix, format, kv, dim, stages)                                                               \
    extern "C" __global__ void __launch_bounds__(128, 3)                                                            \
        narrow_##suffix##_##kv##_d##dim(const Batch batch, const QuantizedArena arena, const Attend args) {         \
        narrow<QuantizedUnit<type, format, dim, 16>, 4, stages>(batch, arena, args);                                    \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 1)                                                            \
        narrow_one_##suffix##_##kv##_d##dim(const Batch batch, const QuantizedArena arena, const Attend args) {     \
        narrow<QuantizedUnit<type, format, dim, 16>, 8, 4>(batch, arena, args);                                         \
    }
#define NARROW_OF(format, kv)            \
    NARROW(F16, f16, format, kv, 64, 6)  \
    NARROW(F16, f16, format, kv, 128, 4) \
    NARROW(BF16, bf16, format, kv, 64, 6) \
    NARROW(BF16, bf16, format, kv, 128, 4)

NARROW_OF(Int8, i8)
NARROW_OF(E4M3, e4m3)
