// What statistics and scores of one node add: those of the compressed keys that its own path completes.
#pragma once
#include "decode_selection/keys.cuh"

// The keys that the path of one node completes; all threads of a CTA.
template <typename T, int kDim>
__device__ __forceinline__ void lse_of_node(
    const Batch& batch, const Select& args, int sequence, int token, int kv_head, int parts) {
    int position = batch.positions[token];
    if (!is_sparse(args, position)) return;
    int span = args.exact ? 16 : 64, window = 2 * span;
    float* out = args.lse + (((i64)token * args.kv_heads + kv_head) * args.lse_parts + parts) * kHeads;
    if (!completes_any(batch.lengths[sequence], position, span, window)) {
        if (threadIdx.x < kHeads) out[threadIdx.x] = -kInfinity;
        return;
    }
    float maximum = -kInfinity, sum = 0.0f;
    visit_node_keys<T, kDim>(
        batch, args, args.exact ? args.node_fine : args.node_coarse, span, window, sequence, token, kv_head,
        [&](int, int, int, float score) { merge(maximum, sum, score, 1.0f); });
    if (threadIdx.x < 128 && threadIdx.x % 8 == 0) out[threadIdx.x / 8] = log_sum(maximum, sum);
}

// The log-sum-exp of every head over all parts, for tokens [first, first + count) of a sequence, into
// `shared` [kTokens][kHeads]; +infinity where nothing was seen, which makes every weight 0. All threads must call it.
template <int kCtaThreads>
__device__ __forceinline__ void gather_lse(
    const Batch& batch, const Select& args, int sequence, int first, int count, int kv_head,
    float (*shared)[kHeads]) {
    constexpr int kEach = kCtaThreads / (kTokens * kHeads);  // neighbouring threads that share a token and head
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
template <typename T, int kDim, int kCtaThreads>
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
    gather_lse<kCtaThreads>(batch, args, sequence, token, 1, kv_head, lse_of_heads);
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
