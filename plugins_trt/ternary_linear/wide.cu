// The product of up to 64 rows of x with ternary weights by warpgroups (packed/wide.cuh), where the device has them.
// For compute capability 9.0 alone.
#include "packed/tiles.cuh"

#ifdef WARPGROUPS
#include "packed/wide.cuh"
#include "ternary_linear/ternary.cuh"

// Rows of x; warpgroups, stages. A round is 128 inputs. Fine: of several scales.
#define WIDE(type, suffix, rows, m, stages, name, fine)                                                 \
    extern "C" __global__ void __launch_bounds__(128 * m + 32, 1)                                       \
        ternary_wide_##suffix##_n##rows##_m##m##name(const __grid_constant__ WideLinear<Linear> args) { \
        wide<TwoBits<type, fine>, rows / 8, m, 1, stages>(args);                                        \
    }
#define WIDE_OF(type, suffix, name, fine)     \
    WIDE(type, suffix, 16, 4, 9, name, fine)  \
    WIDE(type, suffix, 16, 3, 11, name, fine) \
    WIDE(type, suffix, 16, 2, 13, name, fine) \
    WIDE(type, suffix, 32, 4, 7, name, fine)  \
    WIDE(type, suffix, 32, 3, 8, name, fine)  \
    WIDE(type, suffix, 32, 2, 9, name, fine)  \
    WIDE(type, suffix, 64, 4, 5, name, fine)  \
    WIDE(type, suffix, 64, 3, 5, name, fine)  \
    WIDE(type, suffix, 64, 2, 6, name, fine)

WIDE_OF(F16, f16, , false)
WIDE_OF(F16, f16, _fine, true)
WIDE_OF(BF16, bf16, , false)
WIDE_OF(BF16, bf16, _fine, true)
#endif
