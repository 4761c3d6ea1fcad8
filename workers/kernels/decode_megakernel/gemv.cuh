// Products of the gathered input and a weight.
#pragma once
#include "exchange.cuh"

// The next item of a product, in registers while its input is awaited. A lane has 8 columns of each part of a slice:
// for one row of the input of both rows of the tile, for several of one of four.
constexpr int LANES = ROWS == 1 ? 32 : 8, PARTS = SLICE / (8 * LANES), OF_PART = TILE * LANES / 32;
struct Held {
    uint4 numbers[PARTS][OF_PART];
};

__device__ inline void load_item(Warp& warp, Held& held) {
    const uint4* rows = reinterpret_cast<const uint4*>(warp.wait_for_item());
    if (ROWS > 1) rows += warp.lane / LANES * (SLICE / 8);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int each = 0; each < OF_PART; each++)
            held.numbers[part][each] = rows[each * (SLICE / 8) + part * LANES + warp.lane % LANES];
}

// Holds the warp's first item of a phase, if there is one.
__device__ inline void hold(Warp& warp, Held& held, int phase) {
    if (warp.warp < warp.block.state.items[phase]) load_item(warp, held);
}

// The item that is held, for one row: sums[2]. A tile of the tensor cores is two rows of the weight by eight eighths of
// 256 columns, times those of the input; what unlike eighths give is left out.
template <bool WHOLE>
__device__ void multiply_row(const Held& held, const uint4* input, int lane, int columns, float* sums) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        bool inside = WHOLE || (part * LANES + lane) * 8 < columns;
        uint4 none = {0, 0, 0, 0}, x = inside ? input[part * LANES + lane] : none;
        uint4 w = inside ? held.numbers[part][0] : none, v = inside ? held.numbers[part][OF_PART - 1] : none;
        multiply_tiles(even, {w.x, v.x, w.y, v.y}, {x.x, x.y});
        multiply_tiles(odd, {w.z, v.z, w.w, v.w}, {x.z, x.w});
    }
    // Of eighth lane / 4, the lane with lane % 4 == lane / 8 has what counts: partners are such lanes.
    bool second = lane & 4;
    float low = second ? even[1] + odd[1] : even[0] + odd[0], high = second ? even[3] + odd[3] : even[2] + odd[2];
    float sum = second ? high : low;
    sum += __shfl_xor_sync(~0u, second ? low : high, 4);
    sum += __shfl_xor_sync(~0u, sum, 8 | 1);
    sum += __shfl_xor_sync(~0u, sum, 16 | 2);
    if (lane == 0 || lane == 4) sums[lane / 4] = sum;
}

// The item that is held, for several rows: sums[row][output], added to what is there if `more`. A tile of the tensor
// cores is up to 8 rows of the input by two halves of 64 columns times 4 rows of the weight by two halves; what unlike
// halves give is left out.
template <int COLUMNS, bool WHOLE>
__device__ void multiply_rows(const Held& held, const uint4* input, int lane, int columns, bool more, float* sums) {
    constexpr bool UPPER = ROWS > 4;
    int quad = lane / 8, within = lane % 8;  // row of weight and input; 8 columns of 64
    const uint4 *low = input + within + quad % ROWS * (COLUMNS / 8);
    const uint4 *high = input + within + (quad + 4) % ROWS * (COLUMNS / 8);
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        bool inside = WHOLE || (part * LANES + within) * 8 < columns;
        uint4 none = {0, 0, 0, 0}, w = inside ? held.numbers[part][0] : none;
        uint4 x = inside ? low[part * LANES] : none, y = UPPER && inside ? high[part * LANES] : none;
        multiply_tiles(even, {x.x, y.x, x.y, y.y}, {w.x, w.y});
        multiply_tiles(odd, {x.z, y.z, x.w, y.w}, {w.z, w.w});
    }
    bool second = lane & 4;
#pragma unroll
    for (int half = 0; half < 1 + UPPER; half++) {
        float sum = second ? even[2 * half + 1] + odd[2 * half + 1] : even[2 * half] + odd[2 * half];
        sum += __shfl_xor_sync(~0u, sum, 4);
        int row = quad + 4 * half;
        if (second || row >= ROWS) continue;
        float* target = sums + row * TILE + lane % 4;
        *target = more ? *target + sum : sum;
    }
}

// Gives `finish(row, pair, sums)` each pair of outputs of `count` tiles, the first of which is `first` of this block's;
// sums[2] (UNITS == 2, gate and up, whose tiles alternate: [4], gate first).
template <int COLUMNS, int UNITS, class Finish>
__device__ void sum_up(Block& block, int first, int count, Finish finish) {
    constexpr int SLICES = slices(COLUMNS), PAIRS = TILE / 2;
    const float* partial = reinterpret_cast<const float*>(block.state.work + INPUT_BYTES);
    int index = threadIdx.x;
    if (index >= count / UNITS * PAIRS * ROWS) return;
    int row = index % ROWS, pair = index / ROWS % PAIRS, tile = index / (ROWS * PAIRS);
    float sums[2 * UNITS];
    for (int unit = 0; unit < UNITS; unit++) {
        const float* found = partial + ((tile * UNITS + unit) * SLICES * ROWS + row) * TILE + 2 * pair;
        float low = 0, high = 0;
        for (int part = 0; part < SLICES; part++) {
            low += found[part * (ROWS * TILE)], high += found[part * (ROWS * TILE) + 1];
        }
        sums[2 * unit] = low, sums[2 * unit + 1] = high;
    }
    finish(row, (first / UNITS + tile) * PAIRS + pair, sums);
}

// The items of `count` tiles, the first of which is `begin`, of all the product's `items`; `item` is this warp's next.
// It calls `then` behind them, and afterwards frees the last stages: no block waits for these.
template <int COLUMNS, bool WHOLE, class Then>
__device__ void multiply_tiles_of(Warp& warp, Held& held, int& item, int begin, int count, int columns, bool more,
                                  int items, Then then) {
    float* partial = reinterpret_cast<float*>(warp.block.state.work + INPUT_BYTES);
    int parts = slices(columns), end = begin + count * parts;
    for (bool done = false; !done;) {
        bool mine = item < end;
        if (mine) {
            int index = item - begin, part = index % parts;
            float* sums = partial + (index / parts * slices(COLUMNS) + part) * (TILE * ROWS);
            const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + part * (SLICE / 8);
            int left = columns - part * SLICE;
            __syncwarp();  // tiles are multiplied by all lanes at once
            if constexpr (ROWS == 1) multiply_row<WHOLE>(held, input, warp.lane, left, sums);
            else multiply_rows<COLUMNS, WHOLE>(held, input, warp.lane, left, more, sums);
            item += WARPS;
        }
        done = item >= end;
        if (done) {
            __syncthreads();
            then();
        }
        warp.release();
        if (mine && item < items) load_item(warp, held);
    }
}

// A product of the gathered input; finish: see sum_up().
template <int PHASE, int COLUMNS, class Finish>
__device__ void multiply(Warp& warp, Held& held, Finish finish) {
    constexpr int UNITS = PHASE == GATE_UP ? 2 : 1, SLICES = slices(COLUMNS);
    int tiles = warp.block.state.counts[PHASE] * UNITS, item = warp.warp;
    for (int first = 0; first < tiles; first += ROUND) {
        int count = at_most(tiles - first, ROUND);
        multiply_tiles_of<COLUMNS, COLUMNS % SLICE == 0>(
            warp, held, item, first * SLICES, count, COLUMNS, false, tiles * SLICES, [&] {
                sum_up<COLUMNS, UNITS>(warp.block, first, count, finish);
                if (first + ROUND < tiles) __syncthreads();
            });
    }
}

// `down`, whose input is gathered piece by piece.
template <class Finish>
__device__ void multiply_down(Warp& warp, Held& held, const unsigned* words, Finish finish) {
    if constexpr (PIECES == 1) {
        gather<INTERMEDIATE>(warp.args, warp.block, words, INTERMEDIATE / 2, nullptr);
        multiply<DOWN, INTERMEDIATE>(warp, held, finish);
    } else {
        int tiles = warp.block.state.counts[DOWN], item = warp.warp;
        for (int piece = 0; piece < PIECES; piece++) {
            int begin = piece * PIECE, columns = at_most(INTERMEDIATE - begin, PIECE);
            gather<PIECE>(warp.args, warp.block, words + begin / 2, INTERMEDIATE / 2, nullptr, columns);
            multiply_tiles_of<PIECE, INTERMEDIATE % SLICE == 0>(
                warp, held, item, piece * tiles * slices(PIECE), tiles, columns, piece > 0,
                tiles * slices(INTERMEDIATE), [&] {
                    if (piece == PIECES - 1) sum_up<PIECE, 1>(warp.block, 0, tiles, finish);
                });
        }
    }
}
