// What block selection hands from launch to launch, and the choice of the best blocks.
#pragma once
#include "common.cuh"

struct Select {
    const u16* q;            // [T, heads, D], rotated
    const u16* node_fine;    // [T, kv_heads, D], trees only
    const u16* node_coarse;  // [T, kv_heads, D], trees only
    float* lse;              // [T, kv_heads, lse_parts, 16], base 2
    float* scores;           // [T, kv_heads, max_pages, 2]: of the page's slots, of its first slot
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

// ---------------------------------------------------------------- choose

// The bits of a score order as the score does, since it is not negative; a block that always wins beats them all.
constexpr u32 kAlways = 0xffffffffu;

// Writes the best `total` of the blocks 0 .. own (which are more than `total`) of one token and KV head, ascending.
// Thread t of kThreads holds the ranks of blocks t, t + kThreads, ...; kItems * kThreads is at least own + 1. All
// threads must call it, and `blocks` may be shared memory: it is complete after the next barrier.
template <int kItems, int kThreads>
__device__ __forceinline__ void choose(
    const Batch& batch, const Select& args, int stored, int token, int kv_head, int own, i32* blocks) {
    constexpr int kWarps = kThreads / 32;
    __shared__ uint4 partial[16][kWarps / 2];  // two counters a warp and round
    __shared__ u32 counts[(kItems * kWarps + 31) / 32 * 32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    i64 row = (i64)token * args.kv_heads + kv_head;
    int candidates = own + 1;

    // Ranks: block b takes its page's four slots and the first slot of the next page.
    const float2* scores = reinterpret_cast<const float2*>(args.scores) + row * batch.max_pages;
    int scored = ceil_div(stored, kPage);  // pages that `scores` wrote
    u32 ranks[kItems];
    float first_of_next[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        int b = i * kThreads + threadIdx.x;
        ranks[i] = b < candidates && b < scored ? __float_as_uint(__ldcg(&scores[b].x)) : 0;
        first_of_next[i] = b < candidates && b + 1 < scored ? __ldcg(&scores[b + 1].y) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        int b = i * kThreads + threadIdx.x;
        u32 next = __float_as_uint(first_of_next[i]);
        ranks[i] = next > ranks[i] ? next : ranks[i];
        if (b < candidates && (b < args.init_blocks || b > own - args.local_blocks)) ranks[i] = kAlways;
    }
    if (batch.tree_masks != nullptr) {
        const float* nodes = args.node_scores + row * kNodeKeys * 2;
        for (int n = 0; n < kNodeKeys; ++n) {
            int slot = __float_as_int(nodes[2 * n]);
            if (slot < 0) break;
            u32 rank = __float_as_uint(nodes[2 * n + 1]);
#pragma unroll
            for (int i = 0; i < kItems; ++i) {
                int b = i * kThreads + threadIdx.x;
                bool holds = b == slot / kFineSlots || (slot % kFineSlots == 0 && b + 1 == slot / kFineSlots);
                if (holds && rank > ranks[i]) ranks[i] = rank;
            }
        }
    }

    // The total-th largest rank, two bits a round: of the four values the bits can take, the largest that leaves
    // at least `total` ranks as large. Once exactly `total` are, the rest of the bits cannot matter.
    u32 threshold = 0;
    for (int round = 0; round < 16; ++round) {
        u32 step = 1u << (30 - 2 * round);
        u32 low = 0, high = 0;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            low += ranks[i] >= threshold + step ? 1u : 0u;
            low += ranks[i] >= threshold + 2 * step ? 0x10000u : 0u;
            high += ranks[i] >= threshold + 3 * step ? 1u : 0u;
        }
        low = __reduce_add_sync(kFull, low);
        high = __reduce_add_sync(kFull, high);
        if (lane == 0) reinterpret_cast<uint2*>(partial[round])[warp] = uint2{low, high};
        __syncthreads();
        low = high = 0;
#pragma unroll
        for (int w = 0; w < kWarps / 2; ++w) {
            uint4 two = partial[round][w];
            low += two.x + two.z, high += two.y + two.w;
        }
        int most = 0;
        if ((int)high >= args.total) most = (int)high, threshold += 3 * step;
        else if ((int)(low >> 16) >= args.total) most = (int)(low >> 16), threshold += 2 * step;
        else if ((int)(low & 0xffffu) >= args.total) most = (int)(low & 0xffffu), threshold += step;
        if (most == args.total) {
            --threshold;  // all of them are above it
            break;
        }
    }

    // Blocks above the threshold all win; of those at it, the first ones, as many as are missing. Warps count in
    // the order of blocks, and every warp sums the counts up to its own.
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        bool exists = i * kThreads + (int)threadIdx.x < candidates;
        u32 above = __popc(__ballot_sync(kFull, exists && ranks[i] > threshold));
        u32 equal = __popc(__ballot_sync(kFull, exists && ranks[i] == threshold));
        if (lane == 0) counts[i * kWarps + warp] = above | (equal << 16);
    }
    __syncthreads();
    u32 before[kItems], all = 0;
#pragma unroll
    for (int part = 0; part < (kItems * kWarps + 31) / 32; ++part) {
        u32 count = part * 32 + lane < kItems * kWarps ? counts[part * 32 + lane] : 0;
        u32 sum = count;
#pragma unroll
        for (int step = 1; step < 32; step <<= 1) {
            u32 other = __shfl_up_sync(kFull, sum, step);
            if (lane >= step) sum += other;
        }
#pragma unroll
        for (int i = 0; i < 32 / kWarps; ++i) {
            u32 up_to = all + __shfl_sync(kFull, sum - count, i * kWarps + warp);
            if (part * (32 / kWarps) + i < kItems) before[part * (32 / kWarps) + i] = up_to;
        }
        all += __shfl_sync(kFull, sum, 31);
    }
    int missing = args.total - (int)(all & 0xffffu);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
        int b = i * kThreads + threadIdx.x;
        bool above = b < candidates && ranks[i] > threshold;
        bool equal = b < candidates && ranks[i] == threshold;
        u32 lower = (1u << lane) - 1;
        int above_before = (int)(before[i] & 0xffffu) + __popc(__ballot_sync(kFull, above) & lower);
        int equal_before = (int)(before[i] >> 16) + __popc(__ballot_sync(kFull, equal) & lower);
        if (above || (equal && equal_before < missing)) blocks[above_before + min_int(equal_before, missing)] = b;
    }
}
