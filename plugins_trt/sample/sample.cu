// Draws one token a row with all that a request can say about it, as reference.py defines it. Several thread blocks a
// row, each of which owns a part of the vocabulary; they meet at counters in the row's workspace, so all thread blocks of
// a launch with more than one a row must be resident together (launch.py sees to it).
//
// Weights exp((l - max) / t) are whole multiples of 2^-36 here, so their sums are exact in any order. Tokens are counted
// into bins by their distance from the largest logit, which grows with their rank; what is looked for (the last of
// top_k, the last of top_p, the token itself) lies in one bin, whose few tokens are then compared with each other. A bin
// with many is divided into bins again, between its first and its last token.
#include "sample/row.cuh"

// Fills a histogram with the slice's tokens, whose bins `bin_of` gives (-1: none) and which are counted in bins below
// `counted`. It is all zeros before, and all thread blocks' after they have met.
template <typename BinOf>
__device__ __forceinline__ void fill(Shared& s, Histogram* h, const View& view, int counted, BinOf bin_of) {
    for (int start = view.first; start < view.end; start += kMostCounted) {
        int end = min_int(view.end, start + kMostCounted);
        __syncthreads();
        for (int b = threadIdx.x; b < kBins; b += kThreads) s.bins.counts[b] = s.bins.low[b] = s.bins.high[b] = 0;
        __syncthreads();
        view.each(start, end, [&](int id, float logit, bool exists) {
            u64 weight = 0;
            int bin = exists ? bin_of(id, logit, weight) : -1;
            tally(s, bin, weight, counted);
        });
        __syncthreads();
        for (int b = threadIdx.x; b < kBins; b += kThreads) {
            u32 tokens = s.bins.counts[b];
            u64 mass = (u64)s.bins.low[b] + ((u64)s.bins.high[b] << kLimb);
            if (tokens != 0) atomicAdd(&h->counts[b], tokens);
            if (mass != 0) atomicAdd(&h->masses[b], mass);
        }
    }
}

__device__ __noinline__ void fill_first(Shared& s, Histogram* h, const View& view) {
    fill(s, h, view, view.counts ? kBins : kCounted, [&](int id, float logit, u64& weight) {
        float distance = view.distance(logit);
        int bin = view.bin(distance);
        if (bin < 0 || !view.takes(logit, id, distance)) return -1;
        weight = view.weight(distance);
        return bin;
    });
}

// The bin in which the running sum of weights (or of tokens) first exceeds `target`.
__device__ __forceinline__ Interval locate(Shared& s, const Scan& scan, bool by_count, u64 target) {
    u64 mass = scan.mass_before;
    u32 count = scan.count_before;
#pragma unroll
    for (int i = 0; i < kOwnBins; ++i) {
        u64 next_mass = mass + scan.masses[i];
        u32 next_count = count + scan.counts[i];
        if (by_count ? count <= target && target < next_count : mass <= target && target < next_mass) {
            s.place = Interval{(int)threadIdx.x * kOwnBins + i, 0, 0, mass, count, scan.counts[i]};
        }
        mass = next_mass, count = next_count;
    }
    __syncthreads();
    Interval found = s.place;
    __syncthreads();
    return found;
}

// Divides an interval into bins, and leaves the one in which `target` is.
__device__ __noinline__ void divide(Shared& s, Row& row, const View& view, Interval& at, bool by_count, u64 target) {
    row.bounds(s, view, at);
    int width = 64 - __clzll((i64)(at.high - at.low));
    int shift = width > kBinBits ? width - kBinBits : 0;
    Histogram* h = row.next_histogram();
    u64 low = at.low, high = at.high;
    fill(s, h, view, kBins, [&](int id, float logit, u64& weight) {
        float distance = view.distance(logit);
        if (!view.takes(logit, id, distance)) return -1;
        u64 order = view.order(logit, id, distance);
        if (order < low || order > high) return -1;
        weight = view.weight(distance);
        return (int)((order - low) >> shift);
    });
    row.meet();
    Scan scan = scan_of(s, h);
    Interval part = locate(s, scan, by_count, target - (by_count ? (u64)at.count : at.mass));
    at.low = low + ((u64)part.bin << shift);
    u64 last = at.low + ((1ull << shift) - 1);
    at.high = last < high ? last : high;
    at.mass += part.mass, at.count += part.count, at.size = part.size;
    at.bin = -1;
}

// Finds the token at which the running sum first exceeds `target` in an interval that has it: its order, and the sum of
// weights up to and with it.
__device__ __noinline__ Found find(Shared& s, Row& row, const View& view, Interval at, bool by_count, u64 target) {
    while (true) {
        if (at.size <= kListed) {  // as far as they were counted
            at.size = row.gather(s, view, [&](int id, float logit, float distance) {
                u64 order = view.order(logit, id, distance);
                return view.takes(logit, id, distance) &&
                       (at.bin >= 0 ? view.bin(distance) == at.bin : at.low <= order && order <= at.high);
            });
            if (at.size <= kListed) break;
        }
        divide(s, row, view, at, by_count, target);
    }
    u64 wanted = target - (by_count ? (u64)at.count : at.mass);
    for (u32 mine = threadIdx.x; mine < at.size; mine += kThreads) {
        u64 order = s.list.orders[mine], mass = 0;
        u32 count = 0;
        for (u32 other = 0; other < at.size; ++other) {
            if (s.list.orders[other] < order) mass += s.list.weights[other], ++count;
        }
        u64 weight = s.list.weights[mine];
        if (by_count ? count == wanted : mass <= wanted && wanted < mass + weight) {
            s.found = Found{order, at.mass + mass + weight};
        }
    }
    __syncthreads();
    Found found = s.found;
    __syncthreads();
    return found;
}

// The log-sum and the likeliest tokens of the raw logits, before anything is done to them.
__device__ __noinline__ void record(Shared& s, Row& row, const Sample& args, int wanted, Logprobs* out) {
    View view = row.view(1.0f);
    Interval all{-1, 0, 0, 0, 0, (u32)args.vocabulary};
    row.bounds(s, view, all);
    view.largest = logit_of(all.low);
    int width = 64 - __clzll((i64)(all.high - all.low));
    int shift = width > kBinBits ? width - kBinBits : 0;
    Histogram* h = row.next_histogram();
    fill(s, h, view, kBins, [&](int id, float logit, u64& weight) {
        float distance = view.distance(logit);
        weight = view.weight(distance);
        return (int)((view.order(logit, id, distance) - all.low) >> shift);
    });
    row.meet();
    Scan scan = scan_of(s, h);
    if (blockIdx.x == 0 && threadIdx.x == 0) out->largest = view.largest, out->total = scan.mass;
    if (wanted == 0) return;
    Interval part = locate(s, scan, true, (u64)(wanted - 1));
    part.low = all.low + ((u64)part.bin << shift);
    part.high = part.low + ((1ull << shift) - 1);
    part.bin = -1;
    u64 last = find(s, row, view, part, true, (u64)(wanted - 1)).order;
    row.gather(s, view, [&](int id, float logit, float distance) { return view.order(logit, id, distance) <= last; });
    if (blockIdx.x == 0) {
        for (int mine = threadIdx.x; mine < wanted; mine += kThreads) {
            u64 order = s.list.orders[mine];
            int rank = 0;
            for (int other = 0; other < wanted; ++other) rank += s.list.orders[other] < order;
            out->ids[rank] = (i32)(u32)order;
            out->values[rank] = logit_of(order);
        }
    }
    __syncthreads();
}

// Calls `change(e, entry, logit)` for the entries of a list whose tokens are in the slice.
template <typename Change>
__device__ __forceinline__ void each_own(const Sample& args, const Row& row, int from, int to, Change change) {
    for (int e = from + threadIdx.x; e < to; e += kThreads) {
        Entry entry = args.entries[e];
        if (row.first <= entry.id && entry.id < row.end) change(e, entry, row.logits[entry.id]);
    }
    __syncthreads();
}

// What a request says about single tokens, in the slice; what it forbids becomes minus infinity.
__device__ __forceinline__ void process(const Sample& args, const Row& row, const RowOptions& options) {
    if (options.logprobs >= 0) {
        each_own(args, row, options.biases, options.last, [&](int e, Entry, float& logit) { args.raw[e] = logit; });
    }
    each_own(args, row, options.biases, options.seen, [&](int, Entry entry, float& logit) {
        logit = __fadd_rn(logit, __int_as_float(entry.value));
    });
    each_own(args, row, options.seen, options.answered, [&](int, Entry, float& logit) {
        logit = logit < 0.0f ? __fmul_rn(logit, options.repetition) : __fdiv_rn(logit, options.repetition);
    });
    each_own(args, row, options.answered, options.forbidden, [&](int, Entry entry, float& logit) {
        float penalty = __fadd_rn(options.presence, __fmul_rn((float)entry.value, options.frequency));
        logit = __fsub_rn(logit, penalty);
    });
    each_own(args, row, options.forbidden, options.last, [&](int, Entry, float& logit) { logit = -kInfinity; });
    if (options.mask >= 0) {
        const u32* mask = args.masks + (i64)options.mask * args.mask_words;
        for (int id = row.first + threadIdx.x; id < row.end; id += kThreads) {
            if ((mask[id / 32] >> (id % 32) & 1) == 0) row.logits[id] = -kInfinity;
        }
        __syncthreads();
    }
}

// What is looked for in a histogram of the first level, and where it is; the bin is -1 where nothing is there.
struct Aim {
    Interval at;
    u64 target;
};

enum Of { kCount, kShare, kNumber };

// The bin of the token that many tokens are before, of the last of a share of `total`, or of the one that a number draws.
// `total` 0 stands for the histogram's.
__device__ __noinline__ Aim aim(Shared& s, const Histogram* h, Of of, double value, u64 total) {
    Scan scan = scan_of(s, h);
    if (total == 0) total = scan.mass;
    u64 target = of == kShare ? share_of(value, total) : (u64)(of == kNumber ? value * (double)total : value);
    if (of == kNumber && target >= total) target = total - 1;
    Aim aim{{-1, 0, 0, 0, 0, 0}, target};
    if (of == kCount ? target < scan.count : total != 0) aim.at = locate(s, scan, of == kCount, target);
    return aim;
}

// The token of a row with a temperature; `best` is the order of its likeliest one.
__device__ __forceinline__ u64 draw(Shared& s, Row& row, View& view, const Sample& args, u64 best) {
    const RowOptions& options = s.options;
    Histogram* first = &row.space->histograms[0];
    int top_k = args.top_ks[blockIdx.y];
    bool cuts = top_k > 0 && top_k < args.vocabulary;
    view.counts = cuts;
    fill_first(s, first, view);
    view.counts = false;
    u64 likely = 0;
    if (options.min_p > 0.0) {
        likely = row.sum_of(s, view, options.min_p);  // (meets)
    } else {
        row.meet();
    }
    u64 last = ~0ull, total = 0;
    if (cuts) {
        Aim found = aim(s, first, kCount, (double)(top_k - 1), 0);
        if (found.at.bin >= 0) {  // else only tokens without weight are cut off
            Found end = find(s, row, view, found.at, true, found.target);
            last = end.order, total = end.mass;
        }
    }
    double top_p = args.top_ps[blockIdx.y];
    if (top_p < 1.0) {
        Aim found = aim(s, first, kShare, top_p, total);
        if (found.at.bin < 0) return row.leave(first, best);
        Found end = find(s, row, view, found.at, false, found.target);
        last = end.order, total = end.mass;
    }
    if (likely > 0 && (total == 0 || likely < total)) total = likely;
    if (options.typical_p < 1.0) {
        view.last = last, view.least = options.min_p, view.filters = true;
        row.mean_of(s, view);  // (meets)
        view.by_deviation = true;
        row.clear(first);
        row.meet();
        fill_first(s, first, view);
        row.meet();
        Aim found = aim(s, first, kShare, options.typical_p, 0);
        if (found.at.bin < 0) return row.leave(first, best);
        u64 end = find(s, row, view, found.at, false, found.target).order;
        view.by_deviation = false, view.widest = __uint_as_float((u32)(end >> 32));
        row.meet();  // everybody has read the histogram
        row.clear(first);
        row.meet();
        fill_first(s, first, view);
        row.meet();
        total = 0;
    }
    Aim found = aim(s, first, kNumber, args.numbers[blockIdx.y], total);
    if (found.at.bin < 0) return row.leave(first, best);
    u64 order = find(s, row, view, found.at, false, found.target).order;  // (meets)
    row.clear(first);
    return order;
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) sample_f32(const Sample args) {
    extern __shared__ __align__(16) unsigned char memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    wait_for_dependencies();
    launch_dependents();
    float temperature = args.temperatures[blockIdx.y];
    bool warm = temperature >= kSmallest;
    if (threadIdx.x == 0) {
        bool given = args.options != nullptr && args.options[blockIdx.y].draws != 0;
        s.options = given ? args.options[blockIdx.y] : RowOptions::none();
    }
    __syncthreads();
    const RowOptions& options = s.options;  // few registers are left
    if (!warm && options.draws == 0) return;
    Row row(args);
    Logprobs* record_of = args.logprobs + blockIdx.y;
    if (options.logprobs >= 0) record(s, row, args, options.logprobs, record_of);
    if (options.draws != 0) process(args, row, options);

    View view = row.view(temperature);
    u64 best = ~0ull;
    if (args.largest_known && options.draws == 0) {
        int id = args.ids[blockIdx.y];
        float logit = row.logits[id];
        if (logit > -kInfinity) best = order_of(logit, id);
    }
    if (best == ~0ull) best = row.best(s, view);  // (meets)
    view.largest = logit_of(best);
    bool possible = best != ~0ull && view.largest > -kInfinity;
    if (warm && possible) best = draw(s, row, view, args, best);
    if (blockIdx.x != 0) return;
    int id = possible ? (i32)(u32)best : -1;
    if (threadIdx.x == 0) args.ids[blockIdx.y] = id;
    if (options.logprobs < 0 || !possible) return;
    if (threadIdx.x == 0) record_of->chosen = fresh(&row.logits[id]);
    __syncthreads();
    for (int e = options.biases + threadIdx.x; e < options.last; e += kThreads) {
        if (args.entries[e].id == id) record_of->chosen = fresh(&args.raw[e]);
    }
}
