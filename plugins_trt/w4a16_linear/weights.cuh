// 4-bit weights as tensor-core operands; layout.py says how they lie.
#pragma once
#include "packed/tiles.cuh"
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
    i32 gated;        // whether a tile has gate and up
};

constexpr int kStep = 64;   // inputs of a step

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

// What a scale and a zero point make of numbers, as weights; for bfloat16, that are kFactor times too small.
template <typename T, bool kAtOnce = false>
struct Scaled;

// A small integer is a bfloat16 as it lies: bits 0 to 7 count in units of 2^-133, through the subnormal numbers and the
// first binade of the normal ones. So four bits need no base and half of the shifts: one multiplication, by a number so
// large that the product is a normal one, takes the zero point off, exactly, and another one scales, rounding once. At once:
// a single multiplication does both, if the zero point's weight is exact, as it is of a power of two; else it is rounded.
template <bool kAtOnce>
struct Scaled<BF16, kAtOnce> {
    static constexpr float kFactor = 0x1p24f;  // so that every float16 scale has room
    u32 lower, upper;  // what makes numbers of bits 0 to 3 and of bits 4 to 7
    u32 offset, scale; // minus the zero point, and what is left to multiply with

    __device__ __forceinline__ void set(u32 group) {
        constexpr u32 kNothing = 0x80008000u;  // -0, twice
        float value = scale_of(group);
        scale = BF16::pack(value, value);
        lower = 0x76007600u;  // 2^109
        upper = 0x74007400u;  // 2^105
        offset = 0xf600f600u;  // -2^109
        if constexpr (kAtOnce) {
            lower = BF16::fma_pair(scale, lower, kNothing);
            upper = BF16::fma_pair(scale, upper, kNothing);
            offset = BF16::fma_pair(scale, offset, kNothing);
        }
        offset = BF16::fma_pair((group & 0xffff0000u) | group >> 16, offset, kNothing);  // the zero point is such a number, too
    }
    // the eight numbers of a word
    __device__ __forceinline__ void pairs(u32 (&pair)[4], u32 word) const {
        u32 rest = word >> 8;
        pair[0] = BF16::fma_pair(word & 0x000f000fu, lower, offset);
        pair[1] = BF16::fma_pair(word & 0x00f000f0u, upper, offset);
        pair[2] = BF16::fma_pair(rest & 0x000f000fu, lower, offset);
        pair[3] = BF16::fma_pair(rest & 0x00f000f0u, upper, offset);
        if constexpr (!kAtOnce) {
#pragma unroll
            for (int j = 0; j < 4; ++j) pair[j] = BF16::fma_pair(pair[j], scale, 0x80008000u);  // -0
        }
    }
};

template <>
struct Scaled<F16, false> {
    static constexpr float kFactor = 1.0f;
    u32 scale, offset;

    __device__ __forceinline__ void set(u32 group) {
        float value = scale_of(group);
        scale = F16::pack(value, value);
        offset = Nibbles<F16>::negative_offset(group);
    }
    __device__ __forceinline__ void pairs(u32 (&pair)[4], u32 word) const {
        Nibbles<F16>::pairs(pair, word);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            pair[j] = F16::fma_pair(F16::fma_pair(pair[j], Nibbles<F16>::kOnes, offset), scale, 0x80008000u);  // -0
    }
};

// What is added to an output in the end.
template <typename T>
__device__ __forceinline__ float residual_of(const Linear& args, int row, int output) {
    return args.residual == nullptr ? 0.0f : T::unpack(args.residual[(i64)row * args.outputs + output]);
}

// The end of an output: `sum` and, of gated weights, `up` are whole.
template <typename T, bool kGated>
__device__ __forceinline__ void store_output(
    const Linear& args, int row, int output, float sum, float up, float residual) {
    if (args.bias != nullptr) {
        sum += T::unpack(args.bias[output]);
        if constexpr (kGated) up += T::unpack(args.bias[args.outputs + output]);
    }
    if constexpr (kGated) sum = sum / (1.0f + exp2_fast(-kLog2e * sum)) * up;
    else sum += residual;
    args.out[(i64)row * args.outputs + output] = T::round(sum);
}

// 4-bit weights for products of many rows (packed/wide.cuh).
template <typename T, bool kFine, bool kAtOnce = false>
struct FourBits {
    using Type = T;
    using Linear = ::Linear;
    static constexpr int kInputs = kStep;                   // of a unit
    static constexpr u32 kScaleBytes = kFine ? 64 : 32;     // of a tile's unit
    static constexpr float kFactor = Scaled<T>::kFactor;
    static constexpr bool kScalesSums = false;  // (what that saves, the zero points' part of the sums costs)
    struct Scales {
        Scaled<T, kAtOnce> low, high;  // of outputs g and g + 8
    };

    static __device__ __forceinline__ int units(const Linear& args) { return args.steps; }
    static __device__ __forceinline__ u32 scale_bytes(const Linear&) { return kScaleBytes; }
    static __device__ __forceinline__ int scale_place(const Linear&, int unit) { return kFine ? unit : unit >> 1; }
    static __device__ __forceinline__ int scale_of_lane(const Linear&, int lane) { return lane / 4 * 8; }
    // `at`: of the tile and the round, the lane's own
    template <int kUnits>
    static __device__ __forceinline__ void load_scales(Scales& scales, u32 at, int unit, int part, const Linear&) {
        static_assert(kUnits % 2 == 0, "whole groups");
        if (part > 0 || (!kFine && unit % 2 == 1)) return;
        uint2 two = load_eight(at + (kFine ? unit : unit / 2) * 64);
        scales.low.set(two.x);
        scales.high.set(two.y);
    }
    // Operands of two products, of inputs 32 part .. 32 part + 31
    static __device__ __forceinline__ void operands(u32 (&a)[2][4], const uint4& words, int part, const Scales& scales) {
        u32 low[4], high[4];
        scales.low.pairs(low, part == 0 ? words.x : words.y);
        scales.high.pairs(high, part == 0 ? words.z : words.w);
#pragma unroll
        for (int q = 0; q < 2; ++q)
            a[q][0] = low[2 * q], a[q][1] = high[2 * q], a[q][2] = low[2 * q + 1], a[q][3] = high[2 * q + 1];
    }
    static __device__ __forceinline__ float residual(const Linear& args, int row, int output) {
        return residual_of<T>(args, row, output);
    }
    template <bool kGated>
    static __device__ __forceinline__ void store(
        const Linear& args, int row, int output, float sum, float up, float residual) {
        store_output<T, kGated>(args, row, output, sum, up, residual);
    }
};
