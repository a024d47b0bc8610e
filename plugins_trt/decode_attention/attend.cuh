// Attention of a decode or verify step over paged keys, in up to three launches:
//   narrow:  one CTA takes a part of the context of one token and KV head; the heads of the group are the rows of
//            one 16-row tile. Sparse queries (over their selected pages), and dense ones of sequences that bring one
//            token. Bound by memory: each warp streams its own 16 keys at a time and shares nothing until the end.
//   wide:    one CTA takes a part of the context for 64 or 128 rows (tokens x heads of a group) of one sequence. Dense
//            queries of sequences that bring several tokens: a tree, or the end of a prompt. Bound by arithmetic.
//            And the blocks that all sparse queries of such a sequence share, the first and the last ones: they are
//            read once for eight tokens. It is launched before `narrow`, which takes the blocks of each token alone.
//   combine: merges the parts of each token and head, always in the same order.
//
// The grid depends on the bucket; how many parts are used, on the lengths, by the same formula in every kernel. Where
// it is one, the output is written at once.
#pragma once
#include "common.cuh"

struct Attend {
    const u16* q;         // [T, heads, D], rotated
    u16* out;             // [T, heads, D]
    const i32* blocks;    // [T, kv_heads, total], or null: every query is dense
    const i32* counts;    // [T, kv_heads], or null
    float* partial;       // [T, kv_heads, parts, 16, D]: sums not yet divided
    float2* statistics;   // [T, kv_heads, parts, 16]: maximum (base 2) and sum of weights
    float scale;          // 1 / sqrt(D), times log2(e)
    i32 heads;
    i32 kv_heads;
    i32 total;
    i32 dense_below;
    i32 parts;            // parts that `partial` has room for
    i32 narrow_parts;     // the narrow grid's
    i32 wide_parts;       // the wide grid's, 0: not launched
    i32 least_units;      // 16-key units that a CTA of `narrow` takes at least
    i32 init_blocks;      // the first blocks, which every sparse query attends to
    i32 local_blocks;     // the last ones, its own among them; 0: not known, nothing is shared
    i32 shared_parts;     // parts of what the tokens of a sequence share, at most
    i32 least_pages;      // that a CTA of `wide` takes at least
    i32 unused;
};

constexpr int kHeads = 16;
constexpr int kUnit = 16;                    // keys a warp of `narrow` takes at a time
constexpr int kUnitsPerPage = kPage / kUnit;
constexpr int kLeastShared = 8;              // tokens of a sequence whose sparse queries share blocks, at least
constexpr float kLag = 8.0f;                 // base-2 logarithm of the largest weight in `wide`

// ---------------------------------------------------------------- who does what

__device__ __forceinline__ bool is_dense(const Attend& args, int position) {
    return args.blocks == nullptr || position + 1 < args.dense_below;
}

// Rows of a sequence that brings several tokens go to `wide` when they are dense; where `narrow` is not launched
// (one sequence, every query dense), all do.
__device__ __forceinline__ bool is_wide(const Attend& args, int tokens) {
    return args.wide_parts > 0 && (tokens > 1 || (tokens == 1 && args.narrow_parts == 0));
}

// Whether all queries of a sequence are sparse, and the blocks that each of them must attend to are read for several at
// once: there are more blocks than a query attends to, so each list holds those blocks.
__device__ __forceinline__ bool shares_blocks(const Attend& args, int length, int tokens) {
    return args.shared_parts > 0 && args.local_blocks > 1 && tokens >= kLeastShared && args.wide_parts > 0 &&
           !is_dense(args, length) && length / kPage >= args.total;
}

// The first of the last blocks that all share.
__device__ __forceinline__ int first_shared(const Attend& args, int length, int tokens) {
    return (length + tokens - 1) / kPage + 1 - args.local_blocks;
}

__device__ __forceinline__ int shared_active(const Attend& args) {
    return min_int(args.shared_parts, args.init_blocks + args.local_blocks);
}

// The keys of one token and KV head, as entries of up to 64 keys: the pages before its limit, or the selected ones
// (a list may end early, with -1: such an entry holds nothing); then, in a tree, the pages that hold the nodes.
struct Context {
    int limit;       // of the first kind of entries, keys of slots below the limit are seen
    int pages;       // entries of the first kind
    int node_pages;  // entries of the second kind
    int length;      // slot of node 0
    int nodes_end;   // slot behind the last node that is seen
    u64 path;        // nodes that are seen
    int first;       // place of the first entry in the list of selected pages
    int before;      // parts of the pages that are taken together with other tokens'

    __device__ __forceinline__ int entries() const { return pages + node_pages; }
};

__device__ __forceinline__ Context context_of(
    const Batch& batch, const Attend& args, int length, int tokens, int token, int position, int kv_head, bool dense) {
    Context context;
    bool tree = batch.tree_masks != nullptr;
    context.length = length;
    context.limit = tree ? length : position + 1;
    context.pages = dense ? ceil_div(context.limit, kPage) : args.total;
    context.node_pages = 0;
    context.path = 0;
    context.nodes_end = length;
    context.first = context.before = 0;
    if (!dense && shares_blocks(args, length, tokens)) {
        int shared = position / kPage + 1 - first_shared(args, length, tokens);
        context.first = args.init_blocks;
        context.pages = args.total - args.init_blocks - shared;
        context.before = shared_active(args);
        return context;
    }
    if (tree) {
        u64 path = batch.tree_masks[token];
        if (!dense) {
            // Nodes lie in the query's own block, which is always selected, or in the one before.
            i64 row = (i64)token * args.kv_heads + kv_head;
            int own = position / kPage;
            int count = args.counts[row];
            bool before = count > 1 && args.blocks[row * args.total + count - 2] == own - 1;
            if (!before) {
                int others = own * kPage - length;  // nodes on the path that lie before the own block
                for (; others > 0 && path != 0; --others) path &= path - 1;
            }
        }
        context.path = path;
        if (path != 0) {
            context.nodes_end = length + 64 - __clzll((i64)path);
            context.node_pages = (context.nodes_end - 1) / kPage - length / kPage + 1;
        }
    }
    return context;
}

__device__ __forceinline__ int narrow_active(const Attend& args, int entries) {
    return max_int(1, min_int(args.narrow_parts, ceil_div(entries * kUnitsPerPage, args.least_units)));
}

__device__ __forceinline__ int wide_active(const Attend& args, int slots) {
    return max_int(1, min_int(args.wide_parts, ceil_div(ceil_div(slots, kPage), args.least_pages)));
}

// Parts in use of one token and KV head of a sequence that stored `length` tokens and brings `tokens`.
__device__ __forceinline__ int active_parts(
    const Batch& batch, const Attend& args, int length, int tokens, int token, int kv_head) {
    int position = batch.positions[token];
    bool dense = is_dense(args, position);
    if (dense && is_wide(args, tokens)) return wide_active(args, length + tokens);
    Context context = context_of(batch, args, length, tokens, token, position, kv_head, dense);
    return context.before + narrow_active(args, context.entries());
}
