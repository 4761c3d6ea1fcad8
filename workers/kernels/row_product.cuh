// Products of the gathered input and a weight.
#pragma once
#include "row_exchange.cuh"

// The next item of a product for one row of the input, in registers while its words are awaited: a lane's 8 columns of
// 256, of both rows of the weight.
struct Held {
    uint4 first[SLICE / 256], second[SLICE / 256];
};

template <int COLUMNS>
__device__ inline void load_item(Warp& warp, Held& held, int item) {
    int slice = item % slices(COLUMNS);
    const uint4* rows = reinterpret_cast<const uint4*>(warp.wait_for_item());
#pragma unroll
    for (int part = 0; part < SLICE / 256; part++) {
        int place = part * 32 + warp.lane;
        bool inside = COLUMNS % SLICE == 0 || slice * SLICE + place * 8 < COLUMNS;
        held.first[part] = inside ? rows[place] : uint4{0, 0, 0, 0};
        held.second[part] = inside ? rows[place + SLICE / 8] : uint4{0, 0, 0, 0};
    }
}

// Holds the warp's first item of a phase, if there is one.
template <int PHASE>
__device__ inline void hold(Warp& warp, Held& held) {
    if constexpr (ROWS == 1) {
        constexpr int COLUMNS = PHASE == O ? HEADS_WIDTH : PHASE == DOWN ? INNER : HIDDEN;
        if (warp.warp < warp.block.state.items[PHASE]) load_item<COLUMNS>(warp, held, warp.warp);
    }
}

// The item that is held, for one row: sums[2]. A tile of the tensor cores is two rows of the weight by eight eighths of
// 256 columns, times those of the input; what unlike eighths give is left out.
template <int COLUMNS>
__device__ void multiply_row(Warp& warp, const Held& held, int slice, float* sums) {
    const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + slice * (SLICE / 8);
    __syncwarp();  // tiles are multiplied by all lanes at once
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int part = 0; part < SLICE / 256; part++) {
        int place = part * 32 + warp.lane;
        bool inside = COLUMNS % SLICE == 0 || slice * SLICE + place * 8 < COLUMNS;
        uint4 x = inside ? input[place] : uint4{0, 0, 0, 0}, w = held.first[part], v = held.second[part];
        multiply_tiles(even, {w.x, v.x, w.y, v.y}, {x.x, x.y});
        multiply_tiles(odd, {w.z, v.z, w.w, v.w}, {x.z, x.w});
    }
    // Of eighth lane / 4, the lane with lane % 4 == lane / 8 has what counts: partners are such lanes.
    bool second = warp.lane & 4;
    float low = second ? even[1] + odd[1] : even[0] + odd[0], high = second ? even[3] + odd[3] : even[2] + odd[2];
    float sum = second ? high : low;
    sum += __shfl_xor_sync(~0u, second ? low : high, 4);
    sum += __shfl_xor_sync(~0u, sum, 8 | 1);
    sum += __shfl_xor_sync(~0u, sum, 16 | 2);
    if (warp.lane == 0 || warp.lane == 4) sums[warp.lane / 4] = sum;
}

// One item for several rows: sums[row][output], added to what is there if `more`. A tile of the tensor cores is up to 8
// rows of the input by two halves of 64 columns times 4 rows of the weight by two halves; what unlike halves give is
// left out.
template <int COLUMNS, bool WHOLE>
__device__ void multiply_rows(Warp& warp, int slice, int columns, bool more, float* sums) {
    constexpr bool UPPER = ROWS > 4;
    const uint4* weights = reinterpret_cast<const uint4*>(warp.take());
    __syncwarp();  // tiles are multiplied by all lanes at once
    int quad = warp.lane / 8, within = warp.lane % 8;  // row of weight and input; 8 columns of 64
    const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + slice * (SLICE / 8) + within;
    const uint4 *low = input + quad % ROWS * (COLUMNS / 8), *high = input + (quad + 4) % ROWS * (COLUMNS / 8);
    weights += quad * (SLICE / 8) + within;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int part = 0; part < SLICE / 64; part++) {
        bool inside = WHOLE || slice * SLICE + part * 64 + within * 8 < columns;
        uint4 none = {0, 0, 0, 0}, w = inside ? weights[part * 8] : none, x = inside ? low[part * 8] : none;
        uint4 y = UPPER && inside ? high[part * 8] : none;
        multiply_tiles(even, {x.x, y.x, x.y, y.y}, {w.x, w.y});
        multiply_tiles(odd, {x.z, y.z, x.w, y.w}, {w.z, w.w});
    }
    bool second = warp.lane & 4;
#pragma unroll
    for (int half = 0; half < 1 + UPPER; half++) {
        float sum = second ? even[2 * half + 1] + odd[2 * half + 1] : even[2 * half] + odd[2 * half];
        sum += __shfl_xor_sync(~0u, sum, 4);
        int row = quad + 4 * half;
        if (second || row >= ROWS) continue;
        float* place = sums + row * TILE + warp.lane % 4;
        *place = more ? *place + sum : sum;
    }
}

// The items of `count` tiles, the first of which is `begin`, of all the product's `items`; `item` is this warp's next.
template <int COLUMNS, bool WHOLE>
__device__ void multiply_tiles_of(Warp& warp, Held& held, int& item, int begin, int count, int columns, bool more,
                                  int items) {
    float* partial = reinterpret_cast<float*>(warp.block.state.work + INPUT_BYTES);
    int parts = slices(columns);
    while (item < begin + count * parts) {
        int place = item - begin, part = place % parts;
        float* sums = partial + (place / parts * slices(COLUMNS) + part) * (TILE * ROWS);
        item += WARPS;
        if constexpr (ROWS == 1) {
            multiply_row<COLUMNS>(warp, held, part, sums);
            if (item >= items) break;
            warp.release();
            load_item<COLUMNS>(warp, held, item);
        } else {
            multiply_rows<COLUMNS, WHOLE>(warp, part, columns, more, sums);
        }
    }
    __syncthreads();
}

// Gives `finish(row, pair, sums)` each pair of outputs of `count` tiles, the first of which is `first` of this block's;
// sums[2] (UNITS == 2, gate and up, whose tiles alternate: [4], gate first).
template <int COLUMNS, int UNITS, class Finish>
__device__ void sum_up(Block& block, int first, int count, Finish finish) {
    constexpr int PARTS = slices(COLUMNS), PAIRS = TILE / 2;
    const float* partial = reinterpret_cast<const float*>(block.state.work + INPUT_BYTES);
    int place = threadIdx.x;
    if (place >= count / UNITS * PAIRS * ROWS) return;
    int row = place % ROWS, pair = place / ROWS % PAIRS, tile = place / (ROWS * PAIRS);
    float sums[2 * UNITS];
    for (int unit = 0; unit < UNITS; unit++) {
        const float* found = partial + ((tile * UNITS + unit) * PARTS * ROWS + row) * TILE + 2 * pair;
        float low = 0, high = 0;
        for (int part = 0; part < PARTS; part++) {
            low += found[part * (ROWS * TILE)], high += found[part * (ROWS * TILE) + 1];
        }
        sums[2 * unit] = low, sums[2 * unit + 1] = high;
    }
    finish(row, (first / UNITS + tile) * PAIRS + pair, sums);
}

// A product of the gathered input; finish: see sum_up().
template <int PHASE, int COLUMNS, class Finish>
__device__ void multiply(Warp& warp, Held& held, Finish finish) {
    constexpr int UNITS = PHASE == GATE_UP ? 2 : 1;
    int tiles = warp.block.state.counts[PHASE] * UNITS, item = warp.warp;
    for (int first = 0; first < tiles; first += ROUND) {
        int count = at_most(tiles - first, ROUND);
        multiply_tiles_of<COLUMNS, COLUMNS % SLICE == 0>(
            warp, held, item, first * slices(COLUMNS), count, COLUMNS, false, tiles * slices(COLUMNS));
        sum_up<COLUMNS, UNITS>(warp.block, first, count, finish);
        if (first + ROUND < tiles) __syncthreads();
    }
    warp.release();
}

// `down`, whose input is gathered piece by piece.
template <class Finish>
__device__ void multiply_down(Warp& warp, Held& held, const unsigned* words, Finish finish) {
    if constexpr (PIECES == 1) {
        gather<INNER>(warp.step, warp.block, words, INNER / 2, nullptr);
        multiply<DOWN, INNER>(warp, held, finish);
    } else {
        int tiles = warp.block.state.counts[DOWN], item = warp.warp;
        for (int piece = 0; piece < PIECES; piece++) {
            int begin = piece * PIECE, columns = at_most(INNER - begin, PIECE);
            gather<PIECE>(warp.step, warp.block, words + begin / 2, INNER / 2, nullptr, columns);
            multiply_tiles_of<PIECE, INNER % SLICE == 0>(
                warp, held, item, piece * tiles * slices(PIECE), tiles, columns, piece > 0, tiles * slices(INNER));
        }
        sum_up<PIECE, 1>(warp.block, 0, tiles, finish);
        warp.release();
    }
}
