// The product of up to 8 rows of x with ternary weights: x lies in shared memory, the weights stream past it.
//
// Each warp of a thread block multiplies one tile of 16 outputs with a share of the inputs, of which there are `splits`;
// the shares meet in shared memory at the end and are added up in their order. Every thread copies just what it will
// multiply itself, so its ring needs no barrier. Weights do not depend on the launch before: their copies begin before
// its end.
#include "ternary_linear/ternary.cuh"

#ifndef STAGES
#define STAGES 8
#endif
#ifndef EARLY
#define EARLY 0
#endif
#ifndef CHAINS
#define CHAINS 2
#endif

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kStages = STAGES;
constexpr int kChains = CHAINS;
constexpr u32 kWordBytes = 512;  // of a block of a tile
constexpr int kColumns = 8;
constexpr u32 kRowPad = 64;      // so that eight rows of x lie in different banks

// kScales: of a block of inputs; 0: one of all inputs.
template <typename T, int kScales>
__device__ __forceinline__ void few(const Linear& args) {
    extern __shared__ __align__(16) unsigned char shared[];  // the rings of the warps, then x
    __shared__ float sums[kWarps][kColumns][kTile + 1];
    constexpr u32 kScaleBytes = kScales * 4 * 32;
    constexpr u32 kStageBytes = kWordBytes + kScaleBytes;
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int tiles_of_block = kWarps / args.splits;
    int first_tile = (int)blockIdx.x * tiles_of_block;
    int tile = first_tile + warp / args.splits, share = warp % args.splits;
    int begin = args.blocks * share / args.splits, count = args.blocks * (share + 1) / args.splits - begin;
    if (tile >= args.tile_count) count = 0;

    u32 base = shared_address(shared);
    u32 ring = base + warp * (kStages * kStageBytes);
    const uint4* words = args.tiles + ((i64)tile * args.blocks + begin) * 32 + lane;
    const u32* scales = args.scales + (((i64)tile * args.blocks + begin) * 8 + g) * kScales;
    auto copy = [&](int slot, int ahead, bool valid) {  // `ahead` of `words`
        if (valid) {
            copy_async(ring + slot * kStageBytes + lane * 16, words + ahead * 32);
            if constexpr (kScales != 0)
                copy_few_async<kScales * 4>(
                    ring + slot * kStageBytes + kWordBytes + lane * (kScales * 4), scales + ahead * (8 * kScales));
        }
        copy_commit();
    };
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) copy(stage, stage, stage < count);
    u32 of_row = 0;
    if (kScales == 0 && tile < args.tile_count) of_row = args.scales[tile * 8 + g];
    wait_for_dependencies();
#if EARLY
    launch_dependents();
#endif

    // x, rows of `blocks` blocks; behind the last input there are zeros.
    unsigned char* x = shared + kWarps * kStages * kStageBytes;
    u32 x_bytes = args.blocks * (kBlock * 2) + kRowPad;
    {
        constexpr int kAtATime = 8;
        int pieces = args.blocks * (kBlock / 8);
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
    const unsigned char* own_x = x + min_int(g, args.rows - 1) * x_bytes + begin * (kBlock * 2) + t * 16;
    const unsigned char* own_ring = shared + warp * (kStages * kStageBytes);
    float acc[4] = {};
    float sum_of_row[kChains][4] = {};
    for (int first = 0; first < count; first += kStages) {
#pragma unroll
        for (int slot = 0; slot < kStages; ++slot) {
            int i = first + slot;
            if (i >= count) break;
            copy_wait<kStages - 2>();
            uint4 block = *reinterpret_cast<const uint4*>(own_ring + slot * kStageBytes + lane * 16);
            u32 scale[kScales == 0 ? 1 : kScales];
            if constexpr (kScales == 1)
                scale[0] = *reinterpret_cast<const u32*>(own_ring + slot * kStageBytes + kWordBytes + lane * 4);
            if constexpr (kScales == 2) {
                uint2 two = *reinterpret_cast<const uint2*>(own_ring + slot * kStageBytes + kWordBytes + lane * 8);
                scale[0] = two.x, scale[1] = two.y;
            }
            if constexpr (kScales == 4) {
                uint4 four = *reinterpret_cast<const uint4*>(own_ring + slot * kStageBytes + kWordBytes + lane * 16);
                scale[0] = four.x, scale[1] = four.y, scale[2] = four.z, scale[3] = four.w;
            }
            copy((slot + kStages - 1) % kStages, slot + kStages - 1, i + kStages - 1 < count);
            float part[kChains][4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                uint4 b = *reinterpret_cast<const uint4*>(own_x + slot * (kBlock * 2) + u * 64);
                u32 a[2][4];
                weights_of(a, block, u);
                // The chains: u 0, 1 and u 2, 3, or with few scales the two halves of each u.
                constexpr int kPerScale = kScales == 0 ? 4 : 4 / kScales;
                bool begins = kScales != 0 && u % kPerScale == 0;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int chain = half % kChains;
                    float(&sum)[4] = kScales == 0 ? sum_of_row[chain] : part[chain];
                    u32 b0 = half == 0 ? b.x : b.z, b1 = half == 0 ? b.y : b.w;
                    if (begins && (half == 0 || kChains == 2)) T::mma_first(sum, a[half][0], a[half][1], a[half][2], a[half][3], b0, b1);
                    else T::mma(sum, a[half][0], a[half][1], a[half][2], a[half][3], b0, b1);
                }
                if constexpr (kScales != 0) {
                    if ((u + 1) % kPerScale == 0) {
                        u32 both = scale[u / kPerScale];
                        float low = F16::low(both), high = F16::high(both);
#pragma unroll
                        for (int chain = 0; chain < kChains; ++chain)
#pragma unroll
                            for (int e = 0; e < 4; ++e) acc[e] = fmaf(part[chain][e], e < 2 ? low : high, acc[e]);
                    }
                }
            }
        }
        words += kStages * 32;
        scales += kStages * 8 * kScales;
        own_x += kStages * (kBlock * 2);
#if !EARLY
        // (the next launch has its turn when the weights of this one are asked for)
#endif
    }
#if !EARLY
    launch_dependents();
#endif
    if constexpr (kScales == 0) {
        float low = F16::low(of_row), high = F16::high(of_row);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float sum = sum_of_row[0][e];
            if constexpr (kChains == 2) sum += sum_of_row[1][e];
            acc[e] = sum * (e < 2 ? low : high);
        }
    }
    // acc: outputs g and g + 8 of rows 2t and 2t + 1
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        if (2 * t + (e & 1) < args.rows) sums[warp][2 * t + (e & 1)][g + kHalf * (e >> 1)] = acc[e];
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
