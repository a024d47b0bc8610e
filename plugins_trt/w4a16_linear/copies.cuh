// The copy of a pair of scales; apart from the arithmetic, so that the latter can be compiled for a CPU.
#pragma once
#include "common.cuh"

// 8 bytes from global to shared memory, through L1; zeros when `valid` is false.
__device__ __forceinline__ void copy_pair_async(u32 shared, const void* global, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(valid ? 8 : 0)
                 : "memory");
}
