// The scores of block selection of many tokens, as in scores.cu. A warp has 32 keys, the heads of a tile of tokens lie in
// shared memory once for all warps.
#include "decode_selection/many.cuh"

constexpr int kKeysOfWarp = kKeysOfCta / kManyWarps;
constexpr int kPagesOfWarp = kKeysOfWarp / kFineSlots;
static_assert(kKeysOfWarp == 32, "a warp holds two tiles of keys");

// The warp's 32 keys against the heads of one token: the largest weight of each of its eight pages and the weight of the
// page's first slot, for the query that sees what is complete before token `stored`. `slot`: of the warp's first key.
template <typename T, int kDim>
__device__ __forceinline__ void weigh_keys(
    const Rows<kDim> (&keys)[2], u32 heads, const float* lse, float scale, int slot, int stored, int lane,
    float* most_of_pages, float* first_of_pages) {
    int g = lane >> 2, t = lane & 3;
    u32 line = heads + place_of<kDim>(g, t);
    float acc[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            uint4 q = shared_piece((line ^ (u32)(k << 6)) + (u32)(8 * n * kDim * 2));
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const uint4 &low = keys[m].low[k], &high = keys[m].high[k];
                T::mma(acc[m][n], low.x, high.x, low.y, high.y, q.x, q.y);
                T::mma(acc[m][n], low.z, high.z, low.w, high.w, q.z, q.w);
            }
        }
    }
    float weights[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // of rows g, g + 8, g + 16 and g + 24
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        float2 norm = *reinterpret_cast<const float2*>(lse + 8 * n + 2 * t);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int row = 0; row < 4; ++row)
                weights[row] += exp2_fast(fmaf(acc[row / 2][n][row % 2 * 2 + i], scale, i == 0 ? -norm.x : -norm.y));
        }
    }
    // The lanes of a quad hold two heads in eight each: lane t ends with the sum of row g + 8t.
    bool odd = (t & 1) != 0, upper = (t & 2) != 0;
    float low = odd ? weights[1] : weights[0], high = odd ? weights[3] : weights[2];
    low += __shfl_xor_sync(kFull, odd ? weights[0] : weights[1], 1);
    high += __shfl_xor_sync(kFull, odd ? weights[2] : weights[3], 1);
    float weight = (upper ? high : low) + __shfl_xor_sync(kFull, upper ? low : high, 2);
    int own = slot + 8 * t + g;
    if (own < 1 || 16 * own + 15 >= stored) weight = 0.0f;
    float most = fmaxf(weight, __shfl_xor_sync(kFull, weight, 4));
    most = fmaxf(most, __shfl_xor_sync(kFull, most, 8));
    if ((g & 3) == 0) most_of_pages[2 * t + g / 4] = most, first_of_pages[2 * t + g / 4] = weight;
}

// A part of the stored keys for a tile of tokens; waits for the launches before.
template <typename T, int kDim>
__device__ __forceinline__ void scores_of_part(
    const Batch& batch, const Arena& arena, const Select& args, const Tokens& tokens, int kv_head) {
    extern __shared__ __align__(1024) unsigned char rows[];  // the heads of the tile's tokens
    __shared__ float lse_of_heads[kTokens][kHeads];
    __shared__ float most_of_pages[kTokens][kPagesOfCta], first_of_pages[kTokens][kPagesOfCta];
    constexpr int kPieces = kDim / 8;
    int sequence = tokens.sequence, part = tokens.part;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int page = warp * kPagesOfWarp;  // of the CTA's
    int most = stored_tokens(batch, sequence, batch.lengths[sequence] + tokens.end - tokens.start - 1);
    int active = max_int(1, ceil_div(most, kPagesOfCta * kPage));
    if (tokens.first >= tokens.end || part >= active || tokens.are_dense(batch, args)) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    // Keys and queries were written before `lse`, the launch before this: they are read before that one ends.
    int group = args.heads / args.kv_heads, count = tokens.end - tokens.first;
    u32 heads = shared_address(rows);
    for (int i = threadIdx.x; i < count * kHeads * kPieces; i += kManyThreads) {
        int row = i / kPieces, piece = i % kPieces, head = row % kHeads;
        const u16* from = args.q + ((i64)(tokens.first + row / kHeads) * args.heads + kv_head * group + head) * kDim;
        copy_async(heads + place_of<kDim>(row, piece), head < group ? from + piece * 8 : args.q, head < group);
    }
    copy_commit();
    Rows<kDim> keys[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        FineKeys<kDim> fine(arena, batch.table(sequence), kv_head, part * kPagesOfCta + page + m * kFinePages, most, lane);
        keys[m].load(fine.rows[0], fine.rows[1], lane);
    }
    wait_for_dependencies();
    launch_dependents();
    gather_lse<kManyThreads>(batch, args, sequence, tokens.first, count, kv_head, lse_of_heads);
    copy_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int index = 0; index < count; ++index) {
        int stored = stored_tokens(batch, sequence, batch.positions[tokens.first + index]);
        weigh_keys<T, kDim>(
            keys, heads + (u32)(index * kHeads * kDim * 2), lse_of_heads[index], args.scale,
            (part * kPagesOfCta + page) * kFineSlots, stored, lane, &most_of_pages[index][page],
            &first_of_pages[index][page]);
    }
    __syncthreads();
    page = threadIdx.x % kPagesOfCta;
    for (int index = threadIdx.x / kPagesOfCta; index < count; index += kManyThreads / kPagesOfCta) {
        int token = tokens.first + index;
        if (is_sparse(args, batch.positions[token]))
            write_score(args, token, kv_head, part, page, most_of_pages[index], first_of_pages[index]);
    }
}

// Grid: (parts x tiles of tokens, kv_heads, sequences).
template <typename T, int kDim>
__device__ __forceinline__ void scores(const Batch& batch, const Arena& arena, const Select& args) {
    Tokens tokens = Tokens::of_cta(batch, args);
    scores_of_part<T, kDim>(batch, arena, args, tokens, blockIdx.y);
    if (batch.tree_masks == nullptr) return;
    for (int token = tokens.start + (int)blockIdx.x; token < tokens.last; token += (int)gridDim.x)
        scores_of_node<T, kDim, kManyThreads>(batch, args, tokens.sequence, token, blockIdx.y);
}

#define SCORES(type, suffix, dim)                                                                      \
    extern "C" __global__ void __launch_bounds__(kManyThreads, 2)                                        \
        scores_many_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) {             \
        scores<type, dim>(batch, arena, args);                                                         \
    }

SCORES(F16, f16, 64)
SCORES(F16, f16, 128)
SCORES(BF16, bf16, 64)
SCORES(BF16, bf16, 128)
