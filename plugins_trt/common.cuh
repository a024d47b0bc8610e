// What the kernels share: element types, tensor-core and copy instructions, and the addresses of paged keys.
//
// No header is included, neither CUDA's nor C++'s, so that NVRTC compiles these sources with nothing beside it.
// Only instructions of sm_80 are used; what needs more stands behind a check of __CUDA_ARCH__.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

constexpr int kPage = 64;        // tokens of a page
constexpr int kFineSlots = 4;    // fine compressed keys of a page
constexpr u32 kFull = 0xffffffffu;
constexpr float kLog2e = 1.4426950408889634f;
#define kInfinity __int_as_float(0x7f800000)  // no header names it

// ---------------------------------------------------------------- element types

// float16. Pairs are packed low element first.
struct F16 {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 packed;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ float unpack(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ float low(u32 packed) { return unpack((u16)(packed & 0xffffu)); }
    static __device__ __forceinline__ float high(u32 packed) { return unpack((u16)(packed >> 16)); }
    static __device__ __forceinline__ u16 round(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return bits;
    }
    // a * b + c of two pairs, rounded once each
    static __device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
        u32 d;
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    // d[16x8] += a[16x16] b[16x8], fp32 accumulators
    static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    // d[16x8] = a[16x16] b[16x8]
    static __device__ __forceinline__ void mma_first(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
    }
};

// bfloat16
struct BF16 {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }
    static __device__ __forceinline__ float low(u32 packed) { return __uint_as_float(packed << 16); }
    static __device__ __forceinline__ float high(u32 packed) { return __uint_as_float(packed & 0xffff0000u); }
    static __device__ __forceinline__ float unpack(u16 bits) { return __uint_as_float((u32)bits << 16); }
    static __device__ __forceinline__ u16 round(float value) { return (u16)(pack(value, 0.0f) & 0xffffu); }
    // a * b + c of two pairs, rounded once each
    static __device__ __forceinline__ u32 fma_pair(u32 a, u32 b, u32 c) {
        u32 d;
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
        return d;
    }
    static __device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
    // d[16x8] = a[16x16] b[16x8]
    static __device__ __forceinline__ void mma_first(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
    }
};

// ---------------------------------------------------------------- small mathematics

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ int min_int(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ int max_int(int a, int b) { return a > b ? a : b; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(kFull, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    // As integers that order as the floats do: one instruction instead of five exchanges.
    int bits = __float_as_int(x);
    bits = __reduce_max_sync(kFull, bits ^ ((bits >> 31) & 0x7fffffff));
    return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}

// ---------------------------------------------------------------- shared memory and asynchronous copies

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// 16 bytes from global to shared memory, past L1; zeros when `valid` is false (the source is not read then).
__device__ __forceinline__ void copy_async(u32 shared, const void* global, bool valid = true) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}
// 4 bytes, through L1.
__device__ __forceinline__ void copy_word_async(u32 shared, const void* global, bool valid = true) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid ? 4 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(u32 (&r)[4], u32 shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

// Byte offset of 16-byte piece `piece` of row `row` in a tile whose rows are kDim 16-bit elements: pieces are
// permuted within each row by the row's number, so that the eight rows of one 8x8 matrix lie in different banks.
template <int kDim>
__device__ __forceinline__ u32 swizzled(int row, int piece) {
    return (u32)(row * (kDim * 2) + ((piece ^ (row & 7)) << 4));
}

// Adds and returns what was there; what this thread has seen written before it is seen by whoever adds after it.
__device__ __forceinline__ u32 add_in_order(u32* counter, u32 value) {
    u32 old;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(counter), "r"(value) : "memory");
    return old;
}

// ---------------------------------------------------------------- programmatic dependent launch (sm_90)

// A kernel that calls these begins with both, in this order (or reads what two launches before it wrote, and then
// calls both): so when a kernel starts early, all but the one launch before it has been completed.

// Waits until the launch before this one has completed and its writes are visible. A launch that was not made as
// a programmatic dependent one passes at once.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The same, but not before `value` has been computed: left to itself, the compiler moves work behind the wait.
__device__ __forceinline__ void wait_for_dependencies_after(float value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %0, 0x7fc0dead; @p griddepcontrol.wait; @!p griddepcontrol.wait; }" ::"r"(
            __float_as_uint(value))
        : "memory");
#endif
}
// Lets the launches that depend on this one begin (they still wait for its writes).
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---------------------------------------------------------------- the arena and the batch

// One pool of one layer: rows of kDim elements, [pages, kv_heads, slots, kDim]; strides in elements.
struct Pool {
    u16* base;
    i64 page_stride;
    i64 head_stride;

    template <int kDim>
    __device__ __forceinline__ u16* row(int page, int head, int slot) const {
        return base + (i64)page * page_stride + (i64)head * head_stride + slot * kDim;
    }
};

struct Arena {
    Pool keys;    // [pages, kv_heads, 64, kDim]
    Pool values;  // [pages, kv_heads, 64, kDim]
    Pool fine;    // [pages, kv_heads, 4, kDim]; slot s of a sequence's page p: key 4p - 1 + s
    Pool coarse;  // [pages, kv_heads, 1, kDim]; of page p: key p - 1
};

// See contract.Batch.
struct Batch {
    const i32* sequence_starts;  // [sequences + 1]
    const i32* lengths;          // [sequences]
    const i32* page_tables;      // [sequences, max_pages]
    const i32* positions;        // [tokens]
    const u64* tree_masks;       // [tokens] or null
    i32 sequences;
    i32 tokens;
    i32 max_pages;
    i32 unused;

    __device__ __forceinline__ const i32* table(int sequence) const {
        return page_tables + (i64)sequence * max_pages;
    }

    // The same, with what is known of the sequence, in one round of loads.
    __device__ __forceinline__ int sequence_of(int token, int& start, int& count, int& length) const {
        for (int first = 0; first < sequences; first += 32) {
            int index = first + (int)(threadIdx.x & 31);
            bool exists = index < sequences;
            int from = exists ? sequence_starts[index] : 0;
            int to = exists ? sequence_starts[index + 1] : 0;
            int stored = exists ? lengths[index] : 0;
            u32 holds = __ballot_sync(kFull, exists && from <= token && token < to);
            if (holds != 0) {
                int lane = __ffs((int)holds) - 1;
                start = __shfl_sync(kFull, from, lane);
                count = __shfl_sync(kFull, to, lane) - start;
                length = __shfl_sync(kFull, stored, lane);
                return first + lane;
            }
        }
        return -1;
    }

    // The sequence that row `token` belongs to, or -1 for padding. All lanes of a warp must call it together.
    __device__ __forceinline__ int sequence_of(int token) const {
        int before = 0;  // sequences that end at or before the token
        for (int first = 0; first < sequences; first += 32) {
            int index = first + (int)(threadIdx.x & 31);
            bool ended = index < sequences && sequence_starts[index + 1] <= token;
            before += __popc(__ballot_sync(kFull, ended));
        }
        return before < sequences ? before : -1;
    }
};
