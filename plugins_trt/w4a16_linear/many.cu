// The product of 17 to 64 rows of x with 4-bit weights.
//
// A thread block takes 8 tiles, 128 outputs, and a share of the inputs, 128 at a time: 4 pairs of tiles, one for each of
// two warps, which take a half of the inputs each and add up at the end. x goes through shared memory once a thread
// block; a fragment of it that a warp reads serves its two tiles. The weights are scaled before they are multiplied,
// rounded to 16 bits: there is no room for two sets of fp32 sums. With several shares of the inputs, `reduce` adds them
// up in their order.
#include "w4a16_linear/weights.cuh"

constexpr int kThreads = 256;
constexpr int kTilesOfBlock = 8;
constexpr int kInputs = 2 * kStep;            // of a round
constexpr int kOutputs = kTilesOfBlock * kTile;
constexpr int kSumStride = kOutputs + 4;      // floats of a row of sums

template <int kTiles>
constexpr int kStages = kTiles == 8 ? 3 : 4;  // as many as the smallest device has room for
template <int kTiles>
constexpr u32 kRowsBytes = 8 * kTiles * kInputs * 2;  // of x of a stage
constexpr u32 kWordBytes = kThreads * 32;
constexpr u32 kGroupBytes = kThreads * 16;
template <int kTiles>
constexpr u32 kStageBytes = kRowsBytes<kTiles> + kWordBytes + kGroupBytes;

// Grid: (ceil(tiles / 8), splits).
template <typename T, int kTiles, bool kGated>
__device__ __forceinline__ void many(const Linear& args) {
    extern __shared__ __align__(1024) unsigned char ring[];
    static_assert(8 * kTiles * kSumStride * 4 <= kStages<kTiles> * kStageBytes<kTiles>, "the sums take the ring's place");
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int half = warp / 4;  // of the inputs of a round
    int first_tile = (int)blockIdx.x * kTilesOfBlock + warp % 4 * 2;
    int rounds = ceil_div(args.steps, 2);
    int begin = (int)((i64)rounds * blockIdx.y / args.splits);
    int end = (int)((i64)rounds * (blockIdx.y + 1) / args.splits);
    u32 base = shared_address(ring);

    auto copy_weights = [&](int round) {
        u32 stage = base + (u32)((round - begin) % kStages<kTiles>) * kStageBytes<kTiles> + kRowsBytes<kTiles>;
        int step = 2 * round + half;
        bool has_inputs = round < end && step < args.steps;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            int tile = first_tile + m;
            bool valid = has_inputs && tile < args.tile_count;
            i64 at = valid ? (i64)tile * args.steps + step : 0;
            copy_async(stage + threadIdx.x * 32 + m * 16, args.tiles + at * 32 + lane, valid);
            i64 group = valid ? ((i64)tile * (args.steps >> args.group_shift) + (step >> args.group_shift)) * 8 + g : 0;
            copy_pair_async(stage + kWordBytes + threadIdx.x * 16 + m * 8, args.groups + group, valid);
        }
    };
    auto copy_rows = [&](int round) {
        u32 stage = base + (u32)((round - begin) % kStages<kTiles>) * kStageBytes<kTiles>;
        constexpr int kPieces = kInputs / 8;
        int piece = threadIdx.x % kPieces;
        int input = round * kInputs + piece * 8;
        bool has_inputs = round < end && input < args.steps * kStep;
#pragma unroll
        for (int i = 0; i < kTiles / 2; ++i) {
            int row = i * (kThreads / kPieces) + (int)threadIdx.x / kPieces;
            bool valid = has_inputs && row < args.rows;
            const u16* from = args.x + (valid ? row * args.x_stride + input : 0);
            copy_async(stage + swizzled<kInputs>(row, piece), from, valid);
        }
    };

    // The weights of the first rounds do not depend on the launch before.
#pragma unroll 1
    for (int i = 0; i < kStages<kTiles> - 1; ++i) copy_weights(begin + i);
    wait_for_dependencies();
    launch_dependents();
#pragma unroll 1
    for (int i = 0; i < kStages<kTiles> - 1; ++i) {
        copy_rows(begin + i);
        copy_commit();  // (the first group has the weights of all)
    }

    float acc[2][kTiles][4] = {};
#pragma unroll 1
    for (int round = begin; round < end; ++round) {
        copy_wait<kStages<kTiles> - 2>();
        __syncthreads();  // what others copied is here, and what was read in the last round is free
        copy_weights(round + kStages<kTiles> - 1);
        copy_rows(round + kStages<kTiles> - 1);
        copy_commit();
        const unsigned char* stage = ring + (u32)((round - begin) % kStages<kTiles>) * kStageBytes<kTiles>;
        const unsigned char* own = stage + kRowsBytes<kTiles>;
        uint4 words[2];
        words[0] = *reinterpret_cast<const uint4*>(own + threadIdx.x * 32);
        words[1] = *reinterpret_cast<const uint4*>(own + threadIdx.x * 32 + 16);
        uint4 group = *reinterpret_cast<const uint4*>(own + kWordBytes + threadIdx.x * 16);
        u32 groups[2][2] = {{group.x, group.y}, {group.z, group.w}};
        u32 zero[2][2], scale[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                zero[m][i] = Nibbles<T>::negative_zero(groups[m][i]);
                float value = scale_of(groups[m][i]);
                scale[m][i] = T::pack(value, value);
            }
#pragma unroll
        for (int two = 0; two < 2; ++two) {  // parts 2 two and 2 two + 1 of the step
            u32 a[2][2][4];                  // part, tile
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    weights_of_part<T>(a[s][m], words[m], 2 * two + s, zero[m]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) a[s][m][i] = Nibbles<T>::times(a[s][m][i], scale[m][i % 2]);
                }
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                uint4 b = *reinterpret_cast<const uint4*>(
                    stage + swizzled<kInputs>(8 * n + g, half * (kStep / 8) + 2 * t + two));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    T::mma(acc[m][n], a[0][m][0], a[0][m][1], a[0][m][2], a[0][m][3], b.x, b.y);
                    T::mma(acc[m][n], a[1][m][0], a[1][m][1], a[1][m][2], a[1][m][3], b.z, b.w);
                }
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    // The halves of the inputs meet in shared memory: [row, output of the block].
    float* sums = reinterpret_cast<float*>(ring);
    auto place = [&](int m, int n, int i) {
        int row = 8 * n + 2 * t + (i & 1), output = (warp % 4 * 2 + m) * kTile + g + kHalf * (i >> 1);
        return row * kSumStride + output;
    };
    if (half == 1) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[place(m, n, i)] = acc[m][n][i];
    }
    __syncthreads();
    if (half == 0) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[place(m, n, i)] += acc[m][n][i];
    }
    __syncthreads();
    int width = kTile * args.tile_count, first = (int)blockIdx.x * kOutputs;
    if (args.splits > 1) {
        for (int i = threadIdx.x; i < args.rows * kOutputs; i += kThreads) {
            int row = i / kOutputs, output = i % kOutputs;
            if (first + output < width)
                args.partial[((i64)blockIdx.y * args.rows + row) * width + first + output] = sums[row * kSumStride + output];
        }
        return;
    }
    constexpr int kColumns = kGated ? kOutputs / 2 : kOutputs;
    for (int i = threadIdx.x; i < args.rows * kColumns; i += kThreads) {
        int row = i / kColumns, column = i % kColumns;
        int output = (int)blockIdx.x * kColumns + column;
        if (output >= args.outputs) continue;
        const float* of_row = sums + row * kSumStride;
        int at = kGated ? column / kHalf * kTile + column % kHalf : column;
        store_output<T, kGated>(args, row, output, of_row[at], kGated ? of_row[at + kHalf] : 0.0f);
    }
}

// Adds up the shares of the inputs. Grid: (ceil(outputs / 256), rows).
template <typename T, bool kGated>
__device__ __forceinline__ void reduce(const Linear& args) {
    wait_for_dependencies();
    launch_dependents();
    int row = blockIdx.y, output = (int)(blockIdx.x * kThreads + threadIdx.x);
    if (output >= args.outputs) return;
    int width = kTile * args.tile_count;
    int at = kGated ? output / kHalf * kTile + output % kHalf : output;
    float sum = 0.0f, up = 0.0f;
    for (int split = 0; split < args.splits; ++split) {
        const float* part = args.partial + ((i64)split * args.rows + row) * width + at;
        sum += part[0];
        if constexpr (kGated) up += part[kHalf];
    }
    store_output<T, kGated>(args, row, output, sum, up);
}

#define MANY(type, suffix, tiles)                                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) w4a16_many_##suffix##_n##tiles(const Linear args) {   \
        many<type, tiles / 8, false>(args);                                                                         \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) w4a16_gated_many_##suffix##_n##tiles(const Linear args) { \
        many<type, tiles / 8, true>(args);                                                                          \
    }
#define REDUCE(type, suffix)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads) w4a16_reduce_##suffix(const Linear args) {              \
        reduce<type, false>(args);                                                                                 \
    }                                                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads) w4a16_gated_reduce_##suffix(const Linear args) {        \
        reduce<type, true>(args);                                                                                  \
    }

MANY(F16, f16, 32)
MANY(F16, f16, 64)
MANY(BF16, bf16, 32)
MANY(BF16, bf16, 64)
REDUCE(F16, f16)
REDUCE(BF16, bf16)
