// Keys and values of pages as the chunk kernels read them, and the steps of attention over them in shared memory: rows
// in the queries' type (`ExactRows`), or in eight bits with scales, which each warp unpacks for itself
// (`QuantizedRows`) or the thread block once for all its warps (`WidenedRows`).
#pragma once

#include "chunk_attention/tile.cuh"
#include "quantized/products.cuh"

template <typename E_, int kDim_>
struct ExactRows {
    using E = E_;
    using V = E_;  // of the fragments of values
    static constexpr int kDim = kDim_;
    static constexpr bool kWidens = false;
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

    static __device__ __forceinline__ void load_keys(u32 (&b)[4], u32 keys, int row, int step) {
        load_columns<kDim>(b, keys, row, step);
    }
    static __device__ __forceinline__ void scale_both(float (&)[2][kKeysAtOnce / 8][4], u32, int) {}
    struct PagePacker : Packer<kPage> {
        __device__ __forceinline__ PagePacker(u32 scales, int) : Packer<kPage>(scales) {}
    };
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
    static __device__ __forceinline__ void write_row(
        u16* row, const float (&o)[kDim / 8][4], int half, float inverse, int lane) {
        u32* to = reinterpret_cast<u32*>(row + (lane & 3) * 2);
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) to[n * 4] = E::pack(o[n][half * 2] * inverse, o[n][half * 2 + 1] * inverse);
    }
};

// The scales of a tile's keys, then those of its values, are words of two behind the rows of a page, or behind those of a
// unit of keys: the weights are packed before the values are there.
template <typename E_, typename Kv, int kDim_>
struct QuantizedRows {
    using E = E_;
    using V = BF16;
    static constexpr int kDim = kDim_;
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
    static __device__ __forceinline__ void stage(
        unsigned char* tile, int first_row, const float (&o)[kDim / 8][4], int half, float inverse, int lane) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int piece = 0; piece < kDim / 64; ++piece) {
                u32 packed[4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    packed[i] = E::pack(o[piece * 8 + i * 2][half * 2 + c] * inverse,
                                        o[piece * 8 + i * 2 + 1][half * 2 + c] * inverse);
                const int column = (2 * (lane & 3) + c) * (kDim / 64) + piece;
                *reinterpret_cast<uint4*>(tile + swizzled<kDim>(first_row + (lane >> 2) + half * 8, column)) =
                    make_uint4(packed[0], packed[1], packed[2], packed[3]);
            }
    }
};

// A page is copied as it is stored and widened to a tile like that of exact rows; the scales follow as pairs of floats.
// (Scores of more keys at once, beside sums of 128 columns, leave no registers for the scales on some target.)
template <typename E_, typename Kv, int kDim_, int kKeys = kDim_ == 128 ? 16 : kPage>
struct WidenedRows : ExactRows<E_, kDim_> {
    using Exact = ExactRows<E_, kDim_>;
    using Stored = QuantizedRows<E_, Kv, kDim_>;
    using E = E_;
    using V = BF16;
    using Pools = typename Stored::Pools;
    using Source = typename Stored::Source;
    static constexpr int kDim = kDim_;
    static constexpr bool kWidens = true;
    static constexpr u32 kStoredBytes = Stored::kPageBytes;
    static constexpr u32 kPageBytes = 2 * Exact::kTileBytes + kPage * 8;
    static constexpr int kKeysAtOnce = kKeys;

    static __device__ __forceinline__ Source source(const Pools& pools, int head) { return Stored::source(pools, head); }
    template <int kThreads>
    static __device__ __forceinline__ void copy_page(
        u32 to, const Pools& pools, const Source& from, int page, int valid, int thread) {
        Stored::template copy_page<kThreads>(to, pools, from, page, valid, thread);
    }
    // `tile`: keys, values, scales, from a page as it was stored.
    template <int kThreads>
    static __device__ __forceinline__ void widen(u32 tile, u32 stored, int thread) {
        static_assert(kThreads % kPage == 0, "each thread takes pieces of one row");
        const int row = thread % kPage;  // so that neighbouring threads meet different banks
#pragma unroll 1
        for (int piece = thread / kPage; piece < kDim / 16; piece += kThreads / kPage) {
            widen_piece<E>(tile, shared_uint4(stored + byte_piece<kDim>(row, piece)), row, piece);
            widen_piece<V>(tile + Exact::kTileBytes,
                           shared_uint4(stored + Stored::kTileBytes + byte_piece<kDim>(row, piece)), row, piece);
        }
        if (thread < kPage) {
            const u32 pair = shared_word(stored + 2 * Stored::kTileBytes + thread * 4);
            asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(tile + 2 * Exact::kTileBytes + thread * 8),
                         "f"(F16::low(pair)), "f"(F16::high(pair))
                         : "memory");
        }
    }
    template <typename To>
    static __device__ __forceinline__ void widen_piece(u32 tile, uint4 x, int row, int piece) {
        store_shared(tile + swizzled<kDim>(row, 2 * piece),
                     make_uint4(Kv::template neighbours<To>(x.x, 0), Kv::template neighbours<To>(x.x, 1),
                                Kv::template neighbours<To>(x.y, 0), Kv::template neighbours<To>(x.y, 1)));
        store_shared(tile + swizzled<kDim>(row, 2 * piece + 1),
                     make_uint4(Kv::template neighbours<To>(x.z, 0), Kv::template neighbours<To>(x.z, 1),
                                Kv::template neighbours<To>(x.w, 0), Kv::template neighbours<To>(x.w, 1)));
    }
    static __device__ __forceinline__ float2 two_scales(u32 scales, int n) {
        float2 x;
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(x.x), "=f"(x.y)
                     : "r"(scales + n * 32 + (threadIdx.x & 3) * 8));
        return x;
    }
    // `first_key`: of those at once, in the page.
    static __device__ __forceinline__ void scale_both(float (&s)[2][kKeysAtOnce / 8][4], u32 scales, int first_key) {
#pragma unroll
        for (int n = 0; n < kKeysAtOnce / 8; ++n) {
            const float2 x = two_scales(scales + first_key * 4, n);
#pragma unroll
            for (int m = 0; m < 2; ++m) s[m][n][0] *= x.x, s[m][n][1] *= x.y, s[m][n][2] *= x.x, s[m][n][3] *= x.y;
        }
    }
    struct PagePacker {
        u32 scales;
        __device__ __forceinline__ PagePacker(u32 scales_, int first_key) : scales(scales_ + kPage * 4 + first_key * 4) {}
        __device__ __forceinline__ void operator()(u32 (&p)[2], int n, float w0, float w1, float w2, float w3) const {
            const float2 x = two_scales(scales, n);
            p[0] = V::pack(w0 * x.x, w1 * x.y);
            p[1] = V::pack(w2 * x.x, w3 * x.y);
        }
    };
};
