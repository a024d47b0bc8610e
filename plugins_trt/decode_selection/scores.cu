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

// Grid: (parts, kv_heads, sequences x tiles of tokens), and in trees 64 more in x, one for each node.
template <typename T, int kDim>
__device__ __forceinline__ void scores(const Batch& batch, const Arena& arena, const Select& args, int parts) {
    __shared__ float lse_of_heads[kTokens][kHeads];
    __shared__ float most_of_pages[kTokens][kPagesOfCta], first_of_pages[kTokens][kPagesOfCta];
    Tokens tokens = Tokens::of_cta(batch);
    int sequence = tokens.sequence;
    int kv_head = blockIdx.y;
    int part = blockIdx.x;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;

    if (part >= parts) {  // a node's own compressed keys
        wait_for_dependencies();
        launch_dependents();
        int token = tokens.start + part - parts;
        if (!tokens.is_node(part - parts) || !is_sparse(args, batch.positions[token])) return;
        gather_lse(batch, args, sequence, token, 1, kv_head, lse_of_heads);
        float* out = args.node_scores + ((i64)token * args.kv_heads + kv_head) * kNodeKeys * 2;
        float* weights = most_of_pages[0];  // [kNodeKeys, kHeads]
        int found = 0, slots[kNodeKeys];
        visit_node_keys<T, kDim>(
            batch, args, args.node_fine, 16, 32, sequence, token, kv_head,
            [&](int position, int head, int eighth, float score) {
                if (found == kNodeKeys) return;
                if (eighth == 0) weights[found * kHeads + head] = exp2_fast(score - lse_of_heads[0][head]);
#pragma unroll
                for (int i = 0; i < kNodeKeys; ++i)
                    if (i == found) slots[i] = position / 16;
                ++found;
            });
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll
            for (int i = 0; i < kNodeKeys; ++i) {
                float sum = 0.0f;
                if (i < found)
                    for (int head = 0; head < kHeads; ++head) sum += weights[i * kHeads + head];
                out[2 * i] = __int_as_float(i < found ? slots[i] : -1);
                out[2 * i + 1] = sum;
            }
        }
        return;
    }

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

    for (int token = tokens.first; token < tokens.end; ++token) {
        int index = token - tokens.first;
        int stored = stored_tokens(batch, sequence, batch.positions[token]);
        Rows<kDim> q;
        load_heads<kDim>(q, args, token, kv_head, lane);
        float acc[2][4];
        keys_times_heads<T, kDim>(acc, keys, q);
        int page = warp * kFinePages;
        weigh_pages(
            acc, lse_of_heads[index], args.scale, fine.complete, stored, lane, &most_of_pages[index][page],
            &first_of_pages[index][page]);
    }
    __syncthreads();
    static_assert(kTokens * kPagesOfCta == kThreads, "a thread writes one block of one token");
    int index = threadIdx.x / kPagesOfCta, page = threadIdx.x % kPagesOfCta;
    int token = tokens.first + index;
    if (token < tokens.end && is_sparse(args, batch.positions[token]))
        write_score(args, token, kv_head, part, page, most_of_pages[index], first_of_pages[index]);
}

#define SCORES(type, suffix, dim)                                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                          \
        scores_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args, int parts) { \
        scores<type, dim>(batch, arena, args, parts);                                                  \
    }

SCORES(F16, f16, 64)
SCORES(F16, f16, 128)
SCORES(BF16, bf16, 64)
SCORES(BF16, bf16, 128)
