// Block selection of a step of one token, the usual decode step, in two launches: `lse_one`, softmax statistics, and
// `scores_one`, whose last CTA of a KV head also chooses. The same arithmetic as lse.cu, scores.cu and choose.cu, without
// what several tokens and trees need: these kernels take a few microseconds, of which fetching instructions is a part.
#include "decode_selection/choose.cuh"
#include "decode_selection/keys.cuh"

static_assert(kThreads == kChooseThreads && kWarps == kHeads, "a warp gathers the statistics of a head");

// The step's token, row 0, as the CTAs of sequence blockIdx.z see it. Every warp waits for the launch before it.
struct One {
    int position;
    bool is_here;    // the token is this sequence's
    bool is_sparse;  // and it selects

    __device__ __forceinline__ One(const Batch& batch, const Select& args) {
        position = batch.positions[0];
        is_here = batch.sequence_starts[blockIdx.z] < batch.sequence_starts[blockIdx.z + 1];
        is_sparse = is_here && ::is_sparse(args, position);
    }
};

// Grid: (parts, kv_heads, sequences).
template <typename T, int kDim>
__device__ __forceinline__ void lse_one(const Batch& batch, const Arena& arena, const Select& args) {
    __shared__ float2 of_warps[kWarps][kHeads];
    int part = blockIdx.x, kv_head = blockIdx.y;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    One one(batch, args);
    int pages_a_unit = args.exact ? kFinePages : kCoarsePages;
    if (!one.is_sparse || part * kWarps * pages_a_unit * kPage > one.position) {
        wait_for_dependencies();
        launch_dependents();
        return;
    }
    // The keys of accumulator rows g and g + 8.
    const i32* table = batch.table(blockIdx.z);
    bool sees[2];
    const u16* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = (lane >> 2) + 8 * half;
        int page = (part * kWarps + warp) * pages_a_unit + (args.exact ? row / kFineSlots : row);
        int slot = args.exact ? row % kFineSlots : 0;
        int complete = args.exact ? 16 * (page * kFineSlots + slot) + 15 : kPage * page + kPage - 1;
        sees[half] = (args.exact ? page + slot : page) > 0 && complete <= one.position;
        rows[half] = nullptr;
        if (sees[half])
            rows[half] = args.exact ? arena.fine.row<kDim>(table[page], kv_head, slot)
                                    : arena.coarse.row<kDim>(table[page], kv_head, 0);
    }
    wait_for_dependencies();
    launch_dependents();
    Rows<kDim> keys, q;
    keys.load(rows[0], rows[1], lane);
    load_heads<kDim>(q, args, 0, kv_head, lane);
    float acc[2][4];
    keys_times_heads<T, kDim>(acc, keys, q);
    sum_keys(acc, args.scale, sees[0], sees[1], lane, of_warps[warp]);
    __syncthreads();
    if (threadIdx.x < kHeads)
        args.lse[((i64)kv_head * args.lse_parts + part) * kHeads + threadIdx.x] = log_sum_of_warps(of_warps, threadIdx.x);
}

// Grid: (parts, kv_heads, sequences).
template <typename T, int kDim>
__device__ __forceinline__ void scores_one(const Batch& batch, const Arena& arena, const Select& args) {
    __shared__ float lse_of_heads[kHeads];
    __shared__ float most_of_pages[kPagesOfCta], first_of_pages[kPagesOfCta];
    __shared__ bool is_last;
    int part = blockIdx.x, kv_head = blockIdx.y;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    One one(batch, args);
    int stored = one.position + 1;
    int active = ceil_div(stored, kPagesOfCta * kPage);
    if (!one.is_sparse || part >= active) {
        wait_for_dependencies();
        launch_dependents();
        bool is_padding = batch.sequence_starts[batch.sequences] == 0 && blockIdx.z == 0;
        if (part == 0 && (is_padding || (one.is_here && !one.is_sparse))) write_nothing(args, 0, kv_head);
        return;
    }
    // Keys and queries were written before `lse_one`, the launch before this: they are read, and multiplied, before
    // that one ends.
    int page = warp * kFinePages;
    FineKeys<kDim> fine(arena, batch.table(blockIdx.z), kv_head, part * kPagesOfCta + page, stored, lane);
    Rows<kDim> keys, q;
    keys.load(fine.rows[0], fine.rows[1], lane);
    load_heads<kDim>(q, args, 0, kv_head, lane);
    float acc[2][4];
    keys_times_heads<T, kDim>(acc, keys, q);
    int parts = ceil_div(stored, kWarps * (args.exact ? kFinePages : kCoarsePages) * kPage);
    const float* row = args.lse + (i64)kv_head * args.lse_parts * kHeads + warp;
    wait_for_dependencies_after(acc[0][0] + acc[1][0]);
    launch_dependents();
    {  // the log-sum-exp over all parts, a head a warp
        float own = lane < parts ? __ldcg(row + lane * kHeads) : -kInfinity, maximum = own;
#pragma unroll 1
        for (int i = lane + 32; i < parts; i += 32) maximum = fmaxf(maximum, __ldcg(row + i * kHeads));
        maximum = warp_max(maximum);
        float shift = maximum == -kInfinity ? 0.0f : maximum;
        float sum = exp2_fast(own - shift);
#pragma unroll 1
        for (int i = lane + 32; i < parts; i += 32) sum += exp2_fast(__ldcg(row + i * kHeads) - shift);
        sum = warp_sum(sum);
        bool seen = sum > 0.0f && warp < args.heads / args.kv_heads;
        if (lane == 0) lse_of_heads[warp] = seen ? log_sum(maximum, sum) : kInfinity;
    }
    __syncthreads();
    weigh_pages(
        acc, lse_of_heads, args.scale, fine.complete, stored, lane, &most_of_pages[page], &first_of_pages[page]);
    __syncthreads();
    if (warp == 0) {
#pragma unroll
        for (int i = lane; i < kPagesOfCta; i += 32)
            write_score(args, 0, kv_head, part, i, most_of_pages, first_of_pages);
        __syncwarp();
        if (lane == 0) {
            // The barrier ordered the warp's writes before this thread; the release makes them seen elsewhere.
            u32* arrived = args.arrived + blockIdx.z * args.kv_heads + kv_head;
            is_last = add_in_order(arrived, 1) == (u32)active - 1;
            if (is_last) *arrived = 0;
        }
    }
    __syncthreads();
    if (is_last) choose_any(batch, args, stored, 0, kv_head, one.position);
}

#define ONE(type, suffix, dim)                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                            \
        lse_one_##suffix##_d##dim(const Batch batch, const Arena arena, const __grid_constant__ Select args) {    \
        lse_one<type, dim>(batch, arena, args);                                          \
    }                                                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                            \
        scores_one_##suffix##_d##dim(const __grid_constant__ Batch batch, const Arena arena, const __grid_constant__ Select args) { \
        scores_one<type, dim>(batch, arena, args);                                       \
    }

ONE(F16, f16, 64)
ONE(F16, f16, 128)
ONE(BF16, bf16, 64)
ONE(BF16, bf16, 128)
