// What lanes and blocks tell each other.
#pragma once
#include "row_ring.cuh"

// The bits of some words, once all have the tag.
template <int COUNT>
__device__ inline void await(const Word* const (&places)[COUNT], unsigned tag, unsigned (&bits)[COUNT]) {
    Word found[COUNT];
#pragma unroll
    for (int each = 0; each < COUNT; each++) found[each] = read_word(places[each]);
    long long began = clock64();
#pragma unroll
    for (int each = 0; each < COUNT; each++) {
        while ((unsigned)(found[each] >> 32) != tag) {
            check_patience(began);
            found[each] = read_word(places[each]);
        }
        bits[each] = (unsigned)found[each];
    }
}

__device__ inline float sum_of_warp(float value) {
    for (int other = 16; other; other /= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
}

// Puts the input of a product, COLUMNS numbers, into shared memory as pairs: words of `tag`, or `plain` where that is
// not null, normed where `gain` is not null. Behind it all threads see it.
template <int COLUMNS>
__device__ void gather(const Step& step, Block& block, const Word* words, unsigned tag, const unsigned* plain,
                       const Number* gain) {
    constexpr int EACH = (COLUMNS / 4 + THREADS - 1) / THREADS;  // times two pairs
    unsigned pairs[EACH][2];
    uint2 gains[EACH];
    uint2* input = reinterpret_cast<uint2*>(block.state.work);
    const uint2* gain_pairs = reinterpret_cast<const uint2*>(gain);
    for (int each = 0; each < EACH; each++) {
        int place = threadIdx.x + each * THREADS;
        if (gain && place < COLUMNS / 4) gains[each] = gain_pairs[place];
    }
    Word found[EACH][2];
    for (int each = 0; each < EACH; each++) {
        int place = threadIdx.x + each * THREADS;
        if (!plain && place < COLUMNS / 4) read_words(words + 2 * place, found[each][0], found[each][1]);
    }
    float squares = 0;
    for (int each = 0; each < EACH; each++) {
        int place = threadIdx.x + each * THREADS;
        pairs[each][0] = pairs[each][1] = 0;
        if (place >= COLUMNS / 4) continue;
        if (plain) {
            pairs[each][0] = plain[2 * place], pairs[each][1] = plain[2 * place + 1];
        } else {
            long long began = clock64();
            while ((unsigned)(found[each][0] >> 32) != tag || (unsigned)(found[each][1] >> 32) != tag) {
                check_patience(began);
                read_words(words + 2 * place, found[each][0], found[each][1]);
            }
            pairs[each][0] = (unsigned)found[each][0], pairs[each][1] = (unsigned)found[each][1];
        }
        float2 a = unpack(pairs[each][0]), b = unpack(pairs[each][1]);
        squares += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
    }
    float inverse = 1;
    if (gain) {
        squares = sum_of_warp(squares);
        if (threadIdx.x % 32 == 0) block.state.squares[threadIdx.x / 32] = squares;
        __syncthreads();
        squares = 0;
        for (int warp = 0; warp < WARPS; warp++) squares += block.state.squares[warp];
        inverse = rsqrtf(squares / COLUMNS + step.eps);
    }
    for (int each = 0; each < EACH; each++) {
        int place = threadIdx.x + each * THREADS;
        if (place >= COLUMNS / 4) continue;
        if (gain) {
            float2 a = unpack(pairs[each][0]), b = unpack(pairs[each][1]);
            float2 by_a = unpack(gains[each].x), by_b = unpack(gains[each].y);
            a = rounded({a.x * inverse, a.y * inverse}), b = rounded({b.x * inverse, b.y * inverse});
            pairs[each][0] = pack(a.x * by_a.x, a.y * by_a.y), pairs[each][1] = pack(b.x * by_b.x, b.y * by_b.y);
        }
        input[place] = {pairs[each][0], pairs[each][1]};
    }
    __syncthreads();
}
