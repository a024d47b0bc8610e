// Merges the parts of each token and head; see attend.cuh.
#include "decode_attention/attend.cuh"

constexpr int kCombineThreads = 256;

// Grid: (ceil(heads / kRowsOfCta), tokens). D / 4 threads take 16 bytes each of a part of one row of the output;
// with one row a CTA, all its groups of threads share the parts, else each group has a row of its own. A group adds
// parts as it goes, scaled to the largest maximum so far; then the groups' sums are merged in the same way.
template <typename T, int kDim, bool kOneRow>
__device__ __forceinline__ void combine(const Batch& batch, const Attend& args) {
    constexpr int kColumns = kDim / 4;
    constexpr int kGroups = kCombineThreads / kColumns;
    __shared__ float4 sums[kOneRow ? kGroups : 1][kColumns];
    __shared__ float2 statistics[kGroups];
    int token = blockIdx.y;
    int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
    int query_head = kOneRow ? blockIdx.x : blockIdx.x * kGroups + group;
    int kv_head = query_head / (args.heads / args.kv_heads);
    int start, tokens, length, active = 1;
    bool is_padding = batch.sequence_of(token, start, tokens, length) < 0;
    if (!is_padding && query_head < args.heads) active = active_parts(batch, args, length, tokens, token, kv_head);
    wait_for_dependencies();
    launch_dependents();
    if (!kOneRow && query_head >= args.heads) return;
    uint2* out = reinterpret_cast<uint2*>(args.out + ((i64)token * args.heads + query_head) * kDim) + column;
    if (is_padding) {
        if (!kOneRow || group == 0) *out = uint2{0, 0};
        return;
    }
    int heads_of_group = args.heads / args.kv_heads;
    i64 row = (i64)token * args.kv_heads + kv_head;
    i64 place = row * args.parts * kHeads + query_head % heads_of_group;
    if (active == 1) return;

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float maximum = -kInfinity, weight = 0.0f;
    // What was added so far is scaled to the largest maximum once, then each part is added with its own factor.
    auto rescale = [&](float larger) {
        float shift = larger == -kInfinity ? 0.0f : larger;
        float old = exp2_fast(maximum - shift);
        maximum = larger;
        weight *= old;
        sum.x *= old, sum.y *= old, sum.z *= old, sum.w *= old;
        return shift;
    };
    auto add = [&](float2 statistic, float4 x, float shift) {
        float factor = exp2_fast(statistic.x - shift);
        weight = fmaf(statistic.y, factor, weight);
        sum.x = fmaf(x.x, factor, sum.x), sum.y = fmaf(x.y, factor, sum.y);
        sum.z = fmaf(x.z, factor, sum.z), sum.w = fmaf(x.w, factor, sum.w);
    };
    constexpr int kStep = kOneRow ? kGroups : 1;
    constexpr int kAhead = 8;  // parts under way
    for (int first = kOneRow ? group : 0; first < active; first += kStep * kAhead) {
        float2 statistic[kAhead];
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            int part = first + i * kStep;  // past the last, that one again, without weight
            i64 at = place + (i64)min_int(part, active - 1) * kHeads;
            statistic[i] = args.statistics[at];
            x[i] = __ldcs(reinterpret_cast<const float4*>(args.partial + at * kDim) + column);
            if (part >= active) statistic[i] = float2{-kInfinity, 0.0f};
        }
        float larger = maximum;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) larger = fmaxf(larger, statistic[i].x);
        float shift = rescale(larger);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) add(statistic[i], x[i], shift);
    }
    if constexpr (kOneRow) {
        sums[group][column] = sum;
        if (column == 0) statistics[group] = float2{maximum, weight};
        __syncthreads();
        if (group != 0) return;
        float larger = maximum;
#pragma unroll
        for (int i = 1; i < kGroups; ++i) larger = fmaxf(larger, statistics[i].x);
        float shift = rescale(larger);
#pragma unroll
        for (int i = 1; i < kGroups; ++i) add(statistics[i], sums[i][column], shift);
    }
    float inverse = 1.0f / weight;
    *out = uint2{T::pack(sum.x * inverse, sum.y * inverse), T::pack(sum.z * inverse, sum.w * inverse)};
}

#define COMBINE(type, suffix, dim)                                              \
    extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)            \
        combine_many_##suffix##_d##dim(const Batch batch, const Attend args) {  \
        combine<type, dim, true>(batch, args);                                  \
    }                                                                           \
    extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)            \
        combine_few_##suffix##_d##dim(const Batch batch, const Attend args) {   \
        combine<type, dim, false>(batch, args);                                 \
    }

COMBINE(F16, f16, 64)
COMBINE(F16, f16, 128)
COMBINE(BF16, bf16, 64)
COMBINE(BF16, bf16, 128)
