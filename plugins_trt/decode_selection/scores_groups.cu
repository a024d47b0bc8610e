// The scores of block selection of trees, as in scores.cu, by the warpgroup instructions.
// For compute capability 9.0 alone.
//
// A warpgroup has 64 of a part's 256 keys, a product the heads of four tokens. What does not need the softmax statistics is
// done before `lse`, the launch before, has ended.
#include "decode_selection/groups.cuh"

constexpr int kKeysOfCta = kPagesOfCta * kFineSlots;
constexpr int kMostTokens = 32;  // of a tile
constexpr int kTokensTogether = kGroupColumns / kHeads;  // whose heads lie together
static_assert(kKeysOfCta == 64 * (kThreads / 128), "a warpgroup has 64 keys");

// Parts of the log-sum-exp that a tree's nodes see, beside the one of their own path.
__device__ __forceinline__ int group_parts(const Select& args, int stored) {
    return ceil_div(stored / (args.exact ? kPage / kFineSlots : kPage), kGroupKeys);
}

// As `gather_lse`, of up to kMostTokens tokens.
__device__ __forceinline__ void gather_lse_of_tile(
    const Select& args, const Tokens& tokens, int stored, int kv_head, float (*shared)[kHeads]) {
    // Neighbouring threads share a token and head.
    int each = min_int(16, kThreads / kHeads / args.tile), own = (int)threadIdx.x % each;
    int head = (int)threadIdx.x / each % kHeads, index = (int)threadIdx.x / each / kHeads;
    int token = tokens.first + index, parts = group_parts(args, stored);
    float maximum = -kInfinity, sum = 0.0f;
    if (token < tokens.end) {
        const float* row = args.lse + ((i64)token * args.kv_heads + kv_head) * args.lse_parts * kHeads + head;
        constexpr int kAtOnce = 5;
#pragma unroll 1
        for (int first = own; first <= parts; first += kAtOnce * each) {
            float parts_of[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                int part = first + i * each;
                parts_of[i] = -kInfinity;
                if (part <= parts) parts_of[i] = __ldcg(row + (part < parts ? part : args.lse_parts - 1) * kHeads);
            }
            float most = maximum;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) most = fmaxf(most, parts_of[i]);
            float shift = most == -kInfinity ? 0.0f : most;
            sum *= exp2_fast(maximum - shift);
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) sum += exp2_fast(parts_of[i] - shift);
            maximum = most;
        }
    }
    for (int other = 1; other < each; other <<= 1)
        merge(maximum, sum, __shfl_xor_sync(kFull, maximum, other), __shfl_xor_sync(kFull, sum, other));
    if (own == 0 && index < kMostTokens) {
        bool seen = sum > 0.0f && head < args.heads / args.kv_heads;
        shared[index][head] = seen ? log_sum(maximum, sum) : kInfinity;
    }
}

// The products of the warp's 16 keys with the heads of four tokens: for each, the largest weight of each of the warp's four
// pages and the weight of a page's first slot. `slot`: of the warp's first key; `lse`: of the four tokens.
__device__ __forceinline__ void weigh_keys(
    const float (&acc)[8][4], const float (*lse)[kHeads], float scale, int slot, int stored, int lane,
    float (*most_of_pages)[kPagesOfCta], float (*first_of_pages)[kPagesOfCta]) {
    int g = lane >> 2, t = lane & 3;
    bool odd = (t & 1) != 0, upper = (t & 2) != 0;
    float sums[2][4];  // of four tokens, this thread's four heads of each
#pragma unroll
    for (int token = 0; token < 4; ++token) {
        sums[0][token] = sums[1][token] = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float2 norm = *reinterpret_cast<const float2*>(&lse[token][8 * n + 2 * t]);
            const float(&of)[4] = acc[2 * token + n];
#pragma unroll
            for (int half = 0; half < 2; ++half)
                sums[half][token] += exp2_fast(fmaf(of[2 * half], scale, -norm.x)) +
                                     exp2_fast(fmaf(of[2 * half + 1], scale, -norm.y));
        }
    }
    // The lanes of a quad have four heads in sixteen each: lane t ends with the sum of token t.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float low = odd ? sums[half][1] : sums[half][0], high = odd ? sums[half][3] : sums[half][2];
        low += __shfl_xor_sync(kFull, odd ? sums[half][0] : sums[half][1], 1);
        high += __shfl_xor_sync(kFull, odd ? sums[half][2] : sums[half][3], 1);
        float weight = (upper ? high : low) + __shfl_xor_sync(kFull, upper ? low : high, 2);
        int own = slot + 8 * half + g;
        if (own < 1 || 16 * own + 15 >= stored) weight = 0.0f;
        float most = fmaxf(weight, __shfl_xor_sync(kFull, weight, 4));
        most = fmaxf(most, __shfl_xor_sync(kFull, most, 8));
        int page = 2 * half + g / 4;
        if ((g & 3) == 0) most_of_pages[t][page] = most, first_of_pages[t][page] = weight;
    }
}

// Of one node: the keys that its path completes.
struct OfNode {
    float products[kNodeKeys][kHeads];  // scaled, with each head
    i32 slots[kNodeKeys];
    int found;
};

// Multiplies them, which needs no statistics. All threads must call it.
template <typename T, int kDim>
__device__ __forceinline__ void multiply_node(
    const Batch& batch, const Select& args, int sequence, int node, int kv_head, OfNode& of) {
    int found = 0;
    if (completes_any(batch.lengths[sequence], batch.positions[node], 16, 32))
        visit_node_keys<T, kDim>(
            batch, args, args.node_fine, 16, 32, sequence, node, kv_head,
            [&](int position, int head, int eighth, float score) {
                if (found == kNodeKeys) return;
                if (eighth == 0) of.products[found][head] = score;
                if (threadIdx.x == 0) of.slots[found] = position / 16;
                ++found;
            });
    if (threadIdx.x == 0) of.found = found;
}

// Weighs them by the statistics, a head a warp, and writes their scores. All threads must call it, behind a barrier.
__device__ __forceinline__ void weigh_node(
    const Batch& batch, const Select& args, int sequence, int node, int kv_head, OfNode& of) {
    if (!is_sparse(args, batch.positions[node])) return;
    float* out = args.node_scores + ((i64)node * args.kv_heads + kv_head) * kNodeKeys * 2;
    int found = of.found, lane = threadIdx.x & 31, head = threadIdx.x >> 5;
    if (found == 0) {
        if (threadIdx.x == 0) out[0] = __int_as_float(-1);
        return;
    }
    int parts = group_parts(args, batch.lengths[sequence]);
    const float* row = args.lse + ((i64)node * args.kv_heads + kv_head) * args.lse_parts * kHeads + head;
    float maximum = -kInfinity, sum = 0.0f;
    for (int part = lane; part <= parts; part += 32)
        merge(maximum, sum, __ldcg(row + (part < parts ? part : args.lse_parts - 1) * kHeads), 1.0f);
    float most = warp_max(maximum), shift = most == -kInfinity ? 0.0f : most;
    sum = warp_sum(sum * exp2_fast(maximum - shift));
    bool seen = sum > 0.0f && head < args.heads / args.kv_heads;
    float norm = seen ? log_sum(most, sum) : kInfinity;
    if (lane < found) of.products[lane][head] = exp2_fast(of.products[lane][head] - norm);
    __syncthreads();
    if (threadIdx.x < kNodeKeys) {
        int key = threadIdx.x;
        float weight = 0.0f;
        if (key < found)
            for (int of_head = 0; of_head < kHeads; ++of_head) weight += of.products[key][of_head];
        out[2 * key] = __int_as_float(key < found ? of.slots[key] : -1);
        out[2 * key + 1] = weight;
    }
}

// Grid: (parts x tiles of tokens, kv_heads, sequences). A part of the keys that were stored before the step, which all nodes
// see, for a tile of tokens, and the keys that the paths of some nodes complete.
template <typename T, int kDim>
__device__ __forceinline__ void scores(const Batch& batch, const Arena& arena, const Select& args) {
    extern __shared__ __align__(1024) unsigned char shared[];  // the part's keys, then the heads of eight tokens a piece
    __shared__ float lse_of_heads[kMostTokens][kHeads];
    __shared__ float most_of_pages[kMostTokens][kPagesOfCta], first_of_pages[kMostTokens][kPagesOfCta];
    __shared__ OfNode of_node;
    constexpr int kPieces = kDim / 8;
    constexpr u32 kChunkBytes = kGroupColumns * kDim * 2;
    Tokens tokens = Tokens::of_cta(batch, args);
    int sequence = tokens.sequence, part = tokens.part, kv_head = blockIdx.y;
    // (Read from one lane, so that the compiler sees that a warp has one number.)
    int lane = threadIdx.x & 31, warp = __shfl_sync(kFull, (int)threadIdx.x >> 5, 0);
    int stored = batch.lengths[sequence];
    bool has_part = tokens.first < tokens.end && part < max_int(1, ceil_div(stored, kPagesOfCta * kPage));
    int node = tokens.start + (int)blockIdx.x;
    bool has_node = node < tokens.last;
    // Keys and queries were written before `lse`: they are read, and multiplied, before that one ends.
    int count = has_part ? tokens.end - tokens.first : 0;
    u32 keys = shared_address(shared), heads = keys + kKeysOfCta * kDim * 2;
    if (has_part) {
        copy_keys<kDim, kKeysOfCta>(
            keys, arena.fine, batch.table(sequence), 2, kv_head, part * kKeysOfCta,
            stored / (kPage / kFineSlots) - part * kKeysOfCta, warp, kThreads / 32);
        constexpr int kAtOnce = kThreads / kPieces / kHeads;  // tokens whose heads the threads copy at a time
        int group = args.heads / args.kv_heads, piece = (int)threadIdx.x % kPieces;
        int head = (int)threadIdx.x / kPieces % kHeads, of = (int)threadIdx.x / kPieces / kHeads;
        const u16* from = args.q + ((i64)(tokens.first + of) * args.heads + kv_head * group + head) * kDim + piece * 8;
        u32 to = heads + group_place<kGroupColumns>(of * kHeads + head, piece);
#pragma unroll 1
        for (int chunk = 0; chunk < count; chunk += kTokensTogether, to += kChunkBytes) {
#pragma unroll
            for (int i = 0; i < kTokensTogether; i += kAtOnce, from += (i64)kAtOnce * args.heads * kDim)
                copy_async(to + i * kHeads * 128, from, chunk + i + of < count && head < group);
            if (chunk == 0) copy_commit();
        }
        copy_commit();
    }
    if (has_node) multiply_node<T, kDim>(batch, args, sequence, node, kv_head, of_node);
    if (!has_part) {
        wait_for_dependencies();
        launch_dependents();
    }
    if (has_part) {
        u32 rows = keys + (u32)(warp / 4 * 64 * 128);  // the warpgroup's keys
        constexpr u32 kFourBytes = 4 * kHeads * 128;   // of a column of 64 elements of four tokens' heads
        auto weigh = [&](const float(&acc)[8][4], int index) {
            weigh_keys(acc, lse_of_heads + index, args.scale, part * kKeysOfCta + warp * 16, stored, lane,
                       reinterpret_cast<float(*)[kPagesOfCta]>(&most_of_pages[index][warp * kFinePages]),
                       reinterpret_cast<float(*)[kPagesOfCta]>(&first_of_pages[index][warp * kFinePages]));
        };
        copy_wait<1>();
        show_to_warpgroups();
        __syncthreads();
        float acc[8][4], other[8][4];
        begin_product<T, kDim, kKeysOfCta>(acc, rows, heads);
        wait_for_dependencies();
        launch_dependents();
        gather_lse_of_tile(args, tokens, stored, kv_head, lse_of_heads);
        copy_wait<0>();
        show_to_warpgroups();
        __syncthreads();
        // A product is under way while the one before is weighed.
#pragma unroll 1
        for (int index = 0; index < count; index += kTokensTogether) {
            wait_for_product(acc);
            begin_product<T, kDim, kKeysOfCta>(other, rows, heads + kFourBytes);
            weigh(acc, index);
            wait_for_product(other);
            // (The last one is for nothing: with a branch here the compiler has each product waited for.)
            heads += index + kTokensTogether < count ? kChunkBytes : 0;
            begin_product<T, kDim, kKeysOfCta>(acc, rows, heads);
            weigh(other, index + 4);
        }
        warpgroup_wait<0>();
    }
    __syncthreads();
    int page = threadIdx.x % kPagesOfCta;
    for (int index = threadIdx.x / kPagesOfCta; index < count; index += kThreads / kPagesOfCta) {
        int token = tokens.first + index;
        if (is_sparse(args, batch.positions[token]))
            write_score(args, token, kv_head, part, page, most_of_pages[index], first_of_pages[index]);
    }
    while (has_node) {
        weigh_node(batch, args, sequence, node, kv_head, of_node);
        node += (int)gridDim.x;
        if (node >= tokens.last) break;
        __syncthreads();
        multiply_node<T, kDim>(batch, args, sequence, node, kv_head, of_node);
        __syncthreads();
    }
}

// With 128 elements there is room for a warp of `lse` beside those of a CTA, so that this can begin before that ends.
#define SCORES(type, suffix, dim)                                                                  \
    extern "C" __global__ void __launch_bounds__(dim == 128 ? kThreads + 128 : kThreads, 1)        \
        scores_groups_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) { \
        scores<type, dim>(batch, arena, args);                                                     \
    }

SCORES(F16, f16, 64)
SCORES(F16, f16, 128)
SCORES(BF16, bf16, 64)
SCORES(BF16, bf16, 128)
