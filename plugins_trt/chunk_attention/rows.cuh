// Keys and values of pages as the chunk kernels read them: rows in the queries' type (`ExactRows`), or in eight bits
// with scales (`QuantizedRows`), and the steps of attention over such rows in shared memory.
#pragma once

#include "chunk_attention/tile.cuh"
#include "quantized/products.cuh"

template <typename E_, int kDim_>
struct ExactRows {
    using E = E_;
    using V = E_;  // of the fragments of values
    static constexpr int kDim = kDim_;
    static constexpr bool kQuantized = false;
    static constexpr u32 kRowBytes = kDim * 2;
    static constexpr u32 kTileBytes = kPage * kRowBytes;
    static constexpr u32 kPageBytes = 2 * kTileBytes;  // keys, values

    struct Pools {
        Pool keys;
        Pool values;
    };
    // Where the rows of one KV head begin, in page 0.
    struct Source {
        const u16* keys;
        const u16* values;
    };
    static __device__ __forceinline__ Source source(const Pools& pools, int head) {
        return {pools.keys.base + (i64)head * pools.keys.head_stride,
                pools.values.base + (i64)head * pools.values.head_stride};
    }
    // A page's keys and values; rows from `valid` on become zeros.
    template <int kThreads>
    static __device__ __forceinline__ void copy_page(
        u32 to, const Pools& pools, const Source& from, int page, int valid, int thread) {
        copy_rows<kDim, kPage, kThreads>(to, from.keys + page * pools.keys.page_stride, valid, thread);
        copy_rows<kDim, kPage, kThreads>(to + kTileBytes, from.values + page * pools.values.page_stride, valid, thread);
    }

    // Bytes of kKeys rows of keys or of values.
    template <int kKeys>
    static constexpr u32 kUnitBytes = kKeys * kRowBytes;

    // kKeys rows of keys, or of values, from `row` of a page on; a warp copies them.
    template <int kKeys>
    static __device__ __forceinline__ void copy_unit(u32 to, const Pools& pools, const Source& from, bool is_values,
                                                     int page, int row, int valid, int lane) {
        const u16* rows = is_values ? from.values + page * pools.values.page_stride
                                    : from.keys + page * pools.keys.page_stride;
        copy_rows<kDim, kKeys, 32>(to, rows + row * kDim, valid, lane);
    }
    // The fragments of the heads of one token: row lane / 4 and 8 more, of `low` and `high` whether there are such.
    static __device__ __forceinline__ void load_heads(u32 (&q)[kDim / 16][4], const u16* rows, int count, int lane) {
        const int row = lane >> 2, column = (lane & 3) * 2;
        const bool low = row < count, high = row + 8 < count;
        const u32* low_row = reinterpret_cast<const u32*>(rows + (low ? row : 0) * kDim + column);
        const u32* high_row = reinterpret_cast<const u32*>(rows + (high ? row + 8 : 0) * kDim + column);
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
            q[step][0] = low ? low_row[step * 8] : 0u;
            q[step][1] = high ? high_row[step * 8] : 0u;
            q[step][2] = low ? low_row[step * 8 + 4] : 0u;
            q[step][3] = high ? high_row[step * 8 + 4] : 0u;
        }
    }
    template <int kKeys>
    static __device__ __forceinline__ void scores(float (&s)[kKeys / 8][4], const u32 (&q)[kDim / 16][4], u32 keys, u32) {
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step)
#pragma unroll
            for (int n = 0; n < kKeys / 16; ++n) {
                u32 b[4];
                load_columns<kDim>(b, keys, n * 16, step);
                E::mma(s[n * 2], q[step][0], q[step][1], q[step][2], q[step][3], b[0], b[1]);
                E::mma(s[n * 2 + 1], q[step][0], q[step][1], q[step][2], q[step][3], b[2], b[3]);
            }
    }
    // Packs the weights of 8 keys: two of row lane / 4, then two of the row 8 below.
    template <int kKeys>
    struct Packer {
        __device__ __forceinline__ explicit Packer(u32) {}
        __device__ __forceinline__ void operator()(u32 (&p)[2], int, float w0, float w1, float w2, float w3) const {
            p[0] = E::pack(w0, w1);
            p[1] = E::pack(w2, w3);
        }
    };
    template <int kKeys>
    static __device__ __forceinline__ void weighted(float (&o)[kDim / 8][4], const u32 (&p)[kKeys / 8][2], u32 values) {
        add_values<E, kDim, kKeys>(o, p, values, 0);
    }
    // Rows lane / 4 and 8 more of the sums, in fp32 to rows `stride` apart, and divided to a swizzled tile.
    static __device__ __forceinline__ void store(float* rows, int stride, const float (&o)[kDim / 8][4], int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float* part = rows + ((lane >> 2) + half * 8) * stride + (lane & 3) * 2;
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n)
                *reinterpret_cast<float2*>(part + n * 8) = make_float2(o[n][half * 2], o[n][half * 2 + 1]);
        }
    }
    static __device__ __forceinline__ void stage(
        unsigned char* tile, int first_row, const float (&o)[kDim / 8][4], int half, float inverse, int lane) {
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
            *reinterpret_cast<u32*>(tile + swizzled<kDim>(first_row + (lane >> 2) + half * 8, n) + (lane & 3) * 4) =
                E::pack(o[n][half * 2] * inverse, o[n][half * 2 + 1] * inverse);
    }

    // ---- 32 rows a warp

    static constexpr int kKeysAtOnce = kPage;

    // Queries in a swizzled tile lie as they are.
    static __device__ __forceinline__ void arrange_queries(u32, int) {}
    static __device__ __forceinline__ void load_keys(u32 (&b)[4], u32 keys, int row, int step) {
        load_columns<kDim>(b, keys, row, step);
    }
    static __device__ __forceinline__ void scale_both(float (&)[2][kKeysAtOnce / 8][4], u32) {}
    struct Values {
        u32 tile;
        int row;
        __device__ __forceinline__ Values(u32 tile_, int row_) : tile(tile_), row(row_) {}
        __device__ __forceinline__ void load(u32 (&b)[4], int n) const {
            load_columns_transposed<kDim>(b, tile, row, n);
        }
    };
    // Row lane / 4 (`half`: and 8) of the sums, times `factor`.
    static __device__ __forceinline__ void store_row(
        float* row, const float (&o)[kDim / 8][4], int half, float factor, int lane) {
        float2* to = reinterpret_cast<float2*>(row + (lane & 3) * 2);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
            to[n * 4] = make_float2(o[n][half * 2] * factor, o[n][half * 2 + 1] * factor);
    }
};

// The scales of a tile's keys, then those of its values, are words of two behind the rows of a page, or behind those of a
// unit of keys: the weights are packed before the values are there.
template <typename E_, typename Kv, int kDim_>
struct QuantizedRows {
    using E = E_;
    using V = BF16;
    static constexpr int kDim = kDim_;
    static constexpr bool kQuantized = true;
    static constexpr u32 kRowBytes = kDim;
    static constexpr u32 kTileBytes = kPage * kRowBytes;
    static constexpr u32 kPageBytes = 2 * kTileBytes + kPage * 4;

    struct Pools {
        BytePool keys;
        BytePool values;
        Pool key_scales;
        Pool value_scales;
    };
    struct Source {
        const u8* keys;
        const u8* values;
        const u16* key_scales;
        const u16* value_scales;
    };
    static __device__ __forceinline__ Source source(const Pools& pools, int head) {
        return {pools.keys.base + (i64)head * pools.keys.head_stride,
                pools.values.base + (i64)head * pools.values.head_stride,
                pools.key_scales.base + (i64)head * pools.key_scales.head_stride,
                pools.value_scales.base + (i64)head * pools.value_scales.head_stride};
    }
    template <int kRows, int kThreads>
    static __device__ __forceinline__ void copy(u32 tile, const u8* rows, int valid, int thread) {
        constexpr int kPieces = kDim / 16;
        constexpr int kStep = kThreads / kPieces;
        static_assert(kThreads % kPieces == 0 && kRows % kStep == 0, "each thread copies whole pieces");
        const int piece = thread % kPieces, first = thread / kPieces;
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i) {
            int row = first + i * kStep;
            bool inside = row < valid;
            copy_async(tile + byte_piece<kDim>(row, piece), inside ? rows + row * kDim + piece * 16 : rows, inside);
        }
    }
    // Of kKeys tokens; the first kKeys threads copy a word each.
    template <int kKeys>
    static __device__ __forceinline__ void copy_scales(
        u32 to, const Pools& pools, const Source& from, int page, int row, int valid, int thread) {
        if (thread >= kKeys) return;
        const int token = thread % (kKeys / 2) * 2;
        const u16* scales = thread < kKeys / 2 ? from.key_scales + page * pools.key_scales.page_stride
                                               : from.value_scales + page * pools.value_scales.page_stride;
        copy_scales_async(to + thread * 4, scales + row + token, valid - token);
    }
    template <int kThreads>
    static __device__ __forceinline__ void copy_page(
        u32 to, const Pools& pools, const Source& from, int page, int valid, int thread) {
        copy<kPage, kThreads>(to, from.keys + page * pools.keys.page_stride, valid, thread);
        copy<kPage, kThreads>(to + kTileBytes, from.values + page * pools.values.page_stride, valid, thread);
        copy_scales<kPage>(to + 2 * kTileBytes, pools, from, page, 0, valid, thread);
    }

    template <int kKeys>
    static constexpr u32 kUnitBytes = kKeys * (kRowBytes + 4);

    template <int kKeys>
    static __device__ __forceinline__ void copy_unit(u32 to, const Pools& pools, const Source& from, bool is_values,
                                                     int page, int row, int valid, int lane) {
        const u8* rows = is_values ? from.values + page * pools.values.page_stride
                                   : from.keys + page * pools.keys.page_stride;
        copy<kKeys, 32>(to, rows + row * kDim, valid, lane);
        if (!is_values) copy_scales<kKeys>(to + kKeys * kRowBytes, pools, from, page, row, valid, lane);
    }
    static __device__ __forceinline__ void load_heads(u32 (&q)[kDim / 16][4], const u16* rows, int count, int lane) {
        load_queries<kDim>(q, rows, count, lane);
    }
    template <int kKeys>
    static __device__ __forceinline__ void scale_scores(float (&s)[kKeys / 8][4], u32 scales) {
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
            u32 pair = shared_word(scales + (4 * n + (threadIdx.x & 3)) * 4);
            float first = F16::low(pair), second = F16::high(pair);
            s[n][0] *= first, s[n][1] *= second, s[n][2] *= first, s[n][3] *= second;
        }
    }
    template <int kKeys>
    static __device__ __forceinline__ void scores(
        float (&s)[kKeys / 8][4], const u32 (&q)[kDim / 16][4], u32 keys, u32 scales) {
        const int lane = (int)(threadIdx.x & 31);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n)
            add_scores<E, Kv, kDim>(s[2 * n], s[2 * n + 1], q, keys + n * 16 * kRowBytes, lane);
        scale_scores<kKeys>(s, scales);
    }
    template <int kKeys>
    struct Packer {
        u32 scales;
        __device__ __forceinline__ explicit Packer(u32 scales_)
            : scales(scales_ + kKeys * 2 + (threadIdx.x & 3) * 4) {}
        __device__ __forceinline__ void operator()(u32 (&p)[2], int n, float w0, float w1, float w2, float w3) const {
            u32 pair = shared_word(scales + n * 16);
            float first = F16::low(pair), second = F16::high(pair);
            p[0] = BF16::pack(w0 * first, w1 * second);
            p[1] = BF16::pack(w2 * first, w3 * second);
        }
    };
    template <int kKeys>
    static __device__ __forceinline__ void weighted(float (&o)[kDim / 8][4], const u32 (&p)[kKeys / 8][2], u32 values) {
        const int lane = (int)(threadIdx.x & 31);
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k) {
            const u32 of_unit[4] = {p[k * 2][0], p[k * 2][1], p[k * 2 + 1][0], p[k * 2 + 1][1]};
            add_weighted<Kv, kDim>(o, of_unit, values + k * 16 * kRowBytes, lane);
        }
    }
    static __device__ __forceinline__ void store(float* rows, int stride, const float (&o)[kDim / 8][4], int lane) {
        store_sums<kDim>(rows, stride, o, lane);
    }
    // Calls `write` with each 16-byte piece that a thread has of row lane / 4 (`half`: and 8), divided, and its number.
    template <typename Write>
    static __device__ __forceinline__ void pieces_of_row(
        const float (&o)[kDim / 8][4], int half, float inverse, int lane, const Write& write) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int piece = 0; piece < kDim / 64; ++piece) {
                u32 packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    packed[i] = E::pack(o[piece * 8 + i * 2][half * 2 + c] * inverse,
                                        o[piece * 8 + i * 2 + 1][half * 2 + c] * inverse);
                write((2 * (lane & 3) + c) * (kDim / 64) + piece,
                      make_uint4(packed[0], packed[1], packed[2], packed[3]));
            }
    }
    static __device__ __forceinline__ void stage(
        unsigned char* tile, int first_row, const float (&o)[kDim / 8][4], int half, float inverse, int lane) {
        const int row = first_row + (lane >> 2) + half * 8;
        pieces_of_row(o, half, inverse, lane, [&](int piece, uint4 x) {
            *reinterpret_cast<uint4*>(tile + swizzled<kDim>(row, piece)) = x;
        });
    }
    static __device__ __forceinline__ void write_row(
        u16* row, const float (&o)[kDim / 8][4], int half, float inverse, int lane) {
        pieces_of_row(o, half, inverse, lane,
                      [&](int piece, uint4 x) { *reinterpret_cast<uint4*>(row + piece * 8) = x; });
    }

    // ---- 32 rows a warp

    // (Scores of a whole page beside sums of 128 columns leave no registers to unpack with.)
    static constexpr int kKeysAtOnce = kDim == 128 ? 32 : kPage;

    // A key's word of product `step` holds four neighbouring elements, of which bytes 0 and 2 meet the first half of a
    // fragment of queries and 1 and 3 the second: the elements of the warp's 32 rows are put in that order.
    static __device__ __forceinline__ void arrange_queries(u32 tile, int first_row) {
        const int lane = (int)(threadIdx.x & 31);
#pragma unroll 1
        for (int i = lane; i < 32 * kDim / 16; i += 32) {
            const int row = first_row + i / (kDim / 16), step = i % (kDim / 16);
            const u32 first = tile + swizzled<kDim>(row, 2 * step), second = tile + swizzled<kDim>(row, 2 * step + 1);
            const uint4 a = shared_uint4(first), b = shared_uint4(second);
            store_uint4(first, pick(a.x, a.y, 0x5410), pick(a.z, a.w, 0x5410), pick(b.x, b.y, 0x5410),
                        pick(b.z, b.w, 0x5410));
            store_uint4(second, pick(a.x, a.y, 0x7632), pick(a.z, a.w, 0x7632), pick(b.x, b.y, 0x7632),
                        pick(b.z, b.w, 0x7632));
        }
        __syncwarp();
    }
    static __device__ __forceinline__ void store_uint4(u32 address, u32 x, u32 y, u32 z, u32 w) {
        asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
    }
    static __device__ __forceinline__ void load_keys(u32 (&b)[4], u32 keys, int row, int step) {
        const int lane = (int)(threadIdx.x & 31);
        // (Tiles begin at multiples of 128 bytes: a step changes bits of the address that nothing else carries into.)
        const u32 first = keys + byte_piece<kDim>(lane >> 2, 0) + (lane & 3) * 4;
        const u32 word = (first ^ (u32)(step << 4)) + row * kRowBytes;
        Kv::template unpack<E>(shared_word(word), b[0], b[1]);
        Kv::template unpack<E>(shared_word(word + 8 * kRowBytes), b[2], b[3]);
    }
    static __device__ __forceinline__ void scale_both(float (&s)[2][kKeysAtOnce / 8][4], u32 scales) {
#pragma unroll
        for (int n = 0; n < kKeysAtOnce / 8; ++n) {
            u32 pair = shared_word(scales + (4 * n + (threadIdx.x & 3)) * 4);
            float first = F16::low(pair), second = F16::high(pair);
#pragma unroll
            for (int m = 0; m < 2; ++m)
                s[m][n][0] *= first, s[m][n][1] *= second, s[m][n][2] *= first, s[m][n][3] *= second;
        }
    }
    struct Values {
        u32 words[4][kDim / 32];
        __device__ __forceinline__ Values(u32 tile, int row) {
            load_values<kDim>(words, tile + row * kRowBytes, (int)(threadIdx.x & 31));
        }
        __device__ __forceinline__ void load(u32 (&b)[4], int n) const {
            values_of_tile<Kv>(b[0], b[1], words, 2 * n);
            values_of_tile<Kv>(b[2], b[3], words, 2 * n + 1);
        }
    };
    static __device__ __forceinline__ void store_row(
        float* row, const float (&o)[kDim / 8][4], int half, float factor, int lane) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int n = 0; n < kDim / 8; n += 4)
                *reinterpret_cast<float4*>(row + (2 * (lane & 3) + c) * (kDim / 8) + n) =
                    make_float4(o[n][half * 2 + c] * factor, o[n + 1][half * 2 + c] * factor,
                                o[n + 2][half * 2 + c] * factor, o[n + 3][half * 2 + c] * factor);
    }
};
