// A warp's stream of weights, K and V: items in the order in which the step needs them, DEPTH of them under way.
#pragma once
#include "row_shape.cuh"

// An item is two rows' slices of a weight, or 8 positions of K and V; a block's items go round its warps.
struct Warp {
    const Step& step;
    Block& block;
    int warp, lane;
    int layer, phase, item;  // what is fetched next
    unsigned fetched, taken;
    unsigned long long policy;
    int first_page, stored, split_begin;
    bool holds;

    __device__ int num_items(int of) const {
        int count = block.state.counts[of];
        switch (of) {
            case ATTENTION: return count;
            case O: return count * slices(HEADS_WIDTH);
            case GATE_UP: return 2 * count * slices(HIDDEN);
            case DOWN: return count * slices(INNER);
            default: return count * slices(HIDDEN);
        }
    }

    // Fetches the next item of this warp, if there is one, into the slot that was freed longest ago.
    __device__ void fetch_next() {
        while (phase < PHASES && item >= num_items(phase)) {
            item = warp;
            if (phase == DOWN && layer + 1 < step.num_layers) {
                layer++;
                phase = QKV;
            } else {
                phase++;
            }
        }
        if (phase == PHASES) return;
        unsigned slot = fetched % DEPTH;
        if (lane == 0) {
            if (phase == ATTENTION) fetch_positions(slot);
            else fetch_rows(slot);
        }
        fetched++;
        item += WARPS;
    }

    __device__ void fetch_rows(unsigned slot) {
        int columns = phase == O ? HEADS_WIDTH : phase == DOWN ? INNER : HIDDEN;
        int parts = slices(columns), unit = item / parts, column = (item - unit * parts) * SLICE;
        int row = phase == GATE_UP ? 2 * (block.state.begins[phase] + unit / 2) + (unit & 1) * INNER
                                   : 2 * (block.state.begins[phase] + unit);
        const Number* weight = phase == HEAD ? step.lm_head : step.layers[layer * POINTERS + phase];
        const Number* source = weight + (long long)row * columns + column;
        copy(slot, source, source + columns, (columns - column < SLICE ? columns - column : SLICE) * 2);
    }

    __device__ void fetch_positions(unsigned slot) {
        int position = split_begin + item * SHARE, head = blockIdx.x / SPLITS;
        long long page = step.kv_indices[first_page + position / step.page_size];
        const Number* keys = step.pool + page * step.page_elements + layer * step.layer_elements +
                             (head * step.page_size + position % step.page_size) * HEAD_DIM;
        copy(slot, keys, keys + KV_HEADS * step.page_size * HEAD_DIM, SHARE * HEAD_DIM * 2);
    }

    __device__ void copy(unsigned slot, const Number* first, const Number* second, unsigned bytes) {
        unsigned long long* arrival = &block.state.arrivals[warp][slot];
        expect_bytes(arrival, 2 * bytes);
        fetch(block.ring[warp][slot], first, bytes, arrival, policy);
        fetch(block.ring[warp][slot] + SLOT / 2, second, bytes, arrival, policy);
    }

    // The next item's slot; the one before is freed.
    __device__ const unsigned char* take() {
        release();
        unsigned slot = taken % DEPTH;
        long long began = clock64();
        while (!has_arrived(&block.state.arrivals[warp][slot], taken / DEPTH & 1)) check_patience(began);
        holds = true;
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
