// Compressed keys and queries as tensor-core fragments, and who takes which tokens.
//
// A warp holds 16 compressed keys in registers, read as 16-byte pieces straight into tensor-core fragments: the
// dot product runs over its elements in any order, as long as queries and keys use the same, so lane t of a quad
// takes elements 32k + 8t .. 32k + 8t + 7 for two steps of 16. It then passes over up to kTokens tokens.
//
// Fine keys are counted by slots: slot u of a sequence is key u - 1, lies in page u / 4, and is complete once token
// 16u + 15 is stored. Block b takes the largest of slots 4b .. 4b + 4 (keys 4b - 1 .. 4b + 3): the four of its page
// and the first of the next one.
#pragma once
#include "decode_selection/select.cuh"

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kUnit = 16;            // compressed keys a warp holds
constexpr int kHeads = 16;           // rows of a tile
constexpr int kCoarsePages = kUnit;  // pages of a unit of coarse keys
constexpr int kFinePages = kUnit / kFineSlots;
constexpr int kPagesOfCta = kWarps * kFinePages;
constexpr int kTokens = 16;  // most tokens of a sequence that a CTA takes
static_assert(kPagesOfCta == kPage, "as `choose` reads the scores");

// ---------------------------------------------------------------- fragments

// Elements 32k + 8t .. + 7 of rows `low` and `high` for every k: the keys of accumulator rows g and g + 8.
template <int kDim>
struct Rows {
    uint4 low[kDim / 32];
    uint4 high[kDim / 32];

    __device__ __forceinline__ void load(const u16* low_row, const u16* high_row, int lane) {
        int t = lane & 3;
#pragma unroll
        for (int k = 0; k < kDim / 32; ++k) {
            low[k] = low_row ? *reinterpret_cast<const uint4*>(low_row + 32 * k + 8 * t) : uint4{0, 0, 0, 0};
            high[k] = high_row ? *reinterpret_cast<const uint4*>(high_row + 32 * k + 8 * t) : uint4{0, 0, 0, 0};
        }
    }
};

// acc[n] (16 keys x 8 heads) = keys . heads n * 8 .. n * 8 + 7
template <typename T, int kDim>
__device__ __forceinline__ void keys_times_heads(float (&acc)[2][4], const Rows<kDim>& keys, const Rows<kDim>& q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[0][i] = acc[1][i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kDim / 32; ++k) {
        T::mma(acc[0], keys.low[k].x, keys.high[k].x, keys.low[k].y, keys.high[k].y, q.low[k].x, q.low[k].y);
        T::mma(acc[1], keys.low[k].x, keys.high[k].x, keys.low[k].y, keys.high[k].y, q.high[k].x, q.high[k].y);
        T::mma(acc[0], keys.low[k].z, keys.high[k].z, keys.low[k].w, keys.high[k].w, q.low[k].z, q.low[k].w);
        T::mma(acc[1], keys.low[k].z, keys.high[k].z, keys.low[k].w, keys.high[k].w, q.high[k].z, q.high[k].w);
    }
}

// The heads of one KV head of one token; rows past the group are zeros.
template <int kDim>
__device__ __forceinline__ void load_heads(Rows<kDim>& q, const Select& args, int token, int kv_head, int lane) {
    int group = args.heads / args.kv_heads;
    int g = lane >> 2;
    const u16* base = args.q + ((i64)token * args.heads + kv_head * group) * kDim;
    q.load(g < group ? base + g * kDim : nullptr, g + 8 < group ? base + (g + 8) * kDim : nullptr, lane);
}

__device__ __forceinline__ float log_sum(float maximum, float sum) {
    return sum > 0.0f ? maximum + log2_fast(sum) : -kInfinity;
}

// Merges two (maximum, sum) pairs of base-2 exponentials.
__device__ __forceinline__ void merge(float& maximum, float& sum, float other_maximum, float other_sum) {
    float larger = fmaxf(maximum, other_maximum);
    if (larger == -kInfinity) return;
    sum = sum * exp2_fast(maximum - larger) + other_sum * exp2_fast(other_maximum - larger);
    maximum = larger;
}

// ---------------------------------------------------------------- fine keys and pages

// The rows of the 16 fine keys of the pages from `first_page` on, and the tokens that complete them: of accumulator
// rows g and g + 8. What is not complete before token `end` has no row.
template <int kDim>
struct FineKeys {
    int complete[2];
    const u16* rows[2];

    __device__ __forceinline__ FineKeys(
        const Arena& arena, const i32* table, int kv_head, int first_page, int end, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = (lane >> 2) + 8 * half;
            int page = first_page + row / kFineSlots;
            int slot = page * kFineSlots + row % kFineSlots;
            bool exists = slot >= 1 && 16 * slot + 15 < end;
            complete[half] = exists ? 16 * slot + 15 : 0x7fffffff;
            rows[half] = exists ? arena.fine.row<kDim>(table[page], kv_head, row % kFineSlots) : nullptr;
        }
    }
};

// From the products of 16 fine keys with the heads: the largest weight of each of the four pages, and the weight of its
// first slot, for the query that sees what is complete before token `stored`. `lse`: of each head.
__device__ __forceinline__ void weigh_pages(
    const float (&acc)[2][4], const float* lse, float scale, const int (&complete)[2], int stored, int lane,
    float* most_of_pages, float* first_of_pages) {
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float norm = lse[8 * n + 2 * (lane & 3) + i];
            low += exp2_fast(fmaf(acc[n][i], scale, -norm));
            high += exp2_fast(fmaf(acc[n][2 + i], scale, -norm));
        }
    }
#pragma unroll
    for (int other = 1; other < 4; other <<= 1) {
        low += __shfl_xor_sync(kFull, low, other);
        high += __shfl_xor_sync(kFull, high, other);
    }
    if (complete[0] >= stored) low = 0.0f;
    if (complete[1] >= stored) high = 0.0f;
    // Rows g = 0..3 are page 0 of the unit (low) and page 2 (high), rows 4..7 pages 1 and 3.
    float low_most = fmaxf(low, __shfl_xor_sync(kFull, low, 4));
    float high_most = fmaxf(high, __shfl_xor_sync(kFull, high, 4));
    low_most = fmaxf(low_most, __shfl_xor_sync(kFull, low_most, 8));
    high_most = fmaxf(high_most, __shfl_xor_sync(kFull, high_most, 8));
    if (lane % 16 == 0) {
        int page = lane / 16;
        most_of_pages[page] = low_most, most_of_pages[page + 2] = high_most;
        first_of_pages[page] = low, first_of_pages[page + 2] = high;
    }
}

// Writes the score of the CTA's page `page`, but for the slot behind its last page, which is the next CTA's first.
__device__ __forceinline__ void write_score(
    const Select& args, int token, int kv_head, int part, int page, const float* most_of_pages,
    const float* first_of_pages) {
    i64 row = (i64)token * args.kv_heads + kv_head;
    float score = most_of_pages[page];
    if (page + 1 < kPagesOfCta) score = fmaxf(score, first_of_pages[page + 1]);
    args.scores[row * args.score_stride + part * kPagesOfCta + page] = score;
    if (page == 0) args.first_slots[row * (args.score_stride / kPagesOfCta) + part] = first_of_pages[0];
}

// Maximum and sum of 16 keys' weights, of each head, into `out` [16].
__device__ __forceinline__ void sum_keys(
    const float (&acc)[2][4], float scale, bool sees_low, bool sees_high, int lane, float2* out) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {  // head 8n + 2t + i
            float a = sees_low ? acc[n][i] * scale : -kInfinity;
            float b = sees_high ? acc[n][2 + i] * scale : -kInfinity;
            float maximum = fmaxf(a, b);
#pragma unroll
            for (int other = 4; other < 32; other <<= 1)
                maximum = fmaxf(maximum, __shfl_xor_sync(kFull, maximum, other));
            float sum = maximum == -kInfinity ? 0.0f : exp2_fast(a - maximum) + exp2_fast(b - maximum);
#pragma unroll
            for (int other = 4; other < 32; other <<= 1) sum += __shfl_xor_sync(kFull, sum, other);
            if (lane < 4) out[8 * n + 2 * lane + i] = float2{maximum, sum};
        }
    }
}

// The log-sum-exp of one head over the warps of a CTA, from what `sum_keys` left.
__device__ __forceinline__ float log_sum_of_warps(const float2 (*of_warps)[kHeads], int head) {
    float2 each[kWarps];
    float maximum = -kInfinity, sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        each[w] = of_warps[w][head];
        maximum = fmaxf(maximum, each[w].x);
    }
    float shift = maximum == -kInfinity ? 0.0f : maximum;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum = fmaf(each[w].y, exp2_fast(each[w].x - shift), sum);
    return log_sum(maximum, sum);
}

// ---------------------------------------------------------------- tokens and nodes

// One KV head of one token against the compressed keys that the nodes of its own path complete: 8 threads a head.
// Only the first 128 threads work; all must call it. visit(key's position, head of the group, scaled score) runs
// in the first of the 8 threads.
template <typename T, int kDim, typename Visit>
__device__ __forceinline__ void visit_node_keys(
    const Batch& batch, const Select& args, const u16* node_keys, int span, int window, int sequence, int token,
    int kv_head, Visit visit) {
    int group = args.heads / args.kv_heads;
    int head = threadIdx.x / 8;
    int part = threadIdx.x % 8;
    if (threadIdx.x >= 128) return;
    int start = batch.sequence_starts[sequence];
    int depth = 0;
    for (u64 path = batch.tree_masks[token]; path != 0; path &= path - 1, ++depth) {
        int position = batch.lengths[sequence] + depth;
        if (position % span != span - 1 || position < window - 1) continue;
        int node = start + __ffsll((i64)path) - 1;
        const u16* key = node_keys + ((i64)node * args.kv_heads + kv_head) * kDim + part * (kDim / 8);
        const u16* q = args.q + ((i64)token * args.heads + kv_head * group + head) * kDim + part * (kDim / 8);
        float dot = 0.0f;
        if (head < group) {
#pragma unroll
            for (int i = 0; i < kDim / 8; ++i) dot = fmaf(T::unpack(q[i]), T::unpack(key[i]), dot);
        }
#pragma unroll
        for (int lane = 1; lane < 8; lane <<= 1) dot += __shfl_xor_sync(kFull, dot, lane);
        visit(position, head, part, dot * args.scale);
    }
}

// Whether the path of a node, which ends at `position`, completes a compressed key behind `length`: every `span` tokens,
// from `window` on.
__device__ __forceinline__ bool completes_any(int length, int position, int span, int window) {
    return max_int(length | (span - 1), window - 1) <= position;
}

// What a CTA of sequence blockIdx.z takes: tokens [first, end) and a part of the keys. blockIdx.x counts parts, and tiles of
// tokens within them. In trees the CTAs share the nodes out, too, whose paths complete keys of their own.
struct Tokens {
    int sequence;
    int part;
    int start;  // of the sequence
    int first;
    int end;
    int last;   // the end of the sequence

    __device__ __forceinline__ static Tokens of_cta(const Batch& batch, const Select& args) {
        int tiles = ceil_div(batch.tokens, args.tile), place = (int)blockIdx.x;
        Tokens tokens;
        tokens.sequence = (int)blockIdx.z;
        tokens.part = place / tiles;
        tokens.start = batch.sequence_starts[tokens.sequence];
        tokens.last = batch.sequence_starts[tokens.sequence + 1];
        tokens.first = tokens.start + place % tiles * args.tile;
        tokens.end = min_int(tokens.last, tokens.first + args.tile);
        return tokens;
    }
    // Whether none of them selects. (The positions of a tree's nodes do not ascend: they are looked at one by one.)
    __device__ __forceinline__ bool are_dense(const Batch& batch, const Select& args) const {
        return batch.tree_masks == nullptr && !is_sparse(args, batch.positions[end - 1]);
    }
};
