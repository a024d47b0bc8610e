// The product of up to 8 rows of x with ternary weights: x lies in shared memory, the weights stream past it.
//
// Each warp of a thread block multiplies one tile of 16 outputs with a share of the inputs, of which there are `splits`;
// the shares meet in shared memory at the end and are added up in their order. A warp copies just what it will multiply
// itself, so its ring needs no barrier. Weights do not depend on the launch before: their copies begin before its end, and
// what the ring has no room for is brought into L2.
#include "ternary_linear/ternary.cuh"


constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = 4;
constexpr int kFilled = kStages;
constexpr int kPair = 2;                  // blocks of inputs of a stage
constexpr u32 kWordBytes = kPair * 512;   // of a stage of a warp
constexpr int kColumns = 8;
constexpr u32 kPairBytes = kPair * kBlock * 2;  // of a row of x
constexpr u32 kRowPad = 64;               // so that eight rows of x lie in different banks

// kScales: of a block of inputs; 0: one of all inputs.
template <typename T, int kScales>
__device__ __forceinline__ void few(const Linear& args) {
    extern __shared__ __align__(16) unsigned char shared[];  // the rings of the warps, then x
    __shared__ float sums[kWarps][kColumns][kTile + 1];
    constexpr u32 kScaleBytes = kPair * 32 * kScales;
    constexpr u32 kStageBytes = kWordBytes + kScaleBytes;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int tiles_of_block = kWarps / args.splits;
    int first_tile = (int)blockIdx.x * tiles_of_block;
    int tile = first_tile + warp / args.splits, share = warp % args.splits;
    int pairs = args.blocks / kPair;
    int begin = pairs * share / args.splits, count = pairs * (share + 1) / args.splits - begin;
    if (tile >= args.tile_count) count = 0;

    u32 ring = shared_address(shared) + warp * (kStages * kStageBytes);
    i64 place = (i64)tile * args.blocks + begin * kPair;
    const uint4* words = args.tiles + place * 32 + lane;
    const uint4* scales = reinterpret_cast<const uint4*>(args.scales) + place * (2 * kScales) + lane;
    bool copies_scales = lane < kPair * 2 * kScales;
    auto copy = [&](int slot, int ahead, bool valid) {  // `ahead` of `words`
        u32 stage = ring + slot * kStageBytes + lane * 16;
        copy_where(valid, stage, words + ahead * (kPair * 32));
        copy_where(valid, stage + 512, words + ahead * (kPair * 32) + 32);
        if constexpr (kScales != 0) copy_where(valid && copies_scales, stage + kWordBytes, scales + ahead * (kPair * 2 * kScales));
        copy_commit();
    };
#pragma unroll
    for (int stage = 0; stage < kFilled; ++stage) copy(stage, stage, stage < count);
    if (lane == 0 && count > kFilled) {
        prefetch(words + kFilled * (kPair * 32), (count - kFilled) * kWordBytes);
    }
    u32 of_row = 0;
    if (kScales == 0 && tile < args.tile_count) of_row = args.scales[tile * 8 + g];
    wait_for_dependencies();
    launch_dependents();

    // x, rows of `pairs` pairs of blocks; behind the last input there are zeros.
    unsigned char* x = shared + kWarps * kStages * kStageBytes;
    u32 x_bytes = pairs * kPairBytes + kRowPad;
    {
        constexpr int kAtATime = 8;
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
    __syncthreads();

    // Rows behind the last are the last again: their products are not stored.
    const unsigned char* own_x = x + min_int(g, args.rows - 1) * x_bytes + begin * kPairBytes + t * 16;
    const unsigned char* own_ring = shared + warp * (kStages * kStageBytes);
    float acc[kPair][4] = {};
    uint4 next_block[kPair];
    u32 next_both[kPair][kScales + 1];
    auto load = [&](int slot) {
        const unsigned char* stage = own_ring + slot * kStageBytes;
#pragma unroll
        for (int b = 0; b < kPair; ++b) {
            next_block[b] = *reinterpret_cast<const uint4*>(stage + b * 512 + lane * 16);
#pragma unroll
            for (int j = 0; j < kScales; ++j)
                next_both[b][j] = *reinterpret_cast<const u32*>(stage + kWordBytes + ((b * 8 + g) * kScales + j) * 4);
        }
    };
    copy_wait<kStages - 1>();
    if (kScales != 0) __syncwarp();
    load(0);
    for (int first = 0; first < count; first += kStages) {
#pragma unroll
        for (int slot = 0; slot < kStages; ++slot) {
            int i = first + slot;
            if (i >= count) break;
            uint4 block[kPair];
            u32 both[kPair][kScales + 1];
#pragma unroll
            for (int b = 0; b < kPair; ++b) {
                block[b] = next_block[b];
#pragma unroll
                for (int j = 0; j < kScales; ++j) both[b][j] = next_both[b][j];
            }
            copy_wait<kStages - 2>();
            if (kScales != 0) __syncwarp();
            load((slot + 1) % kStages);
            copy(slot, slot + kStages, i + kStages < count);
            float part[kPair][4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                constexpr int kPerScale = kScales == 0 ? 4 : 4 / kScales;
#pragma unroll
                for (int b = 0; b < kPair; ++b) {
                    uint4 from_x = *reinterpret_cast<const uint4*>(own_x + slot * kPairBytes + b * (kBlock * 2) + u * 64);
                    u32 a[2][4];
                    weights_of(a, block[b], u);
                    float(&sum)[4] = kScales == 0 ? acc[b] : part[b];
                    if (kScales != 0 && u % kPerScale == 0) T::mma_first(sum, a[0][0], a[0][1], a[0][2], a[0][3], from_x.x, from_x.y);
                    else T::mma(sum, a[0][0], a[0][1], a[0][2], a[0][3], from_x.x, from_x.y);
                    T::mma(sum, a[1][0], a[1][1], a[1][2], a[1][3], from_x.z, from_x.w);
                    if (kScales != 0 && (u + 1) % kPerScale == 0) {
                        float low = F16::low(both[b][u / kPerScale]), high = F16::high(both[b][u / kPerScale]);
#pragma unroll
                        for (int e = 0; e < 4; ++e) acc[0][e] = fmaf(part[b][e], e < 2 ? low : high, acc[0][e]);
                    }
                }
            }
        }
        words += kStages * (kPair * 32);
        scales += kStages * (kPair * 2 * kScales);
        own_x += kStages * kPairBytes;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if constexpr (kScales == 0) acc[0][e] = (acc[0][e] + acc[1][e]) * (e < 2 ? F16::low(of_row) : F16::high(of_row));
        // acc: outputs g and g + 8 of rows 2t and 2t + 1
        if (2 * t + (e & 1) < args.rows) sums[warp][2 * t + (e & 1)][g + kHalf * (e >> 1)] = acc[0][e];
    }
    __syncthreads();
    int outputs = args.gated ? kHalf : kTile;  // of a tile
    for (int i = threadIdx.x; i < tiles_of_block * outputs * args.rows; i += kThreads) {
        int m = i % outputs, of_block = i / outputs % tiles_of_block, row = i / (outputs * tiles_of_block);
        int output = (first_tile + of_block) * outputs + m;
        if (output >= args.outputs) continue;
        float sum = 0.0f, up = 0.0f;
        for (int w = of_block * args.splits; w < (of_block + 1) * args.splits; ++w) {
            sum += sums[w][row][m];
            if (args.gated) up += sums[w][row][m + kHalf];
        }
        store_output<T>(args, row, output, sum, up);
    }
}

#define FEW(type, suffix, scales)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) ternary_few_##suffix##_s##scales(const Linear args) {     \
        few<type, scales>(args);                                                                                        \
    }
#define FEW_OF(type, suffix) FEW(type, suffix, 0) FEW(type, suffix, 1) FEW(type, suffix, 2) FEW(type, suffix, 4)

FEW_OF(F16, f16)
FEW_OF(BF16, bf16)
