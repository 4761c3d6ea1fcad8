// All layers and the head of a decode step of few rows, in one launch of a block on each multiprocessor.
//
// A step of few rows takes as long as its weights take to read. So each warp fetches its shares of all weights, and of
// the stored K and V, in the order in which it will need them, into a ring of its own in shared memory; what a phase
// must know of the phases before is small, and travels from block to block in words that say themselves whether they
// are there. The stream of weights never waits for them.
//
//   qkv -> attention -> o + residual -> gate and up -> down + residual -> ... -> head
//
// Layers write into two buffers of words by turns. Every block has outputs in every phase: whoever has the input of
// `gate` and `up` knows that all have read what the layer before has told, and clears it for the next one.
#include "row_attention.cuh"
#include "row_product.cuh"

// Which row's positions are this block's: the blocks of a KV head are shared out among the rows so that no share is
// longer than it must be. A row that has nothing stored has a block, too.
__device__ Share share_positions(const Step& step) {
    int stored[ROWS], total = 0, longest = 1, used = SPLITS + 1;
    for (int row = 0; row < ROWS; row++) {
        int full_pages = step.kv_indptr[row + 1] - step.kv_indptr[row] - 1;
        stored[row] = full_pages * step.page_size + step.kv_last_page_len[row] - 1;
        total += ceiling(stored[row], SHARE);
    }
    for (int spare = 0; used > SPLITS; spare++) {  // ends where all rows together use SPLITS - ROWS + 1 whole shares
        longest = at_least(ceiling(total, SPLITS - spare), 1) * SHARE, used = 0;
        for (int row = 0; row < ROWS; row++) used += at_least(ceiling(stored[row], longest), 1);
    }
    int place = (int)blockIdx.x < KV_HEADS * SPLITS ? (int)blockIdx.x % SPLITS : -1;
    Share share = {-1};
    for (int row = 0; row < ROWS; row++) {
        int splits = at_least(ceiling(stored[row], longest), 1), blocks = ROWS == 1 ? SPLITS : splits;
        if (place >= 0 && place < blocks) {
            int begin = at_most(place * longest, stored[row]), count = at_most(stored[row] - begin, longest);
            int size = count > MANY ? SHARE : NEAR;
            share = {row, place, splits, step.kv_indptr[row], stored[row], begin, ceiling(count, size), size};
        }
        place -= blocks;
    }
    return share;
}

// Which outputs and positions are this block's.
__device__ void share_out(const Step& step, Block& block, HeldShare& share) {
    if (threadIdx.x == 0) {
        const int tiles[] = {QKV_ROWS / TILE, 0, HIDDEN / TILE, INNER / TILE, HIDDEN / TILE, step.vocab / TILE};
        constexpr int OF_HIDDEN = slices(HIDDEN);
        const int of_tile[] = {OF_HIDDEN, 0, slices(HEADS_WIDTH), 2 * OF_HIDDEN, slices(INNER), OF_HIDDEN};
        for (int phase = 0; phase < PHASES; phase++) {
            block.state.begins[phase] = (long long)tiles[phase] * blockIdx.x / BLOCKS;
            block.state.counts[phase] =
                (int)((long long)tiles[phase] * (blockIdx.x + 1) / BLOCKS) - block.state.begins[phase];
            block.state.items[phase] = block.state.counts[phase] * of_tile[phase];
        }
        for (int warp = 0; warp < WARPS; warp++)
            for (int slot = 0; slot < DEPTH; slot++) make_arrival(&block.state.arrivals[warp][slot]);
        publish_arrivals();
    }
    if (ROWS > 1 && threadIdx.x == 32) block.state.share = share_positions(step);
    __syncthreads();
    if (threadIdx.x == 0) block.state.items[ATTENTION] = share.items;
    int begin = TILE * block.state.begins[DOWN], count = TILE * block.state.counts[DOWN];
    for (int row = 0; row < ROWS; row++)
        for (int place = threadIdx.x; place < count; place += THREADS)
            block.state.residual[row][place] = (float)step.x[row * HIDDEN + begin + place];
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
#if ROWS == 1
    HeldShare share = share_positions(step);
#else
    HeldShare share = block.state.share;
#endif
    Warp warp(step, block, share);
    unsigned layers_before = step.epoch[0];
    share_out(step, block, share);
    warp.fill();
    warm_up(step, 0);
    const unsigned* x = reinterpret_cast<const unsigned*>(step.x);
    for (int layer = 0; layer < step.num_layers; layer++) {
        const Number* const* of_layer = step.layers + layer * POINTERS;
        unsigned place = (layers_before + layer) % 2 * NUM_WORDS;
        unsigned *told = step.words + place, *other = step.words + (NUM_WORDS - place);
        auto add_to_residual = [&](int to, int phase) {
            return [&, to, phase](int row, int pair, const float* sums) {
                float* both = block.state.residual[row] + 2 * pair;
                float2 sum = rounded({sums[0], sums[1]});
                unsigned bits = pack(both[0] + sum.x, both[1] + sum.y);
                both[0] = unpack(bits).x, both[1] = unpack(bits).y;
                write_word(told + to + row * (HIDDEN / 2) + block.state.begins[phase] * (TILE / 2) + pair, bits);
            };
        };
        Held held;
        hold(warp, held, QKV);
        gather<HIDDEN>(step, block, x, HIDDEN / 2, of_layer[INPUT_NORM]);
        multiply<QKV, HIDDEN>(warp, held, [&](int row, int pair, const float* sums) {
            int place = block.state.begins[QKV] * (TILE / 2) + pair;
            float2 bias = {0, 0};
            if (of_layer[QKV_BIAS]) bias = unpack(reinterpret_cast<const unsigned*>(of_layer[QKV_BIAS])[place]);
            unsigned bits = pack(sums[0] + bias.x, sums[1] + bias.y);
            write_word(told + QKV_AT + row * (QKV_ROWS / 2) + place, bits);
        });
        attend(warp, layer, told);
        warm_up(step, layer + 1);
        hold(warp, held, O);
        gather<HEADS_WIDTH>(step, block, told + HEADS_AT, HEADS_WIDTH / 2, nullptr);
        multiply<O, HEADS_WIDTH>(warp, held, add_to_residual(MID_AT, O));
        hold(warp, held, GATE_UP);
        gather<HIDDEN>(step, block, told + MID_AT, HIDDEN / 2, of_layer[POST_NORM]);
        clear(other);
        multiply<GATE_UP, HIDDEN>(warp, held, [&](int row, int pair, const float* sums) {
            float2 gate = rounded({sums[0], sums[1]}), up = rounded({sums[2], sums[3]});
            float2 active = rounded({gate.x / (1 + expf(-gate.x)), gate.y / (1 + expf(-gate.y))});
            int place = INNER_AT + row * (INNER / 2) + block.state.begins[GATE_UP] * (TILE / 2) + pair;
            write_word(told + place, pack(active.x * up.x, active.y * up.y));
        });
        hold(warp, held, DOWN);
        multiply_down(warp, held, told + INNER_AT, add_to_residual(X_AT, DOWN));
        x = told + X_AT;
    }
    Held held;
    hold(warp, held, HEAD);
    gather<HIDDEN>(step, block, x, HIDDEN / 2, step.final_norm);
    multiply<HEAD, HIDDEN>(warp, held, [&](int row, int pair, const float* sums) {
        unsigned* logits = reinterpret_cast<unsigned*>(step.logits) + (long long)row * (step.vocab / 2);
        logits[block.state.begins[HEAD] * (TILE / 2) + pair] = pack(sums[0], sums[1]);
    });
    if (threadIdx.x == 0 && atomicAdd(step.epoch + 1, 1) == BLOCKS - 1) {
        step.epoch[0] = layers_before + step.num_layers;
        step.epoch[1] = 0;
    }
}
