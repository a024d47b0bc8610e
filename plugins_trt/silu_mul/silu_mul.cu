// out = silu(gate) * up, eight elements a thread.
#include "common.cuh"

struct Gate {
    const u16* gate;  // [rows, size], rows `stride` elements apart
    const u16* up;    // the same
    u16* out;         // [rows, size]
    i64 stride;
    i32 size;  // a multiple of 8
    i32 unused;
};

constexpr int kThreads = 256;

__device__ __forceinline__ float silu_times(float gate, float up) {
    return gate / (1.0f + exp2_fast(-kLog2e * gate)) * up;
}

template <typename T>
__device__ __forceinline__ u32 pair(u32 gate, u32 up) {
    return T::pack(silu_times(T::low(gate), T::low(up)), silu_times(T::high(gate), T::high(up)));
}

// Grid: (ceil(size / 2048), rows).
template <typename T>
__device__ __forceinline__ void silu_mul(const Gate& args) {
    wait_for_dependencies();
    launch_dependents();
    int column = (blockIdx.x * kThreads + threadIdx.x) * 8;
    if (column >= args.size) return;
    i64 row = blockIdx.y;
    uint4 gate = *reinterpret_cast<const uint4*>(args.gate + row * args.stride + column);
    uint4 up = *reinterpret_cast<const uint4*>(args.up + row * args.stride + column);
    uint4 out = {pair<T>(gate.x, up.x), pair<T>(gate.y, up.y), pair<T>(gate.z, up.z), pair<T>(gate.w, up.w)};
    *reinterpret_cast<uint4*>(args.out + row * args.size + column) = out;
}

extern "C" __global__ void __launch_bounds__(kThreads) silu_mul_f16(const Gate args) { silu_mul<F16>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) silu_mul_bf16(const Gate args) { silu_mul<BF16>(args); }
