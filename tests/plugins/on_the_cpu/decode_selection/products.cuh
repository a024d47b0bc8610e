// Stands in for the header of this name in plugins_trt: warpgroup products by the definition of their operands in shared
// memory, which happen at once.
#pragma once
#include "common.cuh"

inline void meet_warpgroup() { g_now->warps[threadIdx.x / 128 * 4].group.arrive_and_wait(); }
inline void show_to_warpgroups() {}
inline void warpgroup_fence() { meet_warpgroup(); }
inline void warpgroup_commit() { meet_warpgroup(); }
template <int kPending>
inline void warpgroup_wait() {}
template <int kTiles>
inline void wait_for_product(float (&)[kTiles][4]) {}

inline u64 rows_described(u32 shared) { return shared >> 4 & 0x3fff; }

// Element `k` of row `row`: eight rows of 128 bytes lie together, whose 16-byte pieces are exchanged by the row's number.
template <typename T>
inline float described(u64 rows, int row, int k) {
    u32 at = (u32)rows * 16 + row / 8 * 1024 + row % 8 * 128 + k * 2;
    at ^= (at >> 7 & 7) << 4;
    u16 element;
    std::memcpy(&element, g_ring + at, 2);
    return T::unpack(element);
}

template <typename T, int kTiles>
inline void group_mma(T, float (&d)[kTiles][4], u64 a, u64 b) {
    int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    for (int half = 0; half < 2; ++half) {
        float row[16];
        for (int k = 0; k < 16; ++k) row[k] = described<T>(a, first_row + 8 * half, k);
        for (int n = 0; n < kTiles; ++n)
            for (int i = 0; i < 2; ++i)
                for (int k = 0; k < 16; ++k)
                    d[n][2 * half + i] += row[k] * described<T>(b, 8 * n + lane % 4 * 2 + i, k);
    }
}
template <typename T, int kTiles>
inline void group_mma_first(T, float (&d)[kTiles][4], u64 a, u64 b) {
    for (auto& tile : d)
        for (float& x : tile) x = 0.0f;
    group_mma(T(), d, a, b);
}
