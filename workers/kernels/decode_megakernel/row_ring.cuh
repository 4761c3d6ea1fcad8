// A warp's stream of weights, K and V: items in the order in which the step needs them, DEPTH of them under way.
#pragma once
#include "row_shape.cuh"

// An item is a tile's slice of a weight, or some positions of K and V; a block's items go round its warps.
struct Warp {
    const Step& step;
    Block& block;
    int warp, lane;
    int layer, phase, item;  // what is fetched next
#if ROWS == 1
    int left, tile, slice;  // items of this phase; where the next one is
    const Number* weight;
#endif
    unsigned fetched, taken;
    unsigned long long policy;
    bool holds;
    HeldShare share;

    __device__ Warp(const Step& step, Block& block, HeldShare& share)
        : step(step), block(block), warp(threadIdx.x / 32), lane(threadIdx.x % 32), layer(0), fetched(0), taken(0),
          policy(streaming_policy()), holds(false), share(share) {}

    // Fetches the first items.
    __device__ void fill() {
#if ROWS == 1
        phase = QKV - 1;
        open_phase();
#else
        phase = QKV, item = warp;
#endif
        for (int slot = 0; slot < DEPTH; slot++) fetch_next();
    }

    __device__ void next_phase() {
        if (phase == DOWN && layer + 1 < step.num_layers) {
            layer++;
            phase = QKV;
        } else {
            phase++;
        }
    }

#if ROWS == 1
    template <class Value>
    __device__ Value by_phase(Value of_o, Value of_down, Value of_others) const {
        return phase == O ? of_o : phase == DOWN ? of_down : of_others;
    }

    // Goes on to the first item of the next phase that has one for this warp.
    __device__ void open_phase() {
        do {
            next_phase();
            if (phase == PHASES) return;
            left = (block.state.items[phase] + WARPS - 1 - warp) / WARPS;
        } while (left <= 0);
        item = warp;
        if (phase == ATTENTION) return;
        constexpr int OF_O = slices(HEADS_WIDTH), OF_DOWN = slices(INNER), OF_OTHERS = slices(HIDDEN);
        tile = by_phase(warp / OF_O, warp / OF_DOWN, warp / OF_OTHERS);
        slice = by_phase(warp % OF_O, warp % OF_DOWN, warp % OF_OTHERS);
        tile += block.state.begins[phase] * (phase == GATE_UP ? 2 : 1);
        weight = phase == HEAD ? step.lm_head : step.layers[layer * POINTERS + phase];
    }

    // Fetches the next item of this warp, if there is one, into the slot that was freed longest ago. Few instructions
    // count here: all warps come by when the words of a phase are told.
    __device__ void fetch_next() {
        if (phase == PHASES) return;
        unsigned slot = fetched % DEPTH;
        if (phase == ATTENTION) {
            if (lane == 0) fetch_positions(slot);
        } else {
            fetch_rows(slot);
        }
        fetched++;
        item += WARPS;
        if (--left == 0) open_phase();
    }

    __device__ void fetch_rows(unsigned slot) {
        constexpr int OF_O = slices(HEADS_WIDTH), OF_DOWN = slices(INNER), OF_OTHERS = slices(HIDDEN);
        int columns = by_phase(HEADS_WIDTH, INNER, HIDDEN), column = slice * SLICE;
        if (lane == 0) {
            int row = phase == GATE_UP ? TILE * (tile / 2) + (tile & 1) * INNER : TILE * tile;
            const Number* source = weight + (long long)row * columns + column;
            unsigned bytes = at_most(columns - column, SLICE) * 2;
            unsigned long long* arrival = &block.state.arrivals[warp][slot];
            expect_bytes(arrival, TILE * bytes);
#pragma unroll
            for (int each = 0; each < TILE; each++)
                fetch(block.ring[warp][slot] + each * (SLICE * 2), source + each * columns, bytes, arrival, policy);
        }
        tile += by_phase(WARPS / OF_O, WARPS / OF_DOWN, WARPS / OF_OTHERS);
        slice += by_phase(WARPS % OF_O, WARPS % OF_DOWN, WARPS % OF_OTHERS);
        int parts = by_phase(OF_O, OF_DOWN, OF_OTHERS);
        if (slice >= parts) slice -= parts, tile++;
    }
#else
    // Fetches the next item of this warp, if there is one, into the slot that was freed longest ago.
    __device__ void fetch_next() {
        while (phase < PHASES && item >= block.state.items[phase]) {
            item = warp;
            next_phase();
        }
        if (phase == PHASES) return;
        unsigned slot = fetched % DEPTH;
        if (lane < TILE) {
            if (phase != ATTENTION) fetch_rows(slot);
            else if (lane == 0) fetch_positions(slot);
        }
        fetched++;
        item += WARPS;
    }

    __device__ void fetch_rows(unsigned slot) {
        int columns = phase == O ? HEADS_WIDTH : phase == DOWN ? INNER : HIDDEN;
        int begin = 0, left = columns, place = item;
        if (PIECES > 1 && phase == DOWN) {
            int of_piece = block.state.counts[DOWN] * slices(PIECE), piece = item / of_piece;
            begin = piece * PIECE, left = at_most(INNER - begin, PIECE), place -= piece * of_piece;
        }
        int parts = slices(left), unit = place / parts, column = begin + (place - unit * parts) * SLICE;
        int row = phase == GATE_UP ? TILE * (block.state.begins[phase] + unit / 2) + (unit & 1) * INNER
                                   : TILE * (block.state.begins[phase] + unit);
        const Number* weight = phase == HEAD ? step.lm_head : step.layers[layer * POINTERS + phase];
        const Number* source = weight + (long long)row * columns + column;
        unsigned bytes = (columns - column < SLICE ? columns - column : SLICE) * 2;
        unsigned long long* arrival = &block.state.arrivals[warp][slot];
        if (lane == 0) expect_bytes(arrival, TILE * bytes);
        fetch(block.ring[warp][slot] + lane * (SLICE * 2), source + (long long)lane * columns, bytes, arrival, policy);
    }
#endif

    __device__ void fetch_positions(unsigned slot) {
        int position = share.begin + item * share.of_item(), head = blockIdx.x / SPLITS;
        long long page = step.kv_indices[share.first_page + position / step.page_size];
        const Entry* keys = step.pool + page * step.page_elements + layer * step.layer_elements +
                            (head * step.page_size + position % step.page_size) * HEAD_DIM;
        unsigned bytes = share.of_item() * HEAD_DIM * sizeof(Entry);
        unsigned long long* arrival = &block.state.arrivals[warp][slot];
        expect_bytes(arrival, 2 * bytes);
        fetch(block.ring[warp][slot], keys, bytes, arrival, policy);
        fetch(block.ring[warp][slot] + SLOT / 2, keys + KV_HEADS * step.page_size * HEAD_DIM, bytes, arrival, policy);
    }

    // The next item's slot, once that is filled. None is held.
    __device__ const unsigned char* wait_for_item() {
        holds = true;
        unsigned slot = taken % DEPTH;
        unsigned long long* arrival = &block.state.arrivals[warp][slot];
        if (!has_arrived(arrival, taken / DEPTH & 1)) {
            long long began = clock64();
            while (!has_arrived(arrival, taken / DEPTH & 1)) check_patience(began);
        }
        return block.ring[warp][slot];
    }

    // Frees the slot that was taken last, if one is. Who waits for a warp's result should not wait for this.
    __device__ void release() {
        if (!holds) return;
        __syncwarp();
        holds = false;
        taken++;
        fetch_next();
    }
};
