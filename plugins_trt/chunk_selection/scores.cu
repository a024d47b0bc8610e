// Second pass of block selection: the softmax over fine compressed keys, summed over the heads of a KV head, its
// maximum over the keys of each block.
#include "chunk_selection/keys.cuh"

template <typename E, int kDim, int kTiles>
__device__ __forceinline__ void block_scores(const SelectionArguments& args) {
    extern __shared__ __align__(256) unsigned char memory[];
    __shared__ u64 barriers[2 * kStages];
    using Keys = Stage<kDim, 4>;
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int head = (int)blockIdx.y, group = args.heads / args.kv_heads;
    __shared__ Tile kept;  // rather than in registers, of which the loop leaves none
    const Tile tile = find_tile(args.batch, (int)blockIdx.x, kTokens);
    if (threadIdx.x == 0) kept = tile;  // the barriers of the queries' loading let the others see it
    if (tile.count == 0 || tile.sequence < 0) return;
    const int first_position = args.batch.positions[tile.first];
    const int last_position = first_position + tile.count - 1;
    if (!args.chooses(last_position)) return;
    const int begin = (int)blockIdx.z * args.split_pages;
    const int end = min_int(args.candidates_end(last_position), begin + args.split_pages);
    if (begin >= end || end <= args.init_blocks) return;

    // Block b needs slot 0 of page b + 1 too. Stages run from the last pages to the first; the one stage after
    // them is computed for its first page's slot 0 only.
    const int count = (end - begin) / Keys::kPages + 1;  // stages, the additional pages included
    const int exist = min_int(last_position / kPage + 1 - begin, count * Keys::kPages);  // pages
    u64* pages = reinterpret_cast<u64*>(memory + kStages * Keys::kBytes);
    Keys::find(pages, args.fine, head, args.batch.table(tile.sequence) + begin, exist);

    Queries<kDim, kTiles> q;
    q.load(memory, args.q, args.q_stride, tile, head, group);

    const u32 stages = shared_address(memory);
    Ring ring;
    ring.start(barriers);
    auto load_stage = [&](int index) {  // from the last
        const int stage = count - 1 - index;
        if (stage >= 0) {
            ring.wait_empty(index);
            Keys::copy(stages + (u32)(index % kStages) * Keys::kBytes, pages + stage * Keys::kPages,
                       exist - stage * Keys::kPages);
            ring.fill(index);
        }
    };
#pragma unroll 1
    for (int i = 0; i < Ring::kAhead; ++i) load_stage(i);

    // The base-2 logarithm of each softmax's sum; +infinity gives heads that see nothing, or that do not exist,
    // the weight 0.
    float log[2 * kTiles][2];
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int token = warp * 2 + n / kTiles, h = (n % kTiles) * 8 + (lane & 3) * 2 + j;
            log[n][j] = kInfinity;
            if (token < tile.count && h < group) {
                const float2* sums = reinterpret_cast<const float2*>(args.sums) +
                                     (i64)(tile.first + token) * args.heads + head * group + h;
                const i64 step = (i64)args.batch.tokens * args.heads;
                float peak = -kInfinity, sum = 0.0f;
#pragma unroll 1
                for (int split = 0; split < args.splits; ++split) peak = fmaxf(peak, sums[split * step].x);
#pragma unroll 1
                for (int split = 0; split < args.splits; ++split)
                    sum = fmaf(sums[split * step].y, exp2_fast(sums[split * step].x - peak), sum);
                if (sum > 0.0f) log[n][j] = peak + log2_fast(sum);
            }
        }

    // After the quad's exchange, this thread holds the sums of one token and of one page's four keys.
    const int slot_token = warp * 2 + (lane & 1);
    const int page_row = (lane >> 2) + ((lane & 2) << 2);
    const int next_row = (page_row + 1) & 15;
    const int next_lane = ((next_row & 7) << 2) | (lane & 1) | ((next_row & 8) >> 2);
    const int position = first_position + slot_token;

    // The score of this thread's key of MMA tile `t` of a stage.
    auto score_keys = [&](u32 stage, int page, int t) {
        float s[2 * kTiles][4];
        Keys::template multiply<E, kTiles>(s, stage, t, q);
        float sums[2][2];  // [token, upper or lower eight keys] over this thread's heads
#pragma unroll
        for (int token = 0; token < 2; ++token)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float sum = 0.0f;
#pragma unroll
                for (int n = token * kTiles; n < (token + 1) * kTiles; ++n) {
                    float weights = exp2_fast(fmaf(s[n][half * 2], args.scale, -log[n][0])) +
                                    exp2_fast(fmaf(s[n][half * 2 + 1], args.scale, -log[n][1]));
                    sum = n == token * kTiles ? weights : sum + weights;
                }
                sums[token][half] = sum;
            }
        const bool odd = lane & 1, upper = lane & 2;
        float low = (odd ? sums[1][0] : sums[0][0]) + __shfl_xor_sync(kFull, odd ? sums[0][0] : sums[1][0], 1);
        float high = (odd ? sums[1][1] : sums[0][1]) + __shfl_xor_sync(kFull, odd ? sums[0][1] : sums[1][1], 1);
        float score = (upper ? high : low) + __shfl_xor_sync(kFull, upper ? low : high, 2);
        return Keys::sees(position, page, t) ? score : 0.0f;
    };

    int page = begin + (count - 1) * Keys::kPages + page_row;
    float carried = 0.0f;  // slot 0 of the page after this stage's last
    int index = 0;
    if ((end - begin) % Keys::kPages == 0) {  // the last stage holds none of the blocks
        load_stage(Ring::kAhead);
        ring.wait_whole(0);
        carried = __shfl_sync(kFull, score_keys(stages, page, 0), next_lane);
        ring.leave(0);
        index = 1;
        page -= Keys::kPages;
    }
#pragma unroll 1
    for (; index < count; ++index, page -= Keys::kPages) {
        load_stage(index + Ring::kAhead);
        ring.wait_whole(index);
        const u32 stage = stages + (u32)(index % kStages) * Keys::kBytes;
        float best = score_keys(stage, page, 0);
        const float next = __shfl_sync(kFull, best, next_lane);
        best = fmaxf(best, page_row == 15 ? carried : next);
        carried = next;
#pragma unroll kUnroll
        for (int t = 1; t < 4; ++t) best = fmaxf(best, score_keys(stage, page, t));
        ring.leave(index);
        if (page < end && slot_token < kept.count)
            args.scores[((i64)blockIdx.y * args.batch.tokens + kept.first + slot_token) * args.stride + page] = best;
    }
}

#define SCORES_ONE(E, name, dim, heads, tiles)                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                             \
        chunk_scores_##name##_##dim##_##heads(const __grid_constant__ SelectionArguments args) { \
        block_scores<E, dim, tiles>(args);                                                \
    }
#define SCORES(E, name)              \
    SCORES_ONE(E, name, 64, 8, 1)    \
    SCORES_ONE(E, name, 64, 16, 2)   \
    SCORES_ONE(E, name, 128, 8, 1)   \
    SCORES_ONE(E, name, 128, 16, 2)

SCORES(F16, f16)
SCORES(BF16, bf16)
