// What packed weights of every kind have in common: tiles of 16 outputs.
#pragma once
#include "common.cuh"
#include "packed/device.cuh"

constexpr int kTile = 16;  // outputs of a tile
constexpr int kHalf = 8;   // of them gate's, of gated weights

// Sums of outputs that lie together.
struct alignas(16) Four {
    float at[4];
};
__device__ __forceinline__ void add_four(float (&sum)[4], const Four& more) {
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j] += more.at[j];
}
