// The product of up to 64 rows of x with packed weights by the warpgroup instructions of compute capability 9.0.
//
// A thread block takes 4 kM tiles of 16 outputs and a share of the inputs, a round of them at a time. One of its warps only
// copies: bulk copies of x and of the weights as they lie, into a ring of stages. The others are warpgroups that multiply
// 64 outputs at once, with weights that each of their warps turns into operands in registers and x from shared memory. They
// wait for nothing but a stage's copies, and for products so long ago that others are under way meanwhile. What they cannot
// do at the same time is to issue: instructions of a round are what such a product takes, and are counted. The
// thread blocks of a cluster add up the shares of the inputs.
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

template <typename Packed, int kColumns, int kM, int kUnits, int kStages>
struct WideShape {
    static constexpr int kWarps = 4 * kM;  // that multiply
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
    static_assert(kRows * (kOutputs + 4) * 4 <= kStages * kStageBytes, "the sums take the ring's place");
};

// Grid: (ranges of tiles, splits).
template <typename Packed, int kColumns, int kM, int kUnits, int kStages>
__device__ __forceinline__ void wide(const WideLinear<typename Packed::Linear>& maps) {
    using S = WideShape<Packed, kColumns, kM, kUnits, kStages>;
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
        // Places of the round that comes.
        u32 rows_at = base, barrier = full, parity = 0;
        u32 words_at = base + S::kRowBytes + warp * (kUnits * 512) + lane * 16;
        u32 scales_at = base + S::kRowBytes + S::kWordBytes + warp * kUnits * Packed::scale_bytes(args) +
                        Packed::scale_of_lane(args, lane);
        int stage = 0;
        u32 previous = 0;  // the barrier of the stage before
        u32 a[2][4][4];    // two parts of 64 inputs in turn: operands of four products each
        typename Packed::Scales scales = {};
        // Of few rows the sums are scaled, a round of them at a time, which are fewer than the weights; of more the weights.
        float sums[kSummed ? kColumns : 1][4] = {};
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            barrier_wait(barrier, parity);
            u64 described = rows_described(rows_at);
            // (Or the compiler makes three instructions of each product's description instead of one.)
            asm volatile("" : "+l"(described));
            uint4 words[kUnits];
#pragma unroll
            for (int unit = 0; unit < kUnits; ++unit) words[unit] = load_sixteen(words_at + unit * 512);
#pragma unroll
            for (int part = 0; part < S::kBlocks; ++part) {
                u32(&operands)[4][4] = a[part % 2];
                warpgroup_wait<1>();  // these operands have been read
                // So have been, here, all of the round before.
                if (part == 1) barrier_arrive_where(lane == 0 && previous != 0, previous);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    constexpr int kHalves = Packed::kInputs / 32;
                    int unit = (2 * part + half) / kHalves, of_unit = (2 * part + half) % kHalves;
                    u32(&two)[2][4] = *reinterpret_cast<u32(*)[2][4]>(&operands[2 * half]);
                    if constexpr (kSummed) {
                        Packed::plain_operands(two, words[unit], of_unit);
                    } else {
                        Packed::template load_scales<kUnits>(scales, scales_at, unit, of_unit, args);
                        Packed::operands(two, words[unit], of_unit, scales);
                    }
                }
                if constexpr (kSummed) {
                    if (part == 0) {
                        warpgroup_wait<0>();
                        Packed::add_scaled(acc, sums, scales);  // (of the first round: nothing)
                        Packed::template load_scales<kUnits>(scales, scales_at, 0, 0, args);
                    }
                }
                u64 rows = described + part * (S::kBlockBytes / 16);
                warpgroup_fence();
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    if constexpr (kSummed) {
                        if (part == 0 && q == 0) warpgroup_mma_first(T(), sums, operands[q], rows);
                        else warpgroup_mma(T(), sums, operands[q], rows + 2 * q);
                    } else {
                        warpgroup_mma(T(), acc, operands[q], rows + 2 * q);
                    }
                }
                warpgroup_commit();
            }
            previous = barrier + 8 * kStages;
            u32 on = S::kStageBytes, next = 8;
            if (++stage == kStages) stage = 0, parity ^= 1, on -= kStages * S::kStageBytes, next -= 8 * kStages;
            rows_at += on, words_at += on, scales_at += on, barrier += next;
        }
        warpgroup_wait<0>();
        if constexpr (kSummed) Packed::add_scaled(acc, sums, scales);
    }
    wait_for_dependencies();  // (they have completed: what they wrote is seen)
    // A thread has gate and up of its outputs.
    if (args.gated && args.splits == 1) {
        int tile = first + warp;
        if (warp == S::kWarps || tile >= last) return;
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int row = 8 * n + 2 * (lane & 3) + i, output = tile * kHalf + (lane >> 2);
                if (row < args.rows && output < args.outputs)
                    Packed::template store<true>(
                        args, row, output, acc[n][i] * Packed::kFactor, acc[n][i + 2] * Packed::kFactor, 0.0f);
            }
        return;
    }
    __syncthreads();

    float* totals = reinterpret_cast<float*>(ring);  // [kRows, kOutputs + 4]
    if (warp < S::kWarps) {
        int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int n = 0; n < kColumns; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                totals[(8 * n + 2 * t + (i & 1)) * (S::kOutputs + 4) + warp * kTile + g + kHalf * (i >> 1)] =
                    acc[n][i] * Packed::kFactor;
    }
    if (args.gated) finish<Packed, true, S::kThreads, 1, S::kRows, S::kOutputs>(args, totals, first, last);
    else finish<Packed, false, S::kThreads, 1, S::kRows, S::kOutputs>(args, totals, first, last);
}
