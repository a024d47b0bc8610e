// Stands in for the header of this name in plugins_trt. There are no clusters here.
#pragma once
#include "common.cuh"

// ldmatrix, by the definition of its fragments: lane l names row l % 8 of matrix l / 8.
inline void load_pieces(u32 (&r)[4], u32 shared) {
    exchange((u64)shared, [&](const u64* rows) {
        u32 lane = threadIdx.x % 32;
        for (u32 matrix = 0; matrix < 4; ++matrix)
            std::memcpy(&r[matrix], g_ring + rows[8 * matrix + lane / 4] + lane % 4 * 4, 4);
        return 0;
    });
}
