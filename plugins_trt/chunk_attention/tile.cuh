// What the chunk kernels share: tiles of neighbouring tokens of one sequence, and the steps of attention on the
// tensor cores with the rows of an MMA tile being heads (and tokens) and its columns keys.
#pragma once

#include "common.cuh"

// Up to `kTokens` neighbouring new tokens of one sequence, or (sequence -1) rows of padding.
struct Tile {
    int sequence;
    int first;   // row of the batch
    int count;   // rows; 0: nothing to do
    int stored;  // tokens of the sequence in the arena, this step's included
};

// Tile number `index` of a batch cut into tiles of `tokens` rows, sequence by sequence, then the padding. All
// lanes of a warp must call it together. There are at most tokens_of_batch / tokens + sequences + 1 tiles.
__device__ __forceinline__ Tile find_tile(const Batch& batch, int index, int tokens) {
    const int lane = (int)(threadIdx.x & 31);
    int before = 0;  // tiles of the sequences before this group of 32
    for (int group = 0; group < batch.sequences; group += 32) {
        int sequence = group + lane;
        int count = 0;
        if (sequence < batch.sequences)
            count = batch.sequence_starts[sequence + 1] - batch.sequence_starts[sequence];
        int tiles = ceil_div(count, tokens);
        int ends = tiles;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            int other = __shfl_up_sync(kFull, ends, step);
            if (lane >= step) ends += other;
        }
        u32 beyond = __ballot_sync(kFull, index < before + ends);
        if (beyond) {
            int owner = __ffs(beyond) - 1;
            int inside = index - before - __shfl_sync(kFull, ends - tiles, owner);
            int chosen = group + owner;
            int start = batch.sequence_starts[chosen], end = batch.sequence_starts[chosen + 1];
            Tile tile;
            tile.sequence = chosen;
            tile.first = start + inside * tokens;
            tile.count = min_int(tokens, end - tile.first);
            tile.stored = batch.lengths[chosen] + end - start;
            return tile;
        }
        before += __shfl_sync(kFull, ends, 31);
    }
    Tile tile;
    tile.sequence = -1;
    tile.first = batch.sequence_starts[batch.sequences] + (index - before) * tokens;
    tile.count = max_int(0, min_int(tokens, batch.tokens - tile.first));
    tile.stored = 0;
    return tile;
}

// The lane's number, read anew: nothing of it is kept in registers from one use to the next.
__device__ __forceinline__ int lane_anew() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Writes zeros to the rows of `count` tokens for the heads of one KV head.
template <int kDim>
__device__ __forceinline__ void zero_rows(u16* out, i64 token_stride, int first, int count, int head, int group,
                                          int thread, int threads) {
    const int pieces = group * kDim / 8;
    for (int i = thread; i < count * pieces; i += threads) {
        u16* row = out + (i64)(first + i / pieces) * token_stride + head * group * kDim;
        reinterpret_cast<uint4*>(row)[i % pieces] = make_uint4(0, 0, 0, 0);
    }
}

// Barriers in shared memory (mbarrier).
__device__ __forceinline__ void barrier_start(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}
// Arrives once this thread's copies so far have landed.
__device__ __forceinline__ void barrier_arrive_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, int parity) {
    u32 done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#endif
    } while (!done);
}

// Copies kRows rows of kDim elements that lie one after the other into a swizzled tile; rows from `valid` on
// become zeros. Every one of the `kThreads` threads takes its share.
template <int kDim, int kRows, int kThreads>
__device__ __forceinline__ void copy_rows(u32 tile, const u16* rows, int valid, int thread) {
    constexpr int kPieces = kDim / 8;
    constexpr int kStep = kThreads / kPieces;
    static_assert(kThreads % kPieces == 0 && kRows % kStep == 0, "each thread copies whole pieces");
    const int piece = thread % kPieces, first = thread / kPieces;
    const u16* mine = rows + (u32)(first * kDim + piece * 8);
    if (valid >= kRows) {
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i)
            copy_async(tile + swizzled<kDim>(first + i * kStep, piece), mine + i * kStep * kDim);
    } else {
#pragma unroll
        for (int i = 0; i < kRows / kStep; ++i) {
            bool inside = first + i * kStep < valid;
            copy_async(tile + swizzled<kDim>(first + i * kStep, piece), inside ? mine + i * kStep * kDim : rows, inside);
        }
    }
}

// The addresses of fragments. Tiles begin at multiples of 256 bytes and `row` is a multiple of 8, so that a step
// along the row changes the address by an exclusive or, as the pieces are permuted: one register serves all steps.

// The 16 x 16 fragment A of rows `row` .. `row` + 15, elements 16 `step` .. 16 `step` + 15 of a swizzled tile.
template <int kDim>
__device__ __forceinline__ void load_rows(u32 (&a)[4], u32 tile, int row, int step) {
    const int lane = (int)(threadIdx.x & 31);
    const u32 first = tile + swizzled<kDim>(lane & 15, lane >> 4);
    load_matrices(a, (first ^ (u32)(step << 5)) + (u32)(row * kDim * 2));
}

// Two fragments B (b[0], b[1] and b[2], b[3]) of 16 rows that are columns of the product: keys of q k^T.
template <int kDim>
__device__ __forceinline__ void load_columns(u32 (&b)[4], u32 tile, int row, int step) {
    const int lane = (int)(threadIdx.x & 31);
    const u32 first = tile + swizzled<kDim>((lane & 7) + ((lane & 16) >> 1), (lane >> 3) & 1);
    load_matrices(b, (first ^ (u32)(step << 5)) + (u32)(row * kDim * 2));
}

// Two fragments B of 16 rows along the sum and elements 16 `step` .. + 15 as columns: values of p v.
template <int kDim>
__device__ __forceinline__ void load_columns_transposed(u32 (&b)[4], u32 tile, int row, int step) {
    const int lane = (int)(threadIdx.x & 31);
    const u32 first = tile + swizzled<kDim>(lane & 15, lane >> 4);
    load_matrices_transposed(b, (first ^ (u32)(step << 5)) + (u32)(row * kDim * 2));
}

// The running softmax of the two rows (lane / 4 and + 8) that a thread holds of a 16-row tile.
struct Softmax {
    float peak[2];  // largest raw score
    float sum[2];   // this thread's part of the sum of 2^(scale (score - peak))

    __device__ __forceinline__ void clear() {
        peak[0] = peak[1] = -kInfinity;
        sum[0] = sum[1] = 0.0f;
    }

    // Scores become weights, packed in pairs as the fragments A of p v by `pack`; the output so far is rescaled.
    template <int kTiles, int kOut, typename Packer>
    __device__ __forceinline__ void update(float (&s)[kTiles][4], u32 (&p)[kTiles][2], float (&o)[kOut][4],
                                           float scale, const Packer& pack) {
        float shift[2], factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = s[0][half * 2];
#pragma unroll
            for (int n = 0; n < kTiles; ++n) top = fmaxf(top, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
            top = fmaxf(top, __shfl_xor_sync(kFull, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kFull, top, 2));
            top = fmaxf(top, peak[half]);
            // A row that has seen nothing yet keeps a peak of -infinity; its weights are 0, not NaN.
            float finite = top == -kInfinity ? 0.0f : top;
            shift[half] = finite * scale;
            factor[half] = exp2_fast(peak[half] * scale - shift[half]);
            peak[half] = top;
        }
        float added[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            float w0 = exp2_fast(fmaf(s[n][0], scale, -shift[0]));
            float w1 = exp2_fast(fmaf(s[n][1], scale, -shift[0]));
            float w2 = exp2_fast(fmaf(s[n][2], scale, -shift[1]));
            float w3 = exp2_fast(fmaf(s[n][3], scale, -shift[1]));
            added[0] += w0 + w1;
            added[1] += w2 + w3;
            pack(p[n], n, w0, w1, w2, w3);
        }
        sum[0] = fmaf(sum[0], factor[0], added[0]);
        sum[1] = fmaf(sum[1], factor[1], added[1]);
        // Once the peaks have settled nothing needs rescaling.
        if (__any_sync(kFull, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int n = 0; n < kOut; ++n) {
                o[n][0] *= factor[0];
                o[n][1] *= factor[0];
                o[n][2] *= factor[1];
                o[n][3] *= factor[1];
            }
        }
    }

    // The rows' sums over the four threads that share them.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] += __shfl_xor_sync(kFull, sum[half], 1);
            sum[half] += __shfl_xor_sync(kFull, sum[half], 2);
        }
    }
};

// o[16 x kDim] += p[16 x kKeys] v[kKeys x kDim], v being rows of a swizzled tile from `row` on.
template <typename E, int kDim, int kKeys>
__device__ __forceinline__ void add_values(float (&o)[kDim / 8][4], const u32 (&p)[kKeys / 8][2], u32 tile, int row) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
        for (int n = 0; n < kDim / 16; ++n) {
            u32 b[4];
            load_columns_transposed<kDim>(b, tile, row + k * 16, n);
            E::mma(o[n * 2], p[k * 2][0], p[k * 2][1], p[k * 2 + 1][0], p[k * 2 + 1][1], b[0], b[1]);
            E::mma(o[n * 2 + 1], p[k * 2][0], p[k * 2][1], p[k * 2 + 1][0], p[k * 2 + 1][1], b[2], b[3]);
        }
    }
}
