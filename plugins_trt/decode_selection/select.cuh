// What block selection hands from launch to launch.
#pragma once
#include "common.cuh"

struct Select {
    const u16* q;            // [T, heads, D], rotated
    const u16* node_fine;    // [T, kv_heads, D], trees only
    const u16* node_coarse;  // [T, kv_heads, D], trees only
    float* lse;              // [T, kv_heads, lse_parts, 16], base 2; a part is 256 keys, by warpgroups 128
    float* scores;           // [T, kv_heads, score_stride]: of each block, but for the slot behind its CTA's last
    float* first_slots;      // [T, kv_heads, score_stride / 64]: of the first slot of each CTA of `scores`
    float* node_scores;      // [T, kv_heads, kNodeKeys, 2]: slot (an integer's bits) and score, trees only
    u32* arrived;            // [sequences, kv_heads], zero between launches
    i32* blocks;             // [T, kv_heads, total], ascending, -1 behind the last
    i32* counts;             // [T, kv_heads], 0 for a dense query and for padding
    float scale;             // 1 / sqrt(D), times log2(e)
    i32 heads;
    i32 kv_heads;
    i32 lse_parts;    // parts of a row of `lse`; in trees the last is the nodes'
    i32 init_blocks;
    i32 local_blocks;
    i32 total;
    i32 dense_below;
    i32 exact;
    i32 score_stride;  // a multiple of 64
    i32 tile;          // tokens of a sequence that a CTA of several takes
    i32 unused;
};

constexpr int kNodeKeys = 4;  // fine keys that 64 nodes of one path can complete

__device__ __forceinline__ bool is_sparse(const Select& args, int position) {
    return position + 1 >= args.dense_below;
}

// Tokens from which compressed keys in pages may be used by the query at `position`: a tree's nodes see those
// that the sequence had completed before the step; a chain's tokens, those that the step completes too.
__device__ __forceinline__ int stored_tokens(const Batch& batch, int sequence, int position) {
    return batch.tree_masks == nullptr ? position + 1 : batch.lengths[sequence];
}
