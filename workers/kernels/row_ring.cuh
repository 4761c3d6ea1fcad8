// A warp's stream of weights, K and V: items in the order in which the step needs them, DEPTH of them under way.
#pragma once
#include "row_shape.cuh"

constexpr int COPIERS = ROWS == 1 ? 1 : TILE;  // lanes that fetch a tile's rows

// An item is a tile's slice of a weight, or 8 positions of K and V; a block's items go round its warps.
struct Warp {
    const Step& step;
    Block& block;
    int warp, lane;
    int layer, phase, item;  // what is fetched next
    unsigned fetched, taken;
    unsigned long long policy;
    bool holds;
    HeldShare share;

    __device__ int num_items(int of) const {
        int count = block.state.counts[of];
        switch (of) {
            case ATTENTION: return share.items;
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
        if (lane < COPIERS) {
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
#pragma unroll
        for (int each = 0; each < TILE / COPIERS; each++) {
            int of_tile = COPIERS == 1 ? each : lane;
            const Number* from = source + (long long)of_tile * columns;
            fetch(block.ring[warp][slot] + of_tile * (SLICE * 2), from, bytes, arrival, policy);
        }
    }

    __device__ void fetch_positions(unsigned slot) {
        int position = share.begin + item * SHARE, head = blockIdx.x / SPLITS;
        long long page = step.kv_indices[share.first_page + position / step.page_size];
        const Number* keys = step.pool + page * step.page_elements + layer * step.layer_elements +
                             (head * step.page_size + position % step.page_size) * HEAD_DIM;
        unsigned bytes = SHARE * HEAD_DIM * 2;
        unsigned long long* arrival = &block.state.arrivals[warp][slot];
        expect_bytes(arrival, 2 * bytes);
        fetch(block.ring[warp][slot], keys, bytes, arrival, policy);
        fetch(block.ring[warp][slot] + SLOT / 2, keys + KV_HEADS * step.page_size * HEAD_DIM, bytes, arrival, policy);
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
