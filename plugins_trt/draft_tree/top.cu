// The likeliest tokens of each part of each row of logits, and what a softmax needs of the part. A thread block a part.
//
// A token's key orders as its logit does, and of equal logits the smaller id first: every thread keeps eight tokens in
// registers, and the block finds its largest key, one after the other.
#include "draft_tree/keys.cuh"

struct Top {
    const float* logits;  // [rows, vocabulary]
    u64* candidates;      // [rows, parts, count] keys, falling; 0 behind the last
    float2* statistics;   // [rows, parts]: the largest logit, and the sum of exp(logit - largest)
    i32 vocabulary;
    i32 parts;
    i32 count;
    i32 unused;
};

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kEach = kPart / kThreads;

// Grid: (parts, rows).
extern "C" __global__ void __launch_bounds__(kThreads) draft_top(const Top args) {
    __shared__ u64 best_of[2][kWarps];
    __shared__ float sums[kWarps];
    wait_for_dependencies();
    launch_dependents();
    int part = blockIdx.x, row = blockIdx.y, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const float* logits = args.logits + (i64)row * args.vocabulary;
    int first = part * kPart + threadIdx.x;
    u64 keys[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        int id = first + i * kThreads;
        keys[i] = id < args.vocabulary ? key_of(logits[id], id) : 0;
    }
    u64* out = args.candidates + ((i64)row * args.parts + part) * args.count;
    float largest = 0.0f;
    for (int found = 0; found < args.count; ++found) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) best = best > keys[i] ? best : keys[i];
        u64 mine = best;
        best = warp_largest(best);
        if (lane == 0) best_of[found & 1][warp] = best;  // (the other half is still being read)
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kWarps; ++i) best = best > best_of[found & 1][i] ? best : best_of[found & 1][i];
        if (found == 0) {
            largest = logit_of(best);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (keys[i] != 0) sum += expf(logit_of(keys[i]) - largest);
            sum = warp_sum(sum);
            if (lane == 0) sums[warp] = sum;
        }
        if (mine == best) {
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (keys[i] == best) keys[i] = 0;
        }
        if (threadIdx.x == 0) out[found] = best;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kWarps; ++i) sum += sums[i];
        args.statistics[(i64)row * args.parts + part] = float2{largest, sum};
    }
}
