// The product of up to 64 rows of x with ternary weights by warpgroups (packed/wide.cuh), where the device has them.
// For compute capability 9.0 alone.
#include "packed/tiles.cuh"

#ifdef WARPGROUPS
#include "packed/wide.cuh"
#include "ternary_linear/ternary.cuh"

// Rows of x; warpgroups along the outputs and along the inputs, stages. A round is 128 inputs. Fine: of several scales.
#define WIDE(type, suffix, rows, m, k, stages, name, fine)                                                             \
    extern "C" __global__ void __launch_bounds__(128 * m * k + 32, 1)                                                  \
        ternary_wide_##suffix##_n##rows##_m##m##_k##k##name(const __grid_constant__ WideLinear<Linear> args) {         \
        wide<TwoBits<type, fine>, rows / 8, m, k, 1, stages>(args);                                                    \
    }
#define WIDE_OF(type, suffix, name, fine)        \
    WIDE(type, suffix, 16, 4, 1, 9, name, fine) \
    WIDE(type, suffix, 16, 3, 1, 9, name, fine) \
    WIDE(type, suffix, 16, 2, 2, 9, name, fine) \
    WIDE(type, suffix, 32, 4, 1, 9, name, fine) \
    WIDE(type, suffix, 32, 3, 1, 9, name, fine) \
    WIDE(type, suffix, 32, 2, 2, 9, name, fine) \
    WIDE(type, suffix, 64, 4, 1, 8, name, fine) \
    WIDE(type, suffix, 64, 3, 1, 8, name, fine) \
    WIDE(type, suffix, 64, 2, 2, 8, name, fine)

WIDE_OF(F16, f16, , false)
WIDE_OF(F16, f16, _fine, true)
WIDE_OF(BF16, bf16, , false)
WIDE_OF(BF16, bf16, _fine, true)
#endif
