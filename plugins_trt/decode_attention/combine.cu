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
    bool is_padding = token >= batch.sequence_starts[batch.sequences];
    wait_for_dependencies();
    launch_dependents();
    if (!kOneRow && query_head >= args.heads) return;
    uint2* out = reinterpret_cast<uint2*>(args.out + ((i64)token * args.heads + query_head) * kDim) + column;
    if (is_padding) {
        if (!kOneRow || group == 0) *out = uint2{0, 0};
        return;
    }
    int heads_of_group = args.heads / args.kv_heads;
    i64 row = (i64)token * args.kv_heads + query_head / heads_of_group;
    i64 place = row * args.parts * kHeads + query_head % heads_of_group;
    int active = args.active[row];
    if (active == 1) return;

    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float maximum = -kInfinity, weight = 0.0f;
    auto add = [&](float2 statistic, float4 x) {
        float larger = fmaxf(maximum, statistic.x);
        float shift = larger == -kInfinity ? 0.0f : larger;
        float old = exp2_fast(maximum - shift), factor = exp2_fast(statistic.x - shift);
        maximum = larger;
        weight = fmaf(weight, old, statistic.y * factor);
        sum.x = fmaf(sum.x, old, x.x * factor), sum.y = fmaf(sum.y, old, x.y * factor);
        sum.z = fmaf(sum.z, old, x.z * factor), sum.w = fmaf(sum.w, old, x.w * factor);
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
#pragma unroll
        for (int i = 0; i < kAhead; ++i) add(statistic[i], x[i]);
    }
    if constexpr (kOneRow) {
        sums[group][column] = sum;
        if (column == 0) statistics[group] = float2{maximum, weight};
        __syncthreads();
        if (group != 0) return;
#pragma unroll
        for (int i = 1; i < kGroups; ++i) add(statistics[i], sums[i][column]);
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
