// The product of up to 64 rows of x with packed weights by the warpgroup instructions of compute capability 9.0.
//
// A thread block takes 4 kM tiles of 16 outputs and a share of the inputs, a round of them at a time. One of its warps only
// copies: bulk copies of x and of the weights as they lie, into a ring of stages. The others are warpgroups that multiply
// 64 outputs at once, with weights that each of their warps turns into operands in registers and x from shared memory. They
// wait for nothing but a stage's copies, and for products so long ago that others are under way meanwhile. kK times as many
// warpgroups take the rounds in turn and add their sums up at the end, and the thread blocks of a cluster add up the shares
// of the inputs.
//
// `Packed` says how weights lie: 16 bytes a lane hold a unit of its inputs of a tile.
#pragma once
#include "packed/bulk.cuh"
#include "packed/finish.cuh"
#include "packed/warpgroup.cuh"

template <typename Linear>
struct WideLinear {
    TensorMap rows;    // of x, boxes of all of them and 64 inputs, swizzled
    TensorMap tiles;   // [tiles, units, 512 bytes], boxes of a thread block's tiles and a round
    TensorMap scales;  // the same of the scales
    Linear linear;
};

template <typename Packed, int kColumns, int kM, int kK, int kUnits, int kStages>
struct WideShape {
    static constexpr int kWarps = 4 * kM * kK;  // that multiply
    static constexpr int kThreads = 32 * (kWarps + 1);
    static constexpr int kTiles = 4 * kM;
    static constexpr int kRows = 8 * kColumns;
    static constexpr u32 kBlockBytes = kRows * 128;  // 64 inputs of x
    static constexpr int kBlocks = kUnits * Packed::kInputs / 64;
    static constexpr u32 kRowBytes = kBlocks * kBlockBytes;
    static constexpr u32 kWordBytes = kTiles * kUnits * 512;
    static constexpr u32 kScaleBytes = kTiles * kUnits * Packed::kScaleBytes;
    static constexpr u32 kStageBytes = (kRowBytes + kWordBytes + kScaleBytes + 1023) / 1024 * 1024;
    static constexpr int kOutputs = kTiles * kTile;
    static_assert(kK * kRows * (kOutputs + 4) * 4 <= kStages * kStageBytes, "the sums take the ring's place");
};

// Grid: (ranges of tiles, splits).
template <typename Packed, int kColumns, int kM, int kK, int kUnits, int kStages>
__device__ __forceinline__ void wide(const WideLinear<typename Packed::Linear>& maps) {
    using S = WideShape<Packed, kColumns, kM, kK, kUnits, kStages>;
    using T = typename Packed::Type;
    constexpr bool kSummed = kColumns <= 2 && Packed::kScalesSums;
    const auto& args = maps.linear;
    extern __shared__ __align__(1024) unsigned char ring[];
    __shared__ __align__(8) u64 barriers[2 * kStages];
    // (The compiler is to know that a warp's threads have one number: the products' descriptions are for all of them.)
    int warp = __shfl_sync(kFull, (int)threadIdx.x / 32, 0), lane = threadIdx.x & 31;
    int first = (int)blockIdx.x * S::kTiles, last = min_int(first + S::kTiles, args.tile_count);
    int rounds = ceil_div(Packed::units(args), kUnits);
    int begin = (int)((i64)rounds * blockIdx.y / args.splits);
    int count = (int)((i64)rounds * (blockIdx.y + 1) / args.splits) - begin;
    u32 base = shared_address(ring), full = shared_address(barriers), empty = full + 8 * kStages;
    if (threadIdx.x == 0) {
        prefetch_map(maps.tiles);
        prefetch_map(maps.scales);
        prefetch_map(maps.rows);
#pragma unroll
        for (int i = 0; i < kStages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4 * kM);  // a warp each
        }
        barriers_are_ready();
    }
    __syncthreads();

    int wm = warp / 4 % kM, wk = kK == 1 ? 0 : warp / 4 / kM;
    float acc[kColumns][4] = {};
    if (warp == S::kWarps) {
        // With all inputs to go through, thread blocks begin at different ones: not all ask for the same rows at once.
        int turned = args.splits == 1 ? (int)((i64)count * blockIdx.x / gridDim.x) : 0;
        auto round_of = [&](int i) { return begin + (turned + i < count ? turned + i : turned + i - count); };
        auto copy_weights = [&](int i) {
            int round = round_of(i);
            u32 barrier = full + 8 * (i % kStages), at = base + i % kStages * S::kStageBytes + S::kRowBytes;
            if (lane > 0) return;
            barrier_expect(barrier, S::kRowBytes + S::kWordBytes + S::kTiles * kUnits * Packed::scale_bytes(args));
            copy_box(at, maps.tiles, 0, round * kUnits, first, barrier);
            copy_box(at + S::kWordBytes, maps.scales, 0, Packed::scale_place(args, round * kUnits), first, barrier);
        };
        auto copy_rows = [&](int i) {
            int round = round_of(i);
            u32 barrier = full + 8 * (i % kStages), at = base + i % kStages * S::kStageBytes;
            if (lane > 0) return;
#pragma unroll
            for (int b = 0; b < S::kBlocks; ++b)
                copy_box(at + b * S::kBlockBytes, maps.rows, (round * S::kBlocks + b) * 64, 0, barrier);
        };
        int ahead = min_int(kStages, count);
        for (int i = 0; i < ahead; ++i) copy_weights(i);  // do not depend on the launch before
        wait_for_dependencies();
        launch_dependents();
        for (int i = 0; i < ahead; ++i) copy_rows(i);
        for (int i = ahead; i < count; ++i) {
            barrier_wait(empty + 8 * (i % kStages), i / kStages - 1 & 1);
            copy_weights(i);
            copy_rows(i);
        }
    } else {
        int slot = wm * 4 + (warp & 3);
        u32 words_at = S::kRowBytes + slot * (kUnits * 512) + lane * 16;
        u32 scales_at = S::kRowBytes + S::kWordBytes + slot * kUnits * Packed::scale_bytes(args);
        u32 a[2][2][4];  // two parts of 32 inputs in turn: operands of two products each
        bool begun = false;
        int previous = 0;
        typename Packed::Scales scales = {};
        // Of few rows the sums are scaled, a round of them at a time, which are fewer than the weights; of more the weights.
        float sums[kSummed ? kColumns : 1][4] = {};
#pragma unroll 1
        for (int i = wk; i < count; i += kK) {
            int used = i % kStages;
            barrier_wait(full + 8 * used, i / kStages & 1);
            const unsigned char* stage = ring + used * S::kStageBytes;
            u32 rows_at = base + used * S::kStageBytes;
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) {
                uint4 words = *reinterpret_cast<const uint4*>(stage + words_at + unit * 512);
#pragma unroll
                for (int part = 0; part < Packed::kInputs / 32; ++part) {
                    constexpr int kParts = Packed::kInputs / 32;
                    int number = unit * kParts + part;
                    u32(&operands)[2][4] = a[number % 2];
                    u64 rows = rows_described(rows_at + number / 2 * S::kBlockBytes) + number % 2 * 4;
                    warpgroup_wait<1>();  // these operands have been read
                    // So have been, here, all of the round before.
                    if (number == 1) barrier_arrive_where(lane == 0 && begun, empty + 8 * previous);
                    if constexpr (kSummed) {
                        Packed::plain_operands(operands, words, part);
                        if (number == 0) {
                            warpgroup_wait<0>();
                            Packed::add_scaled(acc, sums, scales);  // (of the first round: nothing)
                            Packed::template load_scales<kUnits>(scales, stage + scales_at, 0, 0, args);
                        }
                        warpgroup_fence();
#pragma unroll
                        for (int q = 0; q < 2; ++q) {
                            if (number == 0 && q == 0) warpgroup_mma_first(T(), sums, operands[q], rows);
                            else warpgroup_mma(T(), sums, operands[q], rows + 2 * q);
                        }
                    } else {
                        Packed::template load_scales<kUnits>(scales, stage + scales_at, unit, part, args);
                        Packed::operands(operands, words, part, scales);
                        warpgroup_fence();
                        warpgroup_mma(T(), acc, operands[0], rows);
                        warpgroup_mma(T(), acc, operands[1], rows + 2);
                    }
                    warpgroup_commit();
                }
            }
            previous = used;
            begun = true;
        }
        warpgroup_wait<0>();
        if constexpr (kSummed) Packed::add_scaled(acc, sums, scales);
    }
    wait_for_dependencies();  // (they have completed: what they wrote is seen)
    __syncthreads();

    float* totals = reinterpret_cast<float*>(ring);  // [kK, kRows, kOutputs + 4]
    if (warp < S::kWarps) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                totals[(wk * S::kRows + 8 * n + 2 * t + (i & 1)) * (S::kOutputs + 4) + (wm * 4 + (warp & 3)) * kTile + g + kHalf * (i >> 1)] =
                    acc[n][i] * Packed::kFactor;
    }
    __syncthreads();
    if (args.gated) finish<Packed, true, S::kThreads, kK, S::kRows, S::kOutputs>(args, totals, first, last);
    else finish<Packed, false, S::kThreads, kK, S::kRows, S::kOutputs>(args, totals, first, last);
}
