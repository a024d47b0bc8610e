// The end of a product whose inputs are shared out between warps and thread blocks.
#pragma once
#include "packed/tiles.cuh"

// `totals`, in shared memory: [kParts, kRows, kOutputs + 4] sums of tiles `first` to `last`. All threads come here.
// `Packed::store` ends an output.
template <typename Packed, bool kGated, int kThreads, int kParts, int kRows, int kOutputs>
__device__ __forceinline__ void finish(const typename Packed::Linear& args, float* totals, int first, int last) {
    constexpr int kStride = kOutputs + 4;
    constexpr int kOfTile = kGated ? kHalf : kTile;  // columns of out
    constexpr int kWidth = kOutputs / kTile * kOfTile;
    auto total = [&](int row, int at) {
        float sum = totals[row * kStride + at];
#pragma unroll
        for (int k = 1; k < kParts; ++k) sum += totals[(k * kRows + row) * kStride + at];
        return sum;
    };
    auto place_of = [](int column) { return kGated ? column / kHalf * kTile + column % kHalf : column; };
    int width = min_int((last - first) * kOfTile, args.outputs - first * kOfTile);
    if (args.splits == 1) {
        for (int i = threadIdx.x; i < args.rows * kWidth; i += kThreads) {
            int row = i / kWidth, column = i % kWidth, at = place_of(column);
            if (column < width)
                Packed::template store<kGated>(
                    args, row, first * kOfTile + column, total(row, at), kGated ? total(row, at + kHalf) : 0.0f);
        }
        return;
    }
#ifdef CLUSTERS
    if (args.partial == nullptr) {
        // Each thread block of the cluster adds up and stores a part of the columns.
        if constexpr (kParts > 1) {
            for (int i = threadIdx.x; i < args.rows * kOutputs; i += kThreads) {
                int row = i / kOutputs, at = i % kOutputs;
                totals[row * kStride + at] = total(row, at);
            }
        }
        cluster_barrier();
        int share = ceil_div(kWidth, args.splits);
        u32 base = shared_address(totals);
        for (int i = threadIdx.x; i < args.rows * share; i += kThreads) {
            int row = i / share, column = (int)blockIdx.y * share + i % share;
            if (column >= width) continue;
            u32 place = base + (row * kStride + place_of(column)) * 4;
            float of[8], of_up[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                of[k] = k < args.splits ? load_of_cluster(place, k) : 0.0f;
                if constexpr (kGated) of_up[k] = k < args.splits ? load_of_cluster(place + kHalf * 4, k) : 0.0f;
            }
            float sum = 0.0f, up = 0.0f;
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                sum += of[k];
                if constexpr (kGated) up += of_up[k];
            }
            Packed::template store<kGated>(args, row, first * kOfTile + column, sum, up);
        }
        cluster_barrier();  // what others read stays until then
        return;
    }
#endif
    int all = kTile * args.tile_count;
    for (int i = threadIdx.x; i < args.rows * kOutputs; i += kThreads) {
        int row = i / kOutputs, at = i % kOutputs;
        if (at < (last - first) * kTile)
            args.partial[((i64)blockIdx.y * args.rows + row) * all + first * kTile + at] = total(row, at);
    }
}
