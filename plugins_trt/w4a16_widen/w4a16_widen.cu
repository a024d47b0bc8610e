// 4-bit weights into 16-bit ones, in the order of the checkpoint: for products of so many rows that a matrix product of
// 16-bit operands pays for it. A warp takes 8 outputs x 64 inputs, a half of what 512 bytes of the tiles hold.
#include "common.cuh"

struct Widen {
    const u32* tiles;   // [tiles, steps, 32, 4]
    const u32* groups;  // [tiles, inputs / G, 8, 2]
    u16* out;           // [rows, inputs]
    i32 steps;          // inputs / 64
    i32 group_shift;    // a group is 1 << group_shift steps
    i32 first;          // of the octets of outputs
    i32 rows;
    i32 gate_octets;    // of gate, 0: not gated
    i32 unused;
};

constexpr int kThreads = 256;
constexpr int kStep = 64;

// Pair j of a word: the even numbers lie in its lower half, the odd ones in its higher.
template <typename T>
__device__ __forceinline__ u32 pair(u32 word, int j, float scale, float zero) {
    u32 shifted = word >> (4 * j);
    float even = (float)(shifted & 15u), odd = (float)((shifted >> 16) & 15u);
    return T::pack((even - zero) * scale, (odd - zero) * scale);
}

// Grid: (ceil(steps / 8), octets of outputs).
template <typename T>
__device__ __forceinline__ void widen(const Widen& args) {
    int step = (int)blockIdx.x * (kThreads / 32) + (int)threadIdx.x / 32, lane = threadIdx.x & 31;
    int g = lane >> 2, t = lane & 3;
    int octet = args.first + (int)blockIdx.y;
    int tile = octet / 2, half = octet % 2;
    if (args.gate_octets > 0) {
        half = octet >= args.gate_octets ? 1 : 0;
        tile = octet - half * args.gate_octets;
    }
    int row = (int)blockIdx.y * 8 + g;
    bool valid = step < args.steps && row < args.rows;
    uint2 words = {0, 0};
    u32 group = 0;
    if (valid) {  // the weights do not depend on the launch before
        words = *reinterpret_cast<const uint2*>(args.tiles + (((i64)tile * args.steps + step) * 32 + lane) * 4 + 2 * half);
        int groups = args.steps >> args.group_shift;
        group = args.groups[(((i64)tile * groups + (step >> args.group_shift)) * 8 + g) * 2 + half];
    }
    wait_for_dependencies();
    launch_dependents();
    if (!valid) return;
    float scale = F16::unpack((u16)(group & 0xffffu)), zero = (float)(group >> 16);
    // Inputs 8 j + 2 t and 8 j + 2 t + 1: four lanes write 16 bytes together.
    u32* out = reinterpret_cast<u32*>(args.out + ((i64)row * args.steps + step) * kStep) + t;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        out[4 * j] = pair<T>(words.x, j, scale, zero);
        out[16 + 4 * j] = pair<T>(words.y, j, scale, zero);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) w4a16_widen_f16(const Widen args) { widen<F16>(args); }
extern "C" __global__ void __launch_bounds__(kThreads) w4a16_widen_bf16(const Widen args) { widen<BF16>(args); }
