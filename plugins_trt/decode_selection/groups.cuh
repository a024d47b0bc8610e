// What the launches of trees share where the device has warpgroup products, of 64 rows in shared memory with up to 128 others.
#pragma once
#include "decode_selection/nodes.cuh"
#include "decode_selection/products.cuh"

constexpr int kGroupColumns = 128;           // rows that lie together: keys of `lse`, heads of `scores`
constexpr int kGroupKeys = kGroupColumns;    // compressed keys that a CTA of `lse` takes
constexpr int kTokensOfGroup = 64 / kHeads;  // whose heads are 64 rows

// Byte offset of 16-byte piece `piece` of a row among kRows: columns of 64 elements, in the 128-byte swizzle.
template <int kRows>
__device__ __forceinline__ u32 group_place(int row, int piece) {
    return (u32)(piece / 8 * (kRows * 128) + row * 128 + ((piece ^ row) & 7) * 16);
}

// Copies compressed keys [first, first + kRows) of one KV head, of which those from 1 to first + count - 1 exist; a page has
// 1 << shift of them. All warps of the CTA must call it. Each lane looks up the page of one of its warp's rows.
template <int kDim, int kRows>
__device__ __forceinline__ void copy_keys(
    u32 to, const Pool& pool, const i32* table, int shift, int kv_head, int first, int count, int warp, int warps) {
    constexpr int kPieces = kDim / 8, kAtOnce = 32 / kPieces;  // rows that a warp copies at a time
    int lane = threadIdx.x & 31, piece = lane % kPieces;
    int looked_up = (lane / kAtOnce * warps + warp) * kAtOnce + lane % kAtOnce;
    int page = table[(first + (looked_up < count ? looked_up : 0)) >> shift];
    int row = warp * kAtOnce + lane / kPieces;
#pragma unroll 4
    for (int i = lane / kPieces; row < kRows; row += warps * kAtOnce, i += kAtOnce) {
        int of_row = __shfl_sync(kFull, page, i), key = first + row;
        const u16* from = pool.row<kDim>(of_row, kv_head, key & ((1 << shift) - 1)) + piece * 8;
        copy_async(to + group_place<kRows>(row, piece), from, row < count && key > 0);
    }
}

// d = the 64 rows from `a` on, of kRows, times those from `b` on, of kGroupColumns: under way when this returns.
template <typename T, int kDim, int kRows, int kTiles>
__device__ __forceinline__ void begin_product(float (&d)[kTiles][4], u32 a, u32 b) {
    warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        u64 rows = rows_described(a + k / 4 * (kRows * 128)) + k % 4 * 2;
        u64 columns = rows_described(b + k / 4 * (kGroupColumns * 128)) + k % 4 * 2;
        if (k == 0) group_mma_first(T(), d, rows, columns);
        else group_mma(T(), d, rows, columns);
    }
    warpgroup_commit();
}
