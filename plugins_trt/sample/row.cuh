// One row as a thread block sees it: how its tokens are weighed and ordered, and how the row's thread blocks meet.
#pragma once
#include "sample/space.cuh"

// How tokens are ordered, weighed and left out at some point of a draw.
struct View {
    const float* logits;
    int first, end;  // the slice
    float largest, temperature, inverse;
    bool filters;      // whether what follows leaves tokens out
    bool by_deviation; // the order is that of the deviations, not of the ranks
    bool counts;       // tokens are looked for by their number
    float mean;        // of the distances
    float widest;      // largest deviation
    double least;      // smallest weight
    u64 last;          // order of the last rank

    // (largest - logit) / temperature, correctly rounded (Markstein): the inverse is.
    __device__ __forceinline__ float distance(float logit) const {
        float difference = largest - logit;
        float quotient = difference * inverse;
        return fmaf(fmaf(-quotient, temperature, difference), inverse, quotient);
    }
    __device__ __forceinline__ float deviation(float distance) const { return fabsf(distance - mean); }
    __device__ __forceinline__ u64 weight(float distance) const {
        float weight = expf(-distance) * kUnit;
        return weight >= 1.0f ? (u64)weight : 0;
    }
    __device__ __forceinline__ bool takes(float logit, int id, float distance) const {
        return !filters || ((double)expf(-distance) >= least && order_of(logit, id) <= last &&
                            deviation(distance) <= widest);
    }
    // Of the first level; -1 for tokens without weight.
    __device__ __forceinline__ int bin(float distance) const {
        float place = (by_deviation ? deviation(distance) : distance) * kBinsPerUnit;
        return place < (float)kBins ? (int)place : -1;  // (-1 for NaN, too)
    }
    __device__ __forceinline__ u64 order(float logit, int id, float distance) const {
        return by_deviation ? (u64)__float_as_uint(deviation(distance)) << 32 | (u32)id : order_of(logit, id);
    }
    // Calls `use(id, logit, exists)` in whole warps for every token from `from` to `to`.
    template <typename Use>
    __device__ __forceinline__ void each(int from, int to, Use use) const {
        constexpr int kAtOnce = 8;
        for (int base = from; base < to; base += kAtOnce * kThreads) {
            float found[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                int id = base + i * kThreads + (int)threadIdx.x;
                found[i] = id < to ? logits[id] : -kInfinity;
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                int id = base + i * kThreads + (int)threadIdx.x;
                use(id, found[i], id < to);
            }
        }
    }
};

// Adds tokens to a bin. These are the additions that a draw waits for: most are left out for most tokens.
__device__ __forceinline__ void count(Shared& s, int bin, u64 weight, u32 tokens) {
    constexpr u32 kLow = (1u << kLimb) - 1;
    if (tokens != 0) atomicAdd(&s.bins.counts[bin], tokens);
    if (weight == 0) return;
    atomicAdd(&s.bins.low[bin], (u32)weight & kLow);
    u32 high = (u32)(weight >> kLimb);
    if (high != 0) atomicAdd(&s.bins.high[bin], high);
}

// Adds one token a lane to its bin (-1: none), and counts it in bins below `counted`. Where logits are nearly equal whole
// warps fall into one bin: those add up first.
__device__ __forceinline__ void tally(Shared& s, int bin, u64 weight, int counted) {
    u32 some = __ballot_sync(kFull, bin >= 0);
    if (some == 0) return;
    int together = 0;
    if (some == kFull) __match_all_sync(kFull, bin, &together);
    if (!together) {
        if (bin >= 0) count(s, bin, weight, bin < counted ? 1 : 0);
    } else {
        weight = warp_sum_wide(weight);
        if (threadIdx.x % 32 == 0) count(s, bin, weight, bin < counted ? 32 : 0);
    }
}

// Sums over the thread block, for every thread.
__device__ __forceinline__ void block_sum(Shared& s, u64& first, u64& second) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    first = warp_sum_wide(first), second = warp_sum_wide(second);
    __syncthreads();
    if (lane == 0) s.warp_first[warp] = first, s.warp_second[warp] = second;
    __syncthreads();
    first = warp_sum_wide(lane < kThreads / 32 ? s.warp_first[lane] : 0);
    second = warp_sum_wide(lane < kThreads / 32 ? s.warp_second[lane] : 0);
    __syncthreads();
}

// The smallest and the negated largest of the thread block, for every thread.
__device__ __forceinline__ void block_bounds(Shared& s, u64& low, u64& high) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        low = smaller(low, __shfl_xor_sync(kFull, low, step));
        high = ~smaller(~high, ~__shfl_xor_sync(kFull, high, step));
    }
    __syncthreads();
    if (lane == 0) s.warp_first[warp] = low, s.warp_second[warp] = high;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) {
        low = smaller(low, s.warp_first[w]);
        high = ~smaller(~high, ~s.warp_second[w]);
    }
    __syncthreads();
}

// A histogram's bins that are this thread's, and what is before them; the sums of all.
struct Scan {
    u64 masses[kOwnBins];
    u32 counts[kOwnBins];
    u64 mass_before, mass;
    u32 count_before, count;
};

__device__ __forceinline__ Scan scan_of(Shared& s, const Histogram* h) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Scan scan;
    u64 mass = 0, tokens = 0;
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
        scan.masses[i] = fresh(&h->masses[threadIdx.x * kOwnBins + i]);
        scan.counts[i] = fresh(&h->counts[threadIdx.x * kOwnBins + i]);
        mass += scan.masses[i], tokens += scan.counts[i];
    }
    u64 own_mass = mass, own_tokens = tokens;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
        u64 other_mass = __shfl_up_sync(kFull, mass, step), other_tokens = __shfl_up_sync(kFull, tokens, step);
        if (lane >= step) mass += other_mass, tokens += other_tokens;
    }
    __syncthreads();
    if (lane == 31) s.warp_first[warp] = mass, s.warp_second[warp] = tokens;
    __syncthreads();
    scan.mass = 0;
    u64 all = 0, mass_before = mass - own_mass, tokens_before = tokens - own_tokens;
    for (int w = 0; w < kThreads / 32; ++w) {
        if (w == warp) mass_before += scan.mass, tokens_before += all;
        scan.mass += s.warp_first[w], all += s.warp_second[w];
    }
    scan.mass_before = mass_before, scan.count_before = (u32)tokens_before, scan.count = (u32)all;
    __syncthreads();
    return scan;
}

// This thread block's part in a row.
struct Row {
    Space* space;
    float* logits;
    int first, end;  // the slice
    u32 parts, histogram, list;  // which of two is next

    __device__ __forceinline__ explicit Row(const Sample& args)
        : space(args.space + blockIdx.y), logits(args.logits + (i64)blockIdx.y * args.row_stride), parts(0), histogram(0), list(0) {
        int size = ceil_div(args.vocabulary, (int)gridDim.x);
        first = min_int((int)blockIdx.x * size, args.vocabulary);
        end = min_int(first + size, args.vocabulary);
        if (blockIdx.x == 0 && threadIdx.x < 3) space->listed[threadIdx.x] = 0;
    }

    __device__ __forceinline__ View view(float temperature) const {
        return {logits, first, end, 0.0f, temperature, __fdiv_rn(1.0f, temperature), false, false, true, 0.0f, kInfinity, 0.0, ~0ull};
    }

    // Waits for the row's other thread blocks; what they wrote before is seen after it.
    __device__ __forceinline__ void meet() {
        __syncthreads();
        if (gridDim.x == 1) return;
        if (threadIdx.x == 0) {
            u32 before = load_in_order(&space->generation);
            if (add_in_order(&space->arrived, 1) == gridDim.x - 1) {
                space->arrived = 0;
                store_in_order(&space->generation, before + 1);
            } else {
                while (load_in_order(&space->generation) == before) {
                }
            }
        }
        __syncthreads();
    }

    // Zeros this thread block's part of a histogram.
    __device__ __forceinline__ void clear(Histogram* h) const {
        for (int b = blockIdx.x * kThreads + threadIdx.x; b < kBins; b += gridDim.x * kThreads) {
            h->masses[b] = 0, h->counts[b] = 0;
        }
    }

    // Leaves the first histogram as the next launch expects it, and gives `order` back.
    __device__ __forceinline__ u64 leave(Histogram* h, u64 order) {
        meet();  // everybody has read it
        clear(h);
        return order;
    }

    // All zeros, if `bounds` was called since the last one.
    __device__ __forceinline__ Histogram* next_histogram() { return &space->histograms[1 + (histogram++ & 1)]; }

    // Shows the others two numbers of this thread block, and meets.
    __device__ __forceinline__ void show(u64 one, u64 other) {
        if (threadIdx.x == 0) {
            space->parts[parts & 1][0][blockIdx.x] = one;
            space->parts[parts & 1][1][blockIdx.x] = other;
        }
        meet();
    }
    __device__ __forceinline__ u64 shown(int which, int block) const { return fresh(&space->parts[parts & 1][which][block]); }

    // The first and the last order of the tokens in `at`.
    __device__ __forceinline__ void bounds(Shared& s, const View& view, Interval& at) {
        clear(&space->histograms[1 + (histogram & 1)]);
        u64 low = ~0ull, high = 0;
        view.each(first, end, [&](int id, float logit, bool exists) {
            float distance = view.distance(logit);
            u64 order = view.order(logit, id, distance);
            bool inside = at.bin >= 0 ? view.bin(distance) == at.bin : at.high == 0 || (at.low <= order && order <= at.high);
            if (exists && inside && view.takes(logit, id, distance)) {
                low = smaller(low, order), high = ~smaller(~high, ~order);
            }
        });
        block_bounds(s, low, high);
        show(low, high);
        for (int b = 0; b < (int)gridDim.x; ++b) {
            low = smaller(low, shown(0, b));
            high = ~smaller(~high, ~shown(1, b));
        }
        ++parts;
        at.low = low, at.high = high;
    }

    // The order of the row's largest logit; all ones where there is none.
    __device__ __noinline__ u64 best(Shared& s, const View& view) {
        float largest = -kInfinity;
        int place = -1;
        view.each(first, end, [&](int id, float logit, bool) {
            if (logit > largest) largest = logit, place = id;  // the first of equal ones
        });
        u64 low = place < 0 ? ~0ull : order_of(largest, place), high = 0;
        block_bounds(s, low, high);
        show(low, 0);
        for (int b = 0; b < (int)gridDim.x; ++b) low = smaller(low, shown(0, b));
        ++parts;
        return low;
    }

    // Sum of the weights that are at least `least`.
    __device__ __forceinline__ u64 sum_of(Shared& s, const View& view, double least) {
        u64 sum = 0, none = 0;
        view.each(first, end, [&](int, float logit, bool exists) {
            float distance = view.distance(logit);
            if (exists && (double)expf(-distance) >= least) sum += view.weight(distance);
        });
        block_sum(s, sum, none);
        show(sum, 0);
        sum = 0;
        for (int b = 0; b < (int)gridDim.x; ++b) sum += shown(0, b);
        ++parts;
        return sum;
    }

    // Sets the weighted mean of the distances of all tokens that `view` takes.
    __device__ __forceinline__ void mean_of(Shared& s, View& view) {
        u64 mass = 0, moment = 0;
        view.each(first, end, [&](int id, float logit, bool exists) {
            float distance = view.distance(logit);
            if (!exists || !view.takes(logit, id, distance)) return;
            u64 weight = view.weight(distance);
            if (weight == 0) return;
            mass += weight;
            moment += (u64)((double)weight * (double)distance);
        });
        block_sum(s, mass, moment);
        show(mass, moment);
        mass = moment = 0;
        for (int b = 0; b < (int)gridDim.x; ++b) mass += shown(0, b), moment += shown(1, b);
        ++parts;
        view.mean = (float)((double)moment / (double)mass);
    }

    // Lists the tokens that `listed` names, at most kListed, in `s.list`, in no order; returns how many there are.
    template <typename Listed>
    __device__ __forceinline__ u32 gather(Shared& s, const View& view, Listed listed) {
        u32 now = list & 1, counter = list % 3;
        ++list;
        if (blockIdx.x == 0 && threadIdx.x == 0) space->listed[list % 3] = 0;
        view.each(first, end, [&](int id, float logit, bool exists) {
            float distance = view.distance(logit);
            if (exists && listed(id, logit, distance)) {
                u32 place = atomicAdd(&space->listed[counter], 1u);
                if (place < kListed) {
                    space->orders[now][place] = view.order(logit, id, distance);
                    space->weights[now][place] = view.weight(distance);
                }
            }
        });
        meet();
        u32 size = fresh(&space->listed[counter]);
        for (u32 i = threadIdx.x; i < size && i < kListed; i += kThreads) {
            s.list.orders[i] = fresh(&space->orders[now][i]);
            s.list.weights[i] = fresh(&space->weights[now][i]);
        }
        __syncthreads();
        return size;
    }
};

__device__ __forceinline__ u64 share_of(double share, u64 total) {
    double part = ceil(share * (double)total);
    u64 target = part < 1.0 ? 1 : (u64)part;
    return (target < total ? target : total) - 1;
}
