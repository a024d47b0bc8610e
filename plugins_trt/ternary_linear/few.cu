// The product of one or two rows of x with ternary weights: x lies in shared memory, the weights stream past it.
//
// A thread block takes as many tiles of 16 outputs as the others. Its warps multiply a tile each, or share one: each then
// takes a share of the inputs, and the shares are added up in their order at the end. A warp copies just what it will
// multiply itself, tile after tile, so its ring needs no barrier. Weights do not depend on the launch before: their copies
// begin before its end, beside it, for there is room for two thread blocks. There is one for each multiprocessor, also
// where some have less to do: those of the next launch then find the same room everywhere.
#include "ternary_linear/ternary.cuh"


constexpr int kWarpBits = 4;
constexpr int kWarps = 1 << kWarpBits;
constexpr int kThreads = 32 * kWarps;
constexpr int kStages = 3;
constexpr int kPair = 2;                  // blocks of inputs of a stage
constexpr u32 kWordBytes = kPair * 512;   // of a stage of a warp
constexpr u32 kPairBytes = kPair * kBlock * 2;  // of a row of x
constexpr u32 kRowPad = 64;               // so that two rows of x lie in different banks
constexpr int kSumStride = kTile + 4;     // floats of a row of sums

// kOne: there is one row. kScales: of a block of inputs; 0: one of all inputs. Shared memory: the rings of the warps, x, and the sums
// [tile, share, row].
template <typename T, int kScales, bool kOne>
__device__ __forceinline__ void few(const Linear& args) {
    extern __shared__ __align__(16) unsigned char shared[];
    constexpr u32 kScaleBytes = kPair * 32 * kScales;
    constexpr u32 kStageBytes = kWordBytes + kScaleBytes;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    constexpr int kEach = kOne ? 2 : 1;  // (the other columns of an mma are nobody's)
    int shift = args.splits, slots = kWarps >> shift;  // tiles at a time
    int share = warp & ((1 << shift) - 1);
    int first_tile = (int)((u32)args.tile_count * blockIdx.x / gridDim.x);
    int tiles_here = (int)((u32)args.tile_count * (blockIdx.x + 1) / gridDim.x) - first_tile;
    int pairs = args.blocks / kPair;
    int begin = pairs * share >> shift, count = (pairs * (share + 1) >> shift) - begin;
    int tile = warp >> shift;  // of the thread block's
    int total = tile < tiles_here ? (tiles_here - tile + slots - 1 >> kWarpBits - shift) * count : 0;  // pairs of all tiles of the warp

    u32 ring = shared_address(shared) + warp * (kStages * kStageBytes);
    u32 to_come = (u32)(first_tile + tile) * args.blocks + begin * kPair;  // the next block
    bool copies_scales = lane < kPair * 2 * kScales;
    int jump = slots * args.blocks - count * kPair;  // from the end of a tile's share to the next tile's, in blocks
    int until_jump = count, to_copy = total;
    auto copy = [&](int slot) {
        u32 stage = ring + slot * kStageBytes + lane * 16;
        bool valid = to_copy > 0;
        const uint4* words = args.tiles + ((i64)to_come * 32 + lane);
        copy_where(valid, stage, words);
        copy_where(valid, stage + 512, words + 32);
        if constexpr (kScales != 0) {
            const uint4* scales = reinterpret_cast<const uint4*>(args.scales) + ((i64)to_come * (2 * kScales) + lane);
            copy_where(valid && copies_scales, stage + kWordBytes, scales);
        }
        copy_commit();
        --to_copy;
        to_come += kPair;
        if (--until_jump == 0) to_come += jump, until_jump = count;
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    wait_for_dependencies();
    launch_dependents();

    // x, rows of `pairs` pairs of blocks; behind the last input there are zeros.
    unsigned char* x = shared + kWarps * kStages * kStageBytes;
    u32 x_bytes = pairs * kPairBytes + kRowPad;
    {
        constexpr int kAtATime = 4;
        int pieces = pairs * (kPairBytes / 16);
        for (int row = 0; row < args.rows; ++row) {
            const u16* from = args.x + row * args.x_stride;
            unsigned char* to = x + row * x_bytes;
            for (int first = threadIdx.x; first < pieces; first += kAtATime * kThreads) {
                uint4 value[kAtATime];
#pragma unroll
                for (int i = 0; i < kAtATime; ++i) {
                    int piece = first + i * kThreads;
                    value[i] = {0, 0, 0, 0};
                    if (piece * 8 < args.inputs) value[i] = *reinterpret_cast<const uint4*>(from + piece * 8);
                }
#pragma unroll
                for (int i = 0; i < kAtATime; ++i) {
                    int piece = first + i * kThreads;
                    if (piece < pieces) *reinterpret_cast<uint4*>(to + piece * 16) = value[i];
                }
            }
        }
    }
    float* sums = reinterpret_cast<float*>(x + args.rows * x_bytes);
    __syncthreads();

    // Rows behind the last are the last again: their products are not stored.
    // Lane l names row l % 8 of piece l / 8 of four of a fragment's.
    u32 own_x = shared_address(x) + min_int(lane & 7, args.rows - 1) * x_bytes + begin * kPairBytes + (lane >> 3) * 16;
    u32 of_x = own_x;
    const unsigned char* own_ring = shared + warp * (kStages * kStageBytes);
    float acc[kScales == 0 ? kPair : 1][4] = {};
    uint4 block[kPair];
    u32 both[kPair][kScales + 1];
    auto load = [&](int slot) {
        const unsigned char* stage = own_ring + slot * kStageBytes;
#pragma unroll
        for (int b = 0; b < kPair; ++b) {
            block[b] = *reinterpret_cast<const uint4*>(stage + b * 512 + lane * 16);
#pragma unroll
            for (int j = 0; j < kScales; ++j)
                both[b][j] = *reinterpret_cast<const u32*>(stage + kWordBytes + ((b * 8 + g) * kScales + j) * 4);
        }
    };
    int until_end = count;  // of a tile's share
    for (int first = 0; first < total; first += kStages) {
#pragma unroll
        for (int slot = 0; slot < kStages; ++slot) {
            if (first + slot >= total) break;
            copy_wait<kStages - 2>();
            if (kScales != 0) __syncwarp();
            load(slot);
            copy((slot + kStages - 1) % kStages);
            float part[kPair][4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                constexpr int kPerScale = kScales == 0 ? 4 : 4 / kScales;
#pragma unroll
                for (int b = 0; b < kPair; ++b) {
                    u32 from_x[4];
                    load_pieces(from_x, of_x + b * (kBlock * 2) + u * 64);
                    u32 a[2][4];
                    weights_of(a, block[b], u);
                    float(&sum)[4] = kScales == 0 ? acc[kScales == 0 ? b : 0] : part[b];
                    if (kScales != 0 && u % kPerScale == 0) T::mma_first(sum, a[0][0], a[0][1], a[0][2], a[0][3], from_x[0], from_x[1]);
                    else T::mma(sum, a[0][0], a[0][1], a[0][2], a[0][3], from_x[0], from_x[1]);
                    T::mma(sum, a[1][0], a[1][1], a[1][2], a[1][3], from_x[2], from_x[3]);
                    if (kScales != 0 && (u + 1) % kPerScale == 0) {
                        float low = F16::low(both[b][u / kPerScale]), high = F16::high(both[b][u / kPerScale]);
#pragma unroll
                        for (int e = 0; e < 4; e += kEach) acc[0][e] = fmaf(part[b][e], e < 2 ? low : high, acc[0][e]);
                    }
                }
            }
            of_x += kPairBytes;
            if (--until_end == 0) {  // acc: outputs g and g + 8 of rows 2t and 2t + 1
                until_end = count;
                of_x = own_x;
#pragma unroll
                for (int e = 0; e < 4; e += kEach) {
                    float sum = acc[0][e];
                    acc[0][e] = 0.0f;
                    if constexpr (kScales == 0) sum += acc[1][e], acc[1][e] = 0.0f;
                    int row = 2 * t + (e & 1);
                    if (row < args.rows)
                        sums[(((tile << shift) + share) * args.rows + row) * kSumStride + g + kHalf * (e >> 1)] = sum;
                }
                tile += slots;
            }
        }
    }
    if (count == 0) {  // more shares than pairs
        for (; tile < tiles_here; tile += slots)
            for (int i = lane; i < args.rows * kTile; i += 32)
                sums[(((tile << shift) + share) * args.rows + i / kTile) * kSumStride + i % kTile] = 0.0f;
    }
    __syncthreads();
    int bits = args.gated ? 3 : 4, outputs = 1 << bits;  // of a tile
    for (int i = threadIdx.x; i < tiles_here * outputs * args.rows; i += kThreads) {
        int m = i & (outputs - 1), row = kOne ? 0 : (i >> bits) / tiles_here, of_block = (i >> bits) - row * tiles_here;
        int output = first_tile * outputs + of_block * outputs + m;
        if (output >= args.outputs) continue;
        float sum = 0.0f, up = 0.0f;
        const float* from = sums + ((of_block << shift) * args.rows + row) * kSumStride + m;
#pragma unroll 4
        for (int s = 0; s < 1 << shift; ++s, from += args.rows * kSumStride) {
            sum += from[0];
            if (args.gated) up += from[kHalf];
        }
        if constexpr (kScales == 0) {
            u32 both = args.scales[(first_tile + of_block) * 8 + m % 8];
            sum *= m < 8 ? F16::low(both) : F16::high(both);
            up *= F16::high(both);
        }
        store_output<T>(args, row, output, sum, up, residual_of<T>(args, row, output));
    }
}

#if __CUDA_ARCH__ == 1200
constexpr int kResident = 1;  // (there is no room for a second one)
#else
constexpr int kResident = 2;
#endif

// With more scales than one of a block, or two rows, there are too few registers for two thread blocks.
#define FEW(type, suffix, scales, rows)                                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, scales < 2 && rows == 1 ? kResident : 1) ternary_few_##suffix##_s##scales##_n##rows(const Linear args) { \
        few<type, scales, rows == 1>(args);                                                                             \
    }
#define FEW_OF(type, suffix, rows) \
    FEW(type, suffix, 0, rows) FEW(type, suffix, 1, rows) FEW(type, suffix, 2, rows) FEW(type, suffix, 4, rows)

FEW_OF(F16, f16, 1)
FEW_OF(F16, f16, 2)
FEW_OF(BF16, bf16, 1)
FEW_OF(BF16, bf16, 2)
