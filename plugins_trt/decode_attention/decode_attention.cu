// Attention of a decode or verify step over paged keys, in up to three launches:
//   narrow:  one CTA takes a part of the context of one token and KV head; the heads of the group are the rows of
//            one 16-row tile. Sparse queries (over their selected pages), and dense ones of sequences that bring one
//            token. Bound by memory: each warp streams its own 16 keys at a time and shares nothing until the end.
//   wide:    one CTA takes a part of the context for 128 rows (tokens x heads of a group) of one sequence. Dense
//            queries of sequences that bring several tokens: a tree, or the end of a prompt. Bound by arithmetic.
//   combine: merges the parts of each token and head, always in the same order.
//
// The grid depends on the bucket; how many parts are used, on the lengths, by the same formula in every kernel.
#include "common.cuh"

struct Attend {
    const u16* q;         // [T, heads, D], rotated
    u16* out;             // [T, heads, D]
    const i32* blocks;    // [T, kv_heads, total], or null: every query is dense
    const i32* counts;    // [T, kv_heads], or null
    float* partial;       // [T, kv_heads, parts, 16, D]: sums not yet divided
    float2* statistics;   // [T, kv_heads, parts, 16]: maximum (base 2) and sum of weights
    i32* active;          // [T, kv_heads]: parts in use; 1 where the output is written already
    float scale;          // 1 / sqrt(D), times log2(e)
    i32 heads;
    i32 kv_heads;
    i32 total;
    i32 dense_below;
    i32 parts;            // parts that `partial` has room for
    i32 narrow_parts;     // the narrow grid's
    i32 wide_parts;       // the wide grid's, 0: not launched
    i32 least_units;      // 16-key units that a warp of `narrow` takes at least
    i32 unused;
};

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr int kHeads = 16;
constexpr int kUnit = 16;                    // keys a warp of `narrow` takes at a time
constexpr int kUnitsPerPage = kPage / kUnit;
constexpr int kRows = 128;                   // rows of a wide tile
constexpr int kLeastPages = 2;               // pages that a CTA of `wide` takes at least
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

// The keys of one token and KV head, as entries of up to 64 keys: the pages before its limit, or the selected ones
// (a list may end early, with -1: such an entry holds nothing); then, in a tree, the pages that hold the nodes.
struct Context {
    int limit;       // of the first kind of entries, keys of slots below the limit are seen
    int pages;       // entries of the first kind
    int node_pages;  // entries of the second kind
    int length;      // slot of node 0
    int nodes_end;   // slot behind the last node that is seen
    u64 path;        // nodes that are seen

    __device__ __forceinline__ int entries() const { return pages + node_pages; }
};

__device__ __forceinline__ Context context_of(
    const Batch& batch, const Attend& args, int length, int token, int position, int kv_head, bool dense) {
    Context context;
    bool tree = batch.tree_masks != nullptr;
    context.length = length;
    context.limit = tree ? length : position + 1;
    context.pages = dense ? ceil_div(context.limit, kPage) : args.total;
    context.node_pages = 0;
    context.path = 0;
    context.nodes_end = length;
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
    return max_int(1, min_int(args.narrow_parts, ceil_div(entries * kUnitsPerPage, kWarps * args.least_units)));
}

__device__ __forceinline__ int wide_active(const Attend& args, int slots) {
    return max_int(1, min_int(args.wide_parts, ceil_div(ceil_div(slots, kPage), kLeastPages)));
}

// ---------------------------------------------------------------- narrow

template <int kDim>
constexpr int kStages = kDim == 128 ? 3 : 4;

template <int kDim>
constexpr int kNarrowBytes = kWarps * kStages<kDim> * 2 * kUnit * kDim * 2;

// Grid: (narrow_parts, kv_heads, tokens).
template <typename T, int kDim>
__device__ __forceinline__ void narrow(const Batch& batch, const Arena& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int kSteps = kDim / 16;         // steps of 16 elements in a dot product
    constexpr int kTiles = kDim / 8;          // 8-column tiles of an output row
    constexpr int kPieces = kDim / 8;         // 16-byte pieces of a row
    constexpr u32 kTileBytes = kUnit * kDim * 2;
    constexpr int kNothing = 1 << 30;  // a slot behind every limit
    int token = blockIdx.z;
    int kv_head = blockIdx.y;
    int part = blockIdx.x;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int g = lane >> 2, t = lane & 3;
    int group = args.heads / args.kv_heads;
    i64 row = (i64)token * args.kv_heads + kv_head;
    int position = batch.positions[token];
    int start, tokens, length;
    int sequence = batch.sequence_of(token, start, tokens, length);
    bool dense = is_dense(args, position);
    bool is_ready = sequence < 0 || !dense || is_wide(args, tokens);
    if (is_ready) {  // (a dense query finds its pages first)
        wait_for_dependencies();
        launch_dependents();
    }
    u16* out = args.out + ((i64)token * args.heads + kv_head * group) * kDim;
    if (sequence < 0) {
        if (part == 0) {
            for (int i = threadIdx.x; i < group * kPieces; i += kThreads)
                reinterpret_cast<uint4*>(out)[i] = uint4{0, 0, 0, 0};
            if (threadIdx.x == 0) args.active[row] = 1;
        }
        return;
    }
    if (dense && is_wide(args, tokens)) return;
    Context context = context_of(batch, args, length, token, position, kv_head, dense);
    int active = narrow_active(args, context.entries());
    if (part >= active) {
        if (!is_ready) {
            wait_for_dependencies();
            launch_dependents();
        }
        return;
    }
    const i32* blocks = dense ? nullptr : args.blocks + row * args.total;

    // This warp's units, the first of them and the end.
    int units = context.entries() * kUnitsPerPage;
    int workers = active * kWarps;
    int worker = part * kWarps + warp;
    int first = (int)((i64)units * worker / workers);
    int end = (int)((i64)units * (worker + 1) / workers);

    // Lane l knows the page and the first slot of entry `window + l`.
    const i32* table = batch.table(sequence);
    auto slot_of = [&](int entry) {  // the first of the entry's page
        if (entry >= context.pages) return (length / kPage + entry - context.pages) * kPage;
        int block = dense ? entry : blocks[entry];
        return block < 0 ? kNothing : block * kPage;
    };
    int window = 0, entry_page = 0, entry_slot = 0;
    auto look_up = [&](int from) {
        window = from;
        entry_slot = from + lane < context.entries() ? slot_of(from + lane) : kNothing;
        entry_page = entry_slot < kNothing ? table[entry_slot / kPage] : 0;
    };
    look_up(first / kUnitsPerPage);
    if (!is_ready) {
        wait_for_dependencies();
        launch_dependents();
    }
    if (part == 0 && threadIdx.x == 0) args.active[row] = active;

    u32 base = shared_address(shared) + warp * (kStages<kDim> * 2 * kTileBytes);
    auto load = [&](int unit) {
        int entry = unit / kUnitsPerPage;
        if (entry >= window + 32) look_up(entry);
        int page = __shfl_sync(kFull, entry_page, entry - window);
        int slot = __shfl_sync(kFull, entry_slot, entry - window) + unit % kUnitsPerPage * kUnit;
        int limit = entry < context.pages ? context.limit : context.nodes_end;
        const u16* keys = arena.keys.row<kDim>(page, kv_head, slot % kPage);
        const u16* values = arena.values.row<kDim>(page, kv_head, slot % kPage);
        u32 stage = base + (u32)((unit - first) % kStages<kDim>) * (2 * kTileBytes);
#pragma unroll
        for (int i = 0; i < kUnit * kPieces / 32; ++i) {
            int row = (i * 32 + lane) / kPieces;
            int piece = (i * 32 + lane) % kPieces;
            bool valid = slot + row < limit;
            copy_async(stage + swizzled<kDim>(row, piece), keys + row * kDim + piece * 8, valid);
            copy_async(stage + kTileBytes + swizzled<kDim>(row, piece), values + row * kDim + piece * 8, valid);
        }
    };
#pragma unroll
    for (int i = 0; i < kStages<kDim> - 1; ++i) {
        if (first + i < end) load(first + i);
        copy_commit();
    }

    u32 q[kSteps][4];  // rows g and g + 8 are heads of the group
    {
        const u16* rows = args.q + ((i64)token * args.heads + kv_head * group) * kDim;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            const u16* low = rows + g * kDim + 16 * k + 2 * t;
            const u16* high = low + 8 * kDim;
            q[k][0] = g < group ? *reinterpret_cast<const u32*>(low) : 0;
            q[k][1] = g + 8 < group ? *reinterpret_cast<const u32*>(high) : 0;
            q[k][2] = g < group ? *reinterpret_cast<const u32*>(low + 8) : 0;
            q[k][3] = g + 8 < group ? *reinterpret_cast<const u32*>(high + 8) : 0;
        }
    }

    float acc[kTiles][4] = {};
    float maximum[2] = {-kInfinity, -kInfinity};
    float sum[2] = {0.0f, 0.0f};
    for (int unit = first; unit < end; ++unit) {
        copy_wait<kStages<kDim> - 2>();
        __syncwarp();
        // The stage that is filled now was read in the last round, by this warp alone.
        if (unit + kStages<kDim> - 1 < end) load(unit + kStages<kDim> - 1);
        copy_commit();
        // A step of 16 elements is two pieces of a row, so its number enters the swizzled address as an XOR.
        u32 stage = base + (u32)((unit - first) % kStages<kDim>) * (2 * kTileBytes);
        int matrix = lane >> 3, line = lane & 7;
        u32 key_line = stage + swizzled<kDim>((matrix >> 1) * 8 + line, matrix & 1);
        u32 value_line = stage + kTileBytes + swizzled<kDim>((matrix & 1) * 8 + line, matrix >> 1);

        float s[2][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            u32 keys[4];
            load_matrices(keys, key_line ^ (u32)(k << 5));
            T::mma(s[0], q[k][0], q[k][1], q[k][2], q[k][3], keys[0], keys[1]);
            T::mma(s[1], q[k][0], q[k][1], q[k][2], q[k][3], keys[2], keys[3]);
        }

        // (Loads ahead may have moved the window past this unit.)
        int entry = unit / kUnitsPerPage;
        int slot = __shfl_sync(kFull, entry_slot, (entry - window) & 31);
        if (entry < window) slot = slot_of(entry);
        slot += unit % kUnitsPerPage * kUnit;
        if (entry < context.pages) {
            if (slot + kUnit > context.limit) {
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (slot + 8 * n + 2 * t + (i & 1) >= context.limit) s[n][i] = -kInfinity;
            }
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int node = slot + 8 * n + 2 * t + (i & 1) - length;
                    if (node < 0 || node >= 64 || ((context.path >> node) & 1) == 0) s[n][i] = -kInfinity;
                }
        }

        u32 p[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows g and g + 8
            float most = fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
            most = fmaxf(most, __shfl_xor_sync(kFull, most, 1));
            most = fmaxf(most, __shfl_xor_sync(kFull, most, 2));
            most = fmaxf(most * args.scale, maximum[half]);
            float shift = most == -kInfinity ? 0.0f : most;
            float factor = exp2_fast(maximum[half] - shift);
            maximum[half] = most;
            float weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) weights[i] = exp2_fast(fmaf(s[i / 2][2 * half + i % 2], args.scale, -shift));
            sum[half] = sum[half] * factor + (weights[0] + weights[1]) + (weights[2] + weights[3]);
            p[half] = T::pack(weights[0], weights[1]);
            p[2 + half] = T::pack(weights[2], weights[3]);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                acc[n][2 * half] *= factor;
                acc[n][2 * half + 1] *= factor;
            }
        }
#pragma unroll
        for (int n = 0; n < kTiles / 2; ++n) {
            u32 values[4];
            load_matrices_transposed(values, value_line ^ (u32)(n << 5));
            T::mma(acc[2 * n], p[0], p[1], p[2], p[3], values[0], values[1]);
            T::mma(acc[2 * n + 1], p[0], p[1], p[2], p[3], values[2], values[3]);
        }
        __syncwarp();
    }
    copy_wait<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        sum[half] += __shfl_xor_sync(kFull, sum[half], 1);
        sum[half] += __shfl_xor_sync(kFull, sum[half], 2);
    }

    // The warps' parts meet in shared memory, where no copy is under way any more.
    __shared__ float2 warp_statistics[kWarps][kHeads];
    __syncthreads();
    constexpr int kStride = kDim + 4;
    float* warp_acc = reinterpret_cast<float*>(shared) + warp * (kHeads * kStride);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        *reinterpret_cast<float2*>(warp_acc + g * kStride + 8 * n + 2 * t) = float2{acc[n][0], acc[n][1]};
        *reinterpret_cast<float2*>(warp_acc + (g + 8) * kStride + 8 * n + 2 * t) = float2{acc[n][2], acc[n][3]};
    }
    if (t == 0) {
        warp_statistics[warp][g] = float2{maximum[0], sum[0]};
        warp_statistics[warp][g + 8] = float2{maximum[1], sum[1]};
    }
    __syncthreads();
    i64 place = (row * args.parts + part) * kHeads;
    for (int i = threadIdx.x; i < group * (kDim / 4); i += kThreads) {
        int head = i / (kDim / 4), column = i % (kDim / 4) * 4;
        float most = -kInfinity, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) most = fmaxf(most, warp_statistics[w][head].x);
        float shift = most == -kInfinity ? 0.0f : most;
        float4 merged = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            float factor = exp2_fast(warp_statistics[w][head].x - shift);
            weight += warp_statistics[w][head].y * factor;
            float4 x = *reinterpret_cast<const float4*>(
                reinterpret_cast<const float*>(shared) + (w * kHeads + head) * kStride + column);
            merged.x += x.x * factor, merged.y += x.y * factor, merged.z += x.z * factor, merged.w += x.w * factor;
        }
        if (active == 1) {
            float inverse = 1.0f / weight;
            uint2 packed = {T::pack(merged.x * inverse, merged.y * inverse), T::pack(merged.z * inverse, merged.w * inverse)};
            *reinterpret_cast<uint2*>(out + head * kDim + column) = packed;
        } else {
            *reinterpret_cast<float4*>(args.partial + (place + head) * kDim + column) = merged;
            if (column == 0) args.statistics[place + head] = float2{most, weight};
        }
    }
}

// ---------------------------------------------------------------- wide

template <int kDim>
constexpr int kWideBytes = (kRows + 2 * 2 * kPage) * kDim * 2;

struct WideTile {
    int start;      // row of the sequence's first new token
    int first_row;  // of the tile, within the sequence
    int active;     // parts in use
    int slots;      // tokens with the step's
    int end;        // page behind the last of this part
};

// Grid: (wide_parts, tiles, kv_heads). Row r of a sequence is head r % group of its new token r / group.
template <typename T, int kDim>
__device__ __forceinline__ void wide(const Batch& batch, const Arena& arena, const Attend& args) {
    extern __shared__ __align__(1024) unsigned char shared[];
    __shared__ u64 masks[kRows];
    __shared__ WideTile tile;  // what the loop and the end need; no register can be spared for it
    constexpr int kSteps = kDim / 16;
    constexpr int kTiles = kDim / 8;
    constexpr int kPieces = kDim / 8;
    constexpr u32 kPageBytes = kPage * kDim * 2;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    int g = lane >> 2, t = lane & 3;
    int matrix = lane >> 3, line = lane & 7;
    int group = args.heads / args.kv_heads;
    int kv_head = blockIdx.z;
    int part = blockIdx.x;

    // The tile's sequence and the first of its rows.
    int sequence = -1, first_row = 0, tokens = 0, start = 0;
    for (int s = 0, before = 0; s < batch.sequences; ++s) {
        int from = batch.sequence_starts[s];
        int count = batch.sequence_starts[s + 1] - from;
        int tiles = is_wide(args, count) ? ceil_div(count * group, kRows) : 0;
        if ((int)blockIdx.y < before + tiles) {
            sequence = s, first_row = ((int)blockIdx.y - before) * kRows, tokens = count, start = from;
            break;
        }
        before += tiles;
    }
    if (sequence < 0) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    int length = batch.lengths[sequence];
    int slots = length + tokens;
    int active = wide_active(args, slots);
    if (part >= active) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }

    if (threadIdx.x == 0) tile = {start, first_row, active, slots, (int)((i64)ceil_div(slots, kPage) * (part + 1) / active)};

    // Row r of the tile sees keys before the step and the new tokens of its mask; a row that is not dense sees
    // nothing and is not written.
    bool any = false;
    {
        int token = (first_row + (int)threadIdx.x) / group;
        u64 mask = 0;
        if (token < tokens && is_dense(args, batch.positions[start + token])) {
            mask = batch.tree_masks != nullptr ? batch.tree_masks[start + token] : ~0ull >> (63 - token);
        }
        masks[threadIdx.x] = mask;
        any = mask != 0;
    }
    any = __syncthreads_or(any);
    wait_for_dependencies();
    launch_dependents();
    if (!any) return;

    u32 q_shared = shared_address(shared);
    u32 stages = q_shared + kRows * kDim * 2;
    const i32* table = batch.table(sequence);
    int pages = ceil_div(slots, kPage);
    int page = (int)((i64)pages * part / active);
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
        int row = i / kPieces, piece = i % kPieces;
        int token = (first_row + row) / group;
        const u16* from =
            args.q + ((i64)(start + token) * args.heads + kv_head * group + (first_row + row) % group) * kDim + piece * 8;
        copy_async(q_shared + swizzled<kDim>(row, piece), token < tokens ? from : args.q, token < tokens);
    }
    auto load = [&](const Pool& pool, int page, u32 to) {
        constexpr int kStep = kThreads / kPieces;  // rows that the CTA copies at a time, a multiple of 8
        const u16* from = pool.row<kDim>(table[page], blockIdx.z, 0) + threadIdx.x * 8;
        int rows = tile.slots - page * kPage - (int)threadIdx.x / kPieces;
        to += swizzled<kDim>(threadIdx.x / kPieces, threadIdx.x % kPieces);
#pragma unroll
        for (int i = 0; i < kPage / kStep; ++i)
            copy_async(to + i * kStep * kDim * 2, from + i * kStep * kDim, i * kStep < rows);
    };
    load(arena.keys, page, stages);
    copy_commit();
    load(arena.values, page, stages + kPageBytes);
    copy_commit();

    // This warp's 32 rows: two tiles of 16. Rows behind the last token's are left alone.
    int end = tile.end;
    bool works = first_row + warp * 32 < tokens * group;
    u32 q_line = q_shared + swizzled<kDim>(warp * 32 + (matrix & 1) * 8 + line, matrix >> 1);
    u32 key_line = stages + swizzled<kDim>((matrix >> 1) * 8 + line, matrix & 1);
    u32 value_line = stages + kPageBytes + swizzled<kDim>((matrix & 1) * 8 + line, matrix >> 1);
    float acc[2][kTiles][4] = {};
    float maximum[2][2] = {{-kInfinity, -kInfinity}, {-kInfinity, -kInfinity}};
    float sum[2][2] = {};
    u32 stage = 0;
    for (; page < end; ++page, stage ^= 2 * kPageBytes) {
        u32 next = stages + (stage ^ (2 * kPageBytes));
        copy_wait<1>();  // the keys are here, the values may be under way
        __syncthreads();
        if (page + 1 < end) load(arena.keys, page + 1, next);
        copy_commit();
        u32 p[2][2][8];  // the weights, packed: tile, half, keys 8n + 2t and + 1
        if (works) {
            float s[2][8][4];
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < 8; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
                u32 a[2][4];
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    load_matrices(a[m], (q_line ^ (u32)(k << 5)) + m * 16 * kDim * 2);
#pragma unroll
                for (int n = 0; n < 4; ++n) {
                    u32 b[4];
                    load_matrices(b, ((key_line + stage) ^ (u32)(k << 5)) + n * 16 * kDim * 2);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        T::mma(s[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                        T::mma(s[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                    }
                }
            }
            if ((page + 1) * kPage > length) {  // new tokens: each row sees those of its mask
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        // Bit c: the key in slot c of this page is seen.
                        u64 seen = masks[warp * 32 + m * 16 + half * 8 + g];
                        int before = length - page * kPage;  // slots of this page from before the step
                        seen = before > 0 ? (seen << before) | ((1ull << before) - 1) : -before < 64 ? seen >> -before : 0;
                        seen >>= 2 * t;
#pragma unroll
                        for (int n = 0; n < 8; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                if (((seen >> (8 * n + i)) & 1) == 0) s[m][n][2 * half + i] = -kInfinity;
                    }
            }
            // The weights are relative to a maximum that may lag behind by a factor of 2^kLag, which fp32 sums and
            // 16-bit weights bear easily: after the first pages nothing needs to be scaled any more.
            float most[2][2];
            bool outgrown = false;
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float largest = s[m][0][2 * half];
#pragma unroll
                    for (int n = 0; n < 8; ++n)
                        largest = fmaxf(largest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                    largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, 1));
                    largest = fmaxf(largest, __shfl_xor_sync(kFull, largest, 2));
                    most[m][half] = largest * args.scale;
                    outgrown |= most[m][half] > maximum[m][half] + kLag;
                }
            if (__any_sync(kFull, outgrown)) {
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float larger = fmaxf(most[m][half], maximum[m][half]);
                        float factor = larger == -kInfinity ? 1.0f : exp2_fast(maximum[m][half] - larger);
                        maximum[m][half] = larger;
                        sum[m][half] *= factor;
#pragma unroll
                        for (int n = 0; n < kTiles; ++n) {
                            acc[m][n][2 * half] *= factor;
                            acc[m][n][2 * half + 1] *= factor;
                        }
                    }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float shift = maximum[m][half] == -kInfinity ? 0.0f : maximum[m][half];
                    float weights = 0.0f;
#pragma unroll
                    for (int n = 0; n < 8; ++n) {
                        float even = exp2_fast(fmaf(s[m][n][2 * half], args.scale, -shift));
                        float odd = exp2_fast(fmaf(s[m][n][2 * half + 1], args.scale, -shift));
                        weights += even + odd;
                        p[m][half][n] = T::pack(even, odd);
                    }
                    sum[m][half] += weights;
                }
        }
        copy_wait<1>();  // the values are here
        __syncthreads();
        if (page + 1 < end) load(arena.values, page + 1, next + kPageBytes);
        copy_commit();
        if (works) {
#pragma unroll
            for (int k = 0; k < kPage / 16; ++k) {
#pragma unroll
                for (int n = 0; n < kTiles / 2; ++n) {
                    u32 b[4];
                    load_matrices_transposed(b, ((value_line + stage) ^ (u32)(n << 5)) + k * 16 * kDim * 2);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        u32 a0 = p[m][0][2 * k], a1 = p[m][1][2 * k], a2 = p[m][0][2 * k + 1], a3 = p[m][1][2 * k + 1];
                        T::mma(acc[m][2 * n], a0, a1, a2, a3, b[0], b[1]);
                        T::mma(acc[m][2 * n + 1], a0, a1, a2, a3, b[2], b[3]);
                    }
                }
            }
        }
    }
    copy_wait<0>();
    if (!works) return;
    start = tile.start, first_row = tile.first_row, active = tile.active;
    group = args.heads / args.kv_heads;
    lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float weight = sum[m][half];
            weight += __shfl_xor_sync(kFull, weight, 1);
            weight += __shfl_xor_sync(kFull, weight, 2);
            int row = warp * 32 + m * 16 + half * 8 + g;
            if (masks[row] == 0) continue;
            int token = start + (first_row + row) / group;
            int head = (first_row + row) % group;
            if (head == 0 && t == 0 && blockIdx.x == 0) args.active[(i64)token * args.kv_heads + blockIdx.z] = active;
            if (active == 1) {
                u16* out = args.out + ((i64)token * args.heads + kv_head * group + head) * kDim;
                float inverse = 1.0f / weight;
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    *reinterpret_cast<u32*>(out + 8 * n + 2 * t) =
                        T::pack(acc[m][n][2 * half] * inverse, acc[m][n][2 * half + 1] * inverse);
            } else {
                i64 place = (((i64)token * args.kv_heads + kv_head) * args.parts + part) * kHeads + head;
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
                    *reinterpret_cast<float2*>(args.partial + place * kDim + 8 * n + 2 * t) =
                        float2{acc[m][n][2 * half], acc[m][n][2 * half + 1]};
                if (t == 0) args.statistics[place] = float2{maximum[m][half], weight};
            }
        }
}

// ---------------------------------------------------------------- combine

constexpr int kCombineThreads = 256;

// Grid: (ceil(heads / kRowsOfCta), tokens). D / 4 threads take 16 bytes each of a part of one row of the output;
// with one row a CTA, all its groups of threads share the parts, else each group has a row of its own. A group adds
// parts as it goes, scaled to the largest maximum so far; then the groups' sums are merged in the same way.
template <typename T, int kDim, bool kOneRow>
__device__ __forceinline__ void combine(const Batch& batch, const Attend& args) {
    constexpr int kColumns = kDim / 4;
    constexpr int kGroups = kCombineThreads / kColumns;
    __shared__ float4 sums[kOneRow ? kGroups : 1][kColumns];
    __shared__ float2 statistics[kGroups];
    int token = blockIdx.y;
    int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
    int query_head = kOneRow ? blockIdx.x : blockIdx.x * kGroups + group;
    bool is_padding = token >= batch.sequence_starts[batch.sequences];
    wait_for_dependencies();
    launch_dependents();
    if (!kOneRow && query_head >= args.heads) return;
    uint2* out = reinterpret_cast<uint2*>(args.out + ((i64)token * args.heads + query_head) * kDim) + column;
    if (is_padding) {
        if (!kOneRow || group == 0) *out = uint2{0, 0};
        return;
    }
    int heads_of_group = args.heads / args.kv_heads;
    i64 row = (i64)token * args.kv_heads + query_head / heads_of_group;
    i64 place = row * args.parts * kHeads + query_head % heads_of_group;
    int active = args.active[row];
    if (active == 1) return;

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float maximum = -kInfinity, weight = 0.0f;
    auto add = [&](float2 statistic, float4 x) {
        float larger = fmaxf(maximum, statistic.x);
        float shift = larger == -kInfinity ? 0.0f : larger;
        float old = exp2_fast(maximum - shift), factor = exp2_fast(statistic.x - shift);
        maximum = larger;
        weight = fmaf(weight, old, statistic.y * factor);
        sum.x = fmaf(sum.x, old, x.x * factor), sum.y = fmaf(sum.y, old, x.y * factor);
        sum.z = fmaf(sum.z, old, x.z * factor), sum.w = fmaf(sum.w, old, x.w * factor);
    };
    constexpr int kStep = kOneRow ? kGroups : 1;
    constexpr int kAhead = 8;  // parts under way
    for (int first = kOneRow ? group : 0; first < active; first += kStep * kAhead) {
        float2 statistic[kAhead];
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            int part = first + i * kStep;  // past the last, that one again, without weight
            i64 at = place + (i64)min_int(part, active - 1) * kHeads;
            statistic[i] = args.statistics[at];
            x[i] = __ldcs(reinterpret_cast<const float4*>(args.partial + at * kDim) + column);
            if (part >= active) statistic[i] = float2{-kInfinity, 0.0f};
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) add(statistic[i], x[i]);
    }
    if constexpr (kOneRow) {
        sums[group][column] = sum;
        if (column == 0) statistics[group] = float2{maximum, weight};
        __syncthreads();
        if (group != 0) return;
#pragma unroll
        for (int i = 1; i < kGroups; ++i) add(statistics[i], sums[i][column]);
    }
    float inverse = 1.0f / weight;
    *out = uint2{T::pack(sum.x * inverse, sum.y * inverse), T::pack(sum.z * inverse, sum.w * inverse)};
}

#define ATTEND(type, suffix, dim)                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                  \
        narrow_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) {    \
        narrow<type, dim>(batch, arena, args);                                                 \
    }                                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                  \
        wide_##suffix##_d##dim(const Batch batch, const Arena arena, const Attend args) {      \
        wide<type, dim>(batch, arena, args);                                                   \
    }                                                                                          \
    extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)                              \
        combine_many_##suffix##_d##dim(const Batch batch, const Attend args) {                 \
        combine<type, dim, true>(batch, args);                                                 \
    }                                                                                          \
    extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)                              \
        combine_few_##suffix##_d##dim(const Batch batch, const Attend args) {                  \
        combine<type, dim, false>(batch, args);                                                \
    }

ATTEND(F16, f16, 64)
ATTEND(F16, f16, 128)
ATTEND(BF16, bf16, 64)
ATTEND(BF16, bf16, 128)
