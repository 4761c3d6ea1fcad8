// Products of the gathered input and a weight.
#pragma once
#include "row_exchange.cuh"

__device__ inline void multiply_pair(float& sum, unsigned weights, float2 x) {
    float2 w = unpack(weights);
    sum = fmaf(w.x, x.x, sum);
    sum = fmaf(w.y, x.y, sum);
}

// One item for one row: lanes 0 and 16 put the products of two rows of a weight and a slice of the input into `sums`.
template <int COLUMNS, bool WHOLE>
__device__ void multiply_row(Warp& warp, int slice, int columns, bool, float* sums) {
    const unsigned char* rows = warp.take();
    const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + slice * (SLICE / 8);
    const uint4 *first = reinterpret_cast<const uint4*>(rows), *second = first + SLICE / 8;
    float sum = 0, second_sum = 0;
#pragma unroll
    for (int part = 0; part < SLICE / 256; part++) {
        int place = part * 32 + warp.lane;
        if (!WHOLE && slice * SLICE + place * 8 >= columns) break;
        uint4 x = input[place], w = first[place], v = second[place];
        float2 a = unpack(x.x), b = unpack(x.y), c = unpack(x.z), d = unpack(x.w);
        multiply_pair(sum, w.x, a), multiply_pair(sum, w.y, b), multiply_pair(sum, w.z, c), multiply_pair(sum, w.w, d);
        multiply_pair(second_sum, v.x, a), multiply_pair(second_sum, v.y, b);
        multiply_pair(second_sum, v.z, c), multiply_pair(second_sum, v.w, d);
    }
    bool upper = warp.lane & 16;
    float kept = upper ? second_sum : sum, sent = upper ? sum : second_sum;
    kept += __shfl_xor_sync(~0u, sent, 16);
    for (int other = 8; other; other /= 2) kept += __shfl_xor_sync(~0u, kept, other);
    if (warp.lane % 16 == 0) sums[warp.lane / 16] = kept;
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

// The items of tiles [0, count) behind `begin`, of which `item` is this warp's next.
template <int COLUMNS, bool WHOLE>
__device__ void multiply_tiles_of(Warp& warp, int& item, int begin, int count, int columns, bool more) {
    float* partial = reinterpret_cast<float*>(warp.block.state.work + INPUT_BYTES);
    int parts = slices(columns);
    for (; item < begin + count * parts; item += WARPS) {
        int place = item - begin, part = place % parts;
        float* sums = partial + (place / parts * slices(COLUMNS) + part) * (TILE * ROWS);
        if constexpr (ROWS == 1) multiply_row<COLUMNS, WHOLE>(warp, part, columns, more, sums);
        else multiply_rows<COLUMNS, WHOLE>(warp, part, columns, more, sums);
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
__device__ void multiply(Warp& warp, Finish finish) {
    constexpr int UNITS = PHASE == GATE_UP ? 2 : 1;
    int tiles = warp.block.state.counts[PHASE] * UNITS, item = warp.warp;
    for (int first = 0; first < tiles; first += ROUND) {
        int count = at_most(tiles - first, ROUND);
        multiply_tiles_of<COLUMNS, COLUMNS % SLICE == 0>(warp, item, first * slices(COLUMNS), count, COLUMNS, false);
        sum_up<COLUMNS, UNITS>(warp.block, first, count, finish);
        if (first + ROUND < tiles) __syncthreads();
    }
    warp.release();
}

// `down`, whose input is gathered piece by piece.
template <class Finish>
__device__ void multiply_down(Warp& warp, const unsigned* words, Finish finish) {
    if constexpr (PIECES == 1) {
        gather<INNER>(warp.step, warp.block, words, INNER / 2, nullptr);
        multiply<DOWN, INNER>(warp, finish);
    } else {
        int tiles = warp.block.state.counts[DOWN], item = warp.warp;
        for (int piece = 0; piece < PIECES; piece++) {
            int begin = piece * PIECE, columns = at_most(INNER - begin, PIECE);
            gather<PIECE>(warp.step, warp.block, words + begin / 2, INNER / 2, nullptr, columns);
            multiply_tiles_of<PIECE, INNER % SLICE == 0>(
                warp, item, piece * tiles * slices(PIECE), tiles, columns, piece > 0);
        }
        sum_up<PIECE, 1>(warp.block, 0, tiles, finish);
        warp.release();
    }
}
