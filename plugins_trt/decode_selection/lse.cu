// The softmax statistics of block selection: log-sum-exp of the scaled scores over the coarse keys (or the fine ones,
// `exact`), a part a CTA. `scores` gathers the parts. Of many tokens: lse_many.cu.
#include "decode_selection/nodes.cuh"

// A part of the stored keys for a tile of tokens; waits for the launches before.
template <typename T, int kDim>
__device__ __forceinline__ void lse_of_part(
    const Batch& batch, const Arena& arena, const Select& args, const Tokens& tokens, int kv_head) {
    __shared__ float2 shared[kTokens][kWarps][kHeads];
    int sequence = tokens.sequence, part = tokens.part;
    int lane = threadIdx.x & 31;
    int warp = threadIdx.x >> 5;

    // The last token sees most; a part beyond its keys has nothing to do (and is never read).
    int pages_a_unit = args.exact ? kFinePages : kCoarsePages;
    int first_page = (part * kWarps + warp) * pages_a_unit;
    int most = stored_tokens(batch, sequence, batch.lengths[sequence] + tokens.end - tokens.start - 1);
    if (tokens.first >= tokens.end || part * kWarps * pages_a_unit * kPage >= most || tokens.are_dense(batch, args)) {
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
    int position = batch.positions[tokens.first];
    int own_token = tokens.first + (int)threadIdx.x / kHeads;  // whose statistics this thread writes
    bool writes = own_token < tokens.end && is_sparse(args, batch.positions[own_token]);
    wait_for_dependencies();
    launch_dependents();
    Rows<kDim> keys;
    keys.load(rows[0], rows[1], lane);

    Rows<kDim> q, next;
    load_heads<kDim>(q, args, tokens.first, kv_head, lane);
    for (int token = tokens.first; token < tokens.end; ++token, q = next) {
        if (token + 1 < tokens.end) load_heads<kDim>(next, args, token + 1, kv_head, lane);
        if (token > tokens.first) position = batch.positions[token];
        if (!is_sparse(args, position)) continue;
        int stored = stored_tokens(batch, sequence, position);
        float acc[2][4];
        keys_times_heads<T, kDim>(acc, keys, q);
        sum_keys(acc, args.scale, complete[0] < stored, complete[1] < stored, lane, shared[token - tokens.first][warp]);
    }
    __syncthreads();
    if (writes) {
        int head = threadIdx.x % kHeads;
        args.lse[(((i64)own_token * args.kv_heads + kv_head) * args.lse_parts + part) * kHeads + head] =
            log_sum_of_warps(shared[own_token - tokens.first], head);
    }
}

// Grid: (parts x tiles of tokens, kv_heads, sequences).
template <typename T, int kDim>
__device__ __forceinline__ void lse(const Batch& batch, const Arena& arena, const Select& args) {
    Tokens tokens = Tokens::of_cta(batch, args);
    lse_of_part<T, kDim>(batch, arena, args, tokens, blockIdx.y);
    if (batch.tree_masks == nullptr) return;
    for (int token = tokens.start + (int)blockIdx.x; token < tokens.last; token += (int)gridDim.x)
        lse_of_node<T, kDim>(batch, args, tokens.sequence, token, blockIdx.y, args.lse_parts - 1);
}

#define LSE(type, suffix, dim)                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                            \
        lse_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) { \
        lse<type, dim>(batch, arena, args);                                              \
    }

LSE(F16, f16, 64)
LSE(F16, f16, 128)
LSE(BF16, bf16, 64)
LSE(BF16, bf16, 128)
