// Draws one token a row by temperature, top_k and top_p, as reference.py defines it. A thread block a row.
//
// Weights exp((l - max) / t) are whole multiples of 2^-40 here, so their sums are exact in any order. Tokens are counted
// into bins by their distance from the largest logit, which falls as their rank rises; what is looked for (the last of
// top_k, the last of top_p, the token itself) lies in one bin, whose few tokens are then compared with each other. A bin
// with too many (a very high temperature, or equal logits) is searched by halving instead.
#include "common.cuh"

struct Sample {
    const float* logits;        // [rows, vocabulary]
    const float* temperatures;  // [rows]; rows below the smallest normal number are left alone
    const i32* top_ks;          // [rows]; 0: all
    const double* top_ps;       // [rows]; 1: all
    const double* numbers;      // [rows], in [0, 1)
    i32* ids;                   // [rows]
    i64 row_stride;
    i32 vocabulary;
    i32 unused;
};

constexpr int kThreads = 1024;
constexpr int kBins = 2048;
constexpr int kListed = 2048;
constexpr float kBinsPerUnit = 64.0f;
constexpr float kUnit = 1099511627776.0f;  // 2^40

struct Shared {
    u64 masses[kBins];  // of the bins, then up to and with each
    u64 order[kListed];
    u64 weights[kListed];
    u32 counts[kBins];
    u64 warp_masses[32];
    u32 warp_counts[32];
    float warp_maxima[32];
    u64 base_mass, end_mass, found;
    u32 base_count, listed;
    i32 bin;
};

static_assert(sizeof(Shared) <= 58 * 1024, "launch.py asks for so much");

// One row: how its tokens are weighed and ordered.
struct Row {
    const float* logits;
    int size;
    float largest, temperature;

    __device__ __forceinline__ float distance(float logit) const { return (largest - logit) / temperature; }
    __device__ __forceinline__ int bin(float logit) const {
        float place = distance(logit) * kBinsPerUnit;
        return place < (float)(kBins - 1) ? (int)place : kBins - 1;  // (NaN goes to the last)
    }
    __device__ __forceinline__ u64 weight(float logit) const {
        float weight = expf(-distance(logit)) * kUnit;
        return weight >= 1.0f ? (u64)weight : 0;
    }
    // Smaller is of lower rank: falling logits, then rising ids.
    __device__ __forceinline__ u64 order(float logit, int id) const {
        u32 bits = __float_as_uint(logit + 0.0f);  // -0 counts as 0
        u32 rising = bits ^ ((u32)((i32)bits >> 31) | 0x80000000u);
        return (u64)(~rising) << 32 | (u32)id;
    }
};

__device__ __forceinline__ u64 warp_sum_wide(u64 x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane >>= 1) x += __shfl_xor_sync(kFull, x, lane);
    return x;
}

// Sums over the thread block, for every thread.
__device__ __forceinline__ void block_sum(Shared& s, u64& mass, u32& count) {
    mass = warp_sum_wide(mass);
    count = (u32)warp_sum_wide(count);
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.warp_masses[threadIdx.x / 32] = mass, s.warp_counts[threadIdx.x / 32] = count;
    __syncthreads();
    mass = warp_sum_wide(s.warp_masses[threadIdx.x % 32]);
    count = (u32)warp_sum_wide(s.warp_counts[threadIdx.x % 32]);
}

// Turns the bins' masses and counts into those up to and with each bin.
__device__ __forceinline__ void accumulate(Shared& s) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 2 * threadIdx.x;
    u64 mass = s.masses[first] + s.masses[first + 1];
    u32 count = s.counts[first] + s.counts[first + 1];
    u64 own_mass = mass;
    u32 own_count = count;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other_mass = __shfl_up_sync(kFull, mass, step);
        u32 other_count = __shfl_up_sync(kFull, count, step);
        if (lane >= step) mass += other_mass, count += other_count;
    }
    if (lane == 31) s.warp_masses[warp] = mass, s.warp_counts[warp] = count;
    __syncthreads();
    for (int w = 0; w < warp; ++w) mass += s.warp_masses[w], count += s.warp_counts[w];
    u64 before_mass = mass - own_mass;
    u32 before_count = count - own_count;
    s.masses[first] += before_mass;
    s.counts[first] += before_count;
    s.masses[first + 1] = mass;
    s.counts[first + 1] = count;
    __syncthreads();
}

// Finds the token at which the running sum of weights (or, `kByCount`, of tokens) first exceeds `target`: leaves its
// order in `found` and the running sum of weights up to and with it in `end_mass`.
template <bool kByCount>
__device__ __forceinline__ void find(Shared& s, const Row& row, u64 target) {
    for (int b = threadIdx.x; b < kBins; b += kThreads) {
        u64 before_mass = b > 0 ? s.masses[b - 1] : 0;
        u32 before_count = b > 0 ? s.counts[b - 1] : 0;
        bool here = kByCount ? before_count <= target && target < s.counts[b]
                             : before_mass <= target && target < s.masses[b];
        if (here) s.bin = b, s.base_mass = before_mass, s.base_count = before_count, s.listed = 0;
    }
    __syncthreads();
    int bin = s.bin;
    u64 base_mass = s.base_mass;
    u32 base_count = s.base_count;
    u32 size = s.counts[bin] - base_count;
    u64 wanted = target - (kByCount ? (u64)base_count : base_mass);
    if (kByCount && bin == kBins - 1) {  // only tokens without weight are cut off
        if (threadIdx.x == 0) s.end_mass = s.masses[kBins - 1], s.found = ~0ull;
        __syncthreads();
        return;
    }
    if (size <= kListed) {
        for (int id = threadIdx.x; id < row.size; id += kThreads) {
            float logit = row.logits[id];
            if (row.bin(logit) == bin) {
                u32 place = atomicAdd(&s.listed, 1u);
                s.order[place] = row.order(logit, id);
                s.weights[place] = row.weight(logit);
            }
        }
        __syncthreads();
        for (u32 mine = threadIdx.x; mine < size; mine += kThreads) {
            u64 order = s.order[mine], before_mass = 0;
            u32 before_count = 0;
            for (u32 other = 0; other < size; ++other) {
                if (s.order[other] < order) before_mass += s.weights[other], ++before_count;
            }
            u64 weight = s.weights[mine];
            bool here = kByCount ? before_count == wanted : before_mass <= wanted && wanted < before_mass + weight;
            if (here) s.found = order, s.end_mass = base_mass + before_mass + weight;
        }
        __syncthreads();
        return;
    }
    // The smallest order up to which the sum exceeds what is wanted, bit by bit from the highest.
    u64 low = 0;
    for (int bit = 63; bit >= 0; --bit) {
        u64 middle = low | ((1ull << bit) - 1);
        u64 mass = 0;
        u32 count = 0;
        for (int id = threadIdx.x; id < row.size; id += kThreads) {
            float logit = row.logits[id];
            if (row.bin(logit) == bin && row.order(logit, id) <= middle) mass += row.weight(logit), ++count;
        }
        block_sum(s, mass, count);
        if ((kByCount ? (u64)count : mass) <= wanted) low |= 1ull << bit;
    }
    // `low` is that token; its sum may not have been the last one looked at.
    u64 mass = 0;
    u32 count = 0;
    for (int id = threadIdx.x; id < row.size; id += kThreads) {
        float logit = row.logits[id];
        if (row.bin(logit) == bin && row.order(logit, id) <= low) mass += row.weight(logit), ++count;
    }
    block_sum(s, mass, count);
    if (threadIdx.x == 0) s.found = low, s.end_mass = base_mass + mass;
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads) sample_f32(const Sample args) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    wait_for_dependencies();
    launch_dependents();
    float temperature = args.temperatures[blockIdx.x];
    if (!(temperature >= 1.17549435e-38f)) return;
    Row row{args.logits + (i64)blockIdx.x * args.row_stride, args.vocabulary, 0.0f, temperature};

    float largest = -kInfinity;
    for (int id = threadIdx.x; id < row.size; id += kThreads) largest = fmaxf(largest, row.logits[id]);
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0) s.warp_maxima[threadIdx.x / 32] = largest;
    for (int b = threadIdx.x; b < kBins; b += kThreads) s.masses[b] = 0, s.counts[b] = 0;
    __syncthreads();
    row.largest = warp_max(s.warp_maxima[threadIdx.x % 32]);

    for (int id = threadIdx.x; id < row.size; id += kThreads) {
        float logit = row.logits[id];
        int bin = row.bin(logit);
        atomicAdd(&s.counts[bin], 1u);
        u64 weight = row.weight(logit);
        if (bin < kBins - 1 && weight > 0) atomicAdd(&s.masses[bin], weight);
    }
    __syncthreads();
    accumulate(s);

    u64 total = s.masses[kBins - 1];
    int top_k = args.top_ks[blockIdx.x];
    if (top_k > 0 && top_k < row.size) {
        find<true>(s, row, (u64)(top_k - 1));
        total = s.end_mass;
    }
    double top_p = args.top_ps[blockIdx.x];
    if (top_p < 1.0) {
        double part = ceil(top_p * (double)total);
        u64 target = part < 1.0 ? 1 : (u64)part;
        __syncthreads();
        find<false>(s, row, (target < total ? target : total) - 1);
        total = s.end_mass;
    }
    u64 target = (u64)(args.numbers[blockIdx.x] * (double)total);
    __syncthreads();
    find<false>(s, row, target < total ? target : total - 1);
    if (threadIdx.x == 0) args.ids[blockIdx.x] = (i32)(u32)s.found;
}
