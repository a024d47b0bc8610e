// The rows that an EAGLE draft runs on, a thread block a row: the token's embedding beside a hidden state, each with its
// norm where it has one, and the blocks of the window that the row's query attends to.
#include "common.cuh"

struct Input {
    const u16* embedding;       // [V, H]
    const i32* token_ids;       // [R]; -1: padding
    const u16* hidden;          // [any, H]
    const i32* hidden_rows;     // [R]
    const i32* positions;       // [R]
    u16* out;                   // [R, 2 H]
    i32* blocks;                // [R, kv_heads, total]
    i32* counts;                // [R, kv_heads]
    const u16* embedding_norm;  // [H] or null
    const u16* hidden_norm;     // [H] or null
    float scale;                // of the embedding
    float epsilon;
    i32 size;                   // H, a multiple of 8
    i32 kv_heads;
    i32 total;
    i32 unused;
};

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ void unpack(float (&x)[8], uint4 packed) {
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[2 * i] = T::low(words[i]), x[2 * i + 1] = T::high(words[i]);
}

// `out` = `row` * `scale`, over its root mean square and times `norm` where there is one.
template <typename T>
__device__ __forceinline__ void write_half(
    const u16* row, const u16* norm, u16* out, float scale, float epsilon, int size, float* sums) {
    int pieces = size / 8;
    float factor = scale;
    if (norm != nullptr) {
        float squares = 0.0f;
        for (int i = threadIdx.x; i < pieces; i += kThreads) {
            float x[8];
            unpack<T>(x, reinterpret_cast<const uint4*>(row)[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) squares = fmaf(x[j] * scale, x[j] * scale, squares);
        }
        squares = warp_sum(squares);
        __syncthreads();
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kThreads / 32; ++warp) total += sums[warp];
        factor = scale * rsqrtf(total / (float)size + epsilon);
    }
    for (int i = threadIdx.x; i < pieces; i += kThreads) {
        float x[8], weight[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
        unpack<T>(x, reinterpret_cast<const uint4*>(row)[i]);
        if (norm != nullptr) unpack<T>(weight, reinterpret_cast<const uint4*>(norm)[i]);
        uint4 packed;
        packed.x = T::pack(x[0] * factor * weight[0], x[1] * factor * weight[1]);
        packed.y = T::pack(x[2] * factor * weight[2], x[3] * factor * weight[3]);
        packed.z = T::pack(x[4] * factor * weight[4], x[5] * factor * weight[5]);
        packed.w = T::pack(x[6] * factor * weight[6], x[7] * factor * weight[7]);
        reinterpret_cast<uint4*>(out)[i] = packed;
    }
}

template <typename T>
__device__ __forceinline__ void draft_input(const Input& args) {
    __shared__ float sums[kThreads / 32];
    wait_for_dependencies();
    launch_dependents();
    int row = blockIdx.x, token = args.token_ids[row];
    u16* out = args.out + (i64)row * 2 * args.size;
    if (token < 0) {
        for (int i = threadIdx.x; i < args.size / 4; i += kThreads)
            reinterpret_cast<uint4*>(out)[i] = uint4{0, 0, 0, 0};
    } else {
        write_half<T>(args.embedding + (i64)token * args.size, args.embedding_norm, out, args.scale, args.epsilon,
                      args.size, sums);
        write_half<T>(args.hidden + (i64)args.hidden_rows[row] * args.size, args.hidden_norm, out + args.size, 1.0f,
                      args.epsilon, args.size, sums);
    }
    int own = args.positions[row] / kPage, first = max_int(0, own - (args.total - 1)), count = own - first + 1;
    i32* blocks = args.blocks + (i64)row * args.kv_heads * args.total;
    for (int i = threadIdx.x; i < args.kv_heads * args.total; i += kThreads) {
        int place = i % args.total;
        blocks[i] = place < count ? first + place : -1;
    }
    for (int i = threadIdx.x; i < args.kv_heads; i += kThreads) args.counts[row * args.kv_heads + i] = count;
}

extern "C" __global__ void __launch_bounds__(kThreads) draft_input_f16(const Input args) { draft_input<F16>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) draft_input_bf16(const Input args) { draft_input<BF16>(args); }
