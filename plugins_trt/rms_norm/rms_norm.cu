// residual += scale * branch (when there is a branch), then out = weight * residual / rms(residual). A CTA a row.
#include "common.cuh"

struct Norm {
    const u16* branch;  // [rows, size] or null
    u16* residual;      // [rows, size], updated
    const u16* weight;  // [size]
    u16* out;           // [rows, size]
    float scale;
    float epsilon;
    i32 size;  // a multiple of 8
    i32 unused;
};

constexpr int kMaxThreads = 512;
constexpr int kManyThreads = 256;

template <typename T>
__device__ __forceinline__ void unpack(float (&x)[8], uint4 packed) {
    x[0] = T::low(packed.x), x[1] = T::high(packed.x), x[2] = T::low(packed.y), x[3] = T::high(packed.y);
    x[4] = T::low(packed.z), x[5] = T::high(packed.z), x[6] = T::low(packed.w), x[7] = T::high(packed.w);
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
    return {T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
}

// The new residual at a piece, as it is stored.
template <typename T>
__device__ __forceinline__ void add_branch(const Norm& args, i64 at, float (&x)[8]) {
    uint4* place = reinterpret_cast<uint4*>(args.residual + at);
    uint4 stored = *place;
    if (args.branch != nullptr) {
        float y[8];
        unpack<T>(y, *reinterpret_cast<const uint4*>(args.branch + at));
        unpack<T>(x, stored);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = fmaf(y[j], args.scale, x[j]);
        stored = pack<T>(x);
        *place = stored;
    }
    unpack<T>(x, stored);  // the norm is of what was stored
}

template <typename T>
__device__ __forceinline__ void store(const Norm& args, i64 at, const float (&x)[8], uint4 weight, float factor) {
    float w[8];
    unpack<T>(w, weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) w[j] *= x[j] * factor;
    *reinterpret_cast<uint4*>(args.out + at) = pack<T>(w);
}

// A thread keeps kHeld pieces of 8 elements, and reads those of longer rows again. With few rows nothing hides a second
// reading; with many, more thread blocks beside each other do, for which none is kept.
template <typename T, int kHeld>
__device__ __forceinline__ void rms_norm(const Norm& args) {
    __shared__ float partial[32];
    int stride = (int)blockDim.x * 8, first = (int)threadIdx.x * 8;
    // The weights do not depend on the launch before, and come from far: nobody has read them for a step.
    uint4 weights[kHeld > 0 ? kHeld : 1] = {};
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (first + i * stride < args.size) weights[i] = *reinterpret_cast<const uint4*>(args.weight + first + i * stride);
    wait_for_dependencies();
    launch_dependents();
    i64 row = (i64)blockIdx.x * args.size;
    float held[kHeld > 0 ? kHeld : 1][8] = {};
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        if (first + i * stride < args.size) add_branch<T>(args, row + first + i * stride, held[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(held[i][j], held[i][j], squares);
    }
    for (int at = first + kHeld * stride; at < args.size; at += stride) {
        float x[8];
        add_branch<T>(args, row + at, x);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(x[j], x[j], squares);
    }
    squares = warp_sum(squares);
    int lane = threadIdx.x % 32;
    if (lane == 0) partial[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = warp_sum(lane < (int)blockDim.x / 32 ? partial[lane] : 0.0f);
    float factor = rsqrtf(squares / (float)args.size + args.epsilon);
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
        if (first + i * stride < args.size) store<T>(args, row + first + i * stride, held[i], weights[i], factor);
    for (int at = first + kHeld * stride; at < args.size; at += stride) {
        float x[8];
        unpack<T>(x, *reinterpret_cast<const uint4*>(args.residual + row + at));
        store<T>(args, row + at, x, *reinterpret_cast<const uint4*>(args.weight + at), factor);
    }
}

#define NORM(type, suffix)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kMaxThreads) rms_norm_##suffix(const Norm args) {               \
        rms_norm<type, 2>(args);                                                                                 \
    }                                                                                                            \
    extern "C" __global__ void __launch_bounds__(kManyThreads, 8) rms_norm_many_##suffix(const Norm args) {      \
        rms_norm<type, 0>(args);                                                                                 \
    }

NORM(F16, f16)
NORM(BF16, bf16)
