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

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ void unpack(float (&x)[8], uint4 packed) {
    x[0] = T::low(packed.x), x[1] = T::high(packed.x), x[2] = T::low(packed.y), x[3] = T::high(packed.y);
    x[4] = T::low(packed.z), x[5] = T::high(packed.z), x[6] = T::low(packed.w), x[7] = T::high(packed.w);
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&x)[8]) {
    return {T::pack(x[0], x[1]), T::pack(x[2], x[3]), T::pack(x[4], x[5]), T::pack(x[6], x[7])};
}

template <typename T>
__device__ __forceinline__ void rms_norm(const Norm& args) {
    __shared__ float partial[kThreads / 32];
    wait_for_dependencies();
    launch_dependents();
    i64 row = (i64)blockIdx.x * args.size;
    float squares = 0.0f;
    for (int i = threadIdx.x * 8; i < args.size; i += kThreads * 8) {
        uint4* place = reinterpret_cast<uint4*>(args.residual + row + i);
        float x[8];
        unpack<T>(x, *place);
        if (args.branch != nullptr) {
            float y[8];
            unpack<T>(y, *reinterpret_cast<const uint4*>(args.branch + row + i));
#pragma unroll
            for (int j = 0; j < 8; ++j) x[j] = fmaf(y[j], args.scale, x[j]);
            uint4 rounded = pack<T>(x);
            *place = rounded;
            unpack<T>(x, rounded);  // the norm is of what was stored
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) squares = fmaf(x[j], x[j], squares);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) squares += partial[w];
    float factor = rsqrtf(squares / (float)args.size + args.epsilon);
    for (int i = threadIdx.x * 8; i < args.size; i += kThreads * 8) {
        float x[8], weight[8];
        unpack<T>(x, *reinterpret_cast<const uint4*>(args.residual + row + i));
        unpack<T>(weight, *reinterpret_cast<const uint4*>(args.weight + i));
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= factor * weight[j];
        *reinterpret_cast<uint4*>(args.out + row + i) = pack<T>(x);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) rms_norm_f16(const Norm args) { rms_norm<F16>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) rms_norm_bf16(const Norm args) { rms_norm<BF16>(args); }
