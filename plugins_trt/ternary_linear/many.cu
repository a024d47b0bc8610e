// The product of rows of x with ternary weights, up to 32 of them in a thread block.
//
// A thread block takes 8 tiles, 128 outputs, one for each of its warps, and a share of the inputs. x goes through shared
// memory once a thread block. With several shares of the inputs, another launch adds them up in their order.
#include "packed/finish.cuh"
#include "ternary_linear/ternary.cuh"

constexpr int kThreads = 256;
constexpr int kReducers = 64;
constexpr int kTilesOfBlock = 8;
constexpr int kOutputs = kTilesOfBlock * kTile;
constexpr int kSumStride = kOutputs + 4;  // floats of a row of sums

// Of 8 kTiles rows.
template <int kTiles>
struct Shape {
    static constexpr int kRows = 8 * kTiles;
    static constexpr int kBlocks = kTiles == 1 ? 4 : 2;  // of inputs, of a round
    static constexpr int kStages = kTiles == 2 ? 4 : 3;  // as many as the smallest device has room for
    static constexpr u32 kRowBytes = kBlocks * kBlock * 2;
    static constexpr u32 kXBytes = kRows * kRowBytes;
    static constexpr u32 kWordBytes = kTilesOfBlock * kBlocks * 512;
    static constexpr int kPieces = kRowBytes / 16;  // of a row
};

// Keeps the compiler from computing a value again wherever it is used.
template <typename V>
__device__ __forceinline__ void keep(V& value) {
    asm volatile("" : "+r"(value));
}

// Grid: (ceil(tiles / 8) times as many as there are slabs of rows, which come first, splits).
template <typename T, int kTiles, bool kFine>
__device__ __forceinline__ void many(const Linear& args) {
    using S = Shape<kTiles>;
    extern __shared__ __align__(1024) unsigned char ring[];
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int slabs = ceil_div(args.rows, S::kRows);
    int slab = (int)blockIdx.x % slabs, tiles_before = (int)blockIdx.x / slabs * kTilesOfBlock;
    int first_row = slab * S::kRows, rows_here = min_int(args.rows - first_row, S::kRows);
    int rounds = ceil_div(args.blocks, S::kBlocks);
    int begin = (int)((i64)rounds * blockIdx.y / args.splits);
    int end = (int)((i64)rounds * (blockIdx.y + 1) / args.splits);
    u32 base = shared_address(ring);
    int of_block = kFine ? args.scale_count : 1;  // scales of an output
    u32 scale_bytes = of_block * 32;              // of a tile's block
    u32 stage_bytes = S::kXBytes + S::kWordBytes + kTilesOfBlock * S::kBlocks * scale_bytes;

    // A warp copies the words and scales of its tile itself; behind the last tile it takes the last again, whose products
    // are not stored then. Of scales there are pieces of 16 bytes, two or more of a block; one scale of all inputs is every
    // block's.
    u32 tile = min_int(tiles_before + warp, args.tile_count - 1);
    int block = begin * S::kBlocks;
    u32 words_from = (tile * args.blocks + block) * 32 + lane;
    u32 words_to = S::kXBytes + warp * (S::kBlocks * 512) + lane * 16;
    int pieces = 2 * of_block;                                             // of a block
    int stride = !kFine && args.scale_count == 0 ? 0 : pieces;             // from a block to the next
    u32 copies_scales = lane < S::kBlocks * pieces;
    u32 scales_from = tile * (stride == 0 ? 2 : args.blocks * stride) + (block + lane / pieces) * stride + lane % pieces;
    u32 scales_to = S::kXBytes + S::kWordBytes + warp * (S::kBlocks * scale_bytes) + lane * 16;
    keep(words_to);
    keep(scales_to);
    keep(copies_scales);
    auto copy_weights = [&](u32 stage, bool valid) {
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b)
            copy_where(valid && (S::kBlocks <= 2 || block + b < args.blocks), stage + words_to + b * 512, args.tiles + words_from + b * 32);
        copy_where(valid && copies_scales && (S::kBlocks <= 2 || block + lane / pieces < args.blocks), stage + scales_to,
                   reinterpret_cast<const uint4*>(args.scales) + scales_from);
        words_from += S::kBlocks * 32;
        scales_from += S::kBlocks * stride;
        block += S::kBlocks;
    };
    constexpr int kRowsAtOnce = kThreads / S::kPieces;
    int own_row = (int)threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces;
    u32 x_at = (u32)((first_row + own_row) * args.x_stride) + piece * 8;
    int inputs_left = args.inputs - piece * 8;
    u32 x_to = own_row * S::kRowBytes + ((piece ^ (own_row & 7)) << 4);
    int rows_left = rows_here - own_row;
    keep(x_to);
    keep(rows_left);
    keep(inputs_left);
    auto copy_rows = [&](u32 stage, int round) {
        if (round < end) {
            int input = round * (S::kBlocks * kBlock);
#pragma unroll
            for (int i = 0; i < (S::kRows + kRowsAtOnce - 1) / kRowsAtOnce; ++i) {
                // (Rows behind the last are what lies there: their products are not stored.)
                if (rows_left > i * kRowsAtOnce)
                    copy_async(stage + (x_to ^ (kRowsAtOnce * i & 4) << 4) + i * (kRowsAtOnce * S::kRowBytes),
                               args.x + (x_at + input + i * kRowsAtOnce * (u32)args.x_stride), input < inputs_left);
            }
        }
    };

    // The weights of the first rounds do not depend on the launch before.
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) copy_weights(base + i * stage_bytes, begin + i < end);
    wait_for_dependencies();
    launch_dependents();
#pragma unroll 1
    for (int i = 0; i < S::kStages - 1; ++i) {
        copy_rows(base + i * stage_bytes, begin + i);
        copy_commit();  // (the first group has the weights of all)
    }

    float acc[kTiles][4] = {};
    // Lane l names row l % 8 of piece l / 8 of four of a fragment's, u even and u odd.
    u32 even = (lane & 7) * S::kRowBytes + (((lane >> 3) ^ (lane & 7)) << 4);
    u32 scales_at = S::kXBytes + S::kWordBytes + warp * (S::kBlocks * scale_bytes) + g * of_block * 4;
    keep(even);
    u32 odd = even ^ 64;
    keep(odd);
    keep(scales_at);
    u32 filling = (S::kStages - 1) * stage_bytes;  // bytes into the ring
#pragma unroll 1
    for (int round = begin; round < end; ++round) {
        copy_wait<S::kStages - 2>();
        __syncthreads();  // what others copied is here, and what was read in the last round is free
        bool more = round + S::kStages - 1 < end;
        copy_weights(base + filling, more);
        copy_rows(base + filling, round + S::kStages - 1);
        copy_commit();
        filling = filling == (S::kStages - 1) * stage_bytes ? 0 : filling + stage_bytes;
        const unsigned char* stage = ring + filling;  // what is filled next is what is read now
        u32 rows_at = base + filling;
#pragma unroll
        for (int b = 0; b < S::kBlocks; ++b) {
            if (S::kBlocks > 2 && round * S::kBlocks + b >= args.blocks) break;
            uint4 words = *reinterpret_cast<const uint4*>(stage + words_to + b * 512);
            float part[kTiles][4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                if (kTiles >= 4) asm volatile("" ::: "memory");  // or too much is loaded ahead
                u32 a[2][4];
                weights_of(a, words, u);
                bool begins = kFine ? u % 2 == 0 || args.scale_count == 4 : u == 0;
                bool ends = kFine ? u % 2 == 1 || args.scale_count == 4 : u == 3;
                if (kFine && begins) {
#pragma unroll
                    for (int n = 0; n < kTiles; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) part[n][e] = 0.0f;
                }
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    u32 of_x[4];
                    load_pieces(of_x, rows_at + (u % 2 == 0 ? even : odd) + u / 2 * 128 + n * (8 * S::kRowBytes) + b * (kBlock * 2));
                    if (!kFine && begins) T::mma_first(part[n], a[0][0], a[0][1], a[0][2], a[0][3], of_x[0], of_x[1]);
                    else T::mma(part[n], a[0][0], a[0][1], a[0][2], a[0][3], of_x[0], of_x[1]);
                    T::mma(part[n], a[1][0], a[1][1], a[1][2], a[1][3], of_x[2], of_x[3]);
                }
                if (ends) {
                    int j = !kFine ? 0 : args.scale_count == 4 ? u : u / 2;
                    u32 both = *reinterpret_cast<const u32*>(stage + scales_at + b * scale_bytes + j * 4);
                    float low = F16::low(both), high = F16::high(both);
#pragma unroll
                    for (int n = 0; n < kTiles; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) acc[n][e] = fmaf(part[n][e], e < 2 ? low : high, acc[n][e]);
                }
            }
        }
    }
    copy_wait<0>();
    __syncthreads();

    // The sums in shared memory: [row, output of the block].
    float* sums = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            sums[(8 * n + 2 * t + (e & 1)) * kSumStride + warp * kTile + g + kHalf * (e >> 1)] = acc[n][e];
    __syncthreads();
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
        store_output<T>(args, first_row + row, output, of_row[at], args.gated ? of_row[at + kHalf] : 0.0f,
                        residual_of<T>(args, first_row + row, output));
    }
}

#define MANY(type, suffix, rows, name, fine)                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) ternary_many_##suffix##_n##rows##name(const Linear args) { \
        many<type, rows / 8, fine>(args);                                                                                \
    }
#define MANY_OF(type, suffix, name, fine) \
    MANY(type, suffix, 8, name, fine)     \
    MANY(type, suffix, 16, name, fine)    \
    MANY(type, suffix, 32, name, fine)
#define REDUCE(type, suffix)                                                                            \
    extern "C" __global__ void __launch_bounds__(kReducers) ternary_reduce_##suffix(const Linear args) { \
        if (args.gated) add_up<TwoBits<type, false>, true, kReducers>(args);                             \
        else add_up<TwoBits<type, false>, false, kReducers>(args);                                       \
    }

MANY_OF(F16, f16, , false)
MANY_OF(F16, f16, _fine, true)
REDUCE(F16, f16)
MANY_OF(BF16, bf16, _fine, true)
MANY_OF(BF16, bf16, , false)
REDUCE(BF16, bf16)
