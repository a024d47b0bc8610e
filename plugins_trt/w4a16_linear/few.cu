// The product of up to 16 rows of x with 4-bit weights, where a thread block has few outputs.
//
// A thread block takes a range of tiles of 16 outputs, kTiles at a time; each of its warps takes an eighth of the inputs,
// and the warps' sums are added in a fixed order. What a warp reads it copied itself, x too, so that its ring needs no
// barrier; the copies run on across tiles, which keeps the memory busy. Weights do not depend on the launch before: their
// copies begin before its end, and the ring is so small that the thread blocks of two launches have room beside each other.
//
// There is one thread block a multiprocessor, with work for all: those of the next launch, which start while these run,
// then find the same room everywhere and do not end up two and two.
//
// Of many inputs, reading x, which each thread block does, costs more than the weights: then kShares thread blocks, a
// cluster, take more outputs and a share of the inputs each, in one turn.
#include "packed/finish.cuh"
#include "w4a16_linear/weights.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// kRows of x, 1 or a multiple of 8.
template <int kRows, int kTiles, int kStages, bool kFine>
struct Shape {
    static constexpr int kColumns = kRows > 8 ? kRows / 8 : 1;             // of eight rows each, of an mma
    static constexpr u32 kWordBytes = kTiles * 1024;                       // of a round of two steps
    static constexpr u32 kGroupBytes = kTiles * 64 * (kFine ? 2 : 1);      // (a group is one step or two)
    static constexpr u32 kStageBytes = kWordBytes + kGroupBytes + kRows * 256;
    static constexpr u32 kRingBytes = kStages * kStageBytes;               // of a warp
    static constexpr int kOutputs = kTiles * kTile;
    static constexpr int kSumStride = kOutputs + 4;
};

// Grid: (ranges of tiles, kShares).
template <typename T, int kRows, int kTiles, int kStages, bool kGated, bool kFine, int kShares = 1>
__device__ __forceinline__ void few(const Linear& args) {
    using S = Shape<kRows, kTiles, kStages, kFine>;
    constexpr int kColumns = S::kColumns;
    extern __shared__ __align__(1024) unsigned char memory[];  // rings, then the warps' sums
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int rounds = ceil_div(args.steps, 2);
    constexpr int kParts = kWarps * kShares;  // of the inputs
    int part_of = kShares == 1 ? warp : (int)blockIdx.y * kWarps + warp;
    int begin = rounds * part_of / kParts, count = rounds * (part_of + 1) / kParts - begin;
    u32 base = shared_address(memory) + warp * S::kRingBytes;
    int units = ceil_div(args.tile_count, args.unit);
    int first = args.unit * (int)((i64)units * blockIdx.x / gridDim.x);
    int last = min_int(args.unit * (int)((i64)units * (blockIdx.x + 1) / gridDim.x), args.tile_count);

    // The last turn begins earlier when fewer than kTiles are left; what was stored before is not stored again. A single turn
    // takes the last tile several times.
    auto window_of = [&](int tile) { return kShares > 1 ? tile : max_int(min_int(tile, last - kTiles), 0); };
    auto of_window = [&](int m) { return kShares > 1 ? min_int(m, last - 1 - first) : m; };
    i64 tile_stride = args.tile_count < kTiles ? 0 : (i64)args.steps * 32;
    int copied = first, window = window_of(first);
    const uint4* words = args.tiles + window * tile_stride + begin * 64 + lane;
    constexpr int kGroups = kFine ? 2 : 1;  // of a round
    constexpr int kGroupLanes = 4 * kTiles * kGroups;
    int group_count = kFine ? args.steps : args.steps >> 1;
    // (First groups of all tiles, then second ones.)
    int lane_tile = of_window((lane >> 2) % kTiles), lane_group = (lane >> 2) / kTiles;
    const uint4* groups = reinterpret_cast<const uint4*>(args.groups) +
                          ((i64)(args.tile_count < kTiles ? 0 : window + lane_tile) * group_count + begin * kGroups + lane_group) * 4 +
                          (lane & 3);
    int left = last > first ? count : 0, step = 2 * begin;
    u32 filling = base;
    auto copy_weights = [&] {
        if (left > 0) {
            bool whole = !kFine || step + 1 < args.steps;  // (of an odd number of steps the last round has one)
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                copy_async(filling + m * 1024 + lane * 16, words + of_window(m) * tile_stride);
                copy_async(filling + m * 1024 + 512 + lane * 16, words + of_window(m) * tile_stride + 32, whole);
            }
            if (lane < kGroupLanes) copy_async(filling + S::kWordBytes + lane * 16, groups, lane_group == 0 || whole);
            groups += 4 * kGroups;
            words += 64;
            if constexpr (kFine) step += 2;
            if (--left == 0) {
                copied += kTiles;
                left = copied < last ? count : 0;
                int to = window_of(copied);
                words += (to - window) * tile_stride - (i64)count * 64;
                groups += ((i64)(to - window) * group_count - count * kGroups) * 4;
                window = to;
                step = 2 * begin;
            }
        }
    };
    const u16* rows = args.x + begin * (2 * kStep) + (lane & 15) * 8 + (lane >> 4) * args.x_stride;
    int rows_left = count;
    auto copy_rows = [&] {
        bool valid = !kFine || (begin + count - rows_left) * (2 * kStep) + (lane & 15) * 8 < args.steps * kStep;
#pragma unroll
        for (int i = 0; i < (kRows + 1) / 2; ++i) {
            int row = 2 * i + (lane >> 4);
            if (row < kRows && row < args.rows)
                copy_async(
                    filling + S::kWordBytes + S::kGroupBytes + swizzled<2 * kStep>(row, lane & 15),
                    rows + (i64)(2 * i) * args.x_stride, valid);
        }
        rows += 2 * kStep;
        if (--rows_left == 0) rows_left = count, rows -= (i64)count * (2 * kStep);
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        copy_weights();
        filling += S::kStageBytes;
    }
    wait_for_dependencies();
    launch_dependents();
    filling = base;
    if (count > 0) {
#pragma unroll
        for (int i = 0; i < kStages - 1; ++i) {
            copy_rows();
            filling += S::kStageBytes;
            copy_commit();  // (the first group has the weights of all)
        }
    }

    // Rows behind the last are what lies there: their products are not stored.
    // Lane l names row l % 8 of piece l / 8 of four of a fragment's.
    u32 own_row = swizzled<2 * kStep>(lane & 7 & (kRows - 1), lane >> 3);
    u32 current = base, memory_at = shared_address(memory);
#pragma unroll 1
    for (int tile = first; tile < last; tile += kTiles) {
        float acc[kTiles][kColumns][4] = {};
#pragma unroll 1
        for (int round = 0; round < count; ++round) {
            copy_wait<kStages - 2>();
            __syncwarp();
            copy_weights();
            copy_rows();
            copy_commit();
            const unsigned char* stage = memory + (current - memory_at);
            u32 rows_at = current + S::kWordBytes + S::kGroupBytes;
            filling = current;
            current = current == base + (kStages - 1) * S::kStageBytes ? base : current + S::kStageBytes;
            float part[kTiles][kColumns][4], sums[kColumns][4];
            u32 group[kTiles][2];
            constexpr int kUnroll = kFine ? 1 : 2;  // as registers allow
#pragma unroll kUnroll
            for (int s = 0; s < 2; ++s) {
                if (s == 0 || kFine) {
#pragma unroll
                    for (int m = 0; m < kTiles; ++m) {
                        uint2 two = *reinterpret_cast<const uint2*>(stage + S::kWordBytes + (s * kTiles + m) * 64 + g * 8);
                        group[m][0] = two.x, group[m][1] = two.y;
                    }
                }
                // Sums of the inputs of a group, of rows 2 t and 2 t + 1: products with ones.
                constexpr u32 one = Nibbles<T>::kOnes;
                u32 b[kColumns][2][4];  // of 32 inputs each
#pragma unroll
                for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        load_pieces(b[n][h], rows_at + (own_row ^ (2 * s + h) << 6) + n * (8 * 256));
                    if (s == 0 || kFine) T::mma_first(sums[n], one, one, one, one, b[n][0][0], b[n][0][1]);
                    else T::mma(sums[n], one, one, one, one, b[n][0][0], b[n][0][1]);
                    T::mma(sums[n], one, one, one, one, b[n][0][2], b[n][0][3]);
                    T::mma(sums[n], one, one, one, one, b[n][1][0], b[n][1][1]);
                    T::mma(sums[n], one, one, one, one, b[n][1][2], b[n][1][3]);
                }
#pragma unroll
                for (int m = 0; m < kTiles; ++m) {
                    uint4 four = *reinterpret_cast<const uint4*>(stage + m * 1024 + s * 512 + lane * 16);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        u32 low[4], high[4];  // of outputs g and g + 8
                        Nibbles<T>::pairs(low, h == 0 ? four.x : four.y);
                        Nibbles<T>::pairs(high, h == 0 ? four.z : four.w);
#pragma unroll
                        for (int n = 0; n < kColumns; ++n) {
                            if (h == 0 && (s == 0 || kFine))
                                T::mma_first(part[m][n], low[0], high[0], low[1], high[1], b[n][h][0], b[n][h][1]);
                            else T::mma(part[m][n], low[0], high[0], low[1], high[1], b[n][h][0], b[n][h][1]);
                            T::mma(part[m][n], low[2], high[2], low[3], high[3], b[n][h][2], b[n][h][3]);
                        }
                    }
                }
                if (s == 1 || kFine) {
#pragma unroll
                    for (int m = 0; m < kTiles; ++m)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            float scale = scale_of(group[m][i]), offset = -Nibbles<T>::offset(group[m][i]);
#pragma unroll
                            for (int n = 0; n < kColumns; ++n)
#pragma unroll
                                for (int c = 2 * i; c < 2 * i + 2; ++c)
                                    acc[m][n][c] = fmaf(scale, fmaf(offset, sums[n][c & 1], part[m][n][c]), acc[m][n][c]);
                        }
                }
            }
        }
        // acc: outputs g and g + 8 of rows 8 n + 2 t and 8 n + 2 t + 1
        // [kWarps, kRows, kSumStride]; of a single turn where the rings were
        float* totals = reinterpret_cast<float*>(memory + (kShares > 1 ? 0 : kWarps * S::kRingBytes));
        if constexpr (kShares > 1) copy_wait<0>();
        if (kShares > 1 || tile > first) __syncthreads();  // what lies there has been read
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int n = 0; n < kColumns; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int row = 8 * n + 2 * t + (i & 1);
                    if (row < kRows) totals[(warp * kRows + row) * S::kSumStride + m * kTile + g + kHalf * (i >> 1)] = acc[m][n][i];
                }
        if constexpr (kShares > 1) {
            finish<FourBits<T, kFine>, kGated, kThreads, kWarps, kRows, S::kOutputs>(args, totals, first, last);
            return;
        }
        __syncthreads();
        constexpr int kOfTile = kGated ? kHalf : kTile;  // columns of out
        constexpr int kWidth = kTiles * kOfTile;
        int from = window_of(tile);
        for (int i = threadIdx.x; i < args.rows * kWidth; i += kThreads) {
            int row = i / kWidth, column = i % kWidth;
            int output = from * kOfTile + column, of_tile = from + column / kOfTile;
            if (of_tile < tile || of_tile >= last || output >= args.outputs) continue;
            int at = kGated ? column / kHalf * kTile + column % kHalf : column;
            float sum = 0.0f, up = 0.0f;
#pragma unroll
            for (int k = 0; k < kWarps; ++k) {
                sum += totals[(k * kRows + row) * S::kSumStride + at];
                if constexpr (kGated) up += totals[(k * kRows + row) * S::kSumStride + at + kHalf];
            }
            store_output<T, kGated>(args, row, output, sum, up, kGated ? 0.0f : residual_of<T>(args, row, output));
        }
    }
    copy_wait<0>();
}

#define KERNEL(name, blocks, ...)                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, blocks) name(const Linear args) {          \
        __VA_ARGS__(args);                                                                           \
    }
// Rows of x, tiles of a turn, stages of the ring, thread blocks that find room. A kernel for each size of the groups: with
// both in one, the compiler gives each of them fewer registers.
#define FEW(type, suffix, rows, tiles, stages, blocks)                                                                        \
    KERNEL(w4a16_few_##suffix##_n##rows##_t##tiles##_s##stages##_g64, blocks, few<type, rows, tiles, stages, false, true>)        \
    KERNEL(w4a16_few_##suffix##_n##rows##_t##tiles##_s##stages##_g128, blocks, few<type, rows, tiles, stages, false, false>)      \
    KERNEL(w4a16_gated_few_##suffix##_n##rows##_t##tiles##_s##stages##_g64, blocks, few<type, rows, tiles, stages, true, true>)   \
    KERNEL(w4a16_gated_few_##suffix##_n##rows##_t##tiles##_s##stages##_g128, blocks, few<type, rows, tiles, stages, true, false>)
#define FEW_IN_SHARES(type, suffix, rows, tiles, stages, shares)                \
    KERNEL(                                                                     \
        w4a16_few_##suffix##_n##rows##_t##tiles##_s##stages##_x##shares##_g64,  \
        1,                                                                      \
        few<type, rows, tiles, stages, false, true, shares>)                    \
    KERNEL(                                                                     \
        w4a16_few_##suffix##_n##rows##_t##tiles##_s##stages##_x##shares##_g128, \
        1,                                                                      \
        few<type, rows, tiles, stages, false, false, shares>)
#define FEW_OF(type, suffix, blocks)         \
    FEW_IN_SHARES(type, suffix, 16, 4, 2, 2) \
    FEW(type, suffix, 1, 2, 6, 2)            \
    FEW(type, suffix, 1, 2, 5, 2)            \
    FEW(type, suffix, 1, 3, 3, 2)            \
    FEW(type, suffix, 1, 4, 3, 2)            \
    FEW(type, suffix, 8, 2, 3, 2)            \
    FEW(type, suffix, 8, 2, 2, 2)            \
    FEW(type, suffix, 16, 3, 2, 1)           \
    FEW(type, suffix, 16, 2, 2, blocks)      \
    FEW(type, suffix, 16, 1, 2, 2)

FEW_OF(F16, f16, 1)  // (float16 takes more registers)
#if __CUDA_ARCH__ >= 1200
FEW_OF(BF16, bf16, 1)  // (the compiler needs a register more there)
#else
FEW_OF(BF16, bf16, 2)
#endif
