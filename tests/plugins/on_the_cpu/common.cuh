// Stands in for plugins_trt/common.cuh when a kernel is compiled by a C++ compiler: the threads of a CTA take turns on one
// thread of the CPU, and what the sources ask of the device through that header's functions happens in memory.
//
// A thread's turn ends where it waits for others, and which is the next one is drawn, always in the same way: what reads
// too early or writes too late for lack of a barrier does so in most runs, and in each the same.
//
// `g_lazy`: asynchronous copies happen when they are waited for, as late as they may; else at once, as early as they
// may. A kernel that waits too little fails in the first way, one that overwrites what is still read in the second.
// Exchanges between a warp's lanes need all of its lanes, as the device's do with full masks.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <ucontext.h>
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
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct Place {
    unsigned x, y, z;
};

struct Copy {
    u32 to;
    const void* from;
    int bytes;
    bool valid;

    void run() const;
};

struct Warp;
class Barrier;

// A thread of the device.
struct Thread {
    Place thread, block, grid, size;
    Warp* warps;
    Barrier* barrier;
    unsigned char* ring;                    // dynamic shared memory
    std::vector<Copy> open;                 // not committed yet
    std::vector<std::vector<Copy>> groups;  // committed, not waited for
    ucontext_t context;
};
extern Thread* g_now;  // whose turn it is
#define threadIdx (g_now->thread)
#define blockIdx (g_now->block)
#define gridDim (g_now->grid)
#define blockDim (g_now->size)
#define g_ring (g_now->ring)

void make_ready(Thread* thread);
void wait_for_turn();  // another one's turn, until this one is made ready

class Barrier {
public:
    explicit Barrier(int size) : size_(size) {}
    void arrive_and_wait() {
        if (++arrived_ == size_) {
            open();
        } else {
            waiting_.push_back(g_now);
            wait_for_turn();
        }
    }
    // This thread is waited for no longer.
    void leave() {
        if (--size_ == arrived_) open();
    }

private:
    void open() {
        arrived_ = 0;
        for (Thread* thread : waiting_) make_ready(thread);
        waiting_.clear();
    }
    int size_, arrived_ = 0;
    std::vector<Thread*> waiting_;
};

// What a warp's threads show each other for a tensor-core product, or in an exchange.
struct Warp {
    Barrier barrier{32};
    Barrier group{128};  // of a warpgroup, in the first of its warps
    u32 a[32][4];
    u32 b[32][2];
    u64 shown[32];
};
extern bool g_lazy;
inline Warp& this_warp() { return g_now->warps[threadIdx.x / 32]; }

constexpr int kPage = 64, kFineSlots = 4;
constexpr float kLog2e = 1.4426950408889634f;
constexpr u32 kFull = 0xffffffffu;
#define kInfinity __builtin_inff()

inline void __syncthreads() { g_now->barrier->arrive_and_wait(); }

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
inline int __float_as_int(float value) { return bits<int>(value); }
inline int __clzll(i64 x) { return x == 0 ? 64 : __builtin_clzll((u64)x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((u32)x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(i64 x) { return __builtin_ffsll(x); }
inline int __popc(u32 x) { return __builtin_popcount(x); }
template <typename T>
inline T __ldcg(const T* pointer) {
    return *pointer;
}

// Gives `use` what all lanes of this thread's warp show.
template <typename Use>
inline auto exchange(u64 mine, Use use) {
    Warp& warp = this_warp();
    warp.shown[threadIdx.x % 32] = mine;
    warp.barrier.arrive_and_wait();
    auto result = use((const u64*)warp.shown);
    warp.barrier.arrive_and_wait();
    return result;
}
template <typename T>
inline T __shfl_xor_sync(u32, T x, int lanes) {
    static_assert(sizeof(T) <= 8);
    u64 mine = 0;
    std::memcpy(&mine, &x, sizeof(T));
    mine = exchange(mine, [&](const u64* shown) { return shown[threadIdx.x % 32 ^ lanes]; });
    std::memcpy(&x, &mine, sizeof(T));
    return x;
}
inline u32 __shfl_sync(u32, u32 x, int lane) {
    return exchange((u64)x, [&](const u64* shown) { return (u32)shown[lane]; });
}
inline u32 __reduce_add_sync(u32, u32 x) {
    return exchange((u64)x, [](const u64* shown) { return (u32)std::accumulate(shown, shown + 32, (u64)0); });
}
inline u32 __reduce_min_sync(u32, u32 x) {
    return exchange((u64)x, [](const u64* shown) { return (u32)*std::min_element(shown, shown + 32); });
}
inline u32 __reduce_max_sync(u32, u32 x) {
    return exchange((u64)x, [](const u64* shown) { return (u32)*std::max_element(shown, shown + 32); });
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
inline int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
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
        Warp& warp = this_warp();
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
inline float log2_fast(float x) { return std::log2(x); }
inline float fmaxf(float a, float b) { return std::fmax(a, b); }
inline float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes >>= 1) x = fmaxf(x, __shfl_xor_sync(kFull, x, lanes));
    return x;
}
inline float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(kFull, x, lanes);
    return x;
}
inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int min_int(int a, int b) { return a < b ? a : b; }
inline int max_int(int a, int b) { return a > b ? a : b; }

inline void Copy::run() const {
    if (valid) std::memcpy(g_ring + to, from, bytes);
    else std::memset(g_ring + to, 0, bytes);
}
inline u32 shared_address(const void* pointer) { return (u32)((const unsigned char*)pointer - g_ring); }
inline void copy_bytes(const Copy& copy) {
    if (g_lazy) g_now->open.push_back(copy);
    else copy.run();
}
inline void copy_async(u32 to, const void* from, bool valid = true) { copy_bytes({to, from, 16, valid}); }
inline void copy_commit() {
    g_now->groups.push_back(g_now->open);
    g_now->open.clear();
}
template <int kPending>
inline void copy_wait() {
    auto& groups = g_now->groups;
    while ((int)groups.size() > kPending) {
        for (const Copy& copy : groups.front()) copy.run();
        groups.erase(groups.begin());
    }
}
template <int kDim>
inline u32 swizzled(int row, int piece) {
    return (u32)(row * (kDim * 2) + ((piece ^ (row & 7)) << 4));
}
inline void wait_for_dependencies() {}
inline void launch_dependents() {}

#include "arena.cuh"  // the arena and the batch, as the real header has them
