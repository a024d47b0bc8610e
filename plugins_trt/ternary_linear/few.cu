// The product of up to 4 rows of x with ternary weights, in integers: x lies in shared memory, the weights stream past it.
//
// A row of x becomes 16-bit integers, of which its largest element is 32000: the error is below the 2^-16 th part of that,
// and so of a product below the one that rounding to bfloat16 or float16 makes. Each integer is two signed bytes, and each
// of them a column of a tensor-core operand: sums are exact until they meet their scale. The two bits of a weight are a
// signed number of two bits: shifted to the head of a byte and masked they are 0, +64 or -64. So four weights take one
// mask and a shift, half of what they take as 16-bit floats.
//
// A thread block, one on each multiprocessor, takes as many tiles of 16 outputs as the others. Its warps multiply a tile
// each, or share one: each then takes a share of the inputs, and the shares are added up in their order at the end. A warp
// copies just what it will multiply itself, tile after tile, so its ring needs no barrier. Weights do not depend on the
// launch before: their copies begin before its end, beside it, for there is room for two thread blocks.
#include "ternary_linear/ternary.cuh"


constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200
constexpr int kStages = 3;  // these have 99 KiB of shared memory
#else
constexpr int kStages = 6;
#endif
constexpr int kPair = 2;                 // blocks of inputs of a stage
constexpr u32 kWordBytes = kPair * 512;  // of a stage of a warp
constexpr int kRows = 4;                 // at most
constexpr u32 kColumnPad = 64;           // so that eight columns lie in different banks
constexpr int kSumStride = kTile + 4;    // floats of a row of sums
constexpr float kLargest = 32000.0f;     // of a row's integers
constexpr float kTiny = 1e-30f;          // what is smaller may become 0
constexpr float kMagic = 12582912.0f;    // 1.5 * 2^23: what is added to it lies in its lowest bits as an integer

// Sixteen inputs as integers: of the registers of both bytes there are four, which hold two of `first` and two of `second`.
template <typename T>
__device__ __forceinline__ void split(uint4& high, uint4& low, const uint4& first, const uint4& second, float factor) {
    const u32 from[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
    u32 highs[4], lows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 number[2][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            // (128 more: then the upper byte is the nearer one, and the lower one lacks the sign bit.)
            number[h][0] = __float_as_uint(fmaf(T::low(from[h][i]), factor, kMagic + 128.0f));
            number[h][1] = __float_as_uint(fmaf(T::high(from[h][i]), factor, kMagic + 128.0f));
        }
        u32 left = bytes_of(number[1][0], number[0][0], 0x5140), right = bytes_of(number[1][1], number[0][1], 0x5140);
        lows[i] = bytes_of(left, right, 0x5410) ^ 0x80808080u;
        highs[i] = bytes_of(left, right, 0x7632);
    }
    high = {highs[0], highs[1], highs[2], highs[3]};
    low = {lows[0], lows[1], lows[2], lows[3]};
}

// The larger ones of the halves of two pairs without their signs, in the place of the higher half.
__device__ __forceinline__ u32 larger(u32 a, u32 pair) {
    u32 high = pair & 0x7fff0000u, low = (pair << 16) & 0x7fff0000u;
    a = a > high ? a : high;
    return a > low ? a : low;
}

// kScales: of a block of inputs; 0: one of all inputs. Shared memory: the rings of the warps, the bytes of x
// [row, high or low, input], and the sums [tile, share, row].
template <typename T, int kScales>
__device__ __forceinline__ void few(const Linear& args) {
    extern __shared__ __align__(16) unsigned char shared[];
    constexpr u32 kScaleBytes = kPair * 32 * kScales;
    constexpr u32 kStageBytes = kWordBytes + kScaleBytes;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int slots = kWarps / args.splits;  // tiles at a time
    int share = warp % args.splits;
    int first_tile = (int)((i64)args.tile_count * blockIdx.x / gridDim.x);
    int tiles_here = (int)((i64)args.tile_count * (blockIdx.x + 1) / gridDim.x) - first_tile;
    int pairs = args.blocks / kPair;
    int begin = pairs * share / args.splits, count = pairs * (share + 1) / args.splits - begin;
    int tile = warp / args.splits;  // of the thread block's
    int total = tile < tiles_here ? ceil_div(tiles_here - tile, slots) * count : 0;  // pairs of all tiles of the warp

    u32 ring = shared_address(shared) + warp * (kStages * kStageBytes);
    i64 place = (i64)(first_tile + tile) * args.blocks + begin * kPair;
    const uint4* words = args.tiles + place * 32 + lane;
    const uint4* scales = reinterpret_cast<const uint4*>(args.scales) + place * (2 * kScales) + lane;
    bool copies_scales = lane < kPair * 2 * kScales;
    int jump = slots * args.blocks - count * kPair;  // from the end of a tile's share to the next tile's, in blocks
    int until_jump = count, to_copy = total;
    auto copy = [&](int slot) {
        u32 stage = ring + slot * kStageBytes + lane * 16;
        bool valid = to_copy > 0;
        copy_where(valid, stage, words);
        copy_where(valid, stage + 512, words + 32);
        if constexpr (kScales != 0) copy_where(valid && copies_scales, stage + kWordBytes, scales);
        copy_commit();
        --to_copy;
        int step = kPair;
        if (--until_jump == 0) step += jump, until_jump = count;
        words += step * 32;
        scales += step * (2 * kScales);
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage);
    wait_for_dependencies();
    launch_dependents();

    unsigned char* x = shared + kWarps * kStages * kStageBytes;
    u32 column_bytes = args.blocks * kBlock + kColumnPad;
    float* sums = reinterpret_cast<float*>(x + 2 * args.rows * column_bytes);
    u32* largest = reinterpret_cast<u32*>(sums);  // [row, warp], before there are sums
    __shared__ float unit[kRows];                 // of a row's integers
    // Threads take sixteen inputs each: eight, and the eight that are 32 behind them. Behind the last input there are zeros.
    auto load = [&](uint4 (&two)[2], int row, int unit_of_x) {
        int input = unit_of_x / 4 * 64 + unit_of_x % 4 * 8;
        const u16* from = args.x + row * args.x_stride + input;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            two[h] = {0, 0, 0, 0};
            if (input + 32 * h < args.inputs) two[h] = *reinterpret_cast<const uint4*>(from + 32 * h);
        }
    };
    int units = args.blocks * (kBlock / 16);
    for (int row = 0; row < args.rows; ++row) {
        u32 most = 0;
#pragma unroll 2
        for (int i = threadIdx.x; i < units; i += kThreads) {
            uint4 two[2];
            load(two, row, i);
#pragma unroll
            for (int h = 0; h < 2; ++h)
                most = larger(larger(larger(larger(most, two[h].x), two[h].y), two[h].z), two[h].w);
        }
        most = warp_largest(most);
        if (lane == 0) largest[row * kWarps + warp] = most;
    }
    __syncthreads();
    for (int row = 0; row < args.rows; ++row) {
        u32 most = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) most = most > largest[row * kWarps + w] ? most : largest[row * kWarps + w];
        float size = T::high(most);
        size = size < kTiny ? kTiny : size;  // (not so what is no number)
        float factor = kLargest / size;
        if (threadIdx.x == 0) unit[row] = size / kLargest * (1.0f / 64);
        unsigned char* to = x + 2 * row * column_bytes;
#pragma unroll 2
        for (int i = threadIdx.x; i < units; i += kThreads) {
            uint4 two[2], high, low;
            load(two, row, i);
            split<T>(high, low, two[0], two[1], factor);
            *reinterpret_cast<uint4*>(to + i * 16) = high;
            *reinterpret_cast<uint4*>(to + column_bytes + i * 16) = low;
        }
    }
    __syncthreads();

    // Columns behind the last are the last again: their products are not stored.
    u32 own_x = min_int(g, 2 * args.rows - 1) * column_bytes + begin * (kPair * kBlock) + t * 16;
    u32 of_x = own_x;
    const unsigned char* own_ring = shared + warp * (kStages * kStageBytes);
    float acc[2] = {};      // outputs g and g + 8 of row t
    i32 whole[kPair][4] = {};  // of one scale of all inputs
    int until_end = count;  // of a tile's share
    for (int first = 0; first < total; first += kStages) {
#pragma unroll
        for (int slot = 0; slot < kStages; ++slot) {
            if (first + slot >= total) break;
            copy_wait<kStages - 2>();
            if (kScales != 0) __syncwarp();
            const unsigned char* stage = own_ring + slot * kStageBytes;
            uint4 block[kPair];
            u32 both[kPair][kScales + 1];
#pragma unroll
            for (int b = 0; b < kPair; ++b) {
                block[b] = *reinterpret_cast<const uint4*>(stage + b * 512 + lane * 16);
#pragma unroll
                for (int j = 0; j < kScales; ++j)
                    both[b][j] = *reinterpret_cast<const u32*>(stage + kWordBytes + ((b * 8 + g) * kScales + j) * 4);
            }
            copy((slot + kStages - 1) % kStages);
#pragma unroll
            for (int b = 0; b < kPair; ++b) {
                uint4 x0 = *reinterpret_cast<const uint4*>(x + of_x + b * kBlock);       // inputs 0 to 63
                uint4 x1 = *reinterpret_cast<const uint4*>(x + of_x + b * kBlock + 64);  // 64 to 127
                const u32 b0[4] = {x0.x, x0.y, x0.z, x0.w}, b1[4] = {x1.x, x1.y, x1.z, x1.w};
                i32 part[kScales == 0 ? 1 : kScales][4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    u32 a[4] = {block[b].x << (2 * i), block[b].z << (2 * i), block[b].y << (2 * i), block[b].w << (2 * i)};
                    if constexpr (kScales == 4) {  // the eights of a register are of two groups
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            u32 mask = h == 0 ? 0xc000c000u : 0x00c000c0u;
                            mma_bytes(part[h], a[0] & mask, a[1] & mask, b0[i]);
                            mma_bytes(part[2 + h], a[2] & mask, a[3] & mask, b1[i]);
                        }
                    } else {
#pragma unroll
                        for (int j = 0; j < 4; ++j) a[j] &= 0xc0c0c0c0u;
                        if constexpr (kScales == 2) {
                            mma_bytes(part[0], a[0], a[1], b0[i]);
                            mma_bytes(part[1], a[2], a[3], b1[i]);
                        } else {
                            mma_bytes(kScales == 0 ? whole[b] : part[0], a, b0[i], b1[i]);
                        }
                    }
                }
#pragma unroll
                for (int j = 0; j < kScales; ++j) {
                    acc[0] = fmaf((float)(part[j][0] * 256 + part[j][1]), F16::low(both[b][j]), acc[0]);
                    acc[1] = fmaf((float)(part[j][2] * 256 + part[j][3]), F16::high(both[b][j]), acc[1]);
                }
            }
            of_x += kPair * kBlock;
            if (--until_end == 0) {
                until_end = count;
                of_x = own_x;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    if constexpr (kScales == 0) {
                        acc[half] = (float)(whole[0][2 * half] + whole[1][2 * half]) * 256.0f +
                                    (float)(whole[0][2 * half + 1] + whole[1][2 * half + 1]);
                        whole[0][2 * half] = whole[1][2 * half] = whole[0][2 * half + 1] = whole[1][2 * half + 1] = 0;
                    }
                    if (t < args.rows)
                        sums[((tile * args.splits + share) * args.rows + t) * kSumStride + g + kHalf * half] = acc[half];
                    acc[half] = 0.0f;
                }
                tile += slots;
            }
        }
    }
    if (count == 0) {  // more shares than pairs
        for (; tile < tiles_here; tile += slots)
            for (int i = lane; i < args.rows * kTile; i += 32)
                sums[((tile * args.splits + share) * args.rows + i / kTile) * kSumStride + i % kTile] = 0.0f;
    }
    __syncthreads();
    int outputs = args.gated ? kHalf : kTile;  // of a tile
    for (int i = threadIdx.x; i < tiles_here * outputs * args.rows; i += kThreads) {
        int m = i % outputs, of_block = i / outputs % tiles_here, row = i / (outputs * tiles_here);
        int output = (first_tile + of_block) * outputs + m;
        if (output >= args.outputs) continue;
        float sum = 0.0f, up = 0.0f;
        const float* from = sums + (of_block * args.splits * args.rows + row) * kSumStride + m;
#pragma unroll 4
        for (int s = 0; s < args.splits; ++s, from += args.rows * kSumStride) {
            sum += from[0];
            if (args.gated) up += from[kHalf];
        }
        if constexpr (kScales == 0) {
            u32 both = args.scales[(first_tile + of_block) * 8 + m % 8];
            sum *= m < 8 ? F16::low(both) : F16::high(both);
            up *= F16::high(both);
        }
        store_output<T>(args, row, output, sum * unit[row] * (1.0f / kUnit), up * unit[row] * (1.0f / kUnit));
    }
}

#define FEW(type, suffix, scales)                                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) ternary_few_##suffix##_s##scales(const Linear args) { \
        few<type, scales>(args);                                                                                              \
    }
#define FEW_OF(type, suffix) FEW(type, suffix, 0) FEW(type, suffix, 1) FEW(type, suffix, 2) FEW(type, suffix, 4)

FEW_OF(F16, f16)
FEW_OF(BF16, bf16)
