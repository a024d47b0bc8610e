// Keys and values in eight bits; see narrow.cuh.
#include "decode_attention/narrow.cuh"

// To unpack eight bits takes more warps than to load 16: eight of them, which leave room on a multiprocessor for what the
// launches before have not ended.
#define NARROW(unit, suffix, kv, dim)                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) narrow_##suffix##_##kv##_d##dim(          \
        const Batch batch, const QuantizedArena arena, const Attend args) {                        \
        narrow<unit, 8, 3>(batch, arena, args);                                                    \
    }
#define NARROW_OF(type, suffix, dim)                                    \
    using Integers_##suffix##_##dim = IntegerUnit<type, dim, 16>;       \
    using Floats_##suffix##_##dim = QuantizedUnit<type, E4M3, dim, 16>; \
    NARROW(Integers_##suffix##_##dim, suffix, i8, dim)                  \
    NARROW(Floats_##suffix##_##dim, suffix, e4m3, dim)

NARROW_OF(F16, f16, 64)
NARROW_OF(F16, f16, 128)
NARROW_OF(BF16, bf16, 64)
NARROW_OF(BF16, bf16, 128)
