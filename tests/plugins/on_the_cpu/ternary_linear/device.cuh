// Stands in for the header of this name in plugins_trt.
#pragma once
#include "common.cuh"

inline void copy_where(bool valid, u32 to, const void* from) {
    if (valid) copy_bytes({to, from, 16, true});
}
inline void __syncwarp() { this_warp().barrier.arrive_and_wait(); }

inline u32 masked_xor(u32 word, u32 mask, u32 bits) { return (word & mask) ^ bits; }
