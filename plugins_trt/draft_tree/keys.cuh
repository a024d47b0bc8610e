// Tokens as numbers that order as their logits do.
#pragma once
#include "common.cuh"

constexpr int kPart = 2048;  // logits of a part

// Larger for larger logits; of equal ones for the smaller id. Never 0. NaN is the smallest logit there is.
__device__ __forceinline__ u64 key_of(float logit, int id) {
    u32 bits = __float_as_uint(logit == logit ? logit + 0.0f : -kInfinity);
    u32 rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)rising << 32 | (u32)~id;
}
__device__ __forceinline__ float logit_of(u64 key) {
    u32 rising = (u32)(key >> 32);
    return __uint_as_float(rising & 0x80000000u ? rising & 0x7fffffffu : ~rising);
}
__device__ __forceinline__ int id_of(u64 key) { return (int)~(u32)key; }

__device__ __forceinline__ u64 warp_largest(u64 x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) {
        u64 other = __shfl_xor_sync(kFull, x, lane);
        x = x > other ? x : other;
    }
    return x;
}
