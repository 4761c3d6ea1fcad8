// What lanes and blocks tell each other.
#pragma once
#include "row_ring.cuh"
#ifndef GATHER_BATCH
#define GATHER_BATCH 8
#endif

#ifndef POLL
#define POLL (ROWS == 1 ? 0 : 3)
#endif
__device__ inline bool has_tag(Word word, unsigned tag) { return (unsigned)(word >> 32) == tag; }

// The bits of some words, once all have the tag.
template <int COUNT>
__device__ inline void await(const Word* const (&places)[COUNT], unsigned tag, unsigned (&bits)[COUNT]) {
    Word found[COUNT];
#pragma unroll
    for (int each = 0; each < COUNT; each++) found[each] = read_word(places[each]);
    long long began = clock64();
#if POLL & 2
    for (bool waited = true; waited;) {
        waited = false;
#pragma unroll
        for (int each = 0; each < COUNT; each++) {
            if (has_tag(found[each], tag)) continue;
            if (waited) found[each] = read_word(places[each]);
            else
                do {
                    check_patience(began);
                    found[each] = read_word(places[each]);
                } while (!has_tag(found[each], tag));
            waited = true;
        }
    }
#else
#pragma unroll
    for (int each = 0; each < COUNT; each++)
        while (!has_tag(found[each], tag)) {
            check_patience(began);
            found[each] = read_word(places[each]);
        }
#endif
#pragma unroll
    for (int each = 0; each < COUNT; each++) bits[each] = (unsigned)found[each];
}

__device__ inline float sum_of_warp(float value) {
    for (int other = 16; other; other /= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
}

// Puts the input of a product, `columns` numbers of each row, into shared memory as pairs, rows of COLUMNS: words of `tag`,
// whose rows are `stride` words apart, or `plain` where that is not null, normed where `gain` is not null. Behind it all
// threads see it.
template <int COLUMNS>
__device__ void gather(const Step& step, Block& block, const Word* words, int stride, unsigned tag,
                       const unsigned* plain, const Number* gain, int columns = COLUMNS) {
    constexpr int TEAM = THREADS / ROWS;  // threads of a row
    constexpr int EACH = ceiling(COLUMNS / 4, TEAM), BATCH = ROWS == 1 ? EACH : at_most(EACH, GATHER_BATCH);  // times two pairs
    int row = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    unsigned pairs[EACH][2];
    uint2 gains[EACH];
    uint2* input = reinterpret_cast<uint2*>(block.state.work) + row * (COLUMNS / 4);
    const uint2* gain_pairs = reinterpret_cast<const uint2*>(gain);
    words += row * stride;
#pragma unroll
    for (int each = 0; each < EACH; each++) {
        int place = member + each * TEAM;
        if (gain && place < columns / 4) gains[each] = gain_pairs[place];
    }
    float squares = 0;
#pragma unroll
    for (int first = 0; first < EACH; first += BATCH) {
        Word found[BATCH][2];
#pragma unroll
        for (int each = first; each < at_most(first + BATCH, EACH); each++) {
            int place = member + each * TEAM;
            if (!plain && place < columns / 4) read_words(words + 2 * place, found[each - first][0], found[each - first][1]);
        }
#if POLL & 1
        long long began = clock64();
        for (bool waited = !plain; waited;) {
            waited = false;
#pragma unroll
            for (int each = first; each < at_most(first + BATCH, EACH); each++) {
                Word(&both)[2] = found[each - first];
                int place = member + each * TEAM;
                if (place >= columns / 4 || (has_tag(both[0], tag) && has_tag(both[1], tag))) continue;
                if (waited) read_words(words + 2 * place, both[0], both[1]);
                else
                    do {
                        check_patience(began);
                        read_words(words + 2 * place, both[0], both[1]);
                    } while (!has_tag(both[0], tag) || !has_tag(both[1], tag));
                waited = true;
            }
        }
#endif
#pragma unroll
        for (int each = first; each < at_most(first + BATCH, EACH); each++) {
            Word(&both)[2] = found[each - first];
            int place = member + each * TEAM;
            pairs[each][0] = pairs[each][1] = 0;
            if (place >= columns / 4) continue;
            if (plain) {
                const unsigned* of_row = plain + row * (COLUMNS / 2);
                pairs[each][0] = of_row[2 * place], pairs[each][1] = of_row[2 * place + 1];
            } else {
#if !(POLL & 1)
                long long began = clock64();
                while (!has_tag(both[0], tag) || !has_tag(both[1], tag)) {
                    check_patience(began);
                    read_words(words + 2 * place, both[0], both[1]);
                }
#endif
                pairs[each][0] = (unsigned)both[0], pairs[each][1] = (unsigned)both[1];
            }
            float2 a = unpack(pairs[each][0]), b = unpack(pairs[each][1]);
            squares += a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
            if (!gain) input[place] = {pairs[each][0], pairs[each][1]};
        }
    }
    if (gain) {
        squares = sum_of_warp(squares);
        if (threadIdx.x % 32 == 0) block.state.squares[threadIdx.x / 32] = squares;
        __syncthreads();
        squares = 0;
        for (int warp = 0; warp < WARPS / ROWS; warp++) squares += block.state.squares[row * (WARPS / ROWS) + warp];
        float inverse = rsqrtf(squares / COLUMNS + step.eps);
#pragma unroll
        for (int each = 0; each < EACH; each++) {
            int place = member + each * TEAM;
            if (place >= columns / 4) continue;
            float2 a = unpack(pairs[each][0]), b = unpack(pairs[each][1]);
            float2 by_a = unpack(gains[each].x), by_b = unpack(gains[each].y);
            a = rounded({a.x * inverse, a.y * inverse}), b = rounded({b.x * inverse, b.y * inverse});
            input[place] = {pack(a.x * by_a.x, a.y * by_a.y), pack(b.x * by_b.x, b.y * by_b.y)};
        }
    }
    __syncthreads();
}
