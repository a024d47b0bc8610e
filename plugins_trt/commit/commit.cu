// Keeps the accepted path of a verified tree, in one launch for every layer: the keys and values of its nodes move
// to the slots that follow the sequence's earlier tokens, and the compressed keys that the path completes are
// written to their pages, the same bits that `append` gives a sequence decoded token by token.
#include "append/stored.cuh"

template <int kPools>
struct Commit {
    const i32* paths;     // [sequences, 64] accepted nodes, root first
    const i32* accepted;  // [sequences] how many
    i64 layer_strides[kPools];  // elements: keys, values, fine, coarse, and where there are any the scales of both
};

constexpr int kThreads = 128;
constexpr int kNodes = 64;

template <typename Stored, int kKeys>
__device__ __forceinline__ void write_mean(
    const typename Stored::Pages& arena, const i32* table, int head, int position, u16* out, int lane) {
    typename Stored::Row sum = {};
#pragma unroll 16
    for (int x = position - kKeys + 1; x <= position; ++x)
        add(sum, typename Stored::Keys(arena, table[x / kPage], head, x % kPage).row(lane));
    multiply(sum, 1.0f / kKeys);
    store_share<typename Stored::Input, Stored::kDim>(out, sum, lane);
}

// Moves rows of `kPieces` pieces of 16 bytes from the nodes of the path to the slots behind `length`, by way of `rows`.
template <int kDim, int kPieces, typename Pool>
__device__ __forceinline__ void move_rows(
    const Pool& pool, uint4* rows, const i32* table, const i32* path, int head, int length, int accepted) {
    for (int i = threadIdx.x; i < accepted * kPieces; i += kThreads) {
        int slot = length + path[i / kPieces];
        rows[i] = reinterpret_cast<const uint4*>(
            pool.template row<kDim>(table[slot / kPage], head, slot % kPage))[i % kPieces];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < accepted * kPieces; i += kThreads) {
        int slot = length + i / kPieces;
        reinterpret_cast<uint4*>(pool.template row<kDim>(table[slot / kPage], head, slot % kPage))[i % kPieces] = rows[i];
    }
    __syncthreads();
}

// Grid: (layers, kv_heads, sequences).
template <typename Stored, int kPools>
__device__ __forceinline__ void commit(
    const Batch& batch, typename Stored::Pages arena, const Commit<kPools>& args) {
    constexpr int kDim = Stored::kDim;
    constexpr int kPieces = Stored::kRowBytes / 16;
    __shared__ uint4 rows[kNodes * kPieces];
    wait_for_dependencies();
    launch_dependents();
    int layer = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
    int accepted = args.accepted[sequence];
    if (accepted <= 0 || batch.sequence_starts[sequence] == batch.sequence_starts[sequence + 1]) return;
    arena.keys.base += layer * args.layer_strides[0];
    arena.values.base += layer * args.layer_strides[1];
    arena.fine.base += layer * args.layer_strides[2];
    arena.coarse.base += layer * args.layer_strides[3];
    if constexpr (kPools == 6) {
        arena.key_scales.base += layer * args.layer_strides[4];
        arena.value_scales.base += layer * args.layer_strides[5];
    }
    const i32* table = batch.table(sequence);
    const i32* path = args.paths + sequence * kNodes;
    int length = batch.lengths[sequence];
    move_rows<kDim, kPieces>(arena.keys, rows, table, path, head, length, accepted);
    move_rows<kDim, kPieces>(arena.values, rows, table, path, head, length, accepted);
    if constexpr (kPools == 6) {
        auto move_scales = [&](const Pool& pool) {  // a thread moves one
            int node = threadIdx.x, slot = length + (node < accepted ? path[node] : 0);
            u16 moved = node < accepted ? *pool.row<1>(table[slot / kPage], head, slot % kPage) : 0;
            __syncthreads();
            slot = length + node;
            if (node < accepted) *pool.row<1>(table[slot / kPage], head, slot % kPage) = moved;
        };
        move_scales(arena.key_scales);
        move_scales(arena.value_scales);
        __syncthreads();
    }
    // At most four fine keys and one coarse are completed by 64 tokens: a warp each, the coarse after the fine.
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int end = length + accepted;
    int fine = (length + 16) / 16 * 16 - 1 + 16 * warp;  // the position that completes it
    if (fine < end && fine >= 31)
        write_mean<Stored, 32>(
            arena, table, head, fine, arena.fine.template row<kDim>(table[fine / kPage], head, fine % kPage / 16), lane);
    int coarse = (length + 64) / 64 * 64 - 1;
    if (warp == 3 && coarse < end && coarse >= 127)
        write_mean<Stored, 128>(
            arena, table, head, coarse, arena.coarse.template row<kDim>(table[coarse / kPage], head, 0), lane);
}

#define COMMIT(type, suffix, dim)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        commit_##suffix##_d##dim(const Batch batch, const Arena arena, const Commit<4> args) {   \
        commit<Exact<type, dim>>(batch, arena, args);                                            \
    }
#define COMMIT_QUANTIZED(type, suffix, format, kv, dim)                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                       \
        commit_##suffix##_##kv##_d##dim(const Batch batch, const QuantizedArena arena, const Commit<6> args) {   \
        commit<Quantized<type, format, dim>>(batch, arena, args);                                                \
    }
#define COMMIT_OF(type, suffix, dim)                 \
    COMMIT(type, suffix, dim)                        \
    COMMIT_QUANTIZED(type, suffix, Int8, i8, dim)    \
    COMMIT_QUANTIZED(type, suffix, E4M3, e4m3, dim)

COMMIT_OF(F16, f16, 64)
COMMIT_OF(F16, f16, 128)
COMMIT_OF(BF16, bf16, 64)
COMMIT_OF(BF16, bf16, 128)
