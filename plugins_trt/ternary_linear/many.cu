// The product of rows of x with ternary weights, up to 64 of them in a thread block.
//
// A thread block takes 8 tiles, 128 outputs, and a share of the inputs. Its warps are four pairs, of two tiles each; the
// warps of a pair take a half of the inputs of a round each and add up at the end, or of 64 rows a half of the rows. x goes
// through shared memory once a thread block; a fragment of it that a warp reads serves its two tiles. With several shares
// of the inputs, `reduce` adds them up in their order.
#include "ternary_linear/ternary.cuh"

constexpr int kThreads = 256;
constexpr int kTilesOfBlock = 8;
constexpr int kOutputs = kTilesOfBlock * kTile;
constexpr int kSumStride = kOutputs + 4;  // floats of a row of sums

// Of 8 kTiles rows a warp; kRowHalves: the warps of a pair share the rows, not the inputs.
template <int kTiles, bool kRowHalves>
struct Shape {
    static constexpr int kRows = 8 * kTiles * (kRowHalves ? 2 : 1);
    static constexpr int kBlocks = kRowHalves ? 1 : 2;  // of inputs, of a round
    static constexpr int kStages = !kRowHalves && kTiles == 4 ? 3 : 4;  // as many as the smallest device has room for
    static constexpr u32 kRowBytes = kBlocks * kBlock * 2;
    static constexpr u32 kXBytes = kRows * kRowBytes;
    static constexpr u32 kWordBytes = kTilesOfBlock * kBlocks * 512;
    static constexpr int kPieces = kRowBytes / 16;  // of a row
};

// Grid: (ceil(tiles / 8) times as many as there are slabs of rows, which come first, splits).
template <typename T, int kTiles, bool kRowHalves>
__device__ __forceinline__ void many(const Linear& args) {
    using S = Shape<kTiles, kRowHalves>;
    extern __shared__ __align__(1024) unsigned char ring[];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int half = warp / 4, pair = warp % 4;
    int slabs = ceil_div(args.rows, S::kRows);
    int slab = (int)blockIdx.x % slabs, tiles_before = (int)blockIdx.x / slabs * kTilesOfBlock;
    int first_row = slab * S::kRows, rows_here = min_int(args.rows - first_row, S::kRows);
    int first_tile = tiles_before + pair * 2;
    int rounds = args.blocks / S::kBlocks;
    int begin = (int)((i64)rounds * blockIdx.y / args.splits);
    int end = (int)((i64)rounds * (blockIdx.y + 1) / args.splits);
    u32 base = shared_address(ring);
    u32 scale_bytes = args.scale_count * 32;  // of a tile's block
    u32 stage_bytes = S::kXBytes + S::kWordBytes + kTilesOfBlock * S::kBlocks * scale_bytes;

    // Tile m of the pair and block b of a round lie at [pair, m, b]. A warp copies b `half` of both tiles, or of one block
    // the tile `half`. Tiles behind the last are the last again: their products are not stored.
    constexpr int kCopied = kRowHalves ? 1 : 2;  // tiles
    int block = begin * S::kBlocks + (kRowHalves ? 0 : half);
    int pieces = 2 * args.scale_count;  // of the scales of a tile's block
    int scaled_tile = kRowHalves || lane < pieces ? 0 : 1, piece_of_scales = lane - scaled_tile * pieces;
    bool copies_scales = lane < kCopied * pieces;
    u32 place = (pair * 2 + (kRowHalves ? half : 0)) * S::kBlocks + (kRowHalves ? 0 : half);
    u32 words_to = S::kXBytes + place * 512 + lane * 16;
    u32 scales_to = S::kXBytes + S::kWordBytes + (place + scaled_tile * S::kBlocks) * scale_bytes + piece_of_scales * 16;
    auto first_block = [&](int m) {
        int tile = min_int(first_tile + m + (kRowHalves ? half : 0), args.tile_count - 1);
        return (i64)tile * args.blocks + block;
    };
    const uint4* words_from[kCopied];
#pragma unroll
    for (int m = 0; m < kCopied; ++m) words_from[m] = args.tiles + first_block(m) * 32 + lane;
    const uint4* scales_from =
        reinterpret_cast<const uint4*>(args.scales) + first_block(scaled_tile) * pieces + piece_of_scales;
    auto copy_weights = [&](int round, u32 stage) {
        if (round < end) {
#pragma unroll
            for (int m = 0; m < kCopied; ++m) {
                copy_async(stage + words_to + m * (S::kBlocks * 512), words_from[m]);
                words_from[m] += S::kBlocks * 32;
            }
            copy_where(copies_scales, stage + scales_to, scales_from);
            scales_from += S::kBlocks * pieces;
        }
    };
    constexpr int kRowsAtOnce = kThreads / S::kPieces;
    int own_row = (int)threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces;
    int input = begin * (S::kBlocks * kBlock) + piece * 8;
    const u16* x_from = args.x + (first_row + own_row) * args.x_stride + input;
    u32 x_to = own_row * S::kRowBytes + ((piece ^ ((own_row & 1) << 2)) << 4);
    auto copy_rows = [&](int round, u32 stage) {
        if (round < end) {
            const u16* from = x_from;
#pragma unroll
            for (int i = 0; i < S::kRows / kRowsAtOnce; ++i) {
                // (Rows behind the last are what lies there: their products are not stored.)
                if (own_row + i * kRowsAtOnce < rows_here)
                    copy_async(stage + x_to + i * (kRowsAtOnce * S::kRowBytes), from, input < args.inputs);
                from += kRowsAtOnce * args.x_stride;
            }
            x_from += S::kBlocks * kBlock;
            input += S::kBlocks * kBlock;
        }
    };

    // The weights of the first rounds do not depend on the launch before.
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) copy_weights(begin + i, base + i * stage_bytes);
    if (lane == 0) {
        constexpr int kAhead = (S::kStages - 1) * S::kBlocks;
        int left = (end - begin) * S::kBlocks - kAhead;
        int tile = min_int(first_tile + half, args.tile_count - 1);
        if (left > 0) prefetch(args.tiles + ((i64)tile * args.blocks + begin * S::kBlocks + kAhead) * 32, left * 512);
    }
    wait_for_dependencies();
    launch_dependents();
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) {
        copy_rows(begin + i, base + i * stage_bytes);
        copy_commit();  // (the first group has the weights of all)
    }

    float acc[2][kTiles][4] = {}, part[2][kTiles][4] = {};
    // Of rows g and of the pieces 4 u + t, u even and u odd.
    u32 even = (kRowHalves ? half * kTiles * 8 + g : g) * S::kRowBytes + ((t ^ ((g & 1) << 2)) << 4);
    u32 odd = even ^ 64;
    u32 filling = (S::kStages - 1) * stage_bytes;  // bytes into the ring
#pragma unroll 1
    for (int round = begin; round < end; ++round) {
        copy_wait<S::kStages - 2>();
        __syncthreads();  // what others copied is here, and what was read in the last round is free
        copy_weights(round + S::kStages - 1, base + filling);
        copy_rows(round + S::kStages - 1, base + filling);
        copy_commit();
        filling = filling == (S::kStages - 1) * stage_bytes ? 0 : filling + stage_bytes;
        int b = kRowHalves ? 0 : half;
        const unsigned char* stage = ring + filling;  // what is filled next is what is read now
        const unsigned char* x = stage + b * (kBlock * 2);
        uint4 words[2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
            words[m] = *reinterpret_cast<const uint4*>(stage + S::kXBytes + ((pair * 2 + m) * S::kBlocks + b) * 512 + lane * 16);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            u32 a[2][2][4];
            weights_of(a[0], words[0], u);
            weights_of(a[1], words[1], u);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
                uint4 x_of_row = *reinterpret_cast<const uint4*>(
                    x + (u % 2 == 0 ? even + u * 64 : odd + (u - 1) * 64) + n * (8 * S::kRowBytes));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    T::mma(part[m][n], a[m][0][0], a[m][0][1], a[m][0][2], a[m][0][3], x_of_row.x, x_of_row.y);
                    T::mma(part[m][n], a[m][1][0], a[m][1][1], a[m][1][2], a[m][1][3], x_of_row.z, x_of_row.w);
                }
            }
            // A group ends here: with four scales a block everywhere, with two at 1 and 3, with one at 3.
            if (args.scale_count == 4 || (u % 2 == 1 && args.scale_count == 2) || (u == 3 && args.scale_count == 1)) {
                int j = args.scale_count == 4 ? u : args.scale_count == 2 ? u / 2 : 0;
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    u32 both = *reinterpret_cast<const u32*>(stage + S::kXBytes + S::kWordBytes +
                                                             ((pair * 2 + m) * S::kBlocks + b) * scale_bytes +
                                                             (g * args.scale_count + j) * 4);
                    float low = F16::low(both), high = F16::high(both);
#pragma unroll
                    for (int n = 0; n < kTiles; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            acc[m][n][e] = fmaf(part[m][n][e], e < 2 ? low : high, acc[m][n][e]);
                            part[m][n][e] = 0.0f;
                        }
                }
            }
        }
    }
    copy_wait<0>();
    __syncthreads();
    if (args.scale_count == 0) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            u32 both = first_tile + m < args.tile_count ? args.scales[(first_tile + m) * 8 + g] : 0;
            float low = F16::low(both), high = F16::high(both);
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[m][n][e] = part[m][n][e] * (e < 2 ? low : high);
        }
    }

    // The sums in shared memory: [row, output of the block].
    float* sums = reinterpret_cast<float*>(ring);
    auto of_sum = [&](int m, int n, int e) {
        int row = 8 * n + 2 * t + (e & 1) + (kRowHalves ? half * kTiles * 8 : 0);
        return row * kSumStride + (pair * 2 + m) * kTile + g + kHalf * (e >> 1);
    };
    if (kRowHalves || half == 1) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < kTiles; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[of_sum(m, n, e)] = acc[m][n][e];
    }
    __syncthreads();
    if constexpr (!kRowHalves) {
        if (half == 0) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int n = 0; n < kTiles; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[of_sum(m, n, e)] += acc[m][n][e];
        }
        __syncthreads();
    }
    int width = kTile * args.tile_count, first = tiles_before * kTile;
    if (args.splits > 1) {
        for (int i = threadIdx.x; i < rows_here * kOutputs; i += kThreads) {
            int row = i / kOutputs, output = i % kOutputs;
            if (first + output < width)
                args.partial[((i64)blockIdx.y * args.rows + first_row + row) * width + first + output] =
                    sums[row * kSumStride + output];
        }
        return;
    }
    int columns = args.gated ? kOutputs / 2 : kOutputs;
    for (int i = threadIdx.x; i < rows_here * columns; i += kThreads) {
        int row = i / columns, column = i % columns;
        int output = tiles_before * (args.gated ? kHalf : kTile) + column;
        if (output >= args.outputs) continue;
        const float* of_row = sums + row * kSumStride;
        int at = args.gated ? column / kHalf * kTile + column % kHalf : column;
        store_output<T>(args, first_row + row, output, of_row[at], args.gated ? of_row[at + kHalf] : 0.0f);
    }
}

// Adds up the shares of the inputs. Grid: (ceil(outputs / 256), rows).
template <typename T>
__device__ __forceinline__ void reduce(const Linear& args) {
    wait_for_dependencies();
    launch_dependents();
    int row = blockIdx.y, output = (int)(blockIdx.x * kThreads + threadIdx.x);
    if (output >= args.outputs) return;
    int width = kTile * args.tile_count;
    int at = args.gated ? output / kHalf * kTile + output % kHalf : output;
    float sum = 0.0f, up = 0.0f;
#pragma unroll 8
    for (int split = 0; split < args.splits; ++split) {
        const float* part = args.partial + ((i64)split * args.rows + row) * width + at;
        sum += part[0];
        if (args.gated) up += part[kHalf];
    }
    store_output<T>(args, row, output, sum, up);
}

#define MANY(type, suffix, rows, tiles, halves)                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, tiles == 4 ? 1 : 2) ternary_many_##suffix##_n##rows(const Linear args) { \
        many<type, tiles, halves>(args);                                                                           \
    }
#define MANY_OF(type, suffix)        \
    MANY(type, suffix, 8, 1, false)  \
    MANY(type, suffix, 16, 2, false) \
    MANY(type, suffix, 32, 4, false) \
    MANY(type, suffix, 64, 4, true)
#define REDUCE(type, suffix)                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads) ternary_reduce_##suffix(const Linear args) { \
        reduce<type>(args);                                                                             \
    }

MANY_OF(F16, f16)
MANY_OF(BF16, bf16)
REDUCE(F16, f16)
REDUCE(BF16, bf16)
