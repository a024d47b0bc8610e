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
constexpr int kStages = 8;
constexpr int kAhead = 2;
constexpr u32 kWordBytes = kThreads * 16;      // of a stage
constexpr u32 kStageBytes = kWordBytes + kThreads * 8;

// Where the next copies of one thread come from, tile after tile.
struct Source {
    int tile;
    int step;  // of the warp's share

    __device__ __forceinline__ void copy(const Linear& args, int begin, u32 words, u32 groups) const {
        int at = begin + step, lane = threadIdx.x & 31;
        copy_async(words, args.tiles + ((i64)tile * args.steps + at) * 32 + lane);
        const u32* row = args.groups + (i64)(at >> args.group_shift) * (kTile * args.tile_count) + tile * kTile + (lane >> 2);
        copy_word_async(groups, row);
        copy_word_async(groups + 4, row + kHalf);
    }
};

template <typename T, int kTiles, bool kGated>
__device__ __forceinline__ void few(const Linear& args) {
    extern __shared__ __align__(16) unsigned char ring[];  // [kStages] of [kThreads] uint4, then [kThreads] uint2
    __shared__ float sums[2][kWarps][8 * kTiles][kTile];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int begin = args.steps * warp / kWarps, count = args.steps * (warp + 1) / kWarps - begin;

    u32 base = shared_address(ring);
    Source next = {(int)blockIdx.x, 0};
    int filled = 0, used = 0;
    auto fill = [&] {
        if (next.tile < args.tile_count && count > 0) {
            u32 stage = base + (u32)(filled & (kStages - 1)) * kStageBytes;
            next.copy(args, begin, stage + threadIdx.x * 16, stage + kWordBytes + threadIdx.x * 8);
            if (++next.step == count) {
                next.step = 0;
                next.tile += (int)gridDim.x;
            }
        }
        ++filled;
        copy_commit();
    };
#pragma unroll 1
    for (int stage = 0; stage < kStages - 1; ++stage) fill();
    wait_for_dependencies();

    // x: a thread's sixteen inputs of a step, of row g of each tile of eight rows; asked for some steps ahead.
    const u16* x = args.x + (i64)g * args.x_stride + (i64)begin * kStep + 16 * t;
    uint4 ahead[kAhead][kTiles][2];
    int asked = 0;
    auto ask = [&](uint4 (&of_step)[kTiles][2]) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            of_step[n][0] = of_step[n][1] = uint4{0, 0, 0, 0};
            if (8 * n + g < args.rows) {
                const uint4* from = reinterpret_cast<const uint4*>(x + (i64)(8 * n) * args.x_stride + asked * kStep);
                of_step[n][0] = from[0], of_step[n][1] = from[1];
            }
        }
        asked = asked + 1 < count ? asked + 1 : 0;
    };
    if (count > 0) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) ask(ahead[i]);
    }
    bool released = false;
    int buffer = 0;
    for (int tile = (int)blockIdx.x; tile < args.tile_count; tile += (int)gridDim.x, buffer ^= 1) {
        float acc[kTiles][4] = {};
#pragma unroll 1
        for (int step = 0; step < count; ++step) {
            uint4 b[kTiles][2];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                b[n][0] = ahead[0][n][0], b[n][1] = ahead[0][n][1];
#pragma unroll
                for (int i = 0; i + 1 < kAhead; ++i)
                    ahead[i][n][0] = ahead[i + 1][n][0], ahead[i][n][1] = ahead[i + 1][n][1];
            }
            ask(ahead[kAhead - 1]);
            copy_wait<kStages - 2>();
            const unsigned char* stage = ring + (used & (kStages - 1)) * kStageBytes;
            uint4 words = *reinterpret_cast<const uint4*>(stage + threadIdx.x * 16);
            uint2 group = *reinterpret_cast<const uint2*>(stage + kWordBytes + threadIdx.x * 8);
            ++used;
            fill();
            // The next launch has its turn when all weights of this one have been asked for.
            if (!released && next.tile >= args.tile_count) {
                released = true;
                launch_dependents();
            }
            u32 zero[2] = {Nibbles<T>::negative_zero(group.x), Nibbles<T>::negative_zero(group.y)};
            float part[kTiles][4];
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                u32 a[4];
                weights_of_part<T>(a, words, s, zero);
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    const uint4& four = b[n][s / 2];
                    u32 b0 = s % 2 == 0 ? four.x : four.z, b1 = s % 2 == 0 ? four.y : four.w;
                    if (s == 0) T::mma_first(part[n], a[0], a[1], a[2], a[3], b0, b1);
                    else T::mma(part[n], a[0], a[1], a[2], a[3], b0, b1);
                }
            }
            float scale[2] = {scale_of(group.x), scale_of(group.y)};
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[n][i] = fmaf(part[n][i], scale[i / 2], acc[n][i]);
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
