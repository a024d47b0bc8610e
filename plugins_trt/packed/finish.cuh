// The end of a product whose inputs are shared out between warps and thread blocks.
#pragma once
#include "packed/tiles.cuh"

// `totals`, in shared memory: [kParts, kRows, kOutputs + 4] sums of tiles `first` to `last`. All threads come here, having
// written them. The thread blocks of a cluster, each with a share of the inputs, add up and end a part of the outputs each;
// where there are more shares than that, they leave their sums to another launch. A thread ends four outputs of a row at a
// time then, and asks for all that they need before it waits for any of it: `Packed::residual` is what is added to an
// output, `Packed::store` ends it.
template <typename Packed, bool kGated, int kThreads, int kParts, int kRows, int kOutputs>
__device__ __forceinline__ void finish(const typename Packed::Linear& args, float* totals, int first, int last) {
    constexpr int kStride = kOutputs + 4;
    constexpr int kOfTile = kGated ? kHalf : kTile;  // columns of out
    constexpr int kFours = kOutputs / kTile * kOfTile / 4, kFoursOfTiles = kOutputs / 4;
    auto add_parts = [&](float (&sum)[4], int place) {
        Four part[kParts];
#pragma unroll
        for (int k = 0; k < kParts; ++k) part[k] = *reinterpret_cast<const Four*>(totals + k * kRows * kStride + place);
#pragma unroll
        for (int k = 0; k < kParts; ++k) add_four(sum, part[k]);
    };
    auto place_of = [](int row, int column) {
        return row * kStride + (kGated ? column / kHalf * kTile + column % kHalf : column);
    };
    int cluster = cluster_size(), rank = (int)blockIdx.y % cluster;
    // The sums of the cluster's other thread blocks are there.
    auto meet = [&] {
#ifdef CLUSTERS
        if (cluster > 1) {
            if constexpr (kParts > 1) {
                __syncthreads();
                for (int i = threadIdx.x; i < args.rows * kFoursOfTiles; i += kThreads) {
                    int place = i / kFoursOfTiles * kStride + i % kFoursOfTiles * 4;
                    float sum[4] = {};
                    add_parts(sum, place);
                    *reinterpret_cast<Four*>(totals + place) = Four{{sum[0], sum[1], sum[2], sum[3]}};
                }
            }
            cluster_barrier();
            return;
        }
#endif
        __syncthreads();
    };
    auto add_all = [&](float (&sum)[4], int place) {
#ifdef CLUSTERS
        if (cluster > 1) {
            u32 address = shared_address(totals + place);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // of the eight thread blocks that a cluster has at most
                Four of[4];
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (4 * half + k < cluster) load_of_cluster(of[k].at, address, 4 * half + k);
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    if (4 * half + k < cluster) add_four(sum, of[k]);
            }
            return;
        }
#endif
        add_parts(sum, place);
    };
    int width = min_int((last - first) * kOfTile, args.outputs - first * kOfTile);  // columns
    if (args.splits == 1) {
        __syncthreads();
        for (int i = threadIdx.x; i < args.rows * kFours * 4; i += kThreads) {
            int row = i / (kFours * 4), column = i % (kFours * 4), place = place_of(row, column);
            if (column >= width) continue;
            float sum = 0.0f, up = 0.0f;
#pragma unroll
            for (int k = 0; k < kParts; ++k) {
                sum += totals[k * kRows * kStride + place];
                if constexpr (kGated) up += totals[k * kRows * kStride + place + kHalf];
            }
            int output = first * kOfTile + column;
            Packed::template store<kGated>(args, row, output, sum, up, kGated ? 0.0f : Packed::residual(args, row, output));
        }
        return;
    }
    if (args.splits > cluster) {
        meet();
        int all = args.rows * kFoursOfTiles, apart = kTile * args.tile_count;
        float* partial = args.partial + (i64)((int)blockIdx.y / cluster) * args.rows * apart + first * kTile;
        for (int i = all * rank / cluster + (int)threadIdx.x; i < all * (rank + 1) / cluster; i += kThreads) {
            int row = i / kFoursOfTiles, at = i % kFoursOfTiles * 4;
            if (at >= (last - first) * kTile) continue;
            float sum[4] = {};
            add_all(sum, row * kStride + at);
            *reinterpret_cast<Four*>(partial + (i64)row * apart + at) = Four{{sum[0], sum[1], sum[2], sum[3]}};
        }
    } else {
        int all = args.rows * kFours, to = all * (rank + 1) / cluster;
        bool met = false;
        for (int i = all * rank / cluster + (int)threadIdx.x; !met || i < to; i += kThreads) {
            int row = i / kFours, column = i % kFours * 4;
            float residual[4] = {};
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (!kGated && i < to && column + j < width)
                    residual[j] = Packed::residual(args, row, first * kOfTile + column + j);
            if (!met) meet();
            met = true;
            if (i >= to) break;
            float sum[4] = {}, up[4] = {};
            add_all(sum, place_of(row, column));
            if constexpr (kGated) add_all(up, place_of(row, column) + kHalf);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (column + j < width)
                    Packed::template store<kGated>(args, row, first * kOfTile + column + j, sum[j], up[j], residual[j]);
        }
    }
#ifdef CLUSTERS
    if (cluster > 1) cluster_barrier();  // what others read stays until then
#endif
}

// Adds up the shares of the inputs that `finish` left, four outputs a thread. Grid: (ceil(outputs / (4 kThreads)), rows).
template <typename Packed, bool kGated, int kThreads>
__device__ __forceinline__ void add_up(const typename Packed::Linear& args) {
    constexpr int kMost = 8;  // shares
    int row = blockIdx.y, output = (int)(blockIdx.x * kThreads + threadIdx.x) * 4;
    float residual[4] = {};  // written before the product began
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (!kGated && output + j < args.outputs) residual[j] = Packed::residual(args, row, output + j);
    wait_for_dependencies();
    launch_dependents();
    if (output >= args.outputs) return;
    i64 width = kTile * args.tile_count, apart = args.rows * width;
    const float* first = args.partial + row * width + (kGated ? output / kHalf * kTile + output % kHalf : output);
    float sums[kGated ? 2 : 1][4] = {};
#pragma unroll
    for (int half = 0; half < (kGated ? 2 : 1); ++half) {
        Four of[kMost];
#pragma unroll
        for (int k = 0; k < kMost; ++k)
            if (k < args.splits) of[k] = *reinterpret_cast<const Four*>(first + half * kHalf + k * apart);
#pragma unroll
        for (int k = 0; k < kMost; ++k)
            if (k < args.splits) add_four(sums[half], of[k]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
        if (output + j < args.outputs)
            Packed::template store<kGated>(args, row, output + j, sums[0][j], kGated ? sums[kGated][j] : 0.0f, residual[j]);
}
