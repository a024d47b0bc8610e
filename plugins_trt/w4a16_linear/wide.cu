// The product of up to 64 rows of x with 4-bit weights by warpgroups (packed/wide.cuh), where the device has them.
// For compute capability 9.0 alone.
#include "packed/tiles.cuh"

#ifdef WARPGROUPS
#include "packed/wide.cuh"
#include "w4a16_linear/weights.cuh"

// Rows of x; warpgroups, stages. A round is 128 inputs. With "_at_once", zero points
// that are no powers of two cost some exactness.
#define WIDE(type, suffix, rows, m, stages, name, ...)                                                \
    extern "C" __global__ void __launch_bounds__(128 * m + 32, 1)                                     \
        w4a16_wide_##suffix##_n##rows##_m##m##name(const __grid_constant__ WideLinear<Linear> args) { \
        wide<FourBits<type, __VA_ARGS__>, rows / 8, m, 2, stages>(args);                              \
    }
#define WIDE_OF(type, suffix, name, ...)            \
    WIDE(type, suffix, 16, 4, 6, name, __VA_ARGS__) \
    WIDE(type, suffix, 16, 3, 7, name, __VA_ARGS__) \
    WIDE(type, suffix, 16, 2, 9, name, __VA_ARGS__) \
    WIDE(type, suffix, 32, 4, 6, name, __VA_ARGS__) \
    WIDE(type, suffix, 32, 3, 5, name, __VA_ARGS__) \
    WIDE(type, suffix, 32, 2, 7, name, __VA_ARGS__) \
    WIDE(type, suffix, 64, 4, 5, name, __VA_ARGS__) \
    WIDE(type, suffix, 64, 3, 4, name, __VA_ARGS__) \
    WIDE(type, suffix, 64, 2, 5, name, __VA_ARGS__)

WIDE_OF(F16, f16, _g64, true)
WIDE_OF(F16, f16, _g128, false)
WIDE_OF(BF16, bf16, _g64, true)
WIDE_OF(BF16, bf16, _g128, false)
WIDE_OF(BF16, bf16, _g64_at_once, true, true)
WIDE_OF(BF16, bf16, _g128_at_once, false, true)
#endif
