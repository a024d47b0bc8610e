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

// (word & mask) ^ bits, in one instruction: left to itself, the compiler makes two of it where both are constants.
__device__ __forceinline__ u32 masked_xor(u32 word, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}
