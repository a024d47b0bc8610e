// First pass of block selection: maximum and sum of the softmax of every (token, head) over compressed keys, the
// coarse ones or the fine ones.
#include "chunk_selection/keys.cuh"

template <typename E, int kDim, int kTiles, int kSlots>
__device__ __forceinline__ void statistics(const SelectionArguments& args) {
    extern __shared__ __align__(128) unsigned char memory[];
    using Keys = Stage<kDim, kSlots>;
    const int thread = (int)threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int head = (int)blockIdx.y, group = args.heads / args.kv_heads;
    const Tile tile = find_tile(args.batch, (int)blockIdx.x, kTokens);
    if (tile.count == 0 || tile.sequence < 0) return;
    const int first_position = args.batch.positions[tile.first];
    const int last_position = first_position + tile.count - 1;
    if (!args.chooses(last_position)) return;

    const int all = last_position / kPage + 1;  // pages
    const int share = ceil_div(ceil_div(all, Keys::kPages), args.splits) * Keys::kPages;
    const int begin = min_int(all, (int)blockIdx.z * share), end = min_int(all, begin + share);
    const int count = ceil_div(end - begin, Keys::kPages);  // stages; 0 leaves an empty share
    int* pages = reinterpret_cast<int*>(memory + kStages * Keys::kBytes);
    const int* table = args.batch.table(tile.sequence);
    for (int i = thread; i < end - begin; i += kThreads) pages[i] = table[begin + i];

    Queries<kDim, kTiles> q;
    q.load(memory, args.q, args.q_stride, tile, head, group);

    const Pool pool = kSlots == 4 ? args.fine : args.coarse;
    const u32 stages = shared_address(memory);
    auto load_stage = [&](int index) {
        if (index < count)
            Keys::copy(stages + (u32)(index % kStages) * Keys::kBytes, pool, head, pages + index * Keys::kPages,
                       end - begin - index * Keys::kPages);
        copy_commit();
    };
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load_stage(i);

    // Of this thread's heads (two of each eight) over the keys of its rows.
    float peak[2 * kTiles][2], sum[2 * kTiles][2];
#pragma unroll
    for (int n = 0; n < 2 * kTiles; ++n) {
        peak[n][0] = peak[n][1] = -1e30f;
        sum[n][0] = sum[n][1] = 0.0f;
    }
    const int tokens[2] = {first_position + warp * 2, first_position + warp * 2 + 1};

#pragma unroll 1
    for (int index = 0; index < count; ++index) {
        copy_wait<kStages - 2>();
        __syncthreads();
        load_stage(index + kStages - 1);
        const u32 stage = stages + (u32)(index % kStages) * Keys::kBytes;
        const int first_page = begin + index * Keys::kPages;
        const bool partial = (first_page + Keys::kPages) * kPage > first_position || first_page == 0;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            float s[2 * kTiles][4];
            Keys::template multiply<E, kTiles>(s, stage, t, q);
            if (partial) {
                const int row = lane >> 2;
                const int page = first_page + (kSlots == 4 ? row : t * 16 + row), slot = kSlots == 4 ? t : 0;
#pragma unroll
                for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (!Keys::sees(tokens[n / kTiles], page + (i >> 1) * 8, slot)) s[n][i] = -kInfinity;
            }
#pragma unroll
            for (int n = 0; n < 2 * kTiles; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float top = fmaxf(peak[n][j], fmaxf(s[n][j], s[n][j + 2]));
                    float shift = top * args.scale;
                    sum[n][j] = fmaf(sum[n][j], exp2_fast(fmaf(peak[n][j], args.scale, -shift)),
                                     exp2_fast(fmaf(s[n][j], args.scale, -shift)) +
                                         exp2_fast(fmaf(s[n][j + 2], args.scale, -shift)));
                    peak[n][j] = top;
                }
        }
    }
    copy_wait<0>();

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
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                             \
        chunk_statistics_coarse_##name##_##dim##_##heads(const __grid_constant__ SelectionArguments args) { \
        statistics<E, dim, tiles, 1>(args);                                               \
    }                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                             \
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
