// The product of up to 16 rows of x with 4-bit weights: the weights stream once through shared memory to mma.sync.
//
// A thread block takes one tile of 16 outputs at a time; each of its warps takes an eighth of the inputs, and the warps'
// sums are added at the end of the tile in a fixed order. Every thread copies just what it will multiply itself, so its
// ring needs no barrier: the copies run on across tiles, which keeps the memory busy. Numbers less their zero point are
// exact in 16 bits; the scale multiplies the fp32 sums of a step. Weights do not depend on the launch before: their
// copies begin before its end.
#include "w4a16_linear/weights.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 4;
constexpr int kInputs = 2 * kStep;         // of a round, two steps
constexpr u32 kWordBytes = kThreads * 16;  // of a step
constexpr u32 kStageBytes = 2 * kWordBytes + kThreads * 16;

// Where the next copies of one thread come from, round after round, tile after tile.
struct Source {
    const uint4* words;
    const uint2* groups;
    int tile;
    int round;  // of the warp's share

    __device__ __forceinline__ void seek(const Linear& args, int begin) {
        int lane = threadIdx.x & 31;
        words = args.tiles + ((i64)tile * args.steps + 2 * begin) * 32 + lane;
        int count = args.steps >> args.group_shift;
        groups = args.groups + ((i64)tile * count + (2 * begin >> args.group_shift)) * 8 + (lane >> 2);
    }
};

// A thread's inputs of a round: of row g of each tile of eight rows, sixteen of each step.
template <int kTiles>
struct Inputs {
    uint4 of[kTiles][2][2];
};

template <typename T, int kTiles, bool kGated>
__device__ __forceinline__ void few(const Linear& args) {
    extern __shared__ __align__(16) unsigned char ring[];  // [kStages] of [2, kThreads] uint4 and [kThreads, 2] uint2
    __shared__ float sums[2][kWarps][8 * kTiles][kTile];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int rounds = ceil_div(args.steps, 2);
    int begin = rounds * warp / kWarps, count = rounds * (warp + 1) / kWarps - begin;
    // Of an odd number of steps the last round has one.
    int half_round = args.steps % 2 != 0 && begin + count == rounds ? count - 1 : -1;
    int groups_ahead = args.group_shift == 0 ? 8 : 0;        // from a step's groups to the next one's
    int groups_a_round = args.group_shift == 0 ? 16 : 8;

    u32 base = shared_address(ring);
    Source next = {nullptr, nullptr, (int)blockIdx.x, 0};
    next.seek(args, begin);
    u32 filled = 0, used = 0;  // bytes into the ring
    auto fill = [&] {
        if (next.tile < args.tile_count && count > 0) {
            u32 stage = base + filled;
            bool whole = next.round != half_round;
            copy_async(stage + threadIdx.x * 16, next.words);
            copy_async(stage + kWordBytes + threadIdx.x * 16, whole ? next.words + 32 : next.words, whole);
            copy_pair_async(stage + 2 * kWordBytes + threadIdx.x * 16, next.groups);
            copy_pair_async(
                stage + 2 * kWordBytes + threadIdx.x * 16 + 8, whole ? next.groups + groups_ahead : next.groups, whole);
            next.words += 64;
            next.groups += groups_a_round;
            if (++next.round == count) {
                next.round = 0;
                next.tile += (int)gridDim.x;
                next.seek(args, begin);
            }
        }
        filled = filled == (kStages - 1) * kStageBytes ? 0 : filled + kStageBytes;
        copy_commit();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) fill();
    wait_for_dependencies();

    // x is asked for a round ahead. Rows behind the last are the last again: their products are not stored.
    const uint4* x[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const u16* row = args.x + (i64)min_int(8 * n + g, args.rows - 1) * args.x_stride;
        x[n] = reinterpret_cast<const uint4*>(row + (i64)begin * kInputs + 16 * t);
    }
    int asked = 0;
    auto ask = [&](Inputs<kTiles>& inputs) {
        // (Where there is no second step, its weights are zeros.)
        int second = asked != half_round ? kStep / 8 : 0;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const uint4* from = x[n] + asked * (kInputs / 8);
            inputs.of[n][0][0] = from[0], inputs.of[n][0][1] = from[1];
            inputs.of[n][1][0] = from[second], inputs.of[n][1][1] = from[second + 1];
        }
        asked = asked + 1 < count ? asked + 1 : 0;
    };
    Inputs<kTiles> ahead;
    if (count > 0) ask(ahead);
    bool released = false;
    int buffer = 0;
    for (int tile = (int)blockIdx.x; tile < args.tile_count; tile += (int)gridDim.x, buffer ^= 1) {
        float acc[kTiles][4] = {};
        constexpr int kUnroll = kTiles == 1 ? 2 : 1;  // as registers allow: the next inputs need not be moved then
#pragma unroll kUnroll
        for (int round = 0; round < count; ++round) {
            Inputs<kTiles> inputs = ahead;
            ask(ahead);
            copy_wait<kStages - 2>();
            const unsigned char* stage = ring + used;
            uint4 words[2];
            words[0] = *reinterpret_cast<const uint4*>(stage + threadIdx.x * 16);
            words[1] = *reinterpret_cast<const uint4*>(stage + kWordBytes + threadIdx.x * 16);
            uint4 both = *reinterpret_cast<const uint4*>(stage + 2 * kWordBytes + threadIdx.x * 16);
            used = used == (kStages - 1) * kStageBytes ? 0 : used + kStageBytes;
            fill();
            // The next launch has its turn when all weights of this one have been asked for.
            if (!released && next.tile >= args.tile_count) {
                released = true;
                launch_dependents();
            }
            u32 groups[2][2] = {{both.x, both.y}, {both.z, both.w}};
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                u32 zero[2] = {
                    Nibbles<T>::negative_zero(groups[step][0]), Nibbles<T>::negative_zero(groups[step][1])};
                float part[kTiles][4];
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    u32 a[4];
                    weights_of_part<T>(a, words[step], s, zero);
#pragma unroll
                    for (int n = 0; n < kTiles; ++n) {
                        const uint4& four = inputs.of[n][step][s / 2];
                        u32 b0 = s % 2 == 0 ? four.x : four.z, b1 = s % 2 == 0 ? four.y : four.w;
                        if (s == 0) T::mma_first(part[n], a[0], a[1], a[2], a[3], b0, b1);
                        else T::mma(part[n], a[0], a[1], a[2], a[3], b0, b1);
                    }
                }
                float scale[2] = {scale_of(groups[step][0]), scale_of(groups[step][1])};
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[n][i] = fmaf(part[n][i], scale[i / 2], acc[n][i]);
            }
        }
        // acc: outputs g and g + 8 of rows 8n + 2t and 8n + 2t + 1
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[buffer][warp][8 * n + 2 * t + (i & 1)][g + kHalf * (i >> 1)] = acc[n][i];
        }
        __syncthreads();  // the next tile writes the other buffer, so one barrier is enough
        int m = threadIdx.x % kTile, row = threadIdx.x / kTile;
        int output = kGated ? tile * kHalf + m : tile * kTile + m;
        if (row < 8 * kTiles && row < args.rows && output < args.outputs && (!kGated || m < kHalf)) {
            float sum = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                sum += sums[buffer][w][row][m];
                if constexpr (kGated) up += sums[buffer][w][row][m + kHalf];
            }
            store_output<T, kGated>(args, row, output, sum, up);
        }
    }
    copy_wait<0>();
}

#define FEW(type, suffix, tiles)                                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) w4a16_few_##suffix##_n##tiles(const Linear args) {   \
        few<type, tiles / 8, false>(args);                                                                         \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) w4a16_gated_few_##suffix##_n##tiles(const Linear args) { \
        few<type, tiles / 8, true>(args);                                                                          \
    }

FEW(F16, f16, 8)
FEW(F16, f16, 16)
FEW(BF16, bf16, 8)
FEW(BF16, bf16, 16)
