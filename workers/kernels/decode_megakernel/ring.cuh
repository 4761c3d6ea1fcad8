// A warp's ring of weights, K and V: items in the order in which the step needs them, STAGES of them under way.
#pragma once
#include "shape.cuh"

// The first row and column of an item of a product; columns: of its weight.
struct Place {
    int row, column;
};
__device__ inline Place place_of(const Block& block, int phase, int item, int columns) {
    int begin = 0, left = columns;
    if (PIECES > 1 && phase == DOWN) {
        int of_piece = block.state.counts[DOWN] * slices(DOWN, PIECE), piece = item / of_piece;
        begin = piece * PIECE, left = at_most(INTERMEDIATE - begin, PIECE), item -= piece * of_piece;
    }
    int parts = slices(phase, left), unit = item / parts, column = begin + (item - unit * parts) * slice_of(phase);
    int tile = phase == GATE_UP ? block.state.begins[phase] + unit / 2 : block.state.begins[phase] + unit;
    return {TILE * tile + (phase == GATE_UP && unit % 2 ? INTERMEDIATE : 0), column};
}

// An item is a tile's slice of a weight, or some positions of K and V; a block's items go round its warps.
struct Warp {
    const Arguments& args;
    Block& block;
    int warp, lane;
    int layer, phase, item;  // what is fetched next
#if ROWS == 1
    int left, tile, slice;  // items of this phase; where the next one is
    const unsigned char* weight;
#endif
    unsigned fetched, taken;
    unsigned long long policy;
    bool holds;
    HeldSplit kv;

    __device__ Warp(const Arguments& args, Block& block, HeldSplit& kv)
        : args(args), block(block), warp(threadIdx.x / 32), lane(threadIdx.x % 32), layer(0), fetched(0), taken(0),
          policy(streaming_policy()), holds(false), kv(kv) {}

    // Fetches the first items.
    __device__ void fill() {
#if ROWS == 1
        phase = QKV - 1;
        open_phase();
#else
        phase = QKV, item = warp;
#endif
        for (int stage = 0; stage < STAGES; stage++) fetch_next();
    }

    __device__ void next_phase() {
        if (phase == DOWN && layer + 1 < args.num_layers) {
            layer++;
            phase = QKV;
        } else {
            phase++;
        }
    }

    __device__ const unsigned char* weight_of(int phase) const {
        return reinterpret_cast<const unsigned char*>(
            phase == HEAD ? args.lm_head : args.layers[layer * POINTERS + phase]);
    }

#if ROWS == 1
    // Slices of a row.
    static constexpr int OF_O = slices(O, HEADS_WIDTH), OF_DOWN = slices(DOWN, INTERMEDIATE);
    static constexpr int OF_HEAD = slices(HEAD, HIDDEN), OF_OTHERS = slices(QKV, HIDDEN);

    __device__ int by_phase(int of_o, int of_down, int of_head, int of_others) const {
        return phase == O ? of_o : phase == DOWN ? of_down : phase == HEAD ? of_head : of_others;
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
        tile = by_phase(warp / OF_O, warp / OF_DOWN, warp / OF_HEAD, warp / OF_OTHERS);
        slice = by_phase(warp % OF_O, warp % OF_DOWN, warp % OF_HEAD, warp % OF_OTHERS);
        tile += block.state.begins[phase] * (phase == GATE_UP ? 2 : 1);
        weight = weight_of(phase);
    }

    // Fetches the next item of this warp, if there is one, into the stage that was freed longest ago. Few instructions
    // count here: all warps come by when a phase's activations are published.
    __device__ void fetch_next() {
        if (phase == PHASES) return;
        unsigned stage = fetched % STAGES;
        if (phase == ATTENTION) {
            if (lane == 0) fetch_positions(stage);
        } else {
            fetch_rows(stage);
        }
        fetched++;
        item += WARPS;
        if (--left == 0) open_phase();
    }

    __device__ void fetch_rows(unsigned stage) {
        int row_bytes = by_phase(HEADS_WIDTH * weight_bytes(O), INTERMEDIATE * weight_bytes(DOWN),
                                 HIDDEN * weight_bytes(HEAD), HIDDEN * weight_bytes(QKV));
        int begin = slice * SLICE_BYTES;
        if (lane == 0) {
            int row = phase == GATE_UP ? TILE * (tile / 2) + (tile & 1) * INTERMEDIATE : TILE * tile;
            const unsigned char* source = weight + (long long)row * row_bytes + begin;
            unsigned bytes = at_most(row_bytes - begin, SLICE_BYTES);
            unsigned long long* arrival = &block.state.arrivals[warp][stage];
            expect_bytes(arrival, TILE * bytes);
#pragma unroll
            for (int each = 0; each < TILE; each++)
                fetch(block.ring[warp][stage] + each * SLICE_BYTES, source + each * row_bytes, bytes, arrival, policy);
        }
        tile += by_phase(WARPS / OF_O, WARPS / OF_DOWN, WARPS / OF_HEAD, WARPS / OF_OTHERS);
        slice += by_phase(WARPS % OF_O, WARPS % OF_DOWN, WARPS % OF_HEAD, WARPS % OF_OTHERS);
        int parts = by_phase(OF_O, OF_DOWN, OF_HEAD, OF_OTHERS);
        if (slice >= parts) slice -= parts, tile++;
    }
#else
    // Fetches the next item of this warp, if there is one, into the stage that was freed longest ago.
    __device__ void fetch_next() {
        while (phase < PHASES && item >= block.state.items[phase]) {
            item = warp;
            next_phase();
        }
        if (phase == PHASES) return;
        unsigned stage = fetched % STAGES;
        if (lane < TILE) {
            if (phase != ATTENTION) fetch_rows(stage);
            else if (lane == 0) fetch_positions(stage);
        }
        fetched++;
        item += WARPS;
    }

    __device__ void fetch_rows(unsigned stage) {
        int columns = phase == O ? HEADS_WIDTH : phase == DOWN ? INTERMEDIATE : HIDDEN;
        Place place = place_of(block, phase, item, columns);
        int row_bytes = columns * weight_bytes(phase), begin = place.column * weight_bytes(phase);
        const unsigned char* source = weight_of(phase) + (long long)(place.row + lane) * row_bytes + begin;
        unsigned bytes = at_most(row_bytes - begin, SLICE_BYTES);
        unsigned long long* arrival = &block.state.arrivals[warp][stage];
        if (lane == 0) expect_bytes(arrival, TILE * bytes);
        fetch(block.ring[warp][stage] + lane * SLICE_BYTES, source, bytes, arrival, policy);
    }
#endif

    __device__ void fetch_positions(unsigned stage) {
        int position = kv.begin + item * kv.item_positions(), head = blockIdx.x / SPLITS;
        long long page = args.kv_indices[kv.first_page + position / args.page_size];
        const Entry* keys = args.pool + page * args.page_elements + layer * args.layer_elements +
                            (head * args.page_size + position % args.page_size) * HEAD_DIM;
        unsigned bytes = kv.item_positions() * HEAD_DIM * sizeof(Entry);
        unsigned long long* arrival = &block.state.arrivals[warp][stage];
        expect_bytes(arrival, 2 * bytes);
        fetch(block.ring[warp][stage], keys, bytes, arrival, policy);
        fetch(block.ring[warp][stage] + STAGE_BYTES / 2, keys + KV_HEADS * args.page_size * HEAD_DIM, bytes, arrival,
              policy);
    }

    // The next item's stage, once it is filled. None is held.
    __device__ const unsigned char* wait_for_item() {
        holds = true;
        unsigned stage = taken % STAGES;
        unsigned long long* arrival = &block.state.arrivals[warp][stage];
        if (!has_arrived(arrival, taken / STAGES & 1)) {
            long long began = clock64();
            while (!has_arrived(arrival, taken / STAGES & 1)) check_patience(began);
        }
        return block.ring[warp][stage];
    }

    // Frees the stage that was taken last, if one is. Publish a warp's result before this call.
    __device__ void release() {
        if (!holds) return;
        __syncwarp();
        holds = false;
        taken++;
        fetch_next();
    }
};
