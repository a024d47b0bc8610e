// First pass of block selection: maximum and sum of the softmax of every (token, head) over compressed keys, the
// coarse ones or the fine ones.
#include "chunk_selection/keys.cuh"

template <typename E, int kDim, int kTiles, int kSlots>
__device__ __forceinline__ void statistics(const SelectionArguments& args) {
    extern __shared__ __align__(256) unsigned char memory[];
    __shared__ u64 barriers[2 * kStages];
    using Keys = Stage<kDim, kSlots>;
    const int warp = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int head = (int)blockIdx.y, group = args.heads / args.kv_heads;
    // Rather than in registers, of which the loop leaves none.
    __shared__ Tile kept;
    __shared__ int kept_pages;
    Tile tile = find_tile(args.batch, (int)blockIdx.x, kTokens);
    if (threadIdx.x == 0) kept = tile;  // the barriers of the queries' loading let the others see it
    if (tile.count == 0 || tile.sequence < 0) return;
    const int first_position = args.batch.positions[tile.first];
    const int last_position = first_position + tile.count - 1;
    if (!args.chooses(last_position)) return;

    constexpr int kFirst = kSlots == 1 ? 1 : 0;  // page 0 has no coarse key
    const int all = last_position / kPage + 1;    // pages
    const int share = ceil_div(ceil_div(all, Keys::kPages), args.splits) * Keys::kPages;
    const int begin = min_int(all, kFirst + (int)blockIdx.z * share), end = min_int(all, begin + share);
    const int count = ceil_div(end - begin, Keys::kPages);  // stages; 0 leaves an empty share
    if (threadIdx.x == 0) kept_pages = end - begin;
    u64* pages = reinterpret_cast<u64*>(memory + kStages * Keys::kBytes);
    Keys::find(pages, kSlots == 4 ? args.fine : args.coarse, head, args.batch.table(tile.sequence) + begin, end - begin);

    Queries<kDim, kTiles> q;
    q.load(memory, args.q, args.q_stride, tile, head, group);

    const u32 stages = shared_address(memory);
    Ring ring;
    ring.start(barriers);
    auto load_stage = [&](int index) {
        if (index < count) {
            ring.wait_empty(index);
            Keys::copy(stages + (u32)(index % kStages) * Keys::kBytes, pages + index * Keys::kPages,
                       kept_pages - index * Keys::kPages);
            ring.fill(index);
        }
    };
#pragma unroll 1
    for (int i = 0; i < Ring::kAhead; ++i) load_stage(i);

    // Of this thread's heads (two of each eight) over the keys of its rows.
    float peak[2 * kTiles][2], sum[2 * kTiles][2];
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
        peak[n][0] = peak[n][1] = -1e30f;
        sum[n][0] = sum[n][1] = 0.0f;
    }

    // Stages from `first_whole` on and before `end_whole` hold nothing but keys that every token sees.
    const int first_whole = kSlots == 4 && begin == 0 ? 1 : 0;
    const int end_whole = (first_position / kPage - begin) / Keys::kPages;

#pragma unroll 1
    for (int index = 0; index < count; ++index) {
        load_stage(index + Ring::kAhead);
        ring.wait_whole(index);
        const u32 stage = stages + (u32)(index % kStages) * Keys::kBytes;
#pragma unroll(kUnroll >= 2 && kSlots == 1 ? 2 : 1)
        for (int t = 0; t < 4; ++t) {
            float s[2 * kTiles][4];
            Keys::template multiply<E, kTiles>(s, stage, t, q);
            if (index < first_whole || index >= end_whole) {
                const int position = args.batch.positions[kept.first] + warp * 2;
                const int page = begin + index * Keys::kPages + (kSlots == 4 ? 0 : t * 16) + (lane >> 2);
#pragma unroll
                for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!Keys::sees(position + n / kTiles, page + (i >> 1) * 8, kSlots == 4 ? t : 0))
                            s[n][i] = -kInfinity;
            }
#pragma unroll
            for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float top = fmaxf(peak[n][j], fmaxf(s[n][j], s[n][j + 2]));
                    float shift = top * args.scale;
                    // The old peak's difference is taken before it is scaled: of the first one, -1e30, the rounding
                    // of the product alone would be beyond any exponent.
                    sum[n][j] = fmaf(sum[n][j], exp2_fast((peak[n][j] - top) * args.scale),
                                     exp2_fast(fmaf(s[n][j], args.scale, -shift)) +
                                         exp2_fast(fmaf(s[n][j + 2], args.scale, -shift)));
                    peak[n][j] = top;
                }
        }
        ring.leave(index);
    }

    tile = kept;
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float top = peak[n][j];
#pragma unroll
            for (int step = 4; step < 32; step <<= 1) top = fmaxf(top, __shfl_xor_sync(kFull, top, step));
            float part = sum[n][j] * exp2_fast((peak[n][j] - top) * args.scale);
#pragma unroll
            for (int step = 4; step < 32; step <<= 1) part += __shfl_xor_sync(kFull, part, step);
            const int token = warp * 2 + n / kTiles, h = (n % kTiles) * 8 + (lane & 3) * 2 + j;
            if (lane < 4 && token < tile.count && h < group) {
                i64 at = ((i64)blockIdx.z * args.batch.tokens + tile.first + token) * args.heads + head * group + h;
                reinterpret_cast<float2*>(args.sums)[at] = make_float2(top * args.scale, part);
            }
        }
}

#define STATISTICS_ONE(E, name, dim, heads, tiles)                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                             \
        chunk_statistics_coarse_##name##_##dim##_##heads(const __grid_constant__ SelectionArguments args) { \
        statistics<E, dim, tiles, 1>(args);                                               \
    }                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)                             \
        chunk_statistics_fine_##name##_##dim##_##heads(const __grid_constant__ SelectionArguments args) {   \
        statistics<E, dim, tiles, 4>(args);                                               \
    }
#define STATISTICS(E, name)               \
    STATISTICS_ONE(E, name, 64, 8, 1)     \
    STATISTICS_ONE(E, name, 64, 16, 2)    \
    STATISTICS_ONE(E, name, 128, 8, 1)    \
    STATISTICS_ONE(E, name, 128, 16, 2)

STATISTICS(F16, f16)
STATISTICS(BF16, bf16)
