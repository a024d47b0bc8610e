// out[t] = scale * table[ids[t]]; zeros for an id outside the table, which is what padding rows carry.
#include "common.cuh"

struct Gather {
    const i32* ids;    // [rows]
    const u16* table;  // [vocabulary, size]
    u16* out;          // [rows, size]
    float scale;
    i32 vocabulary;
    i32 size;  // a multiple of 8
    i32 unused;
};

constexpr int kThreads = 128;

template <typename T>
__device__ __forceinline__ u32 times(u32 x, float scale) {
    return T::pack(T::low(x) * scale, T::high(x) * scale);
}

// Grid: (ceil(size / 1024), rows).
template <typename T>
__device__ __forceinline__ void embedding(const Gather& args) {
    wait_for_dependencies();
    launch_dependents();
    int column = (blockIdx.x * kThreads + threadIdx.x) * 8;
    if (column >= args.size) return;
    int id = args.ids[blockIdx.y];
    uint4 x = {0, 0, 0, 0};
    if (id >= 0 && id < args.vocabulary) x = *reinterpret_cast<const uint4*>(args.table + (i64)id * args.size + column);
    x = {times<T>(x.x, args.scale), times<T>(x.y, args.scale), times<T>(x.z, args.scale), times<T>(x.w, args.scale)};
    *reinterpret_cast<uint4*>(args.out + (i64)blockIdx.y * args.size + column) = x;
}

extern "C" __global__ void __launch_bounds__(kThreads) embedding_f16(const Gather args) { embedding<F16>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) embedding_bf16(const Gather args) { embedding<BF16>(args); }
