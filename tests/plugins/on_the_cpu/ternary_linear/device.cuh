// Stands in for the header of this name in plugins_trt.
#pragma once
#include "common.cuh"

inline void copy_where(bool valid, u32 to, const void* from) {
    if (valid) copy_bytes({to, from, 16, true});
}
inline u32 __float_as_uint(float value) { return bits<u32>(value); }
inline void __syncwarp() { g_warps[threadIdx.x / 32].barrier.arrive_and_wait(); }
inline u32 warp_largest(u32 value) {
    Warp& warp = g_warps[threadIdx.x / 32];
    warp.a[threadIdx.x % 32][0] = value;
    warp.barrier.arrive_and_wait();
    for (int lane = 0; lane < 32; ++lane) value = warp.a[lane][0] > value ? warp.a[lane][0] : value;
    warp.barrier.arrive_and_wait();
    return value;
}
inline u32 bytes_of(u32 a, u32 b, u32 which) {
    u64 both = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (u32)(both >> (8 * (which >> (4 * i) & 7)) & 0xff) << (8 * i);
    return result;
}
// mma.m16n8k32 and k16 of signed bytes, by the definition of their fragments: of each 16 inputs, a lane has four.
inline void mma_bytes(i32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, int parts = 2) {
    Warp& warp = g_warps[threadIdx.x / 32];
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 b[2] = {b0, b1};
    std::memcpy(warp.a[lane], a, sizeof(a));
    std::memcpy(warp.b[lane], b, sizeof(b));
    warp.barrier.arrive_and_wait();
    for (int i = 0; i < 4; ++i) {
        int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        for (int k = 0; k < 16 * parts; ++k) {
            u32 x = warp.a[row % 8 * 4 + k % 16 / 4][row / 8 + 2 * (k / 16)];
            u32 y = warp.b[column * 4 + k % 16 / 4][k / 16];
            d[i] += (i32)(signed char)(x >> (8 * (k % 4))) * (i32)(signed char)(y >> (8 * (k % 4)));
        }
    }
    warp.barrier.arrive_and_wait();
}
inline void mma_bytes(i32 (&d)[4], u32 a0, u32 a1, u32 b0) { mma_bytes(d, {a0, a1, 0, 0}, b0, 0, 1); }
// (There are no clusters here.)
inline void cluster_sync() {}
inline float load_of_cluster(u32, int) { return NAN; }
