// What the kernels ask of the device beside common.cuh; apart from the arithmetic, so that the latter can be compiled for
// a CPU.
#pragma once
#include "common.cuh"

// 16 bytes from global to shared memory, past L1, or nothing when `valid` is false; without a branch.
__device__ __forceinline__ void copy_where(bool valid, u32 shared, const void* global) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global.L2::128B [%0], [%1], 16; }" ::"r"(shared),
        "l"(global), "r"((u32)valid)
        : "memory");
}
