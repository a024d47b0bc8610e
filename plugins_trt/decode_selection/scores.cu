// Which blocks each query of a decode or verify step attends to (InfLLM-v2), in three launches:
//   lse:    softmax statistics (lse.cu);
//   scores: softmax weight of every fine key, summed over the heads of a group, reduced to a number a block;
//   choose: the best blocks of each token and KV head (choose.cu).
// A step of one token takes two, which are apart: see one.cu.
#include "decode_selection/keys.cuh"

// The log-sum-exp of every head over all parts, for tokens [first, first + count) of a sequence, into
// `shared` [kTokens][kHeads]; +infinity where nothing was seen, which makes every weight 0. All threads must call it.
__device__ __forceinline__ void gather_lse(
    const Batch& batch, const Select& args, int sequence, int first, int count, int kv_head,
    float (*shared)[kHeads]) {
    constexpr int kEach = kThreads / (kTokens * kHeads);  // neighbouring threads that share a token and head
    bool tree = batch.tree_masks != nullptr;
    int pages_a_part = kWarps * (args.exact ? kFinePages : kCoarsePages);
    int part = threadIdx.x % kEach;
    int head = threadIdx.x / kEach % kHeads;
    int index = threadIdx.x / kEach / kHeads;
    float maximum = -kInfinity, sum = 0.0f;
    if (index < count) {
        int stored = stored_tokens(batch, sequence, batch.positions[first + index]);
        int parts = ceil_div(stored, pages_a_part * kPage);
        const float* row =
            args.lse + ((i64)(first + index) * args.kv_heads + kv_head) * args.lse_parts * kHeads + head;
        for (; part < parts + (tree ? 1 : 0); part += kEach)
            merge(maximum, sum, row[(part < parts ? part : args.lse_parts - 1) * kHeads], 1.0f);
    }
#pragma unroll
    for (int other = 1; other < kEach; other <<= 1)
        merge(maximum, sum, __shfl_xor_sync(kFull, maximum, other), __shfl_xor_sync(kFull, sum, other));
    if (threadIdx.x % kEach == 0) {
        bool seen = sum > 0.0f && head < args.heads / args.kv_heads;
        shared[index][head] = seen ? log_sum(maximum, sum) : kInfinity;
    }
    __syncthreads();
}

// The keys that the path of one node completes; all threads of a CTA.
template <typename T, int kDim>
__device__ __forceinline__ void scores_of_node(
    const Batch& batch, const Select& args, int sequence, int token, int kv_head) {
    __shared__ float lse_of_heads[kTokens][kHeads];
    __shared__ float weights[kNodeKeys][kHeads];
    __shared__ i32 slots[kNodeKeys];
    int at = batch.positions[token];
    if (!is_sparse(args, at)) return;
    float* out = args.node_scores + ((i64)token * args.kv_heads + kv_head) * kNodeKeys * 2;
    if (!completes_any(batch.lengths[sequence], at, 16, 32)) {
        if (threadIdx.x == 0) out[0] = __int_as_float(-1);
        return;
    }
    gather_lse(batch, args, sequence, token, 1, kv_head, lse_of_heads);
    int found = 0;
    visit_node_keys<T, kDim>(
        batch, args, args.node_fine, 16, 32, sequence, token, kv_head,
        [&](int position, int head, int eighth, float score) {
            if (found == kNodeKeys) return;
            if (eighth == 0) weights[found][head] = exp2_fast(score - lse_of_heads[0][head]);
            if (threadIdx.x == 0) slots[found] = position / 16;
            ++found;
        });
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kNodeKeys; ++i) {
            float sum = 0.0f;
            if (i < found)
                for (int head = 0; head < kHeads; ++head) sum += weights[i][head];
            out[2 * i] = __int_as_float(i < found ? slots[i] : -1);
            out[2 * i + 1] = sum;
        }
    }
    __syncthreads();
}

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
    gather_lse(batch, args, sequence, tokens.first, tokens.end - tokens.first, kv_head, lse_of_heads);

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
        scores_of_node<T, kDim>(batch, args, tokens.sequence, token, blockIdx.y);
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
