// The product of up to 64 rows of x with 4-bit weights, where a thread block has many outputs or x has many rows.
//
// A thread block takes up to 2 kM tiles of 16 outputs and a share of the inputs, 64 kSteps kK at a time: a pair of tiles
// for each of kM warps, and kK times as many warps, which take a part of the inputs each and add up at the end. x goes
// through shared memory once a thread block; a fragment of it that a warp reads serves its two tiles. Of up to 16 rows the
// sums are scaled, group by group; of more, for which there is no room for two sets of them, the weights are, and rounded
// to 16 bits. Shares of the inputs are added up in their order: by the thread blocks of a cluster through each other's
// shared memory or, where the device has no clusters, by another launch.
#include "packed/finish.cuh"
#include "w4a16_linear/weights.cuh"

template <int kColumns, int kM, int kK, int kSteps, int kStages>
struct Shape {
    static constexpr int kWarps = kM * kK;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kInputs = kStep * kSteps * kK;  // of a round
    static constexpr u32 kRowsBytes = 8 * kColumns * kInputs * 2;
    static constexpr u32 kWordBytes = kWarps * 2 * kSteps * 512;
    static constexpr u32 kGroupBytes = kWarps * 2 * kSteps * 64;
    static constexpr u32 kStageBytes = kRowsBytes + kWordBytes + kGroupBytes;
    static constexpr int kOutputs = kM * 2 * kTile;
    static constexpr int kSumStride = kOutputs + 4;  // floats
    static_assert(kK * 8 * kColumns * kSumStride * 4 <= kStages * kStageBytes, "the sums take the ring's place");
};

// Grid: (ranges of tiles, splits).
template <typename T, int kColumns, int kM, int kK, int kSteps, int kStages, bool kGated, bool kFine>
__device__ __forceinline__ void many(const Linear& args) {
    using S = Shape<kColumns, kM, kK, kSteps, kStages>;
    constexpr bool kScaled = kColumns > 2;  // the weights, not the sums
    extern __shared__ __align__(1024) unsigned char ring[];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int wm = warp % kM, wk = warp / kM;
    int first = (int)((i64)args.tile_count * blockIdx.x / gridDim.x);
    int last = (int)((i64)args.tile_count * (blockIdx.x + 1) / gridDim.x);
    int inputs = args.steps * kStep;
    int rounds = ceil_div(inputs, S::kInputs);
    int begin = (int)((i64)rounds * blockIdx.y / args.splits), end = (int)((i64)rounds * (blockIdx.y + 1) / args.splits);
    u32 base = shared_address(ring);
    u32 own_words = S::kRowsBytes + warp * (2 * kSteps * 512) + lane * 16;
    u32 own_groups = S::kRowsBytes + S::kWordBytes + warp * (2 * kSteps * 64);

    // Where the warp's words, groups and rows of the next round come from. (Warps behind the last tile take it once more.)
    int tile0 = min_int(first + wm * 2, last - 1), tile1 = min_int(first + wm * 2 + 1, last - 1);
    constexpr int kRoundSteps = S::kInputs / kStep;
    int step = begin * kRoundSteps + wk * kSteps;
    const uint4* words0 = args.tiles + ((i64)tile0 * args.steps + step) * 32 + lane;
    const uint4* words1 = args.tiles + ((i64)tile1 * args.steps + step) * 32 + lane;
    constexpr int kGroups = kFine ? kSteps : kSteps / 2;  // of the warp and a round
    constexpr int kPieces = 4 * kGroups;         // of 16 bytes, of a tile
    int group_count = kFine ? args.steps : args.steps >> 1;
    int lane_group = lane % kPieces / 4;
    static_assert(kSteps % 2 == 0, "whole groups");
    const uint4* groups = reinterpret_cast<const uint4*>(args.groups) +
                          ((i64)(lane < kPieces ? tile0 : tile1) * group_count + (kFine ? step : step >> 1) + lane_group) * 4 +
                          lane % 4;
    u32 filling = base;
    auto copy_weights = [&](int round) {
        if (round < end) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                bool valid = step + s < args.steps;
                copy_async(filling + own_words + s * 512, words0 + s * 32, valid);
                copy_async(filling + own_words + (kSteps + s) * 512, words1 + s * 32, valid);
            }
            if (lane < 2 * kPieces)
                copy_async(filling + own_groups + lane * 16, groups, (kFine ? step : step >> 1) + lane_group < group_count);
            groups += kRoundSteps / (kFine ? 1 : 2) * 4;
            words0 += kRoundSteps * 32, words1 += kRoundSteps * 32;
            step += kRoundSteps;
        }
    };
    constexpr int kRowPieces = S::kInputs / 8;
    constexpr int kRowsAtOnce = S::kThreads / kRowPieces;
    static_assert(S::kThreads % kRowPieces == 0, "whole rows are copied at once");
    int first_row = (int)threadIdx.x / kRowPieces, row_piece = (int)threadIdx.x % kRowPieces;
    int input = begin * S::kInputs + row_piece * 8;
    const u16* rows = args.x + first_row * args.x_stride + input;
    auto copy_rows = [&](int round) {
        if (round < end) {
            const u16* from = rows;
#pragma unroll
            for (int i = 0; i < (8 * kColumns + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
                int row = first_row + i * kRowsAtOnce;
                if (row < args.rows) copy_async(filling + swizzled<S::kInputs>(row, row_piece), from, input < inputs);
                from += kRowsAtOnce * args.x_stride;
            }
            rows += S::kInputs;
            input += S::kInputs;
        }
    };

    // The weights of the first rounds do not depend on the launch before.
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
        copy_weights(begin + i);
        filling += S::kStageBytes;
    }
    wait_for_dependencies();
    launch_dependents();
    filling = base;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
        copy_rows(begin + i);
        copy_commit();  // (the first group has the weights of all)
        filling += S::kStageBytes;
    }

    // Rows behind the last are what lies there: their products are not stored.
    // Lane l names row l % 8 of piece l / 8 of four of a fragment's.
    u32 own_row = swizzled<S::kInputs>(lane & 7, lane >> 3);
    float acc[2][kColumns][4] = {};
    u32 used = 0;
#pragma unroll 1
    for (int round = begin; round < end; ++round) {
        copy_wait<kStages - 2>();
        __syncthreads();  // what others copied is here, and what was read in the last round is free
        copy_weights(round + kStages - 1);
        copy_rows(round + kStages - 1);
        copy_commit();
        filling = filling == base + (kStages - 1) * S::kStageBytes ? base : filling + S::kStageBytes;
        const unsigned char* stage = ring + used;
        used = used == (kStages - 1) * S::kStageBytes ? 0 : used + S::kStageBytes;
        const unsigned char* words_at = stage + own_words;
        const unsigned char* groups_at = stage + own_groups + g * 8;
        u32 rows_at = base + (u32)(stage - ring);
        float part[2][kColumns][4], sums[kColumns][4];
        u32 group[2][2];
        Scaled<T> scaled[2][2];
        constexpr int kUnroll = kFine && !kScaled ? 1 : kSteps;  // as registers allow
#pragma unroll kUnroll
        for (int s = 0; s < kSteps; ++s) {
            if (s == 0 || kFine) {
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    uint2 two = *reinterpret_cast<const uint2*>(groups_at + (m * kGroups + s) * 64);
                    group[m][0] = two.x, group[m][1] = two.y;
                    if constexpr (kScaled) scaled[m][0].set(two.x), scaled[m][1].set(two.y);
                }
            }
            uint4 words[2];
#pragma unroll
            for (int m = 0; m < 2; ++m) words[m] = *reinterpret_cast<const uint4*>(words_at + (m * kSteps + s) * 512);
#pragma unroll
            for (int h = 0; h < 2; ++h) {  // eight of a lane's sixteen inputs
                u32 low[2][4], high[2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    u32 of_low = h == 0 ? words[m].x : words[m].y, of_high = h == 0 ? words[m].z : words[m].w;
                    if constexpr (kScaled) {
                        scaled[m][0].pairs(low[m], of_low);
                        scaled[m][1].pairs(high[m], of_high);
                    } else {
                        Nibbles<T>::pairs(low[m], of_low);
                        Nibbles<T>::pairs(high[m], of_high);
                    }
                }
#pragma unroll
                for (int n = 0; n < kColumns; ++n) {
                    u32 b[4];
                    load_pieces(b, rows_at + (own_row ^ ((wk * kSteps + s) * 2 + h) << 6) + n * (8 * S::kInputs * 2));
#pragma unroll
                    for (int q = 0; q < 2; ++q) {
                        u32 b0 = b[2 * q], b1 = b[2 * q + 1];
                        bool opens = h == 0 && q == 0 && (s == 0 || kFine);  // a group
                        if constexpr (!kScaled) {
                            constexpr u32 one = Nibbles<T>::kOnes;  // sums of the inputs, of rows 2 t and 2 t + 1
                            if (opens) T::mma_first(sums[n], one, one, one, one, b0, b1);
                            else T::mma(sums[n], one, one, one, one, b0, b1);
                        }
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
                            u32 a0 = low[m][2 * q], a1 = high[m][2 * q], a2 = low[m][2 * q + 1], a3 = high[m][2 * q + 1];
                            if constexpr (kScaled) T::mma(acc[m][n], a0, a1, a2, a3, b0, b1);
                            else if (opens) T::mma_first(part[m][n], a0, a1, a2, a3, b0, b1);
                            else T::mma(part[m][n], a0, a1, a2, a3, b0, b1);
                        }
                    }
                }
            }
            if constexpr (!kScaled) {
                if (s == kSteps - 1 || kFine) {
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            float factor = scale_of(group[m][i]), offset = -Nibbles<T>::offset(group[m][i]);
#pragma unroll
                            for (int n = 0; n < kColumns; ++n)
#pragma unroll
                                for (int c = 2 * i; c < 2 * i + 2; ++c)
                                    acc[m][n][c] = fmaf(factor, fmaf(offset, sums[n][c & 1], part[m][n][c]), acc[m][n][c]);
                        }
                }
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    float* totals = reinterpret_cast<float*>(ring);  // [kK, 8 kColumns, kSumStride]
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = 8 * n + 2 * t + (i & 1), at = (wm * 2 + m) * kTile + g + kHalf * (i >> 1);
                totals[(wk * 8 * kColumns + row) * S::kSumStride + at] = kScaled ? acc[m][n][i] * Scaled<T>::kFactor : acc[m][n][i];
            }
    finish<FourBits<T, kFine>, kGated, S::kThreads, kK, 8 * kColumns, S::kOutputs>(args, totals, first, last);
}

constexpr int kReducers = 128;

#define KERNEL(name, threads, blocks, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const Linear args) {           \
        __VA_ARGS__(args);                                                                           \
    }
// Rows of x; warps along the outputs and along the inputs, steps of a warp and a round, stages; thread blocks that fit. A
// kernel for each size of the groups: with both in one, the compiler gives each of them fewer registers.
#define MANY(type, suffix, rows, m, k, steps, stages, blocks)                                                             \
    KERNEL(w4a16_many_##suffix##_n##rows##_g64, 32 * m * k, blocks, many<type, rows / 8, m, k, steps, stages, false, true>)   \
    KERNEL(w4a16_many_##suffix##_n##rows##_g128, 32 * m * k, blocks, many<type, rows / 8, m, k, steps, stages, false, false>) \
    KERNEL(                                                                                                               \
        w4a16_gated_many_##suffix##_n##rows##_g64, 32 * m * k, blocks, many<type, rows / 8, m, k, steps, stages, true, true>) \
    KERNEL(                                                                                                               \
        w4a16_gated_many_##suffix##_n##rows##_g128, 32 * m * k, blocks, many<type, rows / 8, m, k, steps, stages, true, false>)
#define REDUCE(name, type, gated)                                                      \
    extern "C" __global__ void __launch_bounds__(kReducers) name(const Linear args) {  \
        add_up<FourBits<type, false>, gated, kReducers>(args);                         \
    }
#define MANY_OF(type, suffix)                                             \
    MANY(type, suffix, 8, 4, 2, 2, 4, 2)                                  \
    MANY(type, suffix, 16, 4, 2, 2, 3, 2)                                 \
    MANY(type, suffix, 32, 8, 1, 2, 3, 2)                                 \
    MANY(type, suffix, 64, 8, 1, 2, 2, 1)                                 \
    REDUCE(w4a16_reduce_##suffix, type, false)                            \
    REDUCE(w4a16_gated_reduce_##suffix, type, true)

MANY_OF(F16, f16)
MANY_OF(BF16, bf16)

#ifdef CLUSTERS
// Not launched: that the kernels here have clusters add up the shares of the inputs.
extern "C" __global__ void w4a16_in_clusters() {}
#endif
