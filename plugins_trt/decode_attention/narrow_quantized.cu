// Keys and values in eight bits; see narrow.cuh.
#include "decode_attention/narrow.cuh"

// To unpack eight bits takes more warps than to load them: `many` fills a multiprocessor with one thread block, so that
// few parts are left to combine, where the device has shared memory for it. `one`: see narrow.cu.
#define NARROW_FORM(form, type, suffix, format, kv, dim, threads, blocks, stages)                        \
    extern "C" __global__ void __launch_bounds__(threads, blocks) form##_##suffix##_##kv##_d##dim(       \
        const Batch batch, const QuantizedArena arena, const Attend args) {                              \
        narrow<QuantizedUnit<type, format, dim, 16>, threads / 32, stages>(batch, arena, args);          \
    }
#define NARROW(type, suffix, format, kv, dim, stages)                              \
    NARROW_FORM(narrow, type, suffix, format, kv, dim, 128, 3, stages)             \
    NARROW_FORM(narrow_many, type, suffix, format, kv, dim, 384, 1, 3)             \
    NARROW_FORM(narrow_one, type, suffix, format, kv, dim, 256, 1, 4)
#define NARROW_OF(format, kv)             \
    NARROW(F16, f16, format, kv, 64, 6)   \
    NARROW(F16, f16, format, kv, 128, 4)  \
    NARROW(BF16, bf16, format, kv, 64, 6) \
    NARROW(BF16, bf16, format, kv, 128, 4)

NARROW_OF(Int8, i8)
NARROW_OF(E4M3, e4m3)
