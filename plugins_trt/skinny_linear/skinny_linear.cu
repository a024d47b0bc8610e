// out = scale * (x W^T + bias) for up to 16 rows of x: the weights stream once through shared memory to mma.sync.
//
// A thread block takes 16 outputs at a time; each of its warps takes an eighth of the inputs, and the warps' sums are
// added at the end of the tile in a fixed order. Every thread copies just the 16-byte pieces of the weights that it will
// multiply itself, so its ring needs no barrier: the copies run on across tiles, which keeps the memory busy. The order
// of the inputs inside a step of 32 is permuted, for weights and x alike, so that a thread's share of an mma is one
// piece. Weights do not depend on the launch before: their copies begin before its end.
//
// Gated: of the weights [gate; up], a tile is 8 rows of gate and the same 8 of up, and silu(gate) * up is stored.
#include "common.cuh"

struct Linear {
    const u16* x;       // [rows, inputs], x_stride apart
    const u16* weight;  // [outputs, inputs]
    void* out;          // [rows, outputs]
    const u16* bias;    // [outputs] or null
    i64 x_stride;
    float scale;
    i32 rows;
    i32 inputs;  // a multiple of 32
    i32 outputs;
    i32 unused[2];
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 6;
constexpr int kStep = 32;
constexpr int kTile = 16;
constexpr int kAhead = 3;

// The weights of one thread: where its next pieces come from, tile after tile.
struct Source {
    const u16* first;   // of output g of the tile
    const u16* second;  // of output g + 8
    int tile;
    int step;  // of the warp's

    template <bool kGated>
    __device__ __forceinline__ void seek(const Linear& args, int begin) {
        int row = (int)(threadIdx.x & 31) >> 2;
        int last = args.outputs - 1;  // behind it the last one is read again, and not stored
        int offset = begin * kStep + (threadIdx.x & 3) * 8;
        int one = kGated ? min_int(tile * (kTile / 2) + row, last) : min_int(tile * kTile + row, last);
        int other = kGated ? args.outputs + one : min_int(tile * kTile + row + 8, last);
        first = args.weight + (i64)one * args.inputs + offset;
        second = args.weight + (i64)other * args.inputs + offset;
    }
};

template <typename T, int kTiles, bool kWide, bool kGated>
__device__ __forceinline__ void skinny_linear(const Linear& args) {
    extern __shared__ __align__(16) unsigned char ring[];  // [kStages, 2, kThreads] pieces of 16 bytes
    __shared__ float sums[2][kWarps][8 * kTiles][kTile];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int row = lane >> 2, part = lane & 3;
    int steps = args.inputs / kStep;
    int begin = steps * warp / kWarps, count = steps * (warp + 1) / kWarps - begin;
    int tiles = ceil_div(args.outputs, kGated ? kTile / 2 : kTile);

    u32 pieces = shared_address(ring) + threadIdx.x * 16;
    Source next;
    next.tile = (int)blockIdx.x;
    next.step = 0;
    next.seek<kGated>(args, begin);
    u32 filled = 0, used = 0;
    auto fill = [&]() {
        if (next.tile < tiles && count > 0) {
            u32 place = pieces + (u32)(filled % kStages) * (2 * kThreads * 16);
            copy_async(place, next.first);
            copy_async(place + kThreads * 16, next.second);
            next.first += kStep;
            next.second += kStep;
            if (++next.step == count) {
                next.step = 0;
                next.tile += (int)gridDim.x;
                next.seek<kGated>(args, begin);
            }
        }
        ++filled;
        copy_commit();
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) fill();
    wait_for_dependencies();

    // x comes from L2 when the launch after this one has taken the rest of L1: it is asked for some steps ahead.
    const u16* x = args.x + (i64)row * args.x_stride + (i64)begin * kStep + part * 8;
    uint4 ahead[kAhead][kTiles];
    int asked = 0;
    auto ask = [&](uint4(&b)[kTiles]) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            b[n] = {0, 0, 0, 0};
            if (8 * n + row < args.rows) {
                b[n] = *reinterpret_cast<const uint4*>(x + (i64)(8 * n) * args.x_stride + asked * kStep);
            }
        }
        asked = asked + 1 < count ? asked + 1 : 0;
    };
    if (count > 0) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) ask(ahead[i]);
    }
    int buffer = 0;
    for (int tile = (int)blockIdx.x; tile < tiles; tile += (int)gridDim.x, buffer ^= 1) {
        float acc[kTiles][4] = {};
#pragma unroll 1
        for (int step = 0; step < count; ++step) {
            uint4 b[kTiles];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                b[n] = ahead[0][n];
#pragma unroll
                for (int i = 0; i + 1 < kAhead; ++i) ahead[i][n] = ahead[i + 1][n];
            }
            ask(ahead[kAhead - 1]);
            copy_wait<kStages - 2>();
            const uint4* place = reinterpret_cast<const uint4*>(ring) + (used % kStages) * (2 * kThreads) + threadIdx.x;
            uint4 a0 = place[0], a1 = place[kThreads];
            ++used;
            fill();
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                T::mma(acc[n], a0.x, a1.x, a0.y, a1.y, b[n].x, b[n].y);
                T::mma(acc[n], a0.z, a1.z, a0.w, a1.w, b[n].z, b[n].w);
            }
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[buffer][warp][8 * n + 2 * part + (i & 1)][row + 8 * (i >> 1)] = acc[n][i];
        }
        __syncthreads();  // the next tile writes the other buffer, so one barrier is enough
        int m = threadIdx.x % kTile, n = threadIdx.x / kTile;
        int output = kGated ? tile * (kTile / 2) + m : tile * kTile + m;
        bool mine = n < 8 * kTiles && n < args.rows && output < args.outputs;
        if (mine && (!kGated || m < kTile / 2)) {
            float sum = 0.0f, up = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                sum += sums[buffer][w][n][m];
                if constexpr (kGated) up += sums[buffer][w][n][m + kTile / 2];
            }
            if (args.bias != nullptr) {
                sum += T::unpack(args.bias[output]);
                if constexpr (kGated) up += T::unpack(args.bias[args.outputs + output]);
            }
            if constexpr (kGated) {
                sum = sum / (1.0f + exp2_fast(-kLog2e * sum)) * up;
            } else {
                sum *= args.scale;
            }
            i64 place = (i64)n * args.outputs + output;
            if constexpr (kWide) {
                reinterpret_cast<float*>(args.out)[place] = sum;
            } else {
                reinterpret_cast<u16*>(args.out)[place] = T::round(sum);
            }
        }
    }
    // Only now: thread blocks of the next launch beside these cost more bandwidth than their early start gains.
    launch_dependents();
    copy_wait<0>();
}

#define KERNEL(name, type, tiles, wide, gated)                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) skinny_##name(const Linear args) {          \
        skinny_linear<type, tiles, wide, gated>(args);                                                     \
    }
KERNEL(linear_bf16_bf16_n8, BF16, 1, false, false)
KERNEL(linear_bf16_bf16_n16, BF16, 2, false, false)
KERNEL(linear_bf16_f32_n8, BF16, 1, true, false)
KERNEL(linear_bf16_f32_n16, BF16, 2, true, false)
KERNEL(gated_bf16_n8, BF16, 1, false, true)
KERNEL(gated_bf16_n16, BF16, 2, false, true)
KERNEL(linear_f16_f16_n8, F16, 1, false, false)
KERNEL(linear_f16_f16_n16, F16, 2, false, false)
KERNEL(linear_f16_f32_n8, F16, 1, true, false)
KERNEL(linear_f16_f32_n16, F16, 2, true, false)
KERNEL(gated_f16_n8, F16, 1, false, true)
KERNEL(gated_f16_n16, F16, 2, false, true)
