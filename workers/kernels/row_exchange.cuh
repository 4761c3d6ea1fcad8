// What lanes and blocks tell each other.
#pragma once
#include "row_ring.cuh"

__device__ inline bool has_tag(Word word, unsigned tag) { return (unsigned)(word >> 32) == tag; }

// Reads until all of COUNT are there. Of several rows, once the first that was missing is there, the others are read
// together: one after another each would take as long as a read does.
template <int COUNT, class IsThere, class Read>
__device__ inline void look_again(long long began, IsThere is_there, Read read) {
    for (bool waited = true; waited;) {
        waited = false;
#pragma unroll
        for (int each = 0; each < COUNT; each++) {
            if (is_there(each)) continue;
            if (ROWS > 1 && waited) {
                read(each);
                continue;
            }
            do {
                check_patience(began);
                read(each);
            } while (!is_there(each));
            waited = ROWS > 1;
        }
    }
}

// The bits of some words, once all have the tag.
template <int COUNT>
__device__ inline void await(const Word* const (&places)[COUNT], unsigned tag, unsigned (&bits)[COUNT]) {
    Word found[COUNT];
#pragma unroll
    for (int each = 0; each < COUNT; each++) found[each] = read_word(places[each]);
    long long began = clock64();
    look_again<COUNT>(began, [&](int each) { return has_tag(found[each], tag); },
                      [&](int each) { found[each] = read_word(places[each]); });
#pragma unroll
    for (int each = 0; each < COUNT; each++) bits[each] = (unsigned)found[each];
}

__device__ inline float sum_of_warp(float value) {
    for (int other = 16; other; other /= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
}

// Puts the input of a product, `columns` numbers of each row, into shared memory as pairs, rows of COLUMNS: words of
// `tag`, whose rows are `stride` words apart, or `plain` where that is not null, normed where `gain` is not null.
// Behind it all threads see it.
template <int COLUMNS>
__device__ void gather(const Step& step, Block& block, const Word* words, int stride, unsigned tag,
                       const unsigned* plain, const Number* gain, int columns = COLUMNS) {
    constexpr int TEAM = THREADS / ROWS;  // threads of a row
    constexpr int EACH = ceiling(COLUMNS / 4, TEAM), BATCH = ROWS == 1 ? EACH : at_most(EACH, 8);  // times two pairs
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
        auto place_of = [&](int each) { return member + (first + each) * TEAM; };
        auto is_none = [&](int each) { return first + each >= EACH || place_of(each) >= columns / 4; };
        auto read = [&](int each) { read_words(words + 2 * place_of(each), found[each][0], found[each][1]); };
        auto is_there = [&](int each) {
            return plain || is_none(each) || (has_tag(found[each][0], tag) && has_tag(found[each][1], tag));
        };
#pragma unroll
        for (int each = 0; each < BATCH; each++)
            if (!plain && !is_none(each)) read(each);
        look_again<BATCH>(clock64(), is_there, read);
#pragma unroll
        for (int each = first; each < at_most(first + BATCH, EACH); each++) {
            int place = member + each * TEAM;
            pairs[each][0] = pairs[each][1] = 0;
            if (place >= columns / 4) continue;
            const unsigned* of_row = plain + row * (COLUMNS / 2) + 2 * place;
            pairs[each][0] = plain ? of_row[0] : (unsigned)found[each - first][0];
            pairs[each][1] = plain ? of_row[1] : (unsigned)found[each - first][1];
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
