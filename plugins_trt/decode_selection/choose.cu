// The best blocks of each token and KV head, a CTA each, from the scores of all blocks.
#include "decode_selection/choose.cuh"

// Grid: (tokens, kv_heads).
__device__ __forceinline__ void choose_all(const Batch& batch, const Select& args) {
    wait_for_dependencies();
    launch_dependents();
    int token = blockIdx.x;
    int kv_head = blockIdx.y;
    int position = batch.positions[token];
    int sequence = batch.sequence_of(token);
    if (sequence < 0 || !is_sparse(args, position)) write_nothing(args, token, kv_head);
    else choose_any(batch, args, sequence, token, kv_head, position);
}

extern "C" __global__ void __launch_bounds__(kChooseThreads, 1) choose_blocks(
    const __grid_constant__ Batch batch, const __grid_constant__ Select args) {
    choose_all(batch, args);
}
