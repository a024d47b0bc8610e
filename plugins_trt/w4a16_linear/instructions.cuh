// Instructions of their own for the 4-bit products; apart from the arithmetic, so that the latter can be compiled for a CPU.
#pragma once
#include "common.cuh"

// (word & mask) | bits, in one instruction: left to itself, the compiler makes two of it where both are constants.
__device__ __forceinline__ u32 masked_or(u32 word, u32 mask, u32 bits) {
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}

__device__ __forceinline__ float bits_as_float(u32 bits) { return __uint_as_float(bits); }
