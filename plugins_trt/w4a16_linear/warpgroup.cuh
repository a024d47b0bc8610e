// The product of 17 to 64 rows of x with 4-bit weights by the warpgroup instructions of compute capability 9.0.
//
// As in many.cu, but that a warpgroup of four warps multiplies 64 outputs at once, its weights from registers and x from
// shared memory, where each warp's fragment of it need not be read by that warp. So each warp takes one tile, and there are
// sixteen of them. x lies in the order of the inputs that the weights' layout asks for: within 64 inputs, pair 8 t + 2 s + h
// at 8 s + 4 h + t. It is copied by pairs therefore, a row of 64 inputs by a warp at once.
#pragma once
#include "w4a16_linear/finish.cuh"

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// d[64 x 8 kColumns] += a[64 x 16] b[16 x 8 kColumns]: each warp has 16 rows of a and d, b is described.
#define FOUR(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WARPGROUP_MMA(type, name)                                                                                          \
    __device__ __forceinline__ void warpgroup_mma(type, float (&d)[8][4], const u32 (&a)[4], u64 b) {                      \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;" \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7)                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }                                                                                                                      \
    __device__ __forceinline__ void warpgroup_mma(type, float (&d)[4][4], const u32 (&a)[4], u64 b) {                      \
        asm volatile(                                                                                                      \
            "wgmma.mma_async.sync.aligned.m64n32k16.f32." name "." name " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13," \
            "%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"                                                                \
            : FOUR(0), FOUR(1), FOUR(2), FOUR(3)                                                                           \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                         \
    }
WARPGROUP_MMA(F16, "f16")
WARPGROUP_MMA(BF16, "bf16")

// kM warps along the outputs, kK times as many along the inputs.
template <int kColumns, int kM, int kK, int kSteps, int kStages>
struct GroupShape {
    static constexpr int kWarps = kM * kK;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRoundSteps = kSteps * kK;
    static constexpr u32 kBlockBytes = 8 * kColumns * 128;  // 64 inputs of x
    static constexpr u32 kRowsBytes = kRoundSteps * kBlockBytes;
    static constexpr u32 kWordBytes = kWarps * kSteps * 512;
    static constexpr u32 kGroupBytes = kWarps * kSteps * 64;
    static constexpr u32 kStageBytes = (kRowsBytes + kWordBytes + kGroupBytes + 1023) / 1024 * 1024;
    static constexpr int kOutputs = kM * kTile;
    static_assert(kM % 4 == 0, "whole warpgroups");
    static_assert(kK * 8 * kColumns * (kOutputs + 4) * 4 <= kStages * kStageBytes, "the sums take the ring's place");
};

// Grid: (ranges of tiles, splits).
template <typename T, int kColumns, int kM, int kK, int kSteps, int kStages, bool kGated, bool kFine>
__device__ __forceinline__ void wide(const Linear& args) {
    using S = GroupShape<kColumns, kM, kK, kSteps, kStages>;
    extern __shared__ __align__(1024) unsigned char ring[];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int wm = warp % kM, wk = warp / kM;
    int first = (int)((i64)args.tile_count * blockIdx.x / gridDim.x);
    int last = (int)((i64)args.tile_count * (blockIdx.x + 1) / gridDim.x);
    int rounds = ceil_div(args.steps, S::kRoundSteps);
    int begin = (int)((i64)rounds * blockIdx.y / args.splits), end = (int)((i64)rounds * (blockIdx.y + 1) / args.splits);
    u32 base = shared_address(ring);
    u32 own_words = S::kRowsBytes + warp * (kSteps * 512) + lane * 16;
    u32 own_groups = S::kRowsBytes + S::kWordBytes + warp * (kSteps * 64);

    // With all inputs to go through, thread blocks begin at different ones: not all of them ask for the same rows at once.
    constexpr bool kTurns = kK == 1;
    int turned = kTurns ? (int)((i64)(end - begin) * blockIdx.x / gridDim.x) : 0;
    int left = end - begin - turned;  // until the first round's turn
    int tile = min_int(first + wm, last - 1);  // (warps behind the last tile take it once more)
    int step = (begin + turned) * S::kRoundSteps + wk * kSteps;
    const uint4* words = args.tiles + ((i64)tile * args.steps + step) * 32 + lane;
    constexpr int kGroups = kFine ? kSteps : kSteps / 2;  // of the warp and a round
    static_assert(kSteps % 2 == 0, "whole groups");
    int group_count = kFine ? args.steps : args.steps >> 1;
    int group = (kFine ? step : step >> 1) + lane / 4;
    const uint4* groups = reinterpret_cast<const uint4*>(args.groups) + ((i64)tile * group_count + group) * 4 + lane % 4;
    int x_step = (begin + turned) * S::kRoundSteps;
    const u16* rows = args.x + (i64)warp * args.x_stride + x_step * kStep + lane * 2;
    u32 own_pair = warp * 128 + (((lane ^ warp) & 7) << 4) + (lane >> 3) * 4;
    constexpr bool kWhole = kK == 1 && !kFine && kSteps == 2;  // the inputs are whole groups of two steps
    auto copy_weights = [&](int round, u32 stage) {
        if (round < end) {
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                bool valid = kWhole || step + s < args.steps;
                copy_async(stage + own_words + s * 512, words + s * 32, valid);
            }
            if (lane < 4 * kGroups) copy_async(stage + own_groups + lane * 16, groups, (kFine ? step : step >> 1) + lane / 4 < group_count);
            words += S::kRoundSteps * 32;
            groups += S::kRoundSteps / (kFine ? 1 : 2) * 4;
            step += S::kRoundSteps;
        }
    };
    auto copy_rows = [&](int round, u32 stage) {
        if (round < end) {
            const u16* from = rows;
#pragma unroll
            for (int i = 0; i < (8 * kColumns + S::kWarps - 1) / S::kWarps; ++i) {
                if (warp + i * S::kWarps < args.rows) {
#pragma unroll
                    for (int b = 0; b < S::kRoundSteps; ++b)
                        copy_word_async(
                            stage + own_pair + b * S::kBlockBytes + i * (S::kWarps * 128), from + b * kStep,
                            kWhole || x_step + b < args.steps);
                }
                from += S::kWarps * args.x_stride;
            }
            rows += S::kRoundSteps * kStep;
            x_step += S::kRoundSteps;
        }
    };
    auto next = [&](u32 stage) { return stage == (kStages - 1) * S::kStageBytes ? 0 : stage + S::kStageBytes; };
    // Where the inputs turn around, when `copied` rounds of them have been.
    auto turn_weights = [&](int copied) {
        if (kTurns && copied == left) {
            int back = end - begin;
            words -= back * S::kRoundSteps * 32, groups -= back * (S::kRoundSteps / (kFine ? 1 : 2) * 4), step -= back * S::kRoundSteps;
        }
    };
    auto turn_rows = [&](int copied) {
        if (kTurns && copied == left) {
            int back = (end - begin) * S::kRoundSteps;
            rows -= back * kStep, x_step -= back;
        }
    };

    // Copies run two rounds less ahead than there are stages: the products of the last round may still read theirs.
    constexpr int kAhead = kStages - 2;
    u32 filling = 0;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
        copy_weights(begin + i, base + filling);
        turn_weights(i + 1);
        filling = next(filling);
    }
    wait_for_dependencies();
    filling = 0;
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
        copy_rows(begin + i, base + filling);
        turn_rows(i + 1);
        copy_commit();  // (the first group has the weights of all)
        filling = next(filling);
    }

    float acc[kColumns][4] = {};
    u32 a[2][2][4];  // of each half of a step: two parts of 16 inputs
    u32 used = 0;
#pragma unroll 1
    for (int round = begin; round < end; ++round) {
        copy_wait<kAhead - 1>();
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read what was copied
        __syncthreads();
        copy_weights(round + kAhead, base + filling);
        turn_weights(round - begin + kAhead + 1);
        copy_rows(round + kAhead, base + filling);
        turn_rows(round - begin + kAhead + 1);
        copy_commit();
        filling = next(filling);
        const unsigned char* stage = ring + used;
        u32 rows_at = base + used + wk * (kSteps * S::kBlockBytes);
        used = next(used);
        u32 negative[2], scale[2];
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            if (kFine || s % 2 == 0) {
                uint2 two = *reinterpret_cast<const uint2*>(stage + own_groups + (kFine ? s : s / 2) * 64 + g * 8);
                u32 group[2] = {two.x, two.y};
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    negative[i] = Nibbles<T>::negative_offset(group[i]);
                    float value = scale_of(group[i]);
                    scale[i] = T::pack(value, value);
                }
            }
            uint4 four = *reinterpret_cast<const uint4*>(stage + own_words + s * 512);
            // 64 inputs of all rows, K-major, in the 128-byte swizzle, whose eight rows take 1024 bytes
            u64 b = (u64)((rows_at + s * S::kBlockBytes) >> 4 & 0x3fff) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                warpgroup_wait<1>();  // this half of the operands has been read
                u32 low[4], high[4];  // of outputs g and g + 8
                scaled_pairs<T>(low, h == 0 ? four.x : four.y, negative[0], scale[0]);
                scaled_pairs<T>(high, h == 0 ? four.z : four.w, negative[1], scale[1]);
#pragma unroll
                for (int q = 0; q < 2; ++q)
                    a[h][q][0] = low[2 * q], a[h][q][1] = high[2 * q], a[h][q][2] = low[2 * q + 1], a[h][q][3] = high[2 * q + 1];
                warpgroup_fence();
#pragma unroll
                for (int q = 0; q < 2; ++q) warpgroup_mma(T(), acc, a[h][q], b + 2 * (2 * h + q));
                warpgroup_commit();
            }
        }
    }
    launch_dependents();
    warpgroup_wait<0>();
    copy_wait<0>();
    __syncthreads();

    float* totals = reinterpret_cast<float*>(ring);  // [kK, 8 kColumns, kOutputs + 4]
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            totals[(wk * 8 * kColumns + 8 * n + 2 * t + (i & 1)) * (S::kOutputs + 4) + wm * kTile + g + kHalf * (i >> 1)] = acc[n][i];
    __syncthreads();
    finish<T, kGated, S::kThreads, kK, 8 * kColumns, S::kOutputs>(args, totals, first, last);
}
