// 4-bit weights as tensor-core operands; layout.py says how they lie.
#pragma once
#include "common.cuh"
#include "w4a16_linear/copies.cuh"

struct Linear {
    const u16* x;         // [rows, inputs], x_stride apart
    const uint4* tiles;   // [tiles, steps, 32]
    const uint2* groups;  // [tiles, inputs / G, 8]: scale and zero point of outputs g and g + 8
    u16* out;             // [rows, outputs]
    const u16* bias;      // [outputs, or gate and up], or null
    const u16* residual;  // [rows, outputs] or null
    float* partial;       // [splits, rows, 16 tiles]
    i64 x_stride;
    i32 rows;
    i32 steps;        // inputs / 64
    i32 tile_count;
    i32 outputs;      // columns of out
    i32 group_shift;  // a group is 1 << group_shift steps
    i32 splits;
};

constexpr int kStep = 64;   // inputs of a step
constexpr int kTile = 16;   // outputs of a tile
constexpr int kHalf = 8;    // of them gate's, of gated weights

// What a thread needs of a 4-bit number: `pair` of a word and four times its number shifted down, less the zero point,
// as two 16-bit floats. An integer behind the leading one of a power of two needs no conversion, and the difference of
// two such is exact.
template <typename T>
struct Nibbles;

template <>
struct Nibbles<BF16> {
    // -(128 + zero), twice
    static __device__ __forceinline__ u32 negative_zero(u32 group) { return (0xc300u | (group >> 16)) * 0x10001u; }
    static __device__ __forceinline__ u32 pair(u32 shifted, u32 negative_zero) {
        u32 value = (shifted & 0x000f000fu) | 0x43004300u;  // 128 + q
        return BF16::fma_pair(value, 0x3f803f80u, negative_zero);  // (sm_80 has no sum of two bfloat16)
    }
    static __device__ __forceinline__ u32 times(u32 pair, u32 scale) {
        return BF16::fma_pair(pair, scale, 0x80008000u);  // -0
    }
};

template <>
struct Nibbles<F16> {
    // -(1024 + zero), twice
    static __device__ __forceinline__ u32 negative_zero(u32 group) { return (0xe400u | (group >> 16)) * 0x10001u; }
    static __device__ __forceinline__ u32 pair(u32 shifted, u32 negative_zero) {
        u32 value = (shifted & 0x000f000fu) | 0x64006400u;  // 1024 + q
        return F16::fma_pair(value, 0x3c003c00u, negative_zero);
    }
    static __device__ __forceinline__ u32 times(u32 pair, u32 scale) {
        return F16::fma_pair(pair, scale, 0x80008000u);  // -0
    }
};

__device__ __forceinline__ float scale_of(u32 group) { return F16::unpack((u16)(group & 0xffffu)); }

// The operand of 16 inputs of a tile, part s of the four of a step: a thread's inputs 4s .. 4s + 3 of its sixteen.
template <typename T>
__device__ __forceinline__ void weights_of_part(u32 (&a)[4], const uint4& words, int s, const u32 (&negative_zero)[2]) {
    u32 low = (s < 2 ? words.x : words.y) >> (s % 2 * 8);   // output g
    u32 high = (s < 2 ? words.z : words.w) >> (s % 2 * 8);  // output g + 8
    a[0] = Nibbles<T>::pair(low, negative_zero[0]);
    a[1] = Nibbles<T>::pair(high, negative_zero[1]);
    a[2] = Nibbles<T>::pair(low >> 4, negative_zero[0]);
    a[3] = Nibbles<T>::pair(high >> 4, negative_zero[1]);
}

// The end of an output: `sum` and, of gated weights, `up` are whole.
template <typename T, bool kGated>
__device__ __forceinline__ void store_output(const Linear& args, int row, int output, float sum, float up) {
    if (args.bias != nullptr) {
        sum += T::unpack(args.bias[output]);
        if constexpr (kGated) up += T::unpack(args.bias[args.outputs + output]);
    }
    i64 place = (i64)row * args.outputs + output;
    if constexpr (kGated) {
        sum = sum / (1.0f + exp2_fast(-kLog2e * sum)) * up;
    } else if (args.residual != nullptr) {
        sum += T::unpack(args.residual[place]);
    }
    args.out[place] = T::round(sum);
}
