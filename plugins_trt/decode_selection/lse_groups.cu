// The softmax statistics of block selection of trees, as in lse.cu, by the warpgroup instructions.
// For compute capability 9.0 alone.
//
// A warpgroup has the heads of four tokens, a warp those of one, against 128 keys, which lie in shared memory once for all.
#include "decode_selection/groups.cuh"

// Grid: (parts x tiles of tokens, kv_heads, sequences), of 32 threads a token of a tile. A part of the keys that were stored
// before the step, which all nodes see, for a tile of tokens, and the keys that the paths of some nodes complete.
template <typename T, int kDim>
__device__ __forceinline__ void lse(const Batch& batch, const Arena& arena, const Select& args) {
    extern __shared__ __align__(1024) unsigned char shared[];  // the part's keys, then 64 rows of heads a warpgroup
    constexpr int kPieces = kDim / 8;
    Tokens tokens = Tokens::of_cta(batch, args);
    int sequence = tokens.sequence, part = tokens.part, kv_head = blockIdx.y;
    // (Read from one lane, so that the compiler sees that a warp has one number.)
    int lane = threadIdx.x & 31, warp = __shfl_sync(kFull, (int)threadIdx.x >> 5, 0);
    int g = lane >> 2, t = lane & 3;

    int span = args.exact ? kPage / kFineSlots : kPage;  // key j is complete with token span * j + span - 1, from 1 on
    int first_key = part * kGroupKeys, seen = batch.lengths[sequence] / span - first_key;
    bool has_part = tokens.first < tokens.end && seen > 0;  // a part without keys is never read
    int token = tokens.first + warp;  // of this warp
    bool selects = token < tokens.end && is_sparse(args, batch.positions[token]);
    // Where this thread's pieces of the warpgroup's heads come from and go to.
    constexpr int kStep = 128 / kPieces, kHalves = kHeads / kStep;  // rows that a warpgroup copies at a time
    int group = args.heads / args.kv_heads, first = tokens.first + warp / 4 * kTokensOfGroup;
    int head = (int)threadIdx.x % 128 / kPieces, piece = (int)threadIdx.x % kPieces;
    const u16* from = args.q + ((i64)first * args.heads + kv_head * group + head) * kDim + piece * 8;
    u32 keys = shared_address(shared), heads = keys + kGroupKeys * kDim * 2 + (u32)(warp / 4 * (64 * kDim * 2));
    u32 to = heads + group_place<64>(head, piece);
    if (has_part) {  // before the launch before has ended
        Pool pool = {
            args.exact ? arena.fine.base : arena.coarse.base,
            args.exact ? arena.fine.page_stride : arena.coarse.page_stride,
            args.exact ? arena.fine.head_stride : arena.coarse.head_stride};
        copy_keys<kDim, kGroupKeys>(
            keys, pool, batch.table(sequence), args.exact ? 2 : 0, kv_head, first_key, seen, warp, (int)blockDim.x / 32);
    }
    wait_for_dependencies();
    launch_dependents();
    if (has_part) {
#pragma unroll
        for (int of = 0; of < kTokensOfGroup; ++of)
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                copy_async(to + (of * kHeads + half * kStep) * 128, from + (of * args.heads + half * kStep) * kDim,
                           first + of < tokens.end && head + half * kStep < group);
        copy_commit();
    }
    // While copies are under way:
    for (int node = tokens.start + (int)blockIdx.x; node < tokens.last; node += (int)gridDim.x)
        lse_of_node<T, kDim>(batch, args, sequence, node, kv_head, args.lse_parts - 1);
    if (!has_part) return;
    copy_wait<0>();
    show_to_warpgroups();
    __syncthreads();
    float acc[16][4];
    begin_product<T, kDim, 64>(acc, heads, keys);
    wait_for_product(acc);

    if (first_key == 0 || seen < kGroupKeys) {
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int key = 8 * n + 2 * t + (i & 1);
                if (key >= seen || key + first_key == 0) acc[n][i] = -kInfinity;
            }
    }
    float* out = args.lse + (((i64)token * args.kv_heads + kv_head) * args.lse_parts + part) * kHeads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float most = acc[0][2 * half];
#pragma unroll
        for (int n = 0; n < 16; ++n) most = fmaxf(most, fmaxf(acc[n][2 * half], acc[n][2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(kFull, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kFull, most, 2)) * args.scale;
        float shift = most == -kInfinity ? 0.0f : most;
        float sums[2] = {0.0f, 0.0f};
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) sums[i] += exp2_fast(fmaf(acc[n][2 * half + i], args.scale, -shift));
        float sum = sums[0] + sums[1];
        sum += __shfl_xor_sync(kFull, sum, 1);
        sum += __shfl_xor_sync(kFull, sum, 2);
        if (selects && t == 0) out[8 * half + g] = log_sum(most, sum);
    }
}

#define LSE(type, suffix, dim)                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * kTokens, 1)                               \
        lse_groups_##suffix##_d##dim(const Batch batch, const Arena arena, const Select args) { \
        lse<type, dim>(batch, arena, args);                                                     \
    }

LSE(F16, f16, 64)
LSE(F16, f16, 128)
LSE(BF16, bf16, 64)
LSE(BF16, bf16, 128)
