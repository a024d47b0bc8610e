// Stands in for plugins_trt/common.cuh when a kernel is compiled by a C++ compiler: the threads of a CTA are threads of
// the CPU, and what the sources ask of the device through that header's functions happens in memory.
//
// `g_lazy`: asynchronous copies happen when they are waited for, as late as they may; else at once, as early as they
// may. A kernel that waits too little fails in the first way, one that overwrites what is still read in the second.
// Exchanges between a warp's lanes need all of its lanes, as the device's do with full masks.
#pragma once
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static

struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct Place {
    unsigned x, y, z;
};
extern thread_local Place threadIdx, blockIdx, gridDim;

// What a warp's threads show each other for a tensor-core product, or in an exchange.
struct Warp {
    std::barrier<> barrier{32};
    u32 a[32][4];
    u32 b[32][2];
    u64 shown[32];
};
extern thread_local Warp* g_warps;
extern thread_local std::barrier<>* g_block;
extern thread_local unsigned char* g_ring;  // dynamic shared memory
extern bool g_lazy;

constexpr float kLog2e = 1.4426950408889634f;
constexpr u32 kFull = 0xffffffffu;
#define kInfinity __builtin_inff()

inline void __syncthreads() { g_block->arrive_and_wait(); }

template <typename To, typename From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

inline float __uint_as_float(u32 word) { return bits<float>(word); }
inline u32 __float_as_uint(float value) { return bits<u32>(value); }
inline float __int_as_float(i32 word) { return bits<float>(word); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __clzll(i64 x) { return x == 0 ? 64 : __builtin_clzll((u64)x); }

// Gives `use` what all lanes of this thread's warp show.
template <typename Use>
inline auto exchange(u64 mine, Use use) {
    Warp& warp = g_warps[threadIdx.x / 32];
    warp.shown[threadIdx.x % 32] = mine;
    warp.barrier.arrive_and_wait();
    auto result = use((const u64*)warp.shown);
    warp.barrier.arrive_and_wait();
    return result;
}
template <typename T>
inline T __shfl_xor_sync(u32, T x, int lanes) {
    return exchange((u64)x, [&](const u64* shown) { return (T)shown[threadIdx.x % 32 ^ lanes]; });
}
template <typename T>
inline T __shfl_up_sync(u32, T x, int lanes) {
    int lane = threadIdx.x % 32;
    return exchange((u64)x, [&](const u64* shown) { return lane < lanes ? x : (T)shown[lane - lanes]; });
}
inline u32 __ballot_sync(u32, bool x) {
    return exchange((u64)x, [](const u64* shown) {
        u32 found = 0;
        for (int lane = 0; lane < 32; ++lane) found |= (u32)shown[lane] << lane;
        return found;
    });
}
inline float fmaf(float a, float b, float c) { return std::fma(a, b, c); }
inline void __match_all_sync(u32, int x, int* same) {
    *same = exchange((u64)(u32)x, [&](const u64* shown) {
        for (int lane = 1; lane < 32; ++lane)
            if (shown[lane] != shown[0]) return 0;
        return 1;
    });
}
inline u32 atomicAdd(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline u64 atomicAdd(u64* at, u64 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline u32 add_in_order(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_ACQ_REL); }

template <typename T>
struct Pairs {
    static float low(u32 packed) { return T::unpack((u16)(packed & 0xffffu)); }
    static float high(u32 packed) { return T::unpack((u16)(packed >> 16)); }
    static u32 pack(float low, float high) { return (u32)T::round(low) | ((u32)T::round(high) << 16); }
    static u32 fma_pair(u32 a, u32 b, u32 c) {
        return pack(std::fma(low(a), low(b), low(c)), std::fma(high(a), high(b), high(c)));
    }
    // mma.m16n8k16, by the definition of its fragments
    static void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        Warp& warp = g_warps[threadIdx.x / 32];
        int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
        std::memcpy(warp.a[lane], a, sizeof(a));
        std::memcpy(warp.b[lane], b, sizeof(b));
        warp.barrier.arrive_and_wait();
        for (int i = 0; i < 4; ++i) {
            int row = g + 8 * (i / 2), column = 2 * t + i % 2;
            for (int k = 0; k < 16; ++k) {
                u32 x = warp.a[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
                u32 y = warp.b[column * 4 + k % 8 / 2][k / 8];
                d[i] += k % 2 == 0 ? low(x) * low(y) : high(x) * high(y);
            }
        }
        warp.barrier.arrive_and_wait();
    }
    static void mma_first(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        for (float& x : d) x = 0.0f;
        mma(d, a0, a1, a2, a3, b0, b1);
    }
};

struct F16 : Pairs<F16> {
    static float unpack(u16 half) { return (float)bits<_Float16>(half); }
    static u16 round(float value) { return bits<u16>((_Float16)value); }
};
struct BF16 : Pairs<BF16> {
    static float unpack(u16 half) { return bits<float>((u32)half << 16); }
    static u16 round(float value) {
        u32 word = bits<u32>(value);
        return (u16)((word + 0x7fffu + ((word >> 16) & 1)) >> 16);
    }
};

inline float exp2_fast(float x) { return std::exp2(x); }
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int min_int(int a, int b) { return a < b ? a : b; }

struct Copy {
    u32 to;
    const void* from;
    int bytes;
    bool valid;

    void run() const {
        if (valid) std::memcpy(g_ring + to, from, bytes);
        else std::memset(g_ring + to, 0, bytes);
    }
};
extern thread_local std::vector<Copy> t_open;                 // not committed yet
extern thread_local std::vector<std::vector<Copy>> t_groups;  // committed, not waited for

inline u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - g_ring); }
inline void copy_bytes(const Copy& copy) {
    if (g_lazy) t_open.push_back(copy);
    else copy.run();
}
inline void copy_async(u32 to, const void* from, bool valid = true) { copy_bytes({to, from, 16, valid}); }
inline void copy_commit() {
    t_groups.push_back(t_open);
    t_open.clear();
}
template <int kPending>
inline void copy_wait() {
    while ((int)t_groups.size() > kPending) {
        for (const Copy& copy : t_groups.front()) copy.run();
        t_groups.erase(t_groups.begin());
    }
}
template <int kDim>
inline u32 swizzled(int row, int piece) {
    return (u32)(row * (kDim * 2) + ((piece ^ (row & 7)) << 4));
}
inline void wait_for_dependencies() {}
inline void launch_dependents() {}
