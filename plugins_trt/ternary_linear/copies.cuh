// Copies of few bytes; apart from the arithmetic, so that the latter can be compiled for a CPU.
#pragma once
#include "common.cuh"

// 4, 8 or 16 bytes from global to shared memory; zeros when `valid` is false.
template <int kBytes>
__device__ __forceinline__ void copy_few_async(u32 shared, const void* global, bool valid = true) {
    if constexpr (kBytes == 16) {
        copy_async(shared, global, valid);
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kBytes),
                     "r"(valid ? kBytes : 0)
                     : "memory");
    }
}
