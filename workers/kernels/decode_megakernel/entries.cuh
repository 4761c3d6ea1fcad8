// K and V as they are stored, and how the tensor cores take them: numbers, or entries of 8 bits, which are numbers
// divided by a scale. These are multiplied as float16, which has them all: so are q and the weights of V, and what
// scales would do to entries is done to scores and output.
#pragma once
#include <type_traits>

#include "shape.cuh"

// How V is summed up. A tile of acc is 16 dimensions by 8 columns, and heads may be fewer: so each has SPANS
// columns, for as many spans of its dimensions. A product then runs over BESIDE positions times SPANS spans, and
// weights are 0 where a column is of another span. So no accumulator is padding, and a lane reads DIMS
// neighbouring dimensions.
constexpr int COLUMNS = GROUP <= 2 ? 2 : GROUP <= 4 ? 4 : 8, SPANS = 8 / COLUMNS, BESIDE = 8 / SPANS;
constexpr int DIMS = HEAD_DIM / (8 * SPANS), TILES = DIMS / 2;
constexpr int LINE_BYTES = DIMS * sizeof(Entry);
struct alignas(at_most(16, LINE_BYTES)) Line {
    std::conditional_t<LINE_BYTES == 2, unsigned short, unsigned> words[at_least(LINE_BYTES / 4, 1)];
};
constexpr int EIGHTS = 2 / sizeof(Entry);  // of dimensions of K, that a lane reads at once

// Pair: two entries beside each other. eight_of: eight of K's dimensions, in 16 bits each. tile_of: of two positions of
// V, two dimensions of a tile.
#if FP8
using Pair = unsigned short;
__device__ inline Pair as_stored(float2 both, float by) { return narrow(both.x * by, both.y * by); }
__device__ inline unsigned as_factors(float2 both) { return pack_half(both.x, both.y); }
__device__ inline uint4 eight_of(const uint4& keys, int half) {
    unsigned low = half ? keys.z : keys.x, high = half ? keys.w : keys.y;
    return {widen((Pair)low), widen((Pair)(low >> 16)), widen((Pair)high), widen((Pair)(high >> 16))};
}
__device__ inline uint2 tile_of(const Line& one, const Line& other, int tile) {
    unsigned both = __byte_perm(one.words[tile / 2], other.words[tile / 2], tile % 2 ? 0x7362 : 0x5140);
    return {widen((Pair)both), widen((Pair)(both >> 16))};
}
template <class... Tiles>
__device__ inline void multiply_stored(float (&acc)[4], Tiles... tiles) {
    multiply_half_tiles(acc, tiles...);
}
#else
using Pair = unsigned;
__device__ inline Pair as_stored(float2 both, float) { return pack(both.x, both.y); }
__device__ inline unsigned as_factors(float2 both) { return pack(both.x, both.y); }
__device__ inline uint4 eight_of(const uint4& keys, int) { return keys; }
__device__ inline uint2 tile_of(const Line& one, const Line& other, int tile) {
    return {__byte_perm(one.words[tile], other.words[tile], 0x5410),
            __byte_perm(one.words[tile], other.words[tile], 0x7632)};
}
template <class... Tiles>
__device__ inline void multiply_stored(float (&acc)[4], Tiles... tiles) {
    multiply_tiles(acc, tiles...);
}
#endif

// What entries of a layer's K and V of one head are to be multiplied with.
struct Scales {
    float of_keys = 1, of_values = 1;

    __device__ Scales(const Arguments& args, int layer, int head) {
        if (!FP8) return;
        const float* scales = args.scales + 2 * layer * KV_HEADS + head;
        of_keys = scales[0], of_values = scales[KV_HEADS];
    }
};
