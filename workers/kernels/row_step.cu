// All layers and the head of a decode step of one row, in one launch of a block on each multiprocessor.
//
// A step of one row takes as long as its weights take to read. So each warp fetches its shares of all weights, and of
// the stored K and V, in the order in which it will need them, into a ring of its own in shared memory; what a phase
// must know of the phases before is small, and travels from block to block in words that carry the layer that wrote
// them: whoever finds the tag it looks for has the numbers (as NCCL's LL protocol does). The stream of weights never
// waits for it.
//
//   qkv -> attention -> o + residual -> gate and up -> down + residual -> ... -> head
//
// A buffer of words is written once a layer. Every block has outputs in every phase, so whoever writes a buffer anew
// has, by way of its inputs, waited for all that read it the layer before.
#include "row_attention.cuh"
#include "row_product.cuh"

// Which outputs and positions are this block's.
__device__ void share_out(const Step& step, Block& block, Warp& warp) {
    warp.first_page = step.kv_indptr[0];
    warp.stored = (step.kv_indptr[1] - warp.first_page - 1) * step.page_size + step.kv_last_page_len[0] - 1;
    int share = (warp.stored + SPLITS * SHARE - 1) / (SPLITS * SHARE) * SHARE, split = blockIdx.x % SPLITS;
    warp.split_begin = split * share;
    int positions = blockIdx.x < KV_HEADS * SPLITS ? at_most(warp.stored - warp.split_begin, share) : 0;
    if (threadIdx.x == 0) {
        const int pairs[] = {QKV_ROWS / 2, 0, HIDDEN / 2, INNER / 2, HIDDEN / 2, step.vocab / 2};
        for (int phase = 0; phase < PHASES; phase++) {
            block.state.begins[phase] = (long long)pairs[phase] * blockIdx.x / BLOCKS;
            block.state.counts[phase] =
                (int)((long long)pairs[phase] * (blockIdx.x + 1) / BLOCKS) - block.state.begins[phase];
        }
        block.state.counts[ATTENTION] = positions > 0 ? (positions + SHARE - 1) / SHARE : 0;
        for (int warp = 0; warp < WARPS; warp++)
            for (int slot = 0; slot < DEPTH; slot++) make_arrival(&block.state.arrivals[warp][slot]);
        publish_arrivals();
    }
    __syncthreads();
    int begin = 2 * block.state.begins[DOWN], count = 2 * block.state.counts[DOWN];
    for (int row = threadIdx.x; row < count; row += THREADS) block.state.residual[row] = (float)step.x[begin + row];
    __syncthreads();
}

// Brings the gains of a layer near: all blocks read them, at moments when each waits for the others.
__device__ void warm_up(const Step& step, int layer) {
    if (layer >= step.num_layers || threadIdx.x != THREADS - 1) return;
    constexpr int NORM = (HIDDEN + 63) / 64, HEADS = ((Q_HEADS + KV_HEADS) * HEAD_DIM + 63) / 64;  // lines of 128 bytes
    for (int line = blockIdx.x; line < 2 * NORM + HEADS; line += BLOCKS) {
        int which = line < NORM ? INPUT_NORM : line < 2 * NORM ? POST_NORM : HEAD_NORMS;
        const Number* gain = step.layers[layer * POINTERS + which];
        if (gain)
            prefetch(gain + 64 * (which == INPUT_NORM ? line : which == POST_NORM ? line - NORM : line - 2 * NORM));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_step(const __grid_constant__ Step step) {
    SHARED_MEMORY(shared);
    Block& block = *reinterpret_cast<Block*>(shared);
    Warp warp{step, block, (int)threadIdx.x / 32, (int)threadIdx.x % 32, 0, QKV, (int)threadIdx.x / 32, 0, 0,
              streaming_policy(), 0, 0, 0, false};
    unsigned first_tag = step.epoch[0];
    share_out(step, block, warp);
    for (int slot = 0; slot < DEPTH; slot++) warp.fetch_next();
    warm_up(step, 0);
    Word* words = step.words;
    const unsigned* embedded = reinterpret_cast<const unsigned*>(step.x);
    for (int layer = 0; layer < step.num_layers; layer++) {
        const Number* const* of_layer = step.layers + layer * POINTERS;
        unsigned tag = first_tag + layer;
        auto add_to_residual = [&](int to, int phase) {
            return [&, to, phase](int pair, const float* sums) {
                float* row = block.state.residual + 2 * pair;
                float2 sum = rounded({sums[0], sums[1]});
                unsigned bits = pack(row[0] + sum.x, row[1] + sum.y);
                row[0] = unpack(bits).x, row[1] = unpack(bits).y;
                write_word(words + to + block.state.begins[phase] + pair, bits, tag);
            };
        };
        gather<HIDDEN>(step, block, words + X_AT, tag - 1, layer ? nullptr : embedded, of_layer[INPUT_NORM]);
        multiply<QKV, HIDDEN>(warp, [&](int pair, const float* sums) {
            int place = block.state.begins[QKV] + pair;
            float2 bias = {0, 0};
            if (of_layer[QKV_BIAS]) bias = unpack(reinterpret_cast<const unsigned*>(of_layer[QKV_BIAS])[place]);
            write_word(words + QKV_AT + place, pack(sums[0] + bias.x, sums[1] + bias.y), tag);
        });
        attend(warp, layer, tag);
        warm_up(step, layer + 1);
        gather<HEADS_WIDTH>(step, block, words + HEADS_AT, tag, nullptr, nullptr);
        multiply<O, HEADS_WIDTH>(warp, add_to_residual(MID_AT, O));
        gather<HIDDEN>(step, block, words + MID_AT, tag, nullptr, of_layer[POST_NORM]);
        multiply<GATE_UP, HIDDEN>(warp, [&](int pair, const float* sums) {
            float2 gate = rounded({sums[0], sums[1]}), up = rounded({sums[2], sums[3]});
            float2 active = rounded({gate.x / (1 + expf(-gate.x)), gate.y / (1 + expf(-gate.y))});
            write_word(
                words + INNER_AT + block.state.begins[GATE_UP] + pair, pack(active.x * up.x, active.y * up.y), tag);
        });
        gather<INNER>(step, block, words + INNER_AT, tag, nullptr, nullptr);
        multiply<DOWN, INNER>(warp, add_to_residual(X_AT, DOWN));
    }
    gather<HIDDEN>(step, block, words + X_AT, first_tag + step.num_layers - 1, nullptr, step.final_norm);
    multiply<HEAD, HIDDEN>(warp, [&](int pair, const float* sums) {
        reinterpret_cast<unsigned*>(step.logits)[block.state.begins[HEAD] + pair] = pack(sums[0], sums[1]);
    });
    if (threadIdx.x == 0 && atomicAdd(step.epoch + 1, 1) == BLOCKS - 1) {
        step.epoch[0] = first_tag + step.num_layers;
        step.epoch[1] = 0;
    }
}
