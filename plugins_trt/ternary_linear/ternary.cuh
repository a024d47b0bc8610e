// Ternary weights as tensor-core operands; layout.py says how they lie.
//
// A weight's two bits are the sign and the highest exponent bit of a 16-bit float, bfloat16 and float16 alike: 00 is 0,
// 01 is +2 and 11 is -2. So a word shifted to where the two bits belong and masked is a register of an operand, of a pair
// of weights, exactly; the factor 2 is taken out of the fp32 sums at the end.
#pragma once
#include "packed/tiles.cuh"
#include "ternary_linear/device.cuh"

struct Linear {
    const u16* x;         // [rows, inputs], x_stride apart
    const uint4* tiles;   // [tiles, blocks, 32]
    const u32* scales;    // [tiles, blocks, 8, scales of a block] (or of a row [tiles, 8]): of outputs g and g + 8
    u16* out;             // [rows, outputs]
    const u16* bias;      // [outputs, or gate and up], or null
    const u16* residual;  // [rows, outputs] or null
    float* partial;       // [splits, rows, 16 tiles]
    i64 x_stride;
    i32 rows;
    i32 inputs;
    i32 blocks;      // of inputs: inputs / 128, rounded up
    i32 tile_count;
    i32 outputs;     // columns of out
    i32 scale_count; // scales of a block; 0: one of all inputs
    i32 splits;      // shares of the inputs (few.cu: the power of two that they are)
    i32 gated;       // whether a tile has gate and up
};

constexpr int kBlock = 128;  // inputs of a block
constexpr float kUnit = 0.5f;  // takes the factor out

// Pair `number` of the eight of a word.
__device__ __forceinline__ u32 pair_of(u32 word, int number) { return (word << (2 * number)) & 0xc000c000u; }

// The two operands of inputs 32 u .. 32 u + 31 of a block.
__device__ __forceinline__ void weights_of(u32 (&a)[2][4], const uint4& words, int u) {
    u32 low = u < 2 ? words.x : words.y;   // output g
    u32 high = u < 2 ? words.z : words.w;  // output g + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int first = 4 * (u % 2) + 2 * half;
        a[half][0] = pair_of(low, first);
        a[half][1] = pair_of(high, first);
        a[half][2] = pair_of(low, first + 1);
        a[half][3] = pair_of(high, first + 1);
    }
}

// What is added to an output in the end.
template <typename T>
__device__ __forceinline__ float residual_of(const Linear& args, int row, int output) {
    return args.residual == nullptr ? 0.0f : T::unpack(args.residual[(i64)row * args.outputs + output]);
}

// The end of an output: `sum` and, of gated weights, `up` are whole.
template <typename T>
__device__ __forceinline__ void store_output(
    const Linear& args, int row, int output, float sum, float up, float residual) {
    sum *= kUnit;
    up *= kUnit;
    if (args.bias != nullptr) {
        sum += T::unpack(args.bias[output]);
        if (args.gated) up += T::unpack(args.bias[args.outputs + output]);
    }
    if (args.gated) sum = sum / (1.0f + exp2_fast(-kLog2e * sum)) * up;
    args.out[(i64)row * args.outputs + output] = T::round(sum + residual);
}

// What a scale makes of four pairs of weights: of the upper bytes of a word's halves, or of the lower ones.
template <typename T>
struct ScaledPairs;

template <>
struct ScaledPairs<F16> {
    static constexpr float kFactor = 1.0f;
    u32 scale;

    __device__ __forceinline__ void set(float value) { scale = F16::pack(value, value); }
    __device__ __forceinline__ void pairs(u32 (&pair)[4], u32 word, bool upper) const {
#pragma unroll
        for (int n = 0; n < 4; ++n) pair[n] = F16::fma_pair(pair_of(word, upper ? n : 4 + n), scale, 0x80008000u);  // -0
    }
};

// A small integer is a bfloat16 as it lies, bits 0 to 7 counted in units of 2^-133. With their upper bits turned over, 0, +2
// and -2 are 2, 3 and 1 there, wherever in a byte: one multiplication scales and takes the 2 off, exactly, and three of four
// shifts are left out. What that makes is kFactor times too small, so that every float16 scale has room.
template <>
struct ScaledPairs<BF16> {
    static constexpr float kFactor = 0x1p25f;
    u32 scale[4], offset;  // of numbers at bits 6, 4, 2 and 0

    __device__ __forceinline__ void set(float value) {
        constexpr u32 kNothing = 0x80008000u;  // -0, twice
        u32 both = BF16::pack(value, value);
#pragma unroll
        for (int n = 0; n < 4; ++n) scale[n] = BF16::fma_pair(both, (0x7300u + 0x100u * n) * 0x10001u, kNothing);  // 2^103 and up
        offset = BF16::fma_pair(both, 0xb400b400u, kNothing);  // -2^-23
    }
    __device__ __forceinline__ void pairs(u32 (&pair)[4], u32 word, bool upper) const {
        if (upper) word >>= 8;
#pragma unroll
        for (int n = 0; n < 4; ++n)
            pair[n] = BF16::fma_pair(masked_xor(word, 0x00030003u << (6 - 2 * n), 0x00020002u << (6 - 2 * n)), scale[n], offset);
    }
};

// Ternary weights for products of many rows (packed/wide.cuh). The weights are scaled, not the sums, and rounded once.
template <typename T, bool kFine>
struct TwoBits {
    using Type = T;
    using Linear = ::Linear;
    static constexpr int kInputs = kBlock;                // of a unit
    static constexpr u32 kScaleBytes = kFine ? 128 : 32;  // of a tile's unit, at most
    static constexpr float kFactor = ScaledPairs<T>::kFactor;
    static constexpr bool kScalesSums = !kFine && kFactor == 1.0f;  // of few rows: one scale a round
    struct Scales {
        ScaledPairs<T> low, high;  // of outputs g and g + 8
        u32 both;
    };

    static __device__ __forceinline__ int units(const Linear& args) { return args.blocks; }
    static __device__ __forceinline__ u32 scale_bytes(const Linear& args) { return kFine ? 32 * args.scale_count : 32; }
    static __device__ __forceinline__ int scale_place(const Linear& args, int unit) { return args.scale_count == 0 ? 0 : unit; }
    static __device__ __forceinline__ int scale_of_lane(const Linear& args, int lane) {
        return lane / 4 * (kFine ? args.scale_count : 1) * 4;
    }
    // `at`: of the tile and the round, the lane's own
    template <int kUnits>
    static __device__ __forceinline__ void load_scales(Scales& scales, u32 at, int unit, int part, const Linear& args) {
        static_assert(kUnits == 1, "one scale of all inputs lies there once");
        if (!kFine && part > 0) return;
        u32 both = load_four(at + (kFine ? args.scale_count == 4 ? part : part >> 1 : 0) * 4);
        scales.both = both;
        scales.low.set(F16::low(both));
        scales.high.set(F16::high(both));
    }
    static __device__ __forceinline__ void operands(u32 (&a)[2][4], const uint4& words, int part, const Scales& scales) {
        u32 low[4], high[4];
        scales.low.pairs(low, part < 2 ? words.x : words.y, part % 2 == 0);
        scales.high.pairs(high, part < 2 ? words.z : words.w, part % 2 == 0);
#pragma unroll
        for (int q = 0; q < 2; ++q)
            a[q][0] = low[2 * q], a[q][1] = high[2 * q], a[q][2] = low[2 * q + 1], a[q][3] = high[2 * q + 1];
    }
    // The same without the scale
    static __device__ __forceinline__ void plain_operands(u32 (&a)[2][4], const uint4& words, int part) {
        weights_of(a, words, part);
    }
    // acc += the products of a group's plain operands, scaled
    template <int kColumns>
    static __device__ __forceinline__ void add_scaled(
        float (&acc)[kColumns][4], const float (&sums)[kColumns][4], const Scales& scales) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                acc[n][c] = fmaf(c < 2 ? F16::low(scales.both) : F16::high(scales.both), sums[n][c], acc[n][c]);
    }
    static __device__ __forceinline__ float residual(const Linear& args, int row, int output) {
        return residual_of<T>(args, row, output);
    }
    template <bool kGated>
    static __device__ __forceinline__ void store(
        const Linear& args, int row, int output, float sum, float up, float residual) {
        store_output<T>(args, row, output, sum, up, residual);
    }
};
