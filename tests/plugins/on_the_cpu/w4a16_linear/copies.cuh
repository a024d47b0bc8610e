// Stands in for the header of this name in plugins_trt.
#pragma once
#include "common.cuh"

inline void copy_pair_async(u32 to, const void* from, bool valid = true) { copy_bytes({to, from, 8, valid}); }
