// Products of queries with keys in eight bits, and of weights with values in eight bits, 16 tokens at a time.
//
// A key's elements are summed in the order in which a thread finds them: kDim / 64 pieces of 16 bytes of each row are a
// thread's, and word j of piece i is what it brings to product 4i + j. The queries' fragments are loaded to suit.
#pragma once
#include "quantized/rows.cuh"

// The fragments of up to 16 rows of queries, kDim elements each, one after the other.
template <int kDim>
__device__ __forceinline__ void load_queries(u32 (&q)[kDim / 16][4], const u16* rows, int count, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
        const u16* low = rows + g * kDim + (kDim / 64 * t + k / 4) * 16 + k % 4 * 4;
        const u16* high = low + 8 * kDim;
        uint2 x = g < count ? *reinterpret_cast<const uint2*>(low) : uint2{0, 0};
        uint2 y = g + 8 < count ? *reinterpret_cast<const uint2*>(high) : uint2{0, 0};
        q[k][0] = pick(x.x, x.y, 0x5410), q[k][1] = pick(y.x, y.y, 0x5410);
        q[k][2] = pick(x.x, x.y, 0x7632), q[k][3] = pick(y.x, y.y, 0x7632);
    }
}

// first += q k[0..7], second += q k[8..15] for the 16 keys whose rows begin at `tile` (a multiple of 16 rows).
template <typename T, typename Kv, int kDim>
__device__ __forceinline__ void add_scores(
    float (&first)[4], float (&second)[4], const u32 (&q)[kDim / 16][4], u32 tile, int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < kDim / 64; ++i) {
        uint4 low = shared_uint4(tile + byte_piece<kDim>(g, kDim / 64 * t + i));
        uint4 high = shared_uint4(tile + byte_piece<kDim>(8 + g, kDim / 64 * t + i));
        const u32 of_first[4] = {low.x, low.y, low.z, low.w}, of_second[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const u32(&a)[4] = q[4 * i + j];
            u32 even, odd;
            Kv::template unpack<T>(of_first[j], even, odd);
            T::mma(first, a[0], a[1], a[2], a[3], even, odd);
            Kv::template unpack<T>(of_second[j], even, odd);
            T::mma(second, a[0], a[1], a[2], a[3], even, odd);
        }
    }
}

// The elements kDim / 8 * (lane / 4) and following of the four values of a thread: of keys 2t, 2t + 1, 8 + 2t, 9 + 2t.
template <int kDim>
__device__ __forceinline__ void load_values(u32 (&words)[4][kDim / 32], u32 tile, int lane) {
    int g = lane >> 2, t = lane & 3;
    u32 even = byte_piece<kDim>(2 * t, kDim == 128 ? g : g >> 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (kDim == 128) {  // (the row's last bit is one of its piece's, too)
            uint4 x = shared_uint4(tile + (i % 2 ? (even ^ 16u) + kDim : even) + i / 2 * 8 * kDim);
            words[i][0] = x.x, words[i][1] = x.y, words[i][2] = x.z, words[i][3] = x.w;
        } else {
            uint2 x = shared_uint2(tile + (i % 2 ? even ^ 64u : even) + i / 2 * 8 * kDim + (g & 1) * 8);
            words[i][0] = x.x, words[i][1] = x.y;
        }
    }
}

// The fragment of tile n, which holds element n of each eighth of a row.
template <typename Kv, int kWords>
__device__ __forceinline__ void values_of_tile(u32& low, u32& high, const u32 (&words)[4][kWords], int n) {
    low = Kv::template across<BF16>(words[0][n / 4], words[1][n / 4], n % 4);
    high = Kv::template across<BF16>(words[2][n / 4], words[3][n / 4], n % 4);
}

// acc += p v for 16 values: p holds their weights as a fragment of bfloat16 whatever the queries are (a weight times a
// scale may be far below what float16 holds). acc[n][i] is element n + (kDim / 8) * (2t + i % 2) of row g + 8 * (i / 2).
template <typename Kv, int kDim>
__device__ __forceinline__ void add_weighted(float (&acc)[kDim / 8][4], const u32 (&p)[4], u32 tile, int lane) {
    u32 words[4][kDim / 32];
    load_values<kDim>(words, tile, lane);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
        u32 low, high;
        values_of_tile<Kv>(low, high, words, n);
        BF16::mma(acc[n], p[0], p[1], p[2], p[3], low, high);
    }
}

// Rows g and g + 8 of such sums, to rows `stride` floats apart.
template <int kDim>
__device__ __forceinline__ void store_sums(float* rows, int stride, const float (&acc)[kDim / 8][4], int lane) {
    int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float* row = rows + (g + i / 2 * 8) * stride + (2 * t + i % 2) * (kDim / 8);
#pragma unroll
        for (int n = 0; n < kDim / 8; n += 4)
            *reinterpret_cast<float4*>(row + n) = float4{acc[n][i], acc[n + 1][i], acc[n + 2][i], acc[n + 3][i]};
    }
}
