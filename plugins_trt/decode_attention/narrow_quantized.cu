// Keys and values in eight bits; see narrow.cuh.
#include "decode_attention/narrow.cuh"

// To unpack eight bits takes more warps than to load them: one thread block fills a multiprocessor, so that few parts are
// left to combine. `many` is for devices that have 147 KiB of shared memory for it, `one` (130 KiB) as in narrow.cu.
#define NARROW_FORM(form, type, suffix, format, kv, dim, warps, stages)                                  \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1) form##_##suffix##_##kv##_d##dim(         \
        const Batch batch, const QuantizedArena arena, const Attend args) {                              \
        narrow<QuantizedUnit<type, format, dim, 16>, warps, stages>(batch, arena, args);                 \
    }
#define NARROW(type, suffix, format, kv, dim)                          \
    NARROW_FORM(narrow, type, suffix, format, kv, dim, 8, 3)           \
    NARROW_FORM(narrow_many, type, suffix, format, kv, dim, 12, 3)     \
    NARROW_FORM(narrow_one, type, suffix, format, kv, dim, 8, 4)
#define NARROW_OF(format, kv)          \
    NARROW(F16, f16, format, kv, 64)   \
    NARROW(F16, f16, format, kv, 128)  \
    NARROW(BF16, bf16, format, kv, 64) \
    NARROW(BF16, bf16, format, kv, 128)

NARROW_OF(Int8, i8)
NARROW_OF(E4M3, e4m3)
