// Rows of keys and values shared by the lanes of a warp, and how they lie in pages: rounded to 16 bits (`Exact`), or in
// eight bits with a scale (`Quantized`).
#pragma once
#include "quantized/rows.cuh"

// A lane's share of a row: kPairs elements of the first half and those they are rotated with, of the second half.
template <int kPairs>
struct Share {
    float first[kPairs];
    float second[kPairs];
};

template <typename T, int kDim, int kPairs = kDim / 64>
__device__ __forceinline__ Share<kPairs> load_share(const u16* row, int lane) {
    Share<kPairs> share;
    if constexpr (kPairs == 2) {
        u32 a = *reinterpret_cast<const u32*>(row + 2 * lane);
        u32 b = *reinterpret_cast<const u32*>(row + kDim / 2 + 2 * lane);
        share.first[0] = T::low(a), share.first[1] = T::high(a);
        share.second[0] = T::low(b), share.second[1] = T::high(b);
    } else {
        share.first[0] = T::unpack(row[lane]);
        share.second[0] = T::unpack(row[kDim / 2 + lane]);
    }
    return share;
}

template <typename T, int kDim, int kPairs = kDim / 64>
__device__ __forceinline__ void store_share(u16* row, const Share<kPairs>& share, int lane) {
    if constexpr (kPairs == 2) {
        *reinterpret_cast<u32*>(row + 2 * lane) = T::pack(share.first[0], share.first[1]);
        *reinterpret_cast<u32*>(row + kDim / 2 + 2 * lane) = T::pack(share.second[0], share.second[1]);
    } else {
        row[lane] = T::round(share.first[0]);
        row[kDim / 2 + lane] = T::round(share.second[0]);
    }
}

template <int kPairs>
__device__ __forceinline__ void add(Share<kPairs>& sum, const Share<kPairs>& x) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        sum.first[i] += x.first[i];
        sum.second[i] += x.second[i];
    }
}

template <int kPairs>
__device__ __forceinline__ void multiply(Share<kPairs>& x, float factor) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        x.first[i] *= factor;
        x.second[i] *= factor;
    }
}

template <typename T, int kDim_>
struct Exact {
    using Input = T;
    using Pages = Arena;
    using Row = Share<kDim_ / 64>;
    static constexpr int kDim = kDim_, kRowBytes = 2 * kDim_;

    static __device__ __forceinline__ void store_key(
        const Pages& arena, int page, int head, int slot, const Row& key, int lane) {
        store_share<T, kDim>(arena.keys.row<kDim>(page, head, slot), key, lane);
    }
    static __device__ __forceinline__ void store_value(
        const Pages& arena, int page, int head, int slot, const Row& value, int lane) {
        store_share<T, kDim>(arena.values.row<kDim>(page, head, slot), value, lane);
    }
    // As it is read once it is stored.
    static __device__ __forceinline__ Row rounded(Row key) {
#pragma unroll
        for (int i = 0; i < kDim / 64; ++i) {
            key.first[i] = T::unpack(T::round(key.first[i]));
            key.second[i] = T::unpack(T::round(key.second[i]));
        }
        return key;
    }
    // Stored keys of one page, one after the other.
    struct Keys {
        const u16* at;
        __device__ __forceinline__ Keys(const Pages& arena, int page, int head, int slot)
            : at(arena.keys.row<kDim>(page, head, slot)) {}
        __device__ __forceinline__ Row row(int lane) const { return unpacked(packed(lane)); }
        __device__ __forceinline__ void next() { at += kDim; }
        // The same in two words, for many at once.
        __device__ __forceinline__ uint2 packed(int lane) const {
            if constexpr (kDim == 128) {
                return uint2{*reinterpret_cast<const u32*>(at + 2 * lane),
                             *reinterpret_cast<const u32*>(at + kDim / 2 + 2 * lane)};
            } else {
                return uint2{at[lane], at[kDim / 2 + lane]};
            }
        }
        static __device__ __forceinline__ Row unpacked(uint2 words) {
            Row x;
            if constexpr (kDim == 128) {
                x.first[0] = T::low(words.x), x.first[1] = T::high(words.x);
                x.second[0] = T::low(words.y), x.second[1] = T::high(words.y);
            } else {
                x.first[0] = T::unpack((u16)words.x), x.second[0] = T::unpack((u16)words.y);
            }
            return x;
        }
    };
};

// Rows come in fp32 (keys rotated and not rounded, values as they are) and are rounded once.
template <typename T, typename Kv, int kDim_>
struct Quantized {
    using Input = T;
    using Pages = QuantizedArena;
    using Row = Share<kDim_ / 64>;
    static constexpr int kDim = kDim_, kPairs = kDim_ / 64, kRowBytes = kDim_;

    static __device__ __forceinline__ u16 row_scale(const Row& x) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            u32 first = __float_as_uint(x.first[i]) & 0x7fffffffu, second = __float_as_uint(x.second[i]) & 0x7fffffffu;
            most = most > first ? most : first;
            most = most > second ? most : second;
        }
        return scale_of<Kv>(__reduce_max_sync(kFull, most));
    }
    static __device__ __forceinline__ void store(
        const BytePool& pool, const Pool& scales, int page, int head, int slot, const Row& x, int lane) {
        u16 scale = row_scale(x);
        float inverse = inverse_of(F16::unpack(scale));
        u8* row = pool.row<kDim>(page, head, slot);
        u32 first[kPairs], second[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            first[i] = Kv::encode(__fmul_rn(x.first[i], inverse));
            second[i] = Kv::encode(__fmul_rn(x.second[i], inverse));
        }
        if constexpr (kPairs == 2) {
            *reinterpret_cast<u16*>(row + 2 * lane) = (u16)(first[0] | first[1] << 8);
            *reinterpret_cast<u16*>(row + kDim / 2 + 2 * lane) = (u16)(second[0] | second[1] << 8);
        } else {
            row[lane] = (u8)first[0];
            row[kDim / 2 + lane] = (u8)second[0];
        }
        if (lane == 0) *scales.row<1>(page, head, slot) = scale;
    }
    static __device__ __forceinline__ void store_key(
        const Pages& arena, int page, int head, int slot, const Row& key, int lane) {
        store(arena.keys, arena.key_scales, page, head, slot, key, lane);
    }
    static __device__ __forceinline__ void store_value(
        const Pages& arena, int page, int head, int slot, const Row& value, int lane) {
        store(arena.values, arena.value_scales, page, head, slot, value, lane);
    }
    static __device__ __forceinline__ Row rounded(Row key) {
        float scale = F16::unpack(row_scale(key)), inverse = inverse_of(scale);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            key.first[i] = Kv::decode(Kv::encode(__fmul_rn(key.first[i], inverse))) * scale;
            key.second[i] = Kv::decode(Kv::encode(__fmul_rn(key.second[i], inverse))) * scale;
        }
        return key;
    }
    struct Keys {
        const u8* at;
        const u16* factor;
        __device__ __forceinline__ Keys(const Pages& arena, int page, int head, int slot)
            : at(arena.keys.row<kDim>(page, head, slot)), factor(arena.key_scales.row<1>(page, head, slot)) {}
        __device__ __forceinline__ Row row(int lane) const { return unpacked(packed(lane)); }
        __device__ __forceinline__ void next() { at += kDim, ++factor; }
        __device__ __forceinline__ uint2 packed(int lane) const {
            u32 a, b;
            if constexpr (kPairs == 2) {
                a = *reinterpret_cast<const u16*>(at + 2 * lane);
                b = *reinterpret_cast<const u16*>(at + kDim / 2 + 2 * lane);
            } else {
                a = at[lane], b = at[kDim / 2 + lane];
            }
            return uint2{a | b << 16, *factor};
        }
        // (The product is exact, so it does not matter whether it is rounded before it is added.)
        static __device__ __forceinline__ Row unpacked(uint2 words) {
            float scale = F16::unpack((u16)words.y);
            Row x;
            x.first[0] = Kv::decode(words.x & 0xffu) * scale;
            x.second[0] = Kv::decode(words.x >> 16 & 0xffu) * scale;
            if constexpr (kPairs == 2) {
                x.first[1] = Kv::decode(words.x >> 8 & 0xffu) * scale;
                x.second[1] = Kv::decode(words.x >> 24) * scale;
            }
            return x;
        }
    };
};
