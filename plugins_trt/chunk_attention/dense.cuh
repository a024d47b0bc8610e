// Dense attention of prefill chunks over pages (the tiling of FlashAttention-2, arXiv 2307.08691).
//
// The heads that share a KV head fill a tile together with neighbouring tokens: 128 rows are 8 tokens x 16 heads
// of MiniCPM4, so each page of keys and values is read once for all of them. A block of four warps takes one
// tile and one KV head and walks the pages up to the tile's last token; with few tiles the context is split over
// blocks, whose parts `combine` joins.
#pragma once
#include "chunk_attention/rows.cuh"

constexpr int kRows = 128;     // (token, head) pairs of a tile
constexpr int kThreads = 128;  // four warps of 32 rows

template <typename Pools>
struct DenseArguments {
    Batch batch;
    Pools pools;
    const u16* q;      // [T, H, kDim]
    u16* out;          // [T, H, kDim]
    float* parts;      // [splits, T, H, kDim], each divided by its own sum; unused with one split
    float* part_logs;  // [splits, T, H], base-2 logarithm of the part's sum; -infinity: no part
    i64 q_stride;      // elements from a token to the next
    i64 out_stride;
    i32 heads;
    i32 kv_heads;
    i32 dense_below;  // a token at position i takes part when i + 1 < dense_below
    i32 splits;
    float scale;  // of the scores, times log2 e
    i32 unused;
};

// What a block knows of its tile, in shared memory rather than in registers, of which the loop leaves none.
template <typename Source>
struct DenseTile {
    Tile tile;
    const i32* table;  // of the sequence's pages
    Source source;     // of the KV head
};

// Rows of a tile: row r is token r / group, head r % group of the KV head's.
template <typename Rows, bool kSplit>
__device__ __forceinline__ void dense_chunk(const DenseArguments<typename Rows::Pools>& args) {
    using E = typename Rows::E;
    constexpr int kDim = Rows::kDim;
    extern __shared__ __align__(256) unsigned char memory[];
    __shared__ DenseTile<typename Rows::Source> kept;
    constexpr u32 kTileBytes = Rows::kTileBytes;
    const u32 q_tile = shared_address(memory);
    const u32 kv_tiles = q_tile + kRows * kDim * 2;  // keys and values of a page, twice, or once and as it is stored

    const int thread = (int)threadIdx.x, warp = thread >> 5, lane = thread & 31;
    const int head = (int)blockIdx.y, group = args.heads / args.kv_heads;
    const int tokens = kRows / group;
    // Later tiles have more to do: they go first.
    Tile tile = find_tile(args.batch, (int)(gridDim.x - 1 - blockIdx.x), tokens);
    if (tile.count == 0) return;
    if (thread == 0) {
        kept.tile = tile;
        kept.table = args.batch.table(max_int(0, tile.sequence));
        kept.source = Rows::source(args.pools, head);
    }
    if (tile.sequence < 0) {
        if (blockIdx.z == 0)
            zero_rows<kDim>(args.out, args.out_stride, tile.first, tile.count, head, group, thread, kThreads);
        return;
    }
    const int* positions = args.batch.positions + tile.first;
    const int first_position = positions[0];
    // Positions rise by one from row to row; the tile ends where its last dense token does.
    const int last_position = min_int(positions[tile.count - 1], args.dense_below - 2);
    if (last_position < first_position) return;

    int block = 0, end = last_position / kPage + 1;
    if (kSplit) {
        int share = ceil_div(end, args.splits);
        block = min_int(end, (int)blockIdx.z * share);
        end = min_int(end, block + share);
    }

    auto load_page = [&](int index, int page, int stage) {
        const u32 to = kv_tiles + (Rows::kWidens ? Rows::kPageBytes : (u32)stage * Rows::kPageBytes);
        Rows::template copy_page<kThreads>(to, args.pools, kept.source, page, kept.tile.stored - index * kPage, thread);
    };

    float o[2][kDim / 8][4];
    Softmax softmax[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        softmax[m].clear();
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
    }

    __syncthreads();
    const int whole = (first_position + 1) / kPage;  // pages that every row sees all of
    if (block < end) {
        {  // queries
            constexpr int kPieces = kDim / 8;
            const int piece = thread % kPieces;
#pragma unroll
            for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
                int row = thread / kPieces + i * (kThreads / kPieces);
                int token = row / group;
                bool inside = token < tile.count;
                const u16* source = args.q + (i64)(tile.first + (inside ? token : 0)) * args.q_stride +
                                    (head * group + row % group) * kDim + piece * 8;
                copy_async(q_tile + swizzled<kDim>(row, piece), source, inside);
            }
        }
        load_page(block, kept.table[block], 0);
        copy_commit();
        int next_page = block + 1 < end ? kept.table[block + 1] : 0;

        for (int stage = 0; block < end; ++block, stage ^= 1) {
            copy_wait<0>();
            __syncthreads();
            if constexpr (Rows::kWidens) {
                Rows::template widen<kThreads>(kv_tiles, kv_tiles + Rows::kPageBytes, (int)threadIdx.x);
                __syncthreads();
            }
            if (block + 1 < end) {
                load_page(block + 1, next_page, stage ^ 1);
                copy_commit();
                next_page = block + 2 < end ? kept.table[block + 2] : 0;
            }
            const u32 keys = kv_tiles + (Rows::kWidens ? 0 : (u32)stage * Rows::kPageBytes), scales = keys + 2 * kTileBytes;
            constexpr int kKeys = Rows::kKeysAtOnce;
#pragma unroll 1
            for (int part = 0; part < kPage; part += kKeys) {
                float s[2][kKeys / 8][4];
#pragma unroll
                for (int step = 0; step < kDim / 16; ++step) {
                    u32 a[2][4];
                    load_rows<kDim>(a[0], q_tile, warp * 32, step);
                    load_rows<kDim>(a[1], q_tile, warp * 32 + 16, step);
#pragma unroll
                    for (int n = 0; n < kKeys / 16; ++n) {
                        u32 b[4];
                        Rows::load_keys(b, keys + part * Rows::kRowBytes, n * 16, step);
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
                            if (step == 0) {
                                E::mma_first(s[m][n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                                E::mma_first(s[m][n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                            } else {
                                E::mma(s[m][n * 2], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                                E::mma(s[m][n * 2 + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                            }
                        }
                    }
                }
                Rows::scale_both(s, scales, part);
                if (block >= whole) {
                    const int lane = lane_anew();
                    const int key = block * kPage + part + (lane & 3) * 2 - args.batch.positions[kept.tile.first];
#pragma unroll
                    for (int m = 0; m < 2; ++m)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int token = (warp * 32 + m * 16 + half * 8 + (lane >> 2)) / group;
                            const int last = min_int(token, kept.tile.count - 1) - key;
#pragma unroll
                            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                                for (int i = 0; i < 2; ++i)
                                    if (n * 8 + i > last) s[m][n][half * 2 + i] = -kInfinity;
                        }
                }
                u32 p[2][kKeys / 8][2];
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    softmax[m].update(s[m], p[m], o[m], args.scale,
                                      typename Rows::PagePacker(scales, part));
#pragma unroll
                for (int k = 0; k < kKeys / 16; ++k) {
                    typename Rows::Values values(keys + kTileBytes, part + k * 16);
#pragma unroll
                    for (int n = 0; n < kDim / 16; ++n) {
                        u32 b[4];
                        values.load(b, n);
#pragma unroll
                        for (int m = 0; m < 2; ++m) {
                            Rows::V::mma(o[m][n * 2], p[m][k * 2][0], p[m][k * 2][1], p[m][k * 2 + 1][0],
                                         p[m][k * 2 + 1][1], b[0], b[1]);
                            Rows::V::mma(o[m][n * 2 + 1], p[m][k * 2][0], p[m][k * 2][1], p[m][k * 2 + 1][0],
                                         p[m][k * 2 + 1][1], b[2], b[3]);
                        }
                    }
                }
            }
        }
    }

    tile = kept.tile;
    const int dense_count = min_int(tile.count, args.dense_below - 1 - args.batch.positions[tile.first]);
#pragma unroll
    for (int m = 0; m < 2; ++m) softmax[m].finish();
    if (kSplit) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = warp * 32 + m * 16 + half * 8 + (lane >> 2);
                int token = row / group;
                if (token >= dense_count) continue;
                i64 index = ((i64)blockIdx.z * args.batch.tokens + tile.first + token) * args.heads + head * group +
                            row % group;
                float sum = softmax[m].sum[half];
                if ((lane & 3) == 0)
                    args.part_logs[index] =
                        sum > 0.0f ? softmax[m].peak[half] * args.scale + log2_fast(sum) : -kInfinity;
                if (!(sum > 0.0f)) continue;
                Rows::store_row(args.parts + index * kDim, o[m], half, 1.0f / sum, lane);
            }
        return;
    }
    // The warp's own rows of the queries are read: they hold the output on its way to 16-byte stores.
    unsigned char* staged = memory;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float inverse = softmax[m].sum[half] > 0.0f ? 1.0f / softmax[m].sum[half] : 0.0f;
            Rows::stage(staged, warp * 32 + m * 16, o[m], half, inverse, lane);
        }
    __syncwarp();
    constexpr int kPieces = kDim / 8;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
        int row = warp * 32 + lane / kPieces + i * (32 / kPieces);
        int token = row / group, piece = lane % kPieces;
        if (token < dense_count)
            *reinterpret_cast<uint4*>(args.out + (i64)(tile.first + token) * args.out_stride +
                                      (head * group + row % group) * kDim + piece * 8) =
                *reinterpret_cast<const uint4*>(staged + swizzled<kDim>(row, piece));
    }
}

// Joins the splits: one warp a (token, head).
template <typename E, int kDim, typename Pools>
__device__ __forceinline__ void combine(const DenseArguments<Pools>& args) {
    const int lane = (int)(threadIdx.x & 31);
    const int row = (int)(blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5));
    const int token = row / args.heads, head = row % args.heads;
    if (token >= args.batch.sequence_starts[args.batch.sequences]) return;  // padding, zeroed already
    if (args.batch.positions[token] + 1 >= args.dense_below) return;
    const i64 step = (i64)args.batch.tokens * args.heads;
    float peak = -kInfinity;
    for (int split = 0; split < args.splits; ++split) peak = fmaxf(peak, args.part_logs[split * step + row]);
    constexpr int kEach = kDim / 32;
    float sum = 0.0f, o[kEach] = {};
    for (int split = 0; split < args.splits; ++split) {
        float log = args.part_logs[split * step + row];
        if (log == -kInfinity) continue;
        float weight = exp2_fast(log - peak);
        sum += weight;
        const float* part = args.parts + (split * step + row) * kDim + lane * kEach;
#pragma unroll
        for (int i = 0; i < kEach; ++i) o[i] = fmaf(weight, part[i], o[i]);
    }
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    u32* to = reinterpret_cast<u32*>(args.out + (i64)token * args.out_stride + head * kDim + lane * kEach);
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) to[i] = E::pack(o[2 * i] * inverse, o[2 * i + 1] * inverse);
}
