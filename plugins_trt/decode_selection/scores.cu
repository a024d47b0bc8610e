// Which blocks each query of a decode or verify step attends to (InfLLM-v2), in two or three launches:
//   lse:    softmax statistics (lse.cu);
//   scores: softmax weight of every fine key, summed over the heads of a group, reduced to a number a block;
//   choose: the best blocks of each token and KV head (choose.cu). With one token the last CTA of `scores` does it.
#include "decode_selection/choose.cuh"
#include "decode_selection/keys.cuh"

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

#define SCORES(type, suffix, dim)                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                 \
        scores_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args, int parts) {        \
        scores<type, dim, false>(batch, arena, args, parts);                                                  \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                 \
        scores_choose_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args, int parts) { \
        scores<type, dim, true>(batch, arena, args, parts);                                                   \
    }

SCORES(F16, f16, 64)
SCORES(F16, f16, 128)
SCORES(BF16, bf16, 64)
SCORES(BF16, bf16, 128)
