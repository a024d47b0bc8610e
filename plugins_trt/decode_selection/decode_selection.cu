// Which blocks each query of a decode or verify step attends to (InfLLM-v2), in two or three launches:
//   lse:    log-sum-exp of the scaled scores over the coarse keys (or the fine ones, `exact`), a part a CTA;
//   scores: softmax weight of every fine key, summed over the heads of a group, reduced to a number a block;
//   choose: the best blocks of each token and KV head. With one token the last CTA of `scores` does it at once.
//
// A warp holds 16 compressed keys in registers, read as 16-byte pieces straight into tensor-core fragments: the
// dot product runs over its elements in any order, as long as queries and keys use the same, so lane t of a quad
// takes elements 32k + 8t .. 32k + 8t + 7 for two steps of 16. It then passes over up to kTokens tokens.
//
// Fine keys are counted by slots: slot u of a sequence is key u - 1, lies in page u / 4, and is complete once token
// 16u + 15 is stored. Block b takes the largest of slots 4b .. 4b + 4 (keys 4b - 1 .. 4b + 3): the four of its page
// and the first of the next one.
#include "decode_selection/select.cuh"

constexpr int kWarps = 16;
constexpr int kThreads = kWarps * 32;
constexpr int kUnit = 16;            // compressed keys a warp holds
constexpr int kHeads = 16;           // rows of a tile
constexpr int kCoarsePages = kUnit;  // pages of a unit of coarse keys
constexpr int kFinePages = kUnit / kFineSlots;
constexpr int kPagesOfCta = kWarps * kFinePages;
constexpr int kTokens = 8;  // tokens of a sequence that a CTA takes
static_assert(kPagesOfCta == kPage && kThreads == kChooseThreads, "as `choose` reads the scores");

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

// ---------------------------------------------------------------- lse

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

// Tokens [first, end) of one sequence, those that a CTA takes; blockIdx.z counts tiles of tokens within sequences.
struct Tokens {
    int sequence;
    int start;  // of the sequence
    int first;
    int end;
    int last;   // the end of the sequence

    __device__ __forceinline__ static Tokens of_cta(const Batch& batch) {
        int tiles = ceil_div(batch.tokens, kTokens);
        Tokens tokens;
        tokens.sequence = (int)blockIdx.z / tiles;
        tokens.start = batch.sequence_starts[tokens.sequence];
        tokens.last = batch.sequence_starts[tokens.sequence + 1];
        tokens.first = tokens.start + (int)blockIdx.z % tiles * kTokens;
        tokens.end = min_int(tokens.last, tokens.first + kTokens);
        return tokens;
    }
    // Token `index` of the sequence; the CTAs of its first tile see to its nodes.
    __device__ __forceinline__ bool is_node(int index) const { return first == start && start + index < last; }
};

// Grid: (parts, kv_heads, sequences x tiles of tokens), and in trees 64 more in x, one for each node.
template <typename T, int kDim>
__device__ __forceinline__ void lse(const Batch& batch, const Arena& arena, const Select& args) {
    __shared__ float2 shared[kTokens][kWarps][kHeads];
    Tokens tokens = Tokens::of_cta(batch);
    int sequence = tokens.sequence;
    int kv_head = blockIdx.y;
    int part = blockIdx.x;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;
    bool tree = batch.tree_masks != nullptr;
    int parts = args.lse_parts - (tree ? 1 : 0);

    if (part >= parts) {  // a node's own compressed keys
        wait_for_dependencies();
        launch_dependents();
        int token = tokens.start + part - parts;
        if (!tokens.is_node(part - parts) || !is_sparse(args, batch.positions[token])) return;
        float maximum = -kInfinity, sum = 0.0f;
        visit_node_keys<T, kDim>(
            batch, args, args.exact ? args.node_fine : args.node_coarse, args.exact ? 16 : 64, args.exact ? 32 : 128,
            sequence, token, kv_head, [&](int, int, int, float score) { merge(maximum, sum, score, 1.0f); });
        if (threadIdx.x < 128 && threadIdx.x % 8 == 0)
            args.lse[(((i64)token * args.kv_heads + kv_head) * args.lse_parts + parts) * kHeads + threadIdx.x / 8] =
                log_sum(maximum, sum);
        return;
    }

    // The last token sees most; a part beyond its keys has nothing to do (and is never read).
    int pages_a_unit = args.exact ? kFinePages : kCoarsePages;
    int first_page = (part * kWarps + warp) * pages_a_unit;
    int most = stored_tokens(batch, sequence, batch.lengths[sequence] + tokens.end - tokens.start - 1);
    if (tokens.first >= tokens.end || part * kWarps * pages_a_unit * kPage >= most) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    const i32* table = batch.table(sequence);
    int g = lane >> 2;
    // The token that completes the key of accumulator row g (low) and g + 8 (high), and the key's address.
    int complete[2];
    const u16* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = g + 8 * half;
        int page = first_page + (args.exact ? row / kFineSlots : row);
        bool exists = args.exact ? page * kFineSlots + row % kFineSlots >= 1 : page >= 1;
        complete[half] = args.exact ? 16 * (page * kFineSlots + row % kFineSlots) + 15 : kPage * page + kPage - 1;
        if (!exists || complete[half] >= most) {
            complete[half] = 0x7fffffff;
            rows[half] = nullptr;
        } else {
            rows[half] = args.exact ? arena.fine.row<kDim>(table[page], kv_head, row % kFineSlots)
                                    : arena.coarse.row<kDim>(table[page], kv_head, 0);
        }
    }
    wait_for_dependencies();
    launch_dependents();
    Rows<kDim> keys;
    keys.load(rows[0], rows[1], lane);

    for (int token = tokens.first; token < tokens.end; ++token) {
        int position = batch.positions[token];
        if (!is_sparse(args, position)) continue;
        int stored = stored_tokens(batch, sequence, position);
        Rows<kDim> q;
        load_heads<kDim>(q, args, token, kv_head, lane);
        float acc[2][4];
        keys_times_heads<T, kDim>(acc, keys, q);
        bool low = complete[0] < stored, high = complete[1] < stored;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // head 8n + 2t + i
                float a = low ? acc[n][i] * args.scale : -kInfinity;
                float b = high ? acc[n][2 + i] * args.scale : -kInfinity;
                float maximum = fmaxf(a, b);
#pragma unroll
                for (int other = 4; other < 32; other <<= 1)
                    maximum = fmaxf(maximum, __shfl_xor_sync(kFull, maximum, other));
                float sum = maximum == -kInfinity ? 0.0f : exp2_fast(a - maximum) + exp2_fast(b - maximum);
#pragma unroll
                for (int other = 4; other < 32; other <<= 1) sum += __shfl_xor_sync(kFull, sum, other);
                if (lane < 4) shared[token - tokens.first][warp][8 * n + 2 * lane + i] = float2{maximum, sum};
            }
        }
    }
    __syncthreads();
    int token = tokens.first + (int)threadIdx.x / kHeads, head = threadIdx.x % kHeads;
    if (token < tokens.end && is_sparse(args, batch.positions[token])) {
        float maximum = -kInfinity, sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            float2 of_warp = shared[token - tokens.first][w][head];
            merge(maximum, sum, of_warp.x, of_warp.y);
        }
        args.lse[(((i64)token * args.kv_heads + kv_head) * args.lse_parts + part) * kHeads + head] =
            log_sum(maximum, sum);
    }
}

// The log-sum-exp of every head over all parts, for tokens [first, first + count) of a sequence, into
// `shared` [kTokens][kHeads]; +infinity where nothing was seen, which makes every weight 0. All threads must call it.
__device__ __forceinline__ void gather_lse(
    const Batch& batch, const Select& args, int sequence, int first, int count, int kv_head,
    float (*shared)[kHeads]) {
    constexpr int kEach = kThreads / (kTokens * kHeads);  // neighbouring threads that share a token and head
    int part = threadIdx.x % kEach;
    int head = threadIdx.x / kEach % kHeads;
    int index = threadIdx.x / kEach / kHeads;
    float maximum = -kInfinity, sum = 0.0f;
    if (index < count) {
        bool tree = batch.tree_masks != nullptr;
        int stored = stored_tokens(batch, sequence, batch.positions[first + index]);
        int pages_a_part = kWarps * (args.exact ? kFinePages : kCoarsePages);
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

// ---------------------------------------------------------------- choose

__device__ __forceinline__ void write_nothing(const Select& args, int token, int kv_head) {
    i64 row = (i64)token * args.kv_heads + kv_head;
    for (int i = threadIdx.x; i < args.total; i += kThreads) args.blocks[row * args.total + i] = -1;
    if (threadIdx.x == 0) args.counts[row] = 0;
}

// Blocks of one query, when all of them win too.
__device__ __forceinline__ void choose_any(
    const Batch& batch, const Select& args, int sequence, int token, int kv_head, int position) {
    int own = position / kPage;
    if (own < args.total) {
        i64 row = (i64)token * args.kv_heads + kv_head;
        for (int i = threadIdx.x; i < args.total; i += kThreads)
            args.blocks[row * args.total + i] = i <= own ? i : -1;
        if (threadIdx.x == 0) args.counts[row] = own + 1;
        return;
    }
    int stored = stored_tokens(batch, sequence, position);
    if (own < 4 * kFewVectors * kThreads) choose<kFewVectors>(batch, args, stored, token, kv_head, own);
    else choose<kManyVectors>(batch, args, stored, token, kv_head, own);
}

// Grid: (tokens, kv_heads).
__device__ __forceinline__ void choose_all(const Batch& batch, const Select& args) {
    wait_for_dependencies();
    launch_dependents();
    int token = blockIdx.x;
    int kv_head = blockIdx.y;
    int position = batch.positions[token];
    int sequence = batch.sequence_of(token);
    if (sequence < 0 || !is_sparse(args, position)) write_nothing(args, token, kv_head);
    else choose_any(batch, args, sequence, token, kv_head, position);
}

// ---------------------------------------------------------------- scores

// Grid: (parts, kv_heads, sequences x tiles of tokens), and in trees 64 more in x, one for each node. `kChoose`: the
// bucket holds one token, and the last CTA of its KV head chooses.
template <typename T, int kDim, bool kChoose>
__device__ __forceinline__ void scores(const Batch& batch, const Arena& arena, const Select& args, int parts) {
    __shared__ float lse_of_heads[kTokens][kHeads];
    __shared__ float most_of_pages[kTokens][kPagesOfCta], first_of_pages[kTokens][kPagesOfCta];
    __shared__ bool is_last;
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
    if (tokens.first >= tokens.end || part >= active) {
        wait_for_dependencies();
        launch_dependents();
        if (kChoose && part == 0 && blockIdx.z == 0 && batch.sequence_starts[batch.sequences] == 0)
            write_nothing(args, 0, kv_head);
        return;
    }
    const i32* table = batch.table(sequence);
    int g = lane >> 2;
    int complete[2];
    const u16* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = g + 8 * half;
        int page = first_page + row / kFineSlots;
        int slot = page * kFineSlots + row % kFineSlots;
        complete[half] = 16 * slot + 15;
        if (slot < 1 || complete[half] >= most) {
            complete[half] = 0x7fffffff;
            rows[half] = nullptr;
        } else {
            rows[half] = arena.fine.row<kDim>(table[page], kv_head, row % kFineSlots);
        }
    }
    // Keys and queries were written before `lse`, the launch before this: they can be read before that one ends.
    Rows<kDim> keys, q;
    keys.load(rows[0], rows[1], lane);
    load_heads<kDim>(q, args, tokens.first, kv_head, lane);
    int position = batch.positions[tokens.first];
    wait_for_dependencies();
    launch_dependents();
    gather_lse(batch, args, sequence, tokens.first, tokens.end - tokens.first, kv_head, lse_of_heads);

    for (int token = tokens.first; token < tokens.end; ++token) {
        int index = token - tokens.first;
        if (index > 0) {
            position = batch.positions[token];
            load_heads<kDim>(q, args, token, kv_head, lane);
        }
        int stored = stored_tokens(batch, sequence, position);
        float acc[2][4];
        keys_times_heads<T, kDim>(acc, keys, q);
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float norm = lse_of_heads[index][8 * n + 2 * (lane & 3) + i];
                low += exp2_fast(fmaf(acc[n][i], args.scale, -norm));
                high += exp2_fast(fmaf(acc[n][2 + i], args.scale, -norm));
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
            int page = warp * kFinePages + lane / 16;
            most_of_pages[index][page] = low_most, most_of_pages[index][page + 2] = high_most;
            first_of_pages[index][page] = low, first_of_pages[index][page + 2] = high;
        }
    }
    __syncthreads();
    static_assert(kTokens * kPagesOfCta == kThreads, "a thread writes one block of one token");
    int index = threadIdx.x / kPagesOfCta, page = threadIdx.x % kPagesOfCta;
    int token = tokens.first + index;
    if (token < tokens.end && is_sparse(args, batch.positions[token])) {
        i64 row = (i64)token * args.kv_heads + kv_head;
        float score = most_of_pages[index][page];
        if (page + 1 < kPagesOfCta) score = fmaxf(score, first_of_pages[index][page + 1]);
        args.scores[row * args.score_stride + part * kPagesOfCta + page] = score;
        if (page == 0) args.first_slots[row * (args.score_stride / kPagesOfCta) + part] = first_of_pages[index][0];
    }
    __syncthreads();

    if constexpr (kChoose) {
        if (threadIdx.x == 0) {
            // The barrier above ordered the CTA's writes before this thread; the fence makes them seen elsewhere.
            __threadfence();
            is_last = atomicAdd(args.arrived + sequence * args.kv_heads + kv_head, 1u) == (u32)active - 1;
            __threadfence();
        }
        __syncthreads();
        if (!is_last) return;
        if (threadIdx.x == 0) args.arrived[sequence * args.kv_heads + kv_head] = 0;
        if (is_sparse(args, position)) choose_any(batch, args, sequence, tokens.first, kv_head, position);
        else write_nothing(args, tokens.first, kv_head);
    }
}

#define SELECT(type, suffix, dim)                                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                    \
        lse_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) {                      \
        lse<type, dim>(batch, arena, args);                                                                   \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                    \
        scores_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args, int parts) {        \
        scores<type, dim, false>(batch, arena, args, parts);                                                  \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                    \
        scores_choose_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args, int parts) { \
        scores<type, dim, true>(batch, arena, args, parts);                                                   \
    }

extern "C" __global__ void __launch_bounds__(kThreads, 1) choose_blocks(const Batch batch, const Select args) {
    choose_all(batch, args);
}

SELECT(F16, f16, 64)
SELECT(F16, f16, 128)
SELECT(BF16, bf16, 64)
SELECT(BF16, bf16, 128)
