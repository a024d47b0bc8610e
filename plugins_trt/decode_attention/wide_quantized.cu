// A part of the context, in eight bits, for 128 rows of one sequence a CTA; see attend.cuh. The steps over a page are
// those of dense chunks (chunk_attention/rows.cuh), the rows and what each of them sees those of wide.cu.
#include "chunk_attention/rows.cuh"
#include "decode_attention/attend.cuh"

constexpr int kThreads = 128;
constexpr int kRows = 128;

template <typename Source>
struct WideTile {
    Source source;  // of the KV head
    const i32* table;
    int start;      // row of the sequence's first new token
    int first_row;  // of the tile, within the sequence
    int length;     // tokens from before the step
    int slots;      // with the step's
    int active;     // parts in use
    int end;        // page behind the last of this part
};

// Grid: (wide_parts, tiles, kv_heads). Row r of a sequence is head r % group of its new token r / group.
template <typename Rows>
__device__ __forceinline__ void wide(const Batch& batch, const QuantizedArena& arena, const Attend& args) {
    using T = typename Rows::E;
    constexpr int kDim = Rows::kDim;
    constexpr int kPieces = kDim / 8;
    constexpr int kKeys = Rows::kKeysAtOnce;
    extern __shared__ __align__(256) unsigned char memory[];
    __shared__ u64 masks[kRows];
    __shared__ WideTile<typename Rows::Source> kept;  // no register can be spared for it
    const int thread = (int)threadIdx.x, warp = thread >> 5;
    const int group = args.heads / args.kv_heads;
    const int part = blockIdx.x;

    // The tile's sequence and the first of its rows.
    int sequence = -1, first_row = 0, tokens = 0, start = 0;
    for (int s = 0, before = 0; s < batch.sequences; ++s) {
        int from = batch.sequence_starts[s];
        int count = batch.sequence_starts[s + 1] - from;
        int tiles = is_wide(args, count) ? ceil_div(count * group, kRows) : 0;
        if ((int)blockIdx.y < before + tiles) {
            sequence = s, first_row = ((int)blockIdx.y - before) * kRows, tokens = count, start = from;
            break;
        }
        before += tiles;
    }
    const int length = sequence < 0 ? 0 : batch.lengths[sequence];
    const int active = sequence < 0 ? 0 : wide_active(args, length + tokens);
    const int pages = ceil_div(length + tokens, kPage);
    // Row r of the tile sees keys before the step and the new tokens of its mask; a row that is not dense sees
    // nothing and is not written.
    bool any = false;
    if (part < active) {
        int token = (first_row + thread) / group;
        u64 mask = 0;
        if (token < tokens && is_dense(args, batch.positions[start + token]))
            mask = batch.tree_masks != nullptr ? batch.tree_masks[start + token] : ~0ull >> (63 - token);
        masks[thread] = mask;
        any = mask != 0;
        if (thread == 0)
            kept = {Rows::source({arena.keys, arena.values, arena.key_scales, arena.value_scales}, blockIdx.z),
                    batch.table(sequence), start, first_row, length, length + tokens, active,
                    (int)((i64)pages * (part + 1) / active)};
    }
    any = __syncthreads_or(any);
    wait_for_dependencies();
    launch_dependents();
    if (!any) return;

    const u32 q_tile = shared_address(memory);
    const u32 keys = q_tile + kRows * kDim * 2, values = keys + Rows::kTileBytes, scales = values + Rows::kTileBytes;
    const u32 stored = keys + Rows::kPageBytes;  // the next page, as it is stored
    int page = (int)((i64)pages * part / active);
    for (int i = thread; i < kRows * kPieces; i += kThreads) {
        int row = i / kPieces, piece = i % kPieces;
        int token = (first_row + row) / group;
        const u16* from = args.q + ((i64)(start + token) * args.heads + blockIdx.z * group + (first_row + row) % group) * kDim;
        copy_async(q_tile + swizzled<kDim>(row, piece), token < tokens ? from + piece * 8 : args.q, token < tokens);
    }
    auto load_page = [&](int index) {
        const typename Rows::Pools pools = {arena.keys, arena.values, arena.key_scales, arena.value_scales};
        Rows::template copy_page<kThreads>(stored, pools, kept.source, kept.table[index],
                                           kept.slots - index * kPage, thread);
        copy_commit();
    };
    load_page(page);

    // This warp's 32 rows: two tiles of 16. Rows behind the last token's are left alone.
    const bool works = first_row + warp * 32 < tokens * group;
    float o[2][kDim / 8][4] = {};
    Softmax softmax[2];
    softmax[0].clear(), softmax[1].clear();
    for (; page < kept.end; ++page) {
        copy_wait<0>();
        __syncthreads();
        Rows::template widen<kThreads>(keys, stored, (int)threadIdx.x);
        __syncthreads();
        if (page + 1 < kept.end) load_page(page + 1);
        if (!works) continue;
#pragma unroll 1
        for (int first_key = 0; first_key < kPage; first_key += kKeys) {
            float s[2][kKeys / 8][4];
#pragma unroll
            for (int step = 0; step < kDim / 16; ++step) {
                u32 a[2][4];
                load_rows<kDim>(a[0], q_tile, warp * 32, step);
                load_rows<kDim>(a[1], q_tile, warp * 32 + 16, step);
#pragma unroll
                for (int n = 0; n < kKeys / 16; ++n) {
                    u32 b[4];
                    Rows::load_keys(b, keys + first_key * Rows::kRowBytes, n * 16, step);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        if (step == 0) {
                            T::mma_first(s[m][n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                            T::mma_first(s[m][n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                        } else {
                            T::mma(s[m][n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                            T::mma(s[m][n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                        }
                    }
                }
            }
            Rows::scale_both(s, scales, first_key);
            if ((page + 1) * kPage > kept.length) {  // new tokens: each row sees those of its mask
                const int lane = lane_anew();
                const int before = kept.length - page * kPage;  // slots of this page from before the step
#pragma unroll
                for (int m = 0; m < 2; ++m)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        u64 seen = masks[warp * 32 + m * 16 + half * 8 + (lane >> 2)];
                        seen = before > 0 ? (seen << before) | ((1ull << before) - 1) : -before < 64 ? seen >> -before : 0;
                        seen >>= first_key + 2 * (lane & 3);
#pragma unroll
                        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                            for (int i = 0; i < 2; ++i)
                                if (((seen >> (8 * n + i)) & 1) == 0) s[m][n][2 * half + i] = -kInfinity;
                    }
            }
            u32 p[2][kKeys / 8][2];
#pragma unroll
            for (int m = 0; m < 2; ++m)
                softmax[m].update(s[m], p[m], o[m], args.scale,
                                  typename Rows::PagePacker(scales, first_key));
#pragma unroll
            for (int k = 0; k < kKeys / 16; ++k) {
                typename Rows::Values rows(values, first_key + k * 16);
#pragma unroll
                for (int n = 0; n < kDim / 16; ++n) {
                    u32 b[4];
                    rows.load(b, n);
#pragma unroll
                    for (int m = 0; m < 2; ++m) {
                        const u32(&low)[2] = p[m][k * 2], (&high)[2] = p[m][k * 2 + 1];
                        Rows::V::mma(o[m][n * 2], low[0], low[1], high[0], high[1], b[0], b[1]);
                        Rows::V::mma(o[m][n * 2 + 1], low[0], low[1], high[0], high[1], b[2], b[3]);
                    }
                }
            }
        }
    }
    if (!works) return;
    const int lane = lane_anew(), heads_of_group = args.heads / args.kv_heads;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        softmax[m].finish();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = warp * 32 + m * 16 + half * 8 + (lane >> 2);
            if (masks[row] == 0) continue;
            const int token = kept.start + (kept.first_row + row) / heads_of_group;
            const int head = (kept.first_row + row) % heads_of_group;
            if (kept.active == 1) {
                u16* out = args.out + ((i64)token * args.heads + blockIdx.z * heads_of_group + head) * kDim;
                Rows::write_row(out, o[m], half, 1.0f / softmax[m].sum[half], lane);
            } else {
                i64 place = (((i64)token * args.kv_heads + blockIdx.z) * args.parts + blockIdx.x) * kHeads + head;
                Rows::store_row(args.partial + place * kDim, o[m], half, 1.0f, lane);
                if ((lane & 3) == 0)
                    args.statistics[place] = float2{softmax[m].peak[half] * args.scale, softmax[m].sum[half]};
            }
        }
    }
}

#define WIDE(type, suffix, format, kv, dim)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) wide_##suffix##_##kv##_d##dim(              \
        const Batch batch, const QuantizedArena arena, const Attend args) {                               \
        wide<WidenedRows<type, format, dim>>(batch, arena, args);                                       \
    }
#define WIDE_OF(format, kv)            \
    WIDE(F16, f16, format, kv, 64)     \
    WIDE(F16, f16, format, kv, 128)    \
    WIDE(BF16, bf16, format, kv, 64)   \
    WIDE(BF16, bf16, format, kv, 128)

WIDE_OF(Int8, i8)
WIDE_OF(E4M3, e4m3)
