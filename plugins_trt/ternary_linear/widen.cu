// Ternary weights into 16-bit ones, in the order of the checkpoint: for products of so many rows that a matrix product of
// 16-bit operands pays for it. A warp takes 8 outputs x 128 inputs, a half of what 512 bytes of the tiles hold.
#include "ternary_linear/ternary.cuh"

struct Widen {
    const u32* tiles;   // [tiles, blocks, 32, 4]
    const u32* scales;  // [tiles, blocks, 8, scales of a block] (or of a row [tiles, 8]): of outputs g and g + 8
    u16* out;           // [rows, inputs]
    i32 inputs;
    i32 blocks;
    i32 scale_count;    // scales of a block; 0: one of all inputs
    i32 first;          // of the octets of outputs
    i32 rows;
    i32 gate_octets;    // of gate, 0: not gated
};

constexpr int kThreads = 256;

// Pair `number` of a word times the scale, which is given twice.
__device__ __forceinline__ u32 wide_pair(u32 word, int number, u32 scale) {
    u32 pair = pair_of(word, number);
    u32 is_some = (pair >> 14 & 0x00010001u) * 0xffffu;
    return (scale ^ (pair & 0x80008000u)) & is_some;
}

// Grid: (ceil(blocks / 8), octets of outputs).
template <typename T>
__device__ __forceinline__ void widen(const Widen& args) {
    int block = (int)blockIdx.x * (kThreads / 32) + (int)threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int octet = args.first + (int)blockIdx.y;
    int tile = octet / 2, half = octet % 2;
    if (args.gate_octets > 0) {
        half = octet >= args.gate_octets ? 1 : 0;
        tile = octet - half * args.gate_octets;
    }
    int row = (int)blockIdx.y * 8 + g;
    bool valid = block < args.blocks && row < args.rows;
    uint2 words = {0, 0};
    u32 scales[4] = {};
    if (valid) {  // the weights do not depend on the launch before
        i64 at = (i64)tile * args.blocks + block;
        words = *reinterpret_cast<const uint2*>(args.tiles + (at * 32 + lane) * 4 + 2 * half);
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            i64 place = args.scale_count == 0 ? tile * 8 + g : (at * 8 + g) * args.scale_count + u * args.scale_count / 4;
            u16 rounded = T::round(F16::unpack((u16)(args.scales[place] >> (16 * half) & 0xffffu)));
            scales[u] = rounded * 0x10001u;
        }
    }
    wait_for_dependencies();
    launch_dependents();
    if (!valid) return;
    // Inputs 8 j + 2 t and 8 j + 2 t + 1: four lanes write 16 bytes together.
    u32* out = reinterpret_cast<u32*>(args.out + (i64)row * args.inputs + block * kBlock) + t;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
        if (block * kBlock + 32 * u >= args.inputs) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) out[16 * u + 4 * j] = wide_pair(u < 2 ? words.x : words.y, u % 2 * 4 + j, scales[u]);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) ternary_widen_f16(const Widen args) { widen<F16>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) ternary_widen_bf16(const Widen args) { widen<BF16>(args); }
