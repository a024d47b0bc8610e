// Merges the parts of each token and head; see attend.cuh.
#include "decode_attention/attend.cuh"

constexpr int kCombineThreads = 256;
constexpr int kFewParts = 32;

// Grid: (heads, tokens). D / 4 threads take 16 bytes each of a part, and groups of so many threads share the parts. A group
// adds parts as it goes, scaled to the largest maximum so far; then the groups' sums are merged in the same way.
template <typename T, int kDim>
__device__ __forceinline__ void combine_many(const Batch& batch, const Attend& args) {
    constexpr int kColumns = kDim / 4;
    constexpr int kGroups = kCombineThreads / kColumns;
    __shared__ float4 sums[kGroups][kColumns];
    __shared__ float2 statistics[kGroups];
    int token = blockIdx.y;
    int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
    int query_head = blockIdx.x;
    int heads_of_group = args.heads / args.kv_heads;
    int kv_head = query_head / heads_of_group;
    int start, tokens, length, active = 1;
    bool is_padding = batch.sequence_of(token, start, tokens, length) < 0;
    if (!is_padding) active = active_parts(batch, args, length, tokens, token, kv_head);
    wait_for_dependencies();
    launch_dependents();
    uint2* out = reinterpret_cast<uint2*>(args.out + ((i64)token * args.heads + query_head) * kDim) + column;
    if (is_padding) {
        if (group == 0) *out = uint2{0, 0};
        return;
    }
    i64 place = ((i64)token * args.kv_heads + kv_head) * args.parts * kHeads + query_head % heads_of_group;
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
    constexpr int kAhead = 8;  // parts under way
    for (int first = group; first < active; first += kGroups * kAhead) {
        float2 statistic[kAhead];
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            int part = first + i * kGroups;  // past the last, that one again, without weight
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
    float inverse = 1.0f / weight;
    *out = uint2{T::pack(sum.x * inverse, sum.y * inverse), T::pack(sum.z * inverse, sum.w * inverse)};
}

// Of up to 32 parts. D / 4 lanes have a row of the output; each knows the statistics of some of its parts, so that the first
// sums are under way together with them.
// Grid: (ceil(heads / rows of a CTA), tokens).
template <typename T, int kDim>
__device__ __forceinline__ void combine_few(const Batch& batch, const Attend& args) {
    constexpr int kLanes = kDim / 4, kRows = kCombineThreads / kLanes, kKnown = kFewParts / kLanes;
    constexpr int kAhead = 12;  // parts under way
    int token = blockIdx.y;
    int lane = threadIdx.x % kLanes;
    int query_head = blockIdx.x * kRows + threadIdx.x / kLanes;
    int heads_of_group = args.heads / args.kv_heads;
    int kv_head = query_head / heads_of_group;
    int start, tokens, length, active = 1;
    bool is_padding = batch.sequence_of(token, start, tokens, length) < 0;
    if (!is_padding && query_head < args.heads) active = active_parts(batch, args, length, tokens, token, kv_head);
    i64 place = ((i64)token * args.kv_heads + kv_head) * args.parts * kHeads + query_head % heads_of_group;
    const float2* statistics = args.statistics + place;
    const float4* partial = reinterpret_cast<const float4*>(args.partial + place * kDim) + lane;
    uint2* out = reinterpret_cast<uint2*>(args.out + ((i64)token * args.heads + query_head) * kDim) + lane;
    wait_for_dependencies();
    launch_dependents();
    bool exists = query_head < args.heads;
    if (exists && is_padding) *out = uint2{0, 0};
    if (!exists || is_padding || active == 1) active = 0;  // (all lanes of a warp stay together)
    float2 known[kKnown];
#pragma unroll
    for (int i = 0; i < kKnown; ++i)
        known[i] = i * kLanes + lane < active ? statistics[(i * kLanes + lane) * kHeads] : float2{-kInfinity, 0.0f};
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    float weight = 0.0f;
#pragma unroll 1
    for (int first = 0; __any_sync(kFull, first < active); first += kAhead) {
        float4 x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            x[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
            if (first + i < active) x[i] = __ldcs(partial + (first + i) * (kHeads * kLanes));
        }
        if (first == 0) {  // a part's maximum becomes the factor of its sums
            float most = known[0].x;
#pragma unroll
            for (int i = 1; i < kKnown; ++i) most = fmaxf(most, known[i].x);
#pragma unroll
            for (int other = kLanes / 2; other > 0; other >>= 1) most = fmaxf(most, __shfl_xor_sync(kFull, most, other));
#pragma unroll
            for (int i = 0; i < kKnown; ++i) {
                known[i].x = known[i].x == -kInfinity ? 0.0f : exp2_fast(known[i].x - most);
                weight = fmaf(known[i].y, known[i].x, weight);
            }
#pragma unroll
            for (int other = kLanes / 2; other > 0; other >>= 1) weight += __shfl_xor_sync(kFull, weight, other);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            float factor = 0.0f;
#pragma unroll
            for (int j = 0; j < kKnown; ++j) {
                float of = __shfl_sync(kFull, known[j].x, (first + i) % kLanes, kLanes);
                if ((first + i) / kLanes == j) factor = of;
            }
            sum.x = fmaf(x[i].x, factor, sum.x), sum.y = fmaf(x[i].y, factor, sum.y);
            sum.z = fmaf(x[i].z, factor, sum.z), sum.w = fmaf(x[i].w, factor, sum.w);
        }
    }
    if (active == 0) return;
    float inverse = 1.0f / weight;
    *out = uint2{T::pack(sum.x * inverse, sum.y * inverse), T::pack(sum.z * inverse, sum.w * inverse)};
}

#define COMBINE(type, suffix, dim)                                             \
    extern "C" __global__ void __launch_bounds__(kCombineThreads, 4)           \
        combine_many_##suffix##_d##dim(const Batch batch, const Attend args) { \
        combine_many<type, dim>(batch, args);                                  \
    }                                                                          \
    extern "C" __global__ void __launch_bounds__(kCombineThreads, 3)           \
        combine_few_##suffix##_d##dim(const Batch batch, const Attend args) {  \
        combine_few<type, dim>(batch, args);                                   \
    }

COMBINE(F16, f16, 64)
COMBINE(F16, f16, 128)
COMBINE(BF16, bf16, 64)
COMBINE(BF16, bf16, 128)
