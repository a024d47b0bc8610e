// The 16 keys and values that a warp of `narrow` takes at a time, as they lie in pages and in shared memory: in 16 bits
// (`Unit`) or in eight with scales (`QuantizedUnit`).
#pragma once
#include "decode_attention/attend.cuh"
#include "quantized/products.cuh"

// As the queries are, T.
template <typename T, int kDim_>
struct Unit {
    using Pages = Arena;
    using Output = T;
    static constexpr int kDim = kDim_;
    static constexpr int kKeys = kUnit;
    static constexpr bool kAlwaysScales = true;  // bound by memory: a vote would cost more
    static constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row
    static constexpr u32 kTileBytes = kUnit * kDim * 2;
    static constexpr u32 kBytes = 2 * kTileBytes;

    // Fragments of the heads of the group: rows g and g + 8.
    using Queries = u32[kDim / 16][4];
    static __device__ __forceinline__ void load_heads(Queries& q, const u16* rows, int group, int lane) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            const u16* low = rows + g * kDim + 16 * k + 2 * t;
            const u16* high = low + 8 * kDim;
            q[k][0] = g < group ? *reinterpret_cast<const u32*>(low) : 0;
            q[k][1] = g + 8 < group ? *reinterpret_cast<const u32*>(high) : 0;
            q[k][2] = g < group ? *reinterpret_cast<const u32*>(low + 8) : 0;
            q[k][3] = g + 8 < group ? *reinterpret_cast<const u32*>(high + 8) : 0;
        }
    }
    // Rows from `slot` on of a sequence's page; those from `limit` on are zeros.
    static __device__ __forceinline__ void load(
        const Pages& arena, int page, int kv_head, int slot, int limit, u32 stage, int lane) {
        const u16* keys = arena.keys.row<kDim>(page, kv_head, slot % kPage);
        const u16* values = arena.values.row<kDim>(page, kv_head, slot % kPage);
#pragma unroll
        for (int i = 0; i < kUnit * kPieces / 32; ++i) {
            int row = (i * 32 + lane) / kPieces;
            int piece = (i * 32 + lane) % kPieces;
            bool valid = slot + row < limit;
            copy_async(stage + swizzled<kDim>(row, piece), keys + row * kDim + piece * 8, valid);
            copy_async(stage + kTileBytes + swizzled<kDim>(row, piece), values + row * kDim + piece * 8, valid);
        }
    }

    u32 key_line, value_line;

    // A step of 16 elements is two pieces of a row, so its number enters the swizzled address as an XOR.
    __device__ __forceinline__ Unit(u32 stage, int lane) {
        int matrix = lane >> 3, line = lane & 7;
        key_line = stage + swizzled<kDim>((matrix >> 1) * 8 + line, matrix & 1);
        value_line = stage + kTileBytes + swizzled<kDim>((matrix & 1) * 8 + line, matrix >> 1);
    }
    __device__ __forceinline__ void scores(float (&s)[2][4], const Queries& q, int) const {
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) {
            u32 keys[4];
            load_matrices(keys, key_line ^ (u32)(k << 5));
            T::mma(s[0], q[k][0], q[k][1], q[k][2], q[k][3], keys[0], keys[1]);
            T::mma(s[1], q[k][0], q[k][1], q[k][2], q[k][3], keys[2], keys[3]);
        }
    }
    __device__ __forceinline__ u32 pack(float first, float second, int) const { return T::pack(first, second); }
    __device__ __forceinline__ void add_values(float (&acc)[kDim / 8][4], const u32 (&p)[1][4], int) const {
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n) {
            u32 values[4];
            load_matrices_transposed(values, value_line ^ (u32)(n << 5));
            T::mma(acc[2 * n], p[0][0], p[0][1], p[0][2], p[0][3], values[0], values[1]);
            T::mma(acc[2 * n + 1], p[0][0], p[0][1], p[0][2], p[0][3], values[2], values[3]);
        }
    }
    // Rows g and g + 8 of the sums, to rows `stride` apart.
    static __device__ __forceinline__ void store(float* rows, int stride, const float (&acc)[kDim / 8][4], int lane) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            *reinterpret_cast<float2*>(rows + g * stride + 8 * n + 2 * t) = float2{acc[n][0], acc[n][1]};
            *reinterpret_cast<float2*>(rows + (g + 8) * stride + 8 * n + 2 * t) = float2{acc[n][2], acc[n][3]};
        }
    }
};

// In eight bits, with the scales of the keys and of the values behind the rows.
template <typename T, typename Kv, int kDim_, int kKeys_>
struct QuantizedUnit {
    using Pages = QuantizedArena;
    using Output = T;
    static constexpr int kDim = kDim_;
    static constexpr int kKeys = kKeys_;
    static constexpr bool kAlwaysScales = false;
    static constexpr int kPieces = kDim / 16;
    static constexpr u32 kTileBytes = kKeys * kDim;
    static constexpr u32 kBytes = 2 * kTileBytes + 2 * kKeys * 2;

    using Queries = u32[kDim / 16][4];
    static __device__ __forceinline__ void load_heads(Queries& q, const u16* rows, int group, int lane) {
        load_queries<kDim>(q, rows, group, lane);
    }
    static __device__ __forceinline__ void load(
        const Pages& arena, int page, int kv_head, int slot, int limit, u32 stage, int lane) {
        const u8* keys = arena.keys.row<kDim>(page, kv_head, slot % kPage);
        const u8* values = arena.values.row<kDim>(page, kv_head, slot % kPage);
#pragma unroll
        for (int i = 0; i < kKeys * kPieces / 32; ++i) {
            int row = (i * 32 + lane) / kPieces;
            int piece = (i * 32 + lane) % kPieces;
            bool valid = slot + row < limit;
            u32 place = byte_piece<kDim>(row, piece);
            copy_async(stage + place, keys + row * kDim + piece * 16, valid);
            copy_async(stage + kTileBytes + place, values + row * kDim + piece * 16, valid);
        }
        if (lane < kKeys) {  // words of two scales: the keys', then the values'
            const Pool& pool = lane < kKeys / 2 ? arena.key_scales : arena.value_scales;
            int row = lane % (kKeys / 2) * 2;
            copy_scales_async(stage + 2 * kTileBytes + lane * 4, pool.row<1>(page, kv_head, slot % kPage + row),
                              limit - slot - row);
        }
    }

    u32 stage;
    int t;

    __device__ __forceinline__ QuantizedUnit(u32 stage_, int lane) : stage(stage_), t(lane & 3) {}
    __device__ __forceinline__ u32 scales(int word) const {
        return shared_word(stage + 2 * kTileBytes + (word + t) * 4);
    }
    __device__ __forceinline__ void scores(float (&s)[kKeys / 8][4], const Queries& q, int lane) const {
#pragma unroll
        for (int n = 0; n < kKeys / 8; n += 2) add_scores<T, Kv, kDim>(s[n], s[n + 1], q, stage + n * 8 * kDim, lane);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
            u32 pair = scales(4 * n);
            float first = F16::low(pair), second = F16::high(pair);
            s[n][0] *= first, s[n][1] *= second, s[n][2] *= first, s[n][3] *= second;
        }
    }
    // The scales of the values go with the weights.
    __device__ __forceinline__ u32 pack(float first, float second, int n) const {
        u32 pair = scales(kKeys / 2 + 4 * n);
        return BF16::pack(first * F16::low(pair), second * F16::high(pair));
    }
    __device__ __forceinline__ void add_values(float (&acc)[kDim / 8][4], const u32 (&p)[kKeys / 16][4], int lane) const {
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
            add_weighted<Kv, kDim>(acc, p[k], stage + kTileBytes + k * 16 * kDim, lane);
    }
    static __device__ __forceinline__ void store(float* rows, int stride, const float (&acc)[kDim / 8][4], int lane) {
        store_sums<kDim>(rows, stride, acc, lane);
    }
};

// Keys that are integers meet the tensor cores as they are: each head is a row of 16-bit integers times a factor, which
// is finer than bfloat16 holds it, and two products of 8-bit integers are one of 16 bits with 8.
template <typename T, int kDim_, int kKeys_>
struct IntegerUnit : QuantizedUnit<T, Int8, kDim_, kKeys_> {
    using Base = QuantizedUnit<T, Int8, kDim_, kKeys_>;
    static constexpr int kDim = kDim_, kKeys = kKeys_;
    static constexpr int kWords = kDim / 16;  // of a key that a thread takes
    static constexpr float kMost = 127.0f * 256.0f;

    struct Queries {
        u32 upper[kDim / 32][4];  // fragments of the numbers' upper bytes, rounded, and what is left
        u32 lower[kDim / 32][4];
        float factor[2];
    };
    static __device__ __forceinline__ void load_heads(Queries& q, const u16* rows, int group, int lane) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[kWords][4];
            u32 most = 0;
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                const u16* from = rows + (g + 8 * half) * kDim + (kDim / 64 * t + w / 4) * 16 + w % 4 * 4;
                uint2 pairs = g + 8 * half < group ? *reinterpret_cast<const uint2*>(from) : uint2{0, 0};
                x[w][0] = T::low(pairs.x), x[w][1] = T::high(pairs.x);
                x[w][2] = T::low(pairs.y), x[w][3] = T::high(pairs.y);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32 size = __float_as_uint(x[w][i]) & 0x7fffffffu;  // orders as the floats do, NaN above all
                    most = most > size ? most : size;
                }
            }
#pragma unroll
            for (int other = 1; other < 4; other <<= 1) {
                u32 theirs = __shfl_xor_sync(kFull, most, other);
                most = most > theirs ? most : theirs;
            }
            float largest = __uint_as_float(most), inverse = most == 0 ? 0.0f : kMost / largest;
            q.factor[half] = largest * (1.0f / kMost);
#pragma unroll
            for (int w = 0; w < kWords; ++w) {
                u32 upper = 0, lower = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int number = __float2int_rn(x[w][i] * inverse), above = (number + 128) >> 8;
                    upper |= (u32)(above & 0xff) << 8 * i;
                    lower |= (u32)(number & 0xff) << 8 * i;
                }
                q.upper[w / 2][half + w % 2 * 2] = upper;
                q.lower[w / 2][half + w % 2 * 2] = lower;
            }
        }
    }
    static __device__ __forceinline__ void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    using Base::Base;
    __device__ __forceinline__ void scores(float (&s)[kKeys / 8][4], const Queries& q, int lane) const {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
            u32 words[kWords];
#pragma unroll
            for (int i = 0; i < kDim / 64; ++i) {
                uint4 x = shared_uint4(this->stage + n * 8 * kDim + byte_piece<kDim>(g, kDim / 64 * t + i));
                words[4 * i] = x.x, words[4 * i + 1] = x.y, words[4 * i + 2] = x.z, words[4 * i + 3] = x.w;
            }
            int upper[4] = {}, lower[4] = {};
#pragma unroll
            for (int step = 0; step < kDim / 32; ++step) {
                mma(upper, q.upper[step], words[2 * step], words[2 * step + 1]);
                mma(lower, q.lower[step], words[2 * step], words[2 * step + 1]);
            }
            u32 pair = this->scales(4 * n);
            float scale[2] = {F16::low(pair), F16::high(pair)};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                s[n][i] = (float)(upper[i] * 256 + lower[i]) * (q.factor[i / 2] * scale[i % 2]);
        }
    }
};
