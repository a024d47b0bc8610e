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

inline int cluster_size() { return 1; }

// Bytes of shared memory.
template <typename T>
inline T load_of_ring(u32 shared) {
    T value;
    std::memcpy(&value, g_ring + shared, sizeof(value));
    return value;
}
inline uint4 load_sixteen(u32 shared) { return load_of_ring<uint4>(shared); }
inline uint2 load_eight(u32 shared) { return load_of_ring<uint2>(shared); }
inline u32 load_four(u32 shared) { return load_of_ring<u32>(shared); }
