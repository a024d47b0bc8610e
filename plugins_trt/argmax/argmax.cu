// The id of each row's largest logit; of equal ones the smaller id. NaN never wins. A CTA a row.
#include "common.cuh"

struct Rows {
    const void* logits;  // [rows, size], rows `stride` elements apart
    i32* ids;            // [rows]
    i64 stride;
    i32 size;
    i32 unused;
};

constexpr int kThreads = 1024;

struct F32 {
    using Element = float;
    static __device__ __forceinline__ float unpack(float x) { return x; }
};
struct Half : F16 {
    using Element = u16;
};
struct Brain : BF16 {
    using Element = u16;
};

__device__ __forceinline__ void keep_better(float& best, int& id, float other, int other_id) {
    if (other > best || (other == best && other_id < id)) best = other, id = other_id;
}

__device__ __forceinline__ void keep_best_of_warp(float& best, int& id) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1)
        keep_better(best, id, __shfl_xor_sync(kFull, best, lane), __shfl_xor_sync(kFull, id, lane));
}

template <typename T>
__device__ __forceinline__ void argmax(const Rows& args) {
    __shared__ float bests[kThreads / 32];
    __shared__ int ids[kThreads / 32];
    wait_for_dependencies();
    launch_dependents();
    const auto* row = static_cast<const typename T::Element*>(args.logits) + blockIdx.x * args.stride;
    float best = -kInfinity;
    int id = args.size - 1;
#pragma unroll 8
    for (int i = threadIdx.x; i < args.size; i += kThreads) keep_better(best, id, T::unpack(row[i]), i);
    keep_best_of_warp(best, id);
    if (threadIdx.x % 32 == 0) bests[threadIdx.x / 32] = best, ids[threadIdx.x / 32] = id;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = bests[threadIdx.x], id = ids[threadIdx.x];
    keep_best_of_warp(best, id);
    if (threadIdx.x == 0) args.ids[blockIdx.x] = id;
}

extern "C" __global__ void __launch_bounds__(kThreads) argmax_f32(const Rows args) { argmax<F32>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) argmax_f16(const Rows args) { argmax<Half>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) argmax_bf16(const Rows args) { argmax<Brain>(args); }
