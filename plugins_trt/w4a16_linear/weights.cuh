// 4-bit weights as tensor-core operands; layout.py says how they lie.
#pragma once
#include "common.cuh"
#include "w4a16_linear/instructions.cuh"

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
    i32 splits;       // shares of the inputs, of thread blocks
    i32 unit;         // tiles that one thread block takes together
    i32 unused;
};

constexpr int kStep = 64;   // inputs of a step
constexpr int kTile = 16;   // outputs of a tile
constexpr int kHalf = 8;    // of them gate's, of gated weights

// A 4-bit number q behind the leading one of a power of two is a 16-bit float, kBase + q, without a conversion: one
// instruction, or two with a shift. The products with kBase and with the zero point are the same for all outputs of a
// group but for a factor, the sum of its inputs, and taken off at its end; or, of many rows, taken off the weights, exactly.
template <typename T>
struct Nibbles;

template <>
struct Nibbles<BF16> {
    static constexpr u32 kOnes = 0x3f803f80u;
    // 128 + q of the eight numbers of a word, inputs 2 j and 2 j + 1 in pair j
    static __device__ __forceinline__ void pairs(u32 (&pair)[4], u32 word) {
#pragma unroll
        for (int j = 0; j < 4; ++j) pair[j] = masked_or(word >> (4 * j), 0x000f000fu, 0x43004300u);
    }
    // 128 + zero
    static __device__ __forceinline__ float offset(u32 group) { return bits_as_float((group & 0xffff0000u) | 0x43000000u); }
    // -(128 + zero), twice
    static __device__ __forceinline__ u32 negative_offset(u32 group) { return (0xc300u | (group >> 16)) * 0x10001u; }
};

template <>
struct Nibbles<F16> {
    static constexpr u32 kOnes = 0x3c003c00u;
    // 64 + q: as small a base as there is room for above the number, since products with it cancel out
    static __device__ __forceinline__ void pairs(u32 (&pair)[4], u32 word) {
        pair[0] = masked_or(word << 4, 0x00f000f0u, 0x54005400u);
        pair[1] = masked_or(word, 0x00f000f0u, 0x54005400u);
        pair[2] = masked_or(word >> 4, 0x00f000f0u, 0x54005400u);
        pair[3] = masked_or(word >> 8, 0x00f000f0u, 0x54005400u);
    }
    // 64 + zero
    static __device__ __forceinline__ float offset(u32 group) {
        return bits_as_float(((group & 0xffff0000u) << 1) | 0x42800000u);
    }
    // -(64 + zero), twice
    static __device__ __forceinline__ u32 negative_offset(u32 group) {
        return (0xd400u | (group >> 12 & 0xf0u)) * 0x10001u;
    }
};

__device__ __forceinline__ float scale_of(u32 group) { return F16::unpack((u16)(group & 0xffffu)); }

// The same eight numbers as scaled weights, rounded once.
template <typename T>
__device__ __forceinline__ void scaled_pairs(u32 (&pair)[4], u32 word, u32 negative_offset, u32 scale) {
    Nibbles<T>::pairs(pair, word);
#pragma unroll
    for (int j = 0; j < 4; ++j)
        pair[j] = T::fma_pair(T::fma_pair(pair[j], Nibbles<T>::kOnes, negative_offset), scale, 0x80008000u);  // -0
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
