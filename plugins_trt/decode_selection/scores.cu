// Which blocks each query of a decode or verify step attends to (InfLLM-v2), in three launches:
//   lse:    softmax statistics (lse.cu);
//   scores: softmax weight of every fine key, summed over the heads of a group, reduced to a number a block;
//   choose: the best blocks of each token and KV head (choose.cu).
// A step of one token takes two, which are apart: see one.cu. Of many tokens the first two are those of lse_many.cu and
// scores_many.cu, which have more in shared memory; of trees, where the device has warpgroup products, those of
// lse_groups.cu and scores_groups.cu.
#include "decode_selection/nodes.cuh"

// A part of the stored keys for a tile of tokens; waits for the launches before.
template <typename T, int kDim>
__device__ __forceinline__ void scores_of_part(
    const Batch& batch, const Arena& arena, const Select& args, const Tokens& tokens, int kv_head) {
    __shared__ float lse_of_heads[kTokens][kHeads];
    __shared__ float most_of_pages[kTokens][kPagesOfCta], first_of_pages[kTokens][kPagesOfCta];
    int sequence = tokens.sequence, part = tokens.part;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int first_page = (part * kWarps + warp) * kFinePages;
    int most = stored_tokens(batch, sequence, batch.lengths[sequence] + tokens.end - tokens.start - 1);
    int active = max_int(1, ceil_div(most, kPagesOfCta * kPage));
    if (tokens.first >= tokens.end || part >= active || tokens.are_dense(batch, args)) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    FineKeys<kDim> fine(arena, batch.table(sequence), kv_head, first_page, most, lane);
    // Keys and queries were written before `lse`, the launch before this: they can be read before that one ends.
    Rows<kDim> keys;
    keys.load(fine.rows[0], fine.rows[1], lane);
    wait_for_dependencies();
    launch_dependents();
    gather_lse<kThreads>(batch, args, sequence, tokens.first, tokens.end - tokens.first, kv_head, lse_of_heads);

    Rows<kDim> q, next;
    load_heads<kDim>(q, args, tokens.first, kv_head, lane);
    for (int token = tokens.first; token < tokens.end; ++token, q = next) {
        int index = token - tokens.first;
        if (token + 1 < tokens.end) load_heads<kDim>(next, args, token + 1, kv_head, lane);
        int stored = stored_tokens(batch, sequence, batch.positions[token]);
        float acc[2][4];
        keys_times_heads<T, kDim>(acc, keys, q);
        int page = warp * kFinePages;
        weigh_pages(
            acc, lse_of_heads[index], args.scale, fine.complete, stored, lane, &most_of_pages[index][page],
            &first_of_pages[index][page]);
    }
    __syncthreads();
    int page = threadIdx.x % kPagesOfCta;
    for (int index = threadIdx.x / kPagesOfCta; tokens.first + index < tokens.end; index += kThreads / kPagesOfCta) {
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
        scores_of_node<T, kDim, kThreads>(batch, args, tokens.sequence, token, blockIdx.y);
}

#define SCORES(type, suffix, dim)                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                          \
        scores_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) {             \
        scores<type, dim>(batch, arena, args);                                                         \
    }

SCORES(F16, f16, 64)
SCORES(F16, f16, 128)
SCORES(BF16, bf16, 64)
SCORES(BF16, bf16, 128)
