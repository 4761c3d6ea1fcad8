// Products of the gathered input and a weight.
#pragma once
#include "scales.cuh"

// The next item of a product, in registers while its input is awaited. A lane has 16 bytes of each part of a slice: for
// one row of the input of both rows of the tile, for several of one of four.
constexpr int LANES = ROWS == 1 ? 32 : 8, PARTS = SLICE_BYTES / (16 * LANES), OF_PART = TILE * LANES / 32;
struct Held {
    uint4 numbers[PARTS][OF_PART];
    float scale;  // see load_scale()
};

__device__ inline void load_item(Warp& warp, Held& held) {
    const uint4* rows = reinterpret_cast<const uint4*>(warp.wait_for_item());
    if (ROWS > 1) rows += warp.lane / LANES * (SLICE_BYTES / 16);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int each = 0; each < OF_PART; each++)
            held.numbers[part][each] = rows[each * (SLICE_BYTES / 16) + part * LANES + warp.lane % LANES];
}

// Holds the warp's first item of a phase, if there is one.
template <int PHASE>
__device__ inline void hold(Warp& warp, Held& held, int layer) {
    if (warp.warp >= warp.block.state.items[PHASE]) return;
    held.scale = load_scale<PHASE>(warp, layer, warp.warp);
    load_item(warp, held);
}

// sums[2] of a row: `low` and `high` are sums of columns. Of eighth lane / 4, the lane with lane % 4 == lane / 8 has what
// counts: partners are such lanes.
__device__ inline void add_eighths(float low, float high, int lane, float* sums) {
    bool second = lane & 4;
    float sum = second ? high : low;
    sum += __shfl_xor_sync(~0u, second ? low : high, 4);
    sum += __shfl_xor_sync(~0u, sum, 8 | 1);
    sum += __shfl_xor_sync(~0u, sum, 16 | 2);
    if (lane == 0 || lane == 4) sums[lane / 4] = sum;
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
    bool second = lane & 4;
    float low = second ? even[1] + odd[1] : even[0] + odd[0], high = second ? even[3] + odd[3] : even[2] + odd[2];
    add_eighths(low, high, lane, sums);
}

// The same for weights in 8 bits: parts of 512 columns, of which a lane has 16.
template <bool WHOLE>
__device__ void multiply_scaled_row(const Held& held, const uint4* input, int lane, int columns, float* sums) {
    bool second = lane & 4;
    float low = 0, high = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        bool inside = WHOLE || (part * LANES + lane) * 16 < columns;
        const uint4* own = input + 2 * part * LANES;
        uint4 none = {0, 0, 0, 0}, x = inside ? own[place_of_eight<QKV>(2 * lane)] : none;
        uint4 y = inside ? own[place_of_eight<QKV>(2 * lane + 1)] : none;
        uint4 w = inside ? held.numbers[part][0] : none, v = inside ? held.numbers[part][OF_PART - 1] : none;
        float even[4] = {}, odd[4] = {};
        auto multiply_four = [](float (&acc)[4], unsigned w, unsigned v, unsigned x, unsigned y) {
            uint2 upper = widen_four(w), lower = widen_four(v);
            multiply_tiles(acc, {upper.x, lower.x, upper.y, lower.y}, {x, y});
        };
        multiply_four(even, w.x, v.x, x.x, x.y), multiply_four(odd, w.y, v.y, x.z, x.w);
        multiply_four(even, w.z, v.z, y.x, y.y), multiply_four(odd, w.w, v.w, y.z, y.w);
        int group = part * (LANES / 8) + lane / 8;
        low += (second ? even[1] + odd[1] : even[0] + odd[0]) * __shfl_sync(~0u, held.scale, group);
        high += (second ? even[3] + odd[3] : even[2] + odd[2]) * __shfl_sync(~0u, held.scale, 16 + group);
    }
    add_eighths(low, high, lane, sums);
}

// Adds the halves of a row's sums and writes them, or adds them to what is there if `more`.
__device__ inline void add_halves(float sum, int row, int lane, bool more, float* sums) {
    sum += __shfl_xor_sync(~0u, sum, 4);
    if (lane & 4 || row >= ROWS) return;
    float* target = sums + row * TILE + lane % 4;
    *target = more ? *target + sum : sum;
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
    for (int half = 0; half < 1 + UPPER; half++)
        add_halves(second ? even[2 * half + 1] + odd[2 * half + 1] : even[2 * half] + odd[2 * half], quad + 4 * half,
                   lane, more, sums);
}

// The same for weights in 8 bits: parts of 128 columns, of which a lane has 16.
template <int COLUMNS, bool WHOLE>
__device__ void multiply_scaled_rows(const Held& held, const uint4* input, int lane, int columns, bool more,
                                     float* sums) {
    constexpr bool UPPER = ROWS > 4;
    int quad = lane / 8, within = lane % 8;
    const uint4 *low = input + quad % ROWS * (COLUMNS / 8), *high = input + (quad + 4) % ROWS * (COLUMNS / 8);
    bool second = lane & 4;
    float sum[1 + UPPER] = {};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        bool inside = WHOLE || (part * LANES + within) * 16 < columns;
        uint4 none = {0, 0, 0, 0}, w = inside ? held.numbers[part][0] : none;
        float even[4] = {}, odd[4] = {};
#pragma unroll
        for (int eight = 0; eight < 2; eight++) {
            int index = 2 * part * LANES + place_of_eight<QKV>(2 * within + eight);
            uint4 x = inside ? low[index] : none, y = UPPER && inside ? high[index] : none;
            uint2 left = widen_four(eight ? w.z : w.x), right = widen_four(eight ? w.w : w.y);
            multiply_tiles(even, {x.x, y.x, x.y, y.y}, {left.x, left.y});
            multiply_tiles(odd, {x.z, y.z, x.w, y.w}, {right.x, right.y});
        }
        float scale = __shfl_sync(~0u, held.scale, lane % 4 * PARTS + part);
#pragma unroll
        for (int half = 0; half < 1 + UPPER; half++)
            sum[half] += scale * (second ? even[2 * half + 1] + odd[2 * half + 1] : even[2 * half] + odd[2 * half]);
    }
#pragma unroll
    for (int half = 0; half < 1 + UPPER; half++) add_halves(sum[half], quad + 4 * half, lane, more, sums);
}

// Gives `finish(row, pair, sums)` each pair of outputs of `count` tiles, the first of which is `first` of this block's;
// sums[2] (UNITS == 2, gate and up, whose tiles alternate: [4], gate first).
template <int SLICES, int UNITS, class Finish>
__device__ void sum_up(Block& block, int first, int count, Finish finish) {
    constexpr int PAIRS = TILE / 2;
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
template <int PHASE, int COLUMNS, bool WHOLE, class Then>
__device__ void multiply_tiles_of(Warp& warp, Held& held, int layer, int& item, int begin, int count, int columns,
                                  bool more, int items, Then then) {
    constexpr int SLICE = slice_of(PHASE);
    constexpr bool SCALED = weight_bytes(PHASE) == 1;
    float* partial = reinterpret_cast<float*>(warp.block.state.work + INPUT_BYTES);
    int parts = slices(PHASE, columns), end = begin + count * parts;
    for (bool done = false; !done;) {
        bool mine = item < end;
        if (mine) {
            int index = item - begin, part = index % parts;
            float* sums = partial + (index / parts * slices(PHASE, COLUMNS) + part) * (TILE * ROWS);
            const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + part * (SLICE / 8);
            int left = columns - part * SLICE;
            float scale = item + WARPS < items ? load_scale<PHASE>(warp, layer, item + WARPS) : 0;
            __syncwarp();  // tiles are multiplied by all lanes at once
            if constexpr (ROWS == 1 && SCALED) multiply_scaled_row<WHOLE>(held, input, warp.lane, left, sums);
            else if constexpr (ROWS == 1) multiply_row<WHOLE>(held, input, warp.lane, left, sums);
            else if constexpr (SCALED) multiply_scaled_rows<COLUMNS, WHOLE>(held, input, warp.lane, left, more, sums);
            else multiply_rows<COLUMNS, WHOLE>(held, input, warp.lane, left, more, sums);
            held.scale = scale;
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
__device__ void multiply(Warp& warp, Held& held, int layer, Finish finish) {
    constexpr int UNITS = PHASE == GATE_UP ? 2 : 1, SLICES = slices(PHASE, COLUMNS);
    int tiles = warp.block.state.counts[PHASE] * UNITS, item = warp.warp;
    for (int first = 0; first < tiles; first += ROUND) {
        int count = at_most(tiles - first, ROUND);
        multiply_tiles_of<PHASE, COLUMNS, COLUMNS % slice_of(PHASE) == 0>(
            warp, held, layer, item, first * SLICES, count, COLUMNS, false, tiles * SLICES, [&] {
                sum_up<SLICES, UNITS>(warp.block, first, count, finish);
                if (first + ROUND < tiles) __syncthreads();
            });
    }
}

// `down`, whose input is gathered piece by piece.
template <class Finish>
__device__ void multiply_down(Warp& warp, Held& held, int layer, const unsigned* words, Finish finish) {
    if constexpr (PIECES == 1) {
        gather<DOWN, INTERMEDIATE>(warp.args, warp.block, words, INTERMEDIATE / 2, nullptr);
        multiply<DOWN, INTERMEDIATE>(warp, held, layer, finish);
    } else {
        int tiles = warp.block.state.counts[DOWN], item = warp.warp;
        for (int piece = 0; piece < PIECES; piece++) {
            int begin = piece * PIECE, columns = at_most(INTERMEDIATE - begin, PIECE);
            gather<DOWN, PIECE>(warp.args, warp.block, words + begin / 2, INTERMEDIATE / 2, nullptr, columns);
            multiply_tiles_of<DOWN, PIECE, INTERMEDIATE % slice_of(DOWN) == 0>(
                warp, held, layer, item, piece * tiles * slices(DOWN, PIECE), tiles, columns, piece > 0,
                tiles * slices(DOWN, INTERMEDIATE), [&] {
                    if (piece == PIECES - 1) sum_up<slices(DOWN, PIECE), 1>(warp.block, 0, tiles, finish);
                });
        }
    }
}
