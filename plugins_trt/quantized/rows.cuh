// Keys and values in eight bits a number, with one float16 scale for each token and KV head: x = scale * stored. What
// is stored of a token depends on that token alone.
//
// Rows of a page are bytes in the order of the head's elements. The kernels read them from tiles in shared memory
// straight into the fragments of 16-bit tensor-core products, where every stored number is exact: the scale of a key
// multiplies its scores, the scale of a value its weights. A product may sum over elements in any order, so a thread
// takes what lies together: four elements of a row are one word, its bytes 0 and 2 one pair and 1 and 3 the other.
#pragma once
#include "common.cuh"

using u8 = unsigned char;

// One pool of one layer: rows of kDim bytes, [pages, kv_heads, 64, kDim]; strides in bytes.
struct BytePool {
    u8* base;
    i64 page_stride;
    i64 head_stride;

    template <int kDim>
    __device__ __forceinline__ u8* row(int page, int head, int slot) const {
        return base + (i64)page * page_stride + (i64)head * head_stride + slot * kDim;
    }
};

struct QuantizedArena {
    BytePool keys;      // [pages, kv_heads, 64, kDim]
    BytePool values;    // [pages, kv_heads, 64, kDim]
    Pool fine;          // as in Arena
    Pool coarse;
    Pool key_scales;    // [pages, kv_heads, 64], float16
    Pool value_scales;  // [pages, kv_heads, 64], float16
};

template <typename T>
constexpr bool kIsBfloat = false;
template <>
inline constexpr bool kIsBfloat<BF16> = true;

// ---------------------------------------------------------------- the two formats

// Picks bytes of two words into four, by the hexadecimal digits of `selector`.
__device__ __forceinline__ u32 pick(u32 a, u32 b, u32 selector) {
    u32 picked;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(a), "r"(b), "r"(selector));
    return picked;
}
// (a & mask) | b, one instruction
__device__ __forceinline__ u32 mask_or(u32 a, u32 mask, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
    return d;
}
// (a & mask) ^ b
__device__ __forceinline__ u32 mask_xor(u32 a, u32 mask, u32 b) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
    return d;
}

// Integers from -127 to 127.
struct Int8 {
    static constexpr float kLargest = 127.0f;

    // A scaled number as it is stored.
    static __device__ __forceinline__ u32 encode(float x) {
        x = fminf(fmaxf(x, -kLargest), kLargest);
        return (u32)__float2int_rn(x) & 0xffu;
    }
    static __device__ __forceinline__ float decode(u32 stored) { return (float)(signed char)stored; }

    // The numbers in bits 0-7 and 16-23 as a pair of T; the other bits may be anything.
    template <typename T>
    static __device__ __forceinline__ u32 pair_of_low_bytes(u32 w) {
        if constexpr (kIsBfloat<T>) {
            // 128 + the lower seven bits, less 128 or (with bit 7, which is 1 more in the last place) 256.
            u32 positive = mask_or(w, 0x007f007fu, 0x43004300u), less = mask_or(w, 0x00800080u, 0xc300c300u);
            return BF16::fma_pair(positive, 0x3f803f80u, less);
        } else {
            u32 above = mask_xor(w, 0x00ff00ffu, 0x64806480u);  // 1024 + 128 + the number
            return F16::fma_pair(above, 0x3c003c00u, 0xe480e480u);
        }
    }
    // Bytes 0 and 2 of a word, and 1 and 3.
    template <typename T>
    static __device__ __forceinline__ void unpack(u32 word, u32& even, u32& odd) {
        even = pair_of_low_bytes<T>(word);
        odd = pair_of_low_bytes<T>(word >> 8);
    }
    // Bytes 0 and 1 of a word, or (`half` 1) 2 and 3.
    template <typename T>
    static __device__ __forceinline__ u32 neighbours(u32 word, int half) {
        return pair_of_low_bytes<T>(pick(word, word, half ? 0x3322u : 0x1100u));
    }
    // Byte `byte` of two words.
    template <typename T>
    static __device__ __forceinline__ u32 across(u32 first, u32 second, int byte) {
        return pair_of_low_bytes<T>(pick(first, second, (u32)(byte | (4 + byte) << 8) * 0x11u));
    }
};

// 8-bit floating point: sign, four bits of exponent (bias 7), three of mantissa; the largest number is 448.
struct E4M3 {
    static constexpr float kLargest = 448.0f;

    static __device__ __forceinline__ u32 encode(float x) {
        u32 sign = __float_as_uint(x) >> 24 & 0x80u;
        float size = fminf(fabsf(x), kLargest);
        u32 bits = __float_as_uint(size);
        // Rounded to nearest, ties to even, as a number with a bias of 127 and three bits of mantissa.
        u32 rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
        u32 stored = size < 0.015625f ? (u32)__float2int_rn(size * 512.0f) : rounded - (120u << 3);
        return sign | stored;
    }
    static __device__ __forceinline__ float decode(u32 stored) {
        // The bits in their places make a number that is 2^120 too small.
        u32 bits = (stored & 0x80u) << 24 | (stored & 0x7fu) << 20;
        return __fmul_rn(__uint_as_float(bits), __uint_as_float((127u + 120u) << 23));
    }

    // The numbers in bits 8-15 and 24-31 as a pair of T; the other bits may be anything.
    template <typename T>
    static __device__ __forceinline__ u32 pair_of_high_bytes(u32 w) {
        if constexpr (kIsBfloat<T>) {
            u32 small = mask_or(w, 0x80008000u, w >> 4 & 0x07f007f0u);
            return BF16::fma_pair(small, 0x7b807b80u, 0u);  // times 2^120
        } else {
            u32 small = mask_or(w, 0x80008000u, w >> 1 & 0x3f803f80u);
            return F16::fma_pair(small, 0x5c005c00u, 0u);  // times 2^8
        }
    }
    template <typename T>
    static __device__ __forceinline__ void unpack(u32 word, u32& even, u32& odd) {
        even = pair_of_high_bytes<T>(word << 8);
        odd = pair_of_high_bytes<T>(word);
    }
    template <typename T>
    static __device__ __forceinline__ u32 neighbours(u32 word, int half) {
        return pair_of_high_bytes<T>(pick(word, word, half ? 0x3322u : 0x1100u));
    }
    template <typename T>
    static __device__ __forceinline__ u32 across(u32 first, u32 second, int byte) {
        return pair_of_high_bytes<T>(pick(first, second, (u32)(byte | (4 + byte) << 8) * 0x11u));
    }
};

// The scale of a row whose largest absolute value has these bits (an integer orders them as the floats, and NaN above
// all): never infinite for finite numbers, NaN for a row that holds what is none.
template <typename Kv>
__device__ __forceinline__ u16 scale_of(u32 largest_bits) {
    float scale = __fmul_rn(__uint_as_float(largest_bits), 1.0f / Kv::kLargest);
    if (largest_bits >= 0x7f800000u) return 0x7e00;
    return F16::round(fminf(scale, 65504.0f));
}
// What a row is multiplied with before it is rounded.
__device__ __forceinline__ float inverse_of(float scale) { return scale > 0.0f ? __frcp_rn(scale) : 0.0f; }

// ---------------------------------------------------------------- tiles in shared memory

// Byte offset of 16-byte piece `piece` of row `row` in a tile of 8-bit rows. Pieces are permuted so that what eight
// threads read together lies in different banks: neighbouring rows (keys), or every second row (values).
template <int kDim>
__device__ __forceinline__ u32 byte_piece(int row, int piece) {
    if constexpr (kDim == 128) return (u32)(row * 128 + ((piece ^ (row & 7)) << 4));
    int line = row >> 1, place = (row & 1) << 2 | piece;  // two rows of 64 bytes are one line of the banks
    return (u32)(line * 128 + ((place ^ (line & 3) << 1) << 4));
}

__device__ __forceinline__ uint4 shared_uint4(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
    return x;
}
__device__ __forceinline__ uint2 shared_uint2(u32 address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address));
    return x;
}
__device__ __forceinline__ void store_shared(u32 address, uint4 x) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
__device__ __forceinline__ u32 shared_word(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

// The scales of two neighbouring tokens, of which the first `valid` are there; the others become zeros.
__device__ __forceinline__ void copy_scales_async(u32 shared, const u16* global, int valid) {
    int bytes = 2 * min_int(max_int(valid, 0), 2);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
