// All layers and the head of a decode step of few rows, in one launch of a block on each multiprocessor.
//
// A step of few rows takes as long as its weights take to read. So each warp fetches its part of all weights, and of
// the stored K and V, in the order in which it needs them, into a ring of its own in shared memory. Activations are
// small: blocks publish them to each other in words that show whether they are there. Fetching weights never waits for
// activations.
//
//   qkv -> attention -> o + residual -> gate and up -> down + residual -> ... -> head
//
// Layers publish into two buffers by turns. Every block has outputs in every phase. A block that has the input of
// `gate` and `up` knows that all have read what the layer before published, and clears that buffer for the next layer.
#include "attention.cuh"
#include "gemv.cuh"

// Which row's positions are this block's. The rows divide the blocks of a KV head so that the longest split is as short
// as it can be. A row that has nothing stored has a block, too.
__device__ KVSplit split_positions(const Arguments& args) {
    int stored[ROWS], before[ROWS] = {}, items = 0, longest = 1, used = SPLITS + 1;
    for (int row = 0; row < ROWS; row++) {
        int full_pages = args.kv_indptr[row + 1] - args.kv_indptr[row] - 1;
        if (ROWS > 1 && args.preceding) before[row] = args.preceding[row];
        stored[row] = full_pages * args.page_size + args.kv_last_page_len[row] - 1 - before[row];
        items += ceiling(stored[row], ITEM_POSITIONS);
    }
    for (int spare = 0; used > SPLITS; spare++) {  // ends where all rows together use SPLITS - ROWS + 1 whole splits
        longest = at_least(ceiling(items, SPLITS - spare), 1) * ITEM_POSITIONS, used = 0;
        for (int row = 0; row < ROWS; row++) used += at_least(ceiling(stored[row], longest), 1);
    }
    int index = (int)blockIdx.x < KV_HEADS * SPLITS ? (int)blockIdx.x % SPLITS : -1;
    KVSplit kv = {-1};
    for (int row = 0; row < ROWS; row++) {
        int splits = at_least(ceiling(stored[row], longest), 1), blocks = ROWS == 1 ? SPLITS : splits;
        if (index >= 0 && index < blocks) {
            int begin = at_most(index * longest, stored[row]), count = at_most(stored[row] - begin, longest);
            int size = count > MANY_POSITIONS ? ITEM_POSITIONS : MMA_POSITIONS;
            kv = {row, index, splits, args.kv_indptr[row], stored[row], before[row], begin, ceiling(count, size), size};
        }
        index -= blocks;
    }
    return kv;
}

// Which outputs and positions are this block's.
__device__ void assign_work(const Arguments& args, Block& block, HeldSplit& kv) {
    if (threadIdx.x == 0) {
        const int tiles[] = {QKV_ROWS / TILE, 0, HIDDEN / TILE, INTERMEDIATE / TILE, HIDDEN / TILE, args.vocab / TILE};
        constexpr int OF_HIDDEN = slices(QKV, HIDDEN), OF_O = slices(O, HEADS_WIDTH), OF_DOWN = slices(DOWN, INTERMEDIATE);
        const int of_tile[] = {OF_HIDDEN, 0, OF_O, 2 * OF_HIDDEN, OF_DOWN, slices(HEAD, HIDDEN)};
        for (int phase = 0; phase < PHASES; phase++) {
            block.state.begins[phase] = (long long)tiles[phase] * blockIdx.x / BLOCKS;
            block.state.counts[phase] =
                (int)((long long)tiles[phase] * (blockIdx.x + 1) / BLOCKS) - block.state.begins[phase];
            block.state.items[phase] = block.state.counts[phase] * of_tile[phase];
        }
        for (int warp = 0; warp < WARPS; warp++)
            for (int stage = 0; stage < STAGES; stage++) make_arrival(&block.state.arrivals[warp][stage]);
        publish_arrivals();
    }
    if (ROWS > 1 && threadIdx.x == 32) block.state.kv = split_positions(args);
    __syncthreads();
    if (threadIdx.x == 0) block.state.items[ATTENTION] = kv.items;
    int begin = TILE * block.state.begins[DOWN], count = TILE * block.state.counts[DOWN];
    for (int row = 0; row < ROWS; row++)
        for (int column = threadIdx.x; column < count; column += THREADS)
            block.state.residual[row][column] = (float)args.x[row * HIDDEN + begin + column];
    __syncthreads();
}

// Brings the gains of a layer near: all blocks read them, at moments when each waits for the others.
__device__ void warm_up(const Arguments& args, int layer) {
    if (layer >= args.num_layers || threadIdx.x != THREADS - 1) return;
    constexpr int NORM = (HIDDEN + 63) / 64, HEADS = ((Q_HEADS + KV_HEADS) * HEAD_DIM + 63) / 64;  // lines of 128 bytes
    for (int line = blockIdx.x; line < 2 * NORM + HEADS; line += BLOCKS) {
        int which = line < NORM ? INPUT_NORM : line < 2 * NORM ? POST_NORM : HEAD_NORMS;
        const Number* gain = args.layers[layer * POINTERS + which];
        if (gain)
            prefetch(gain + 64 * (which == INPUT_NORM ? line : which == POST_NORM ? line - NORM : line - 2 * NORM));
    }
}

// The place in `tapped` for what a layer takes; negative: it is not wanted.
__device__ int tap_of(const Arguments& args, int layer) {
    for (int tap = 0; tap < MAX_TAPS; tap++)
        if (args.taps[tap] == layer) return tap;
    return -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_megakernel(const __grid_constant__ Arguments args) {
    SHARED_MEMORY(shared);
    Block& block = *reinterpret_cast<Block*>(shared);
#if ROWS == 1
    HeldSplit kv = split_positions(args);
#else
    HeldSplit kv = block.state.kv;
#endif
    Warp warp(args, block, kv);
    unsigned layers_before = args.epoch[0];
    assign_work(args, block, kv);
    warp.fill();
    warm_up(args, 0);
    const unsigned* x = reinterpret_cast<const unsigned*>(args.x);
    for (int layer = 0; layer < args.num_layers; layer++) {
        const Number* const* of_layer = args.layers + layer * POINTERS;
        unsigned buffer = (layers_before + layer) % 2 * PUBLISHED_WORDS;
        unsigned *published = args.published + buffer, *earlier = args.published + (PUBLISHED_WORDS - buffer);
        auto add_to_residual = [&](int to, int phase, int tap) {
            return [&, to, phase, tap](int row, int pair, const float* sums) {
                float* both = block.state.residual[row] + 2 * pair;
                float2 sum = rounded({sums[0], sums[1]});
                unsigned bits = pack(both[0] + sum.x, both[1] + sum.y);
                both[0] = unpack(bits).x, both[1] = unpack(bits).y;
                int index = block.state.begins[phase] * (TILE / 2) + pair;
                write_word(published + to + row * (HIDDEN / 2) + index, bits);
                if (tap >= 0) args.tapped[(row * MAX_TAPS + tap) * (HIDDEN / 2) + index] = bits;
            };
        };
        Held held;
        hold<QKV>(warp, held, layer);
        gather<QKV, HIDDEN>(args, block, x, HIDDEN / 2, of_layer[INPUT_NORM]);
        multiply<QKV, HIDDEN>(warp, held, layer, [&](int row, int pair, const float* sums) {
            int index = block.state.begins[QKV] * (TILE / 2) + pair;
            float2 bias = {0, 0};
            if (of_layer[QKV_BIAS]) bias = unpack(reinterpret_cast<const unsigned*>(of_layer[QKV_BIAS])[index]);
            unsigned bits = pack(sums[0] + bias.x, sums[1] + bias.y);
            write_word(published + QKV_AT + row * (QKV_ROWS / 2) + index, bits);
        });
        attend(warp, layer, published);
        warm_up(args, layer + 1);
        hold<O>(warp, held, layer);
        gather<O, HEADS_WIDTH>(args, block, published + HEADS_AT, HEADS_WIDTH / 2, nullptr);
        multiply<O, HEADS_WIDTH>(warp, held, layer, add_to_residual(MID_AT, O, -1));
        hold<GATE_UP>(warp, held, layer);
        gather<GATE_UP, HIDDEN>(args, block, published + MID_AT, HIDDEN / 2, of_layer[POST_NORM]);
        clear(earlier);
        multiply<GATE_UP, HIDDEN>(warp, held, layer, [&](int row, int pair, const float* sums) {
            float2 gate = rounded({sums[0], sums[1]}), up = rounded({sums[2], sums[3]});
            float2 active = rounded({gate.x / (1 + expf(-gate.x)), gate.y / (1 + expf(-gate.y))});
            int index = INTERMEDIATE_AT + row * (INTERMEDIATE / 2) + block.state.begins[GATE_UP] * (TILE / 2) + pair;
            write_word(published + index, pack(active.x * up.x, active.y * up.y));
        });
        hold<DOWN>(warp, held, layer);
        int tap = tap_of(args, layer + 1);
        multiply_down(warp, held, layer, published + INTERMEDIATE_AT, add_to_residual(X_AT, DOWN, tap));
        x = published + X_AT;
    }
    Held held;
    hold<HEAD>(warp, held, 0);
    gather<HEAD, HIDDEN>(args, block, x, HIDDEN / 2, args.final_norm);
    multiply<HEAD, HIDDEN>(warp, held, 0, [&](int row, int pair, const float* sums) {
        unsigned* logits = reinterpret_cast<unsigned*>(args.logits) + (long long)row * (args.vocab / 2);
        logits[block.state.begins[HEAD] * (TILE / 2) + pair] = pack(sums[0], sums[1]);
    });
    if (threadIdx.x == 0 && atomicAdd(args.epoch + 1, 1) == BLOCKS - 1) {
        args.epoch[0] = layers_before + args.num_layers;
        args.epoch[1] = 0;
    }
}
