// Keeps the accepted path of a verified tree, in one launch for every layer: the keys and values of its nodes move
// to the slots that follow the sequence's earlier tokens, and the compressed keys that the path completes are
// written to their pages, the same bits that `append` gives a sequence decoded token by token.
#include "common.cuh"

struct Commit {
    const i32* paths;     // [sequences, 64] accepted nodes, root first
    const i32* accepted;  // [sequences] how many
    i64 layer_strides[4];  // elements: keys, values, fine, coarse
};

constexpr int kThreads = 128;
constexpr int kNodes = 64;

template <typename T, int kDim, int kKeys>
__device__ __forceinline__ void write_mean(
    const Pool& keys, const i32* table, int head, int position, u16* out, int lane) {
    constexpr int kElements = kDim / 32;
    float sum[kElements] = {};
#pragma unroll 16
    for (int x = position - kKeys + 1; x <= position; ++x) {
        const u16* row = keys.row<kDim>(table[x / kPage], head, x % kPage) + lane;
#pragma unroll
        for (int i = 0; i < kElements; ++i) sum[i] += T::unpack(row[32 * i]);
    }
#pragma unroll
    for (int i = 0; i < kElements; ++i) out[32 * i + lane] = T::round(sum[i] * (1.0f / kKeys));
}

// Grid: (layers, kv_heads, sequences).
template <typename T, int kDim>
__device__ __forceinline__ void commit(const Batch& batch, Arena arena, const Commit& args) {
    constexpr int kPieces = kDim / 8;
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
    const i32* table = batch.table(sequence);
    const i32* path = args.paths + sequence * kNodes;
    int length = batch.lengths[sequence];
    auto move = [&](const Pool pool) {
        for (int i = threadIdx.x; i < accepted * kPieces; i += kThreads) {
            int slot = length + path[i / kPieces];
            rows[i] = reinterpret_cast<const uint4*>(pool.row<kDim>(table[slot / kPage], head, slot % kPage))[i % kPieces];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < accepted * kPieces; i += kThreads) {
            int slot = length + i / kPieces;
            reinterpret_cast<uint4*>(pool.row<kDim>(table[slot / kPage], head, slot % kPage))[i % kPieces] = rows[i];
        }
        __syncthreads();
    };
    move(arena.keys);
    move(arena.values);
    // At most four fine keys and one coarse are completed by 64 tokens: a warp each, the coarse after the fine.
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int end = length + accepted;
    int fine = (length + 16) / 16 * 16 - 1 + 16 * warp;  // the position that completes it
    if (fine < end && fine >= 31)
        write_mean<T, kDim, 32>(
            arena.keys, table, head, fine, arena.fine.row<kDim>(table[fine / kPage], head, fine % kPage / 16), lane);
    int coarse = (length + 64) / 64 * 64 - 1;
    if (warp == 3 && coarse < end && coarse >= 127)
        write_mean<T, kDim, 128>(
            arena.keys, table, head, coarse, arena.coarse.row<kDim>(table[coarse / kPage], head, 0), lane);
}

#define COMMIT(type, suffix, dim)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        commit_##suffix##_d##dim(const Batch batch, const Arena arena, const Commit args) {      \
        commit<type, dim>(batch, arena, args);                                                   \
    }

COMMIT(F16, f16, 64)
COMMIT(F16, f16, 128)
COMMIT(BF16, bf16, 64)
COMMIT(BF16, bf16, 128)
