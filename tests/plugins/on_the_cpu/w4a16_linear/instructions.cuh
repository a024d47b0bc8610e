// Stands in for the header of this name in plugins_trt. There are no clusters here.
#pragma once
#include "common.cuh"

inline u32 masked_or(u32 word, u32 mask, u32 bits) { return (word & mask) | bits; }
inline float bits_as_float(u32 word) { return bits<float>(word); }
inline void __syncwarp() { this_warp().barrier.arrive_and_wait(); }
