// The softmax statistics of block selection of many tokens, as in lse.cu. A warp has the heads of a token, the keys of the
// part lie in shared memory: sums over keys are a thread's own until the end.
#include "decode_selection/many.cuh"

constexpr int kChunk = 32;  // keys that a warp looks at together

// Maxima and sums of the weights of some keys, of heads g and g + 8, as far as this thread has seen them.
struct Statistics {
    float maximum[2];
    float sum[2];
};

// Adds keys [first, end) of those in shared memory, of which [0, seen) but for `unseen` count.
template <typename T, int kDim>
__device__ __forceinline__ void add_keys(
    Statistics& of, const Rows<kDim>& q, u32 keys, int first, int end, int unseen, int seen, float scale, int lane) {
    int g = lane >> 2, t = lane & 3;
    u32 line = keys + place_of<kDim>(g, t);
#pragma unroll 1
    for (int chunk = first; chunk < end; chunk += kChunk) {
        float s[kChunk / 8][4];
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
        for (int k = 0; k < kDim / 32; ++k) {
#pragma unroll
            for (int n = 0; n < kChunk / 8; ++n) {
                uint4 b = shared_piece((line ^ (u32)(k << 6)) + (u32)((chunk + 8 * n) * kDim * 2));
                T::mma(s[n], q.low[k].x, q.high[k].x, q.low[k].y, q.high[k].y, b.x, b.y);
                T::mma(s[n], q.low[k].z, q.high[k].z, q.low[k].w, q.high[k].w, b.z, b.w);
            }
        }
        if (chunk + kChunk > seen || (unseen >= chunk && unseen < chunk + kChunk)) {
#pragma unroll
            for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int key = chunk + 8 * n + 2 * t + (i & 1);
                    if (key >= seen || key == unseen) s[n][i] = -kInfinity;
                }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = s[0][2 * half];
#pragma unroll
            for (int n = 0; n < kChunk / 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            most = fmaxf(most * scale, of.maximum[half]);
            float shift = most == -kInfinity ? 0.0f : most;
            float sum = of.sum[half] * exp2_fast(of.maximum[half] - shift);
#pragma unroll
            for (int n = 0; n < kChunk / 8; ++n) {
                sum += exp2_fast(fmaf(s[n][2 * half], scale, -shift));
                sum += exp2_fast(fmaf(s[n][2 * half + 1], scale, -shift));
            }
            of.maximum[half] = most, of.sum[half] = sum;
        }
    }
}

// A part of the stored keys for a tile of tokens; waits for the launches before.
template <typename T, int kDim>
__device__ __forceinline__ void lse_of_part(
    const Batch& batch, const Arena& arena, const Select& args, const Tokens& tokens, int kv_head) {
    extern __shared__ __align__(1024) unsigned char rows[];  // the part's keys
    __shared__ float2 of_warps[2][kManyWarps][kHeads];
    constexpr int kPieces = kDim / 8;
    int sequence = tokens.sequence, part = tokens.part;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    bool tree = batch.tree_masks != nullptr;

    // The last token sees most; a part beyond its keys has nothing to do (and is never read).
    int span = args.exact ? kPage / kFineSlots : kPage;  // key j is complete with token span * j + span - 1, from 1 on
    int first_key = part * kKeysOfCta;
    int most = stored_tokens(batch, sequence, batch.lengths[sequence] + tokens.end - tokens.start - 1);
    if (tokens.first >= tokens.end || first_key * span >= most || tokens.are_dense(batch, args)) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    // A tree's nodes see what was stored before the step: it is read before the launch before has ended.
    if (!tree) {
        wait_for_dependencies();
        launch_dependents();
    }
    u32 keys = shared_address(rows);
    int count = min_int(kKeysOfCta, most / span - first_key);
    {
        const i32* table = batch.table(sequence);
        constexpr int kRowsAtOnce = kManyThreads / kPieces;
        int piece = threadIdx.x % kPieces, row = threadIdx.x / kPieces;
        int padded = ceil_div(count, kChunk) * kChunk;
#pragma unroll 8
        for (; row < padded; row += kRowsAtOnce) {
            int key = first_key + row;
            bool exists = row < count && key > 0;
            const u16* from = arena.coarse.base;
            if (exists)
                from = args.exact ? arena.fine.row<kDim>(table[key / kFineSlots], kv_head, key % kFineSlots)
                                  : arena.coarse.row<kDim>(table[key], kv_head, 0);
            copy_async(keys + place_of<kDim>(row, piece), from + piece * 8, exists);
        }
        copy_commit();
    }
    if (tree) {
        wait_for_dependencies();
        launch_dependents();
    }
    // Warps take a token each, and those that share one a share of the keys.
    int at_once = min_int(args.tile, kManyWarps), shares = kManyWarps / at_once;
    int share = warp / at_once;
    int chunks = ceil_div(count, kChunk);
    int first = chunks * share / shares * kChunk, end = chunks * (share + 1) / shares * kChunk;
    Statistics of_token[2];
#pragma unroll
    for (int turn = 0; turn < 2; ++turn) {
        int token = tokens.first + warp % at_once + turn * kManyWarps;
        Rows<kDim> q;
        bool works = token < tokens.end && (turn == 0 || args.tile > kManyWarps);
        int position = works ? batch.positions[token] : 0;
        works = works && is_sparse(args, position);
        if (works) load_heads<kDim>(q, args, token, kv_head, lane);
        if (turn == 0) {
            copy_wait<0>();
            __syncthreads();
        }
        Statistics& of = of_token[turn];
        of = {{-kInfinity, -kInfinity}, {0.0f, 0.0f}};
        if (!works) continue;
        int seen = stored_tokens(batch, sequence, position) / span - first_key;
        add_keys<T, kDim>(of, q, keys, first, end, -first_key, seen, args.scale, lane);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int other = 1; other < 4; other <<= 1)
                merge(of.maximum[half], of.sum[half], __shfl_xor_sync(kFull, of.maximum[half], other),
                      __shfl_xor_sync(kFull, of.sum[half], other));
            if ((lane & 3) == 0)
                of_warps[turn][warp][(lane >> 2) + 8 * half] = float2{of.maximum[half], of.sum[half]};
        }
    }
    __syncthreads();
    int index = threadIdx.x / kHeads, head = threadIdx.x % kHeads, token = tokens.first + index;
    if (token < tokens.end && is_sparse(args, batch.positions[token])) {
        float maximum = -kInfinity, sum = 0.0f;
        for (int w = index % kManyWarps; w < kManyWarps; w += at_once) {
            float2 of = of_warps[index / kManyWarps][w][head];
            merge(maximum, sum, of.x, of.y);
        }
        args.lse[(((i64)token * args.kv_heads + kv_head) * args.lse_parts + part) * kHeads + head] =
            log_sum(maximum, sum);
    }
}

// Grid: (parts x tiles of tokens, kv_heads, sequences).
template <typename T, int kDim>
__device__ __forceinline__ void lse(const Batch& batch, const Arena& arena, const Select& args) {
    Tokens tokens = Tokens::of_cta(batch, args);
    lse_of_part<T, kDim>(batch, arena, args, tokens, blockIdx.y);
    if (batch.tree_masks == nullptr) return;
    for (int token = tokens.start + (int)blockIdx.x; token < tokens.last; token += (int)gridDim.x)
        lse_of_node<T, kDim>(batch, args, tokens.sequence, token, blockIdx.y, args.lse_parts - 1);
}

#define LSE(type, suffix, dim)                                                           \
    extern "C" __global__ void __launch_bounds__(kManyThreads, 2)                        \
        lse_many_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) { \
        lse<type, dim>(batch, arena, args);                                              \
    }

LSE(F16, f16, 64)
LSE(F16, f16, 128)
LSE(BF16, bf16, 64)
LSE(BF16, bf16, 128)
