// Weights in 8 bits (WEIGHT8): E4M3, and float32 scales [rows / row block, groups of columns]. The tensor cores multiply
// the widened numbers by x, and scales count for sums of 64 columns: so products are exact up to their float32 sums.
#pragma once
#include "exchange.cuh"

constexpr int SCALED_COLUMN_BITS = 7;
static_assert(1 << SCALED_COLUMN_BITS == SCALED_COLUMNS);

// A byte of SCALING says what shares scales: which power of two of rows (upper half) and whether groups of columns do.
struct ScaleBlock {
    int row_bits, column_bits;

    __device__ ScaleBlock(const Arguments& args, int layer, int phase) {
        auto scaling = reinterpret_cast<unsigned long long>(args.layers[layer * POINTERS + SCALING]);
        unsigned byte = ((unsigned)scaling >> 8 * (phase == QKV ? 0 : phase - O + 1)) & 255;
        row_bits = byte >> 4, column_bits = byte & 1 ? SCALED_COLUMN_BITS : 30;
    }
};

// One of an item's scales, of which each lane holds one: of row lane / OF_ROW of the tile, and of group lane % OF_ROW of
// the slice. So a lane asks for the next item's scale before it multiplies, and lanes exchange them.
template <int PHASE>
__device__ inline float load_scale(const Warp& warp, int layer, int item) {
    if constexpr (weight_bytes(PHASE) == 2) {
        return 1;
    } else {
        constexpr int OF_ROW = slice_of(PHASE) / SCALED_COLUMNS;
        static_assert(OF_ROW * TILE == 32);
        constexpr int COLUMNS = PHASE == O ? HEADS_WIDTH : PHASE == DOWN ? INTERMEDIATE : HIDDEN;
        Place place = place_of(warp.block, PHASE, item, COLUMNS);
        int row = place.row + warp.lane / OF_ROW, column = place.column + warp.lane % OF_ROW * SCALED_COLUMNS;
        if (column >= COLUMNS) return 0;
        ScaleBlock block(warp.args, layer, PHASE);
        constexpr int AT = PHASE == QKV ? QKV_SCALES : O_SCALES + (PHASE - O);
        auto scales = reinterpret_cast<const float*>(warp.args.layers[layer * POINTERS + AT]);
        int groups = ((COLUMNS - 1) >> block.column_bits) + 1;
        return scales[(row >> block.row_bits) * groups + (column >> block.column_bits)];
    }
}

// Four numbers of 8 bits in two pairs, exactly (but for NaN, which counts as 480). Moved into the place of a wider
// exponent they are too small by a power of two, subnormal ones as well.
__device__ inline uint2 widen_four(unsigned four) {
#if HALF
    constexpr int BITS = 7;
    constexpr unsigned OF_NUMBER = 0xbf80bf80u, FACTOR = 0x5c005c00u;  // 2 ** 8
#else
    constexpr int BITS = 4;
    constexpr unsigned OF_NUMBER = 0x87f087f0u, FACTOR = 0x7b807b80u;  // 2 ** 120
#endif
    unsigned low = (extend_signs<0>(four) << BITS) & OF_NUMBER, high = (extend_signs<2>(four) << BITS) & OF_NUMBER;
    return {multiply_pairs(low, FACTOR), multiply_pairs(high, FACTOR)};
}
