// Appends a step's keys and values to their pages, in one launch: optional q/k norm, RoPE (NeoX halves), keys and
// values into pages, and every compressed key that the step completes.
//
// One warp takes one row of one token: a query head, a key head, a value head, or the fine or coarse compressed
// key of one KV head that the token completes. A compressed key is the mean of keys *as stored*: those from before
// the step are read from pages, those of the step are made again from the step's inputs, because the warps that
// store them may not have run yet. Both give the same bits and are added in the order of positions, so nothing
// depends on how a prompt was cut.
//
// In a tree no compressed key is written to pages: a node that completes one from its own path (its position is
// 15 mod 16, or 63 mod 64) leaves it in `node_fine` / `node_coarse`, for the selection of itself and its
// descendants. `commit` writes the accepted path's to the pages.
#include "append/stored.cuh"

struct Append {
    const u16* q;       // [T, heads, D], rows `q_stride` elements apart
    const u16* k;       // [T, kv_heads, D], rows `k_stride` apart
    const u16* v;       // [T, kv_heads, D], rows `v_stride` apart
    u16* q_out;         // [T, heads, D]
    const u16* q_norm;  // [D] or null
    const u16* k_norm;  // [D] or null
    const float* cosine;  // [max_positions, D / 2]
    const float* sine;    // [max_positions, D / 2]
    u16* node_fine;       // [T, kv_heads, D], trees only
    u16* node_coarse;     // [T, kv_heads, D], trees only
    i64 q_stride;
    i64 k_stride;
    i64 v_stride;
    float epsilon;
    i32 heads;
    i32 kv_heads;
    i32 unused;
};

constexpr int kWarps = 4;

constexpr int kStoredTogether = 16;  // keys that are read at once, stored
constexpr int kMadeTogether = 4;     // and made again

// A lane's share of the angles of one position.
template <int kPairs>
struct Angles {
    float cosine[kPairs];
    float sine[kPairs];

    __device__ __forceinline__ static Angles load(const Append& args, int position, int lane) {
        i64 place = ((i64)position * 32 + lane) * kPairs;
        Angles angles;
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
            angles.cosine[i] = args.cosine[place + i], angles.sine[i] = args.sine[place + i];
        return angles;
    }
};

// The norm (when `norm` is given) and the rotation by `angles`, in fp32. The rounding of each step is spelled out:
// were it left to the compiler to fuse, a key made again could differ from the stored one in its last bit.
template <typename T, int kDim, int kPairs = kDim / 64>
__device__ __forceinline__ Share<kPairs> rotate(
    Share<kPairs> x, const u16* norm, const Append& args, const Angles<kPairs>& angles, int lane) {
    if (norm != nullptr) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            squares = __fmaf_rn(x.first[i], x.first[i], squares);
            squares = __fmaf_rn(x.second[i], x.second[i], squares);
        }
        float factor = rsqrtf(__fmaf_rn(warp_sum(squares), 1.0f / kDim, args.epsilon));
        Share<kPairs> weight = load_share<T, kDim>(norm, lane);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            x.first[i] = __fmul_rn(__fmul_rn(x.first[i], factor), weight.first[i]);
            x.second[i] = __fmul_rn(__fmul_rn(x.second[i], factor), weight.second[i]);
        }
    }
    Share<kPairs> rotated;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        rotated.first[i] = __fmaf_rn(x.first[i], angles.cosine[i], -__fmul_rn(x.second[i], angles.sine[i]));
        rotated.second[i] = __fmaf_rn(x.second[i], angles.cosine[i], __fmul_rn(x.first[i], angles.sine[i]));
    }
    return rotated;
}

// The mean of the `kKeys` keys that end with the one of row `token`, at `position`, in the order of positions.
template <typename Stored, int kKeys>
__device__ __forceinline__ typename Stored::Row mean_of_keys(
    const Batch& batch, const typename Stored::Pages& arena, const Append& args, int sequence, int token, int position,
    int head, int lane) {
    using T = typename Stored::Input;
    constexpr int kDim = Stored::kDim, kPairs = kDim / 64;
    const i32* table = batch.table(sequence);
    int length = batch.lengths[sequence];
    int start = batch.sequence_starts[sequence];
    Share<kPairs> sum = {};
    int x = position - kKeys + 1;
    int stored_end = min_int(length, position + 1);
    // Some keys at once, the last of them whether or not all count: one after the other each would wait for memory.
    while (x < stored_end) {
        int page_end = min_int(stored_end, (x / kPage + 1) * kPage);
        typename Stored::Keys keys(arena, table[x / kPage], head, x % kPage);
        for (; x < page_end; x += kStoredTogether) {
            uint2 rows[kStoredTogether];
#pragma unroll
            for (int i = 0; i < kStoredTogether; ++i) {
                rows[i] = keys.packed(lane);
                if (x + i + 1 < page_end) keys.next();
            }
#pragma unroll
            for (int i = 0; i < kStoredTogether; ++i)
                if (x + i < page_end) add(sum, Stored::Keys::unpacked(rows[i]));
        }
        x = page_end;
    }
    bool tree = batch.tree_masks != nullptr;
    u64 path = 0;  // ancestors in the order of their depth
    if (tree) {
        path = batch.tree_masks[token];
        for (int skipped = x - length; skipped > 0; --skipped) path &= path - 1;
    }
    for (; x <= position; x += kMadeTogether) {
        Share<kPairs> inputs[kMadeTogether];
        Angles<kPairs> angles[kMadeTogether];
#pragma unroll
        for (int i = 0; i < kMadeTogether; ++i) {
            int at = min_int(x + i, position);
            int row = tree ? start + __ffsll((i64)path) - 1 : token - position + at;
            if (at < position) path &= path - 1;
            inputs[i] = load_share<T, kDim>(args.k + row * args.k_stride + head * kDim, lane);
            angles[i] = Angles<kPairs>::load(args, at, lane);
        }
#pragma unroll
        for (int i = 0; i < kMadeTogether; ++i)
            if (x + i <= position) add(sum, Stored::rounded(rotate<T, kDim>(inputs[i], args.k_norm, args, angles[i], lane)));
    }
    multiply(sum, 1.0f / kKeys);
    return sum;
}

template <typename Stored>
__device__ __forceinline__ void append(const Batch& batch, const typename Stored::Pages& arena, const Append& args) {
    using T = typename Stored::Input;
    constexpr int kDim = Stored::kDim;
    wait_for_dependencies();
    launch_dependents();
    int lane = threadIdx.x & 31;
    int token = blockIdx.y;
    int row = blockIdx.x * kWarps + (threadIdx.x >> 5);
    int sequence = batch.sequence_of(token);
    if (row >= args.heads + 4 * args.kv_heads) return;
    if (row < args.heads) {
        u16* out = args.q_out + ((i64)token * args.heads + row) * kDim;
        Share<kDim / 64> query = {};
        if (sequence >= 0) {
            query = load_share<T, kDim>(args.q + token * args.q_stride + row * kDim, lane);
            auto angles = Angles<kDim / 64>::load(args, batch.positions[token], lane);
            query = rotate<T, kDim>(query, args.q_norm, args, angles, lane);
        }
        store_share<T, kDim>(out, query, lane);
        return;
    }
    if (sequence < 0) return;
    row -= args.heads;
    int kind = row / args.kv_heads;  // key, value, fine, coarse
    int head = row % args.kv_heads;
    int position = batch.positions[token];
    if (kind < 2) {
        int slot = batch.lengths[sequence] + token - batch.sequence_starts[sequence];
        int page = batch.table(sequence)[slot / kPage];
        if (kind == 0) {
            Share<kDim / 64> key = load_share<T, kDim>(args.k + token * args.k_stride + head * kDim, lane);
            key = rotate<T, kDim>(key, args.k_norm, args, Angles<kDim / 64>::load(args, position, lane), lane);
            Stored::store_key(arena, page, head, slot % kPage, key, lane);
        } else {
            Share<kDim / 64> value = load_share<T, kDim>(args.v + token * args.v_stride + head * kDim, lane);
            Stored::store_value(arena, page, head, slot % kPage, value, lane);
        }
        return;
    }
    bool tree = batch.tree_masks != nullptr;
    i64 node = ((i64)token * args.kv_heads + head) * kDim;
    if (kind == 2) {
        if (position % 16 != 15 || position < 31) return;
        u16* out = tree ? args.node_fine + node
                        : arena.fine.template row<kDim>(batch.table(sequence)[position / kPage], head, position % kPage / 16);
        store_share<T, kDim>(
            out, mean_of_keys<Stored, 32>(batch, arena, args, sequence, token, position, head, lane), lane);
    } else {
        if (position % 64 != 63 || position < 127) return;
        u16* out = tree ? args.node_coarse + node
                        : arena.coarse.template row<kDim>(batch.table(sequence)[position / kPage], head, 0);
        store_share<T, kDim>(
            out, mean_of_keys<Stored, 128>(batch, arena, args, sequence, token, position, head, lane), lane);
    }
}

#define APPEND(type, suffix, dim)                                                             \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 3)                                 \
        append_##suffix##_d##dim(const Batch batch, const Arena arena, const Append args) {   \
        append<Exact<type, dim>>(batch, arena, args);                                         \
    }
#define APPEND_QUANTIZED(type, suffix, format, kv, dim)                                                     \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, 3)                                               \
        append_##suffix##_##kv##_d##dim(const Batch batch, const QuantizedArena arena, const Append args) { \
        append<Quantized<type, format, dim>>(batch, arena, args);                                           \
    }
#define APPEND_OF(type, suffix, dim)                 \
    APPEND(type, suffix, dim)                        \
    APPEND_QUANTIZED(type, suffix, Int8, i8, dim)    \
    APPEND_QUANTIZED(type, suffix, E4M3, e4m3, dim)

APPEND_OF(F16, f16, 64)
APPEND_OF(F16, f16, 128)
APPEND_OF(BF16, bf16, 64)
APPEND_OF(BF16, bf16, 128)
