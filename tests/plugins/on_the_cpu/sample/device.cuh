// Stands in for plugins_trt/sample/device.cuh.
#pragma once
#include "common.cuh"

constexpr int kThreads = 64;
constexpr int kResident = 1;

inline u32 fresh(const u32* pointer) { return __atomic_load_n(pointer, __ATOMIC_RELAXED); }
inline u64 fresh(const u64* pointer) { return __atomic_load_n(pointer, __ATOMIC_RELAXED); }
inline float fresh(const float* pointer) { return bits<float>(fresh((const u32*)pointer)); }
inline u32 load_in_order(const u32* pointer) {
    make_ready(g_now);  // others may have to come first
    wait_for_turn();
    return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}
inline void store_in_order(u32* pointer, u32 value) { __atomic_store_n(pointer, value, __ATOMIC_RELEASE); }
