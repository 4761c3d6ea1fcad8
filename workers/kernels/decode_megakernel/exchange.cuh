// How blocks publish activations to each other, in words of 32 bits.
//
// A word that is not published yet is NONE. NONE is no pair of numbers, and no float that arithmetic gives, so a word
// needs no flag beside it.
#pragma once
#include "ring.cuh"

constexpr unsigned NONE = ~0u;

// Clears this block's part of a buffer, by one warp, once all blocks have read it. Other blocks write and read there
// only after they have found what this block publishes behind its next barrier.
__device__ inline void clear(unsigned* buffer) {
    if (threadIdx.x < THREADS - 32) return;
    for (int index = 4 * (32 * blockIdx.x + threadIdx.x % 32); index < PUBLISHED_WORDS; index += 4 * 32 * BLOCKS)
        write_words(buffer + index, {NONE, NONE, NONE, NONE});
    __threadfence();
}

__device__ inline bool is_there(unsigned word) { return word != NONE; }
__device__ inline bool is_there(const uint4& words) {
    return words.x != NONE && words.y != NONE && words.z != NONE && words.w != NONE;
}

// Reads until all of COUNT are published. With several rows, once the first missing word has come, the others are read
// together: one after another, each would take as long as a read does.
template <int COUNT, class Found, class Read>
__device__ inline void look_again(Found (&found)[COUNT], Read read) {
    long long began = clock64();
    for (bool waited = true; waited;) {
        waited = false;
#pragma unroll
        for (int each = 0; each < COUNT; each++) {
            if (is_there(found[each])) continue;
            if (ROWS > 1 && waited) {
                read(each);
                continue;
            }
            do {
                check_patience(began);
                read(each);
            } while (!is_there(found[each]));
            waited = ROWS > 1;
        }
    }
}

// Some words, once all are published.
template <int COUNT>
__device__ inline void await(const unsigned* const (&sources)[COUNT], unsigned (&words)[COUNT]) {
    auto read = [&](int each) { words[each] = read_word(sources[each]); };
#pragma unroll
    for (int each = 0; each < COUNT; each++) read(each);
    look_again<COUNT>(words, read);
}

__device__ inline float sum_of_warp(float value) {
    for (int other = 16; other; other /= 2) value += __shfl_xor_sync(~0u, value, other);
    return value;
}

__device__ inline float squares_of(unsigned pair) {
    float2 both = unpack(pair);
    return both.x * both.x + both.y * both.y;
}
__device__ inline float squares_of(const uint4& pairs) {
    return squares_of(pairs.x) + squares_of(pairs.y) + squares_of(pairs.z) + squares_of(pairs.w);
}

__device__ inline unsigned normed(unsigned pair, unsigned gain, float inverse) {
    float2 both = unpack(pair), by = unpack(gain);
    both = rounded({both.x * inverse, both.y * inverse});
    return pack(both.x * by.x, both.y * by.y);
}
__device__ inline uint4 normed(const uint4& pairs, const uint4& gains, float inverse) {
    return {normed(pairs.x, gains.x, inverse), normed(pairs.y, gains.y, inverse), normed(pairs.z, gains.z, inverse),
            normed(pairs.w, gains.w, inverse)};
}

// Where eight neighbouring columns of a product's input stand. For a weight in 8 bits a lane reads two eights, one after
// the other. Some swap places with their neighbour, so that no two of eight lanes read from one bank.
template <int PHASE>
__device__ inline int place_of_eight(int index) {
    return weight_bytes(PHASE) == 2 ? index : index ^ (index >> 3 & 1);
}

// Gathers the input of a product, `columns` numbers of each row, into shared memory as pairs, in rows of COLUMNS.
// words: the published activations, whose rows are `stride` apart. gain: of the norm before the product; null: none.
// All threads see the input when it returns.
template <int PHASE, int COLUMNS>
__device__ void gather(const Arguments& args, Block& block, const unsigned* words, int stride, const Number* gain,
                       int columns = COLUMNS) {
    constexpr int TEAM = THREADS / ROWS;  // threads of a row
    constexpr int EACH = ceiling(COLUMNS / 8, TEAM), BATCH = ROWS == 1 ? EACH : at_most(EACH, 4);  // times four pairs
    int row = threadIdx.x / TEAM, member = threadIdx.x % TEAM;
    uint4 pairs[EACH], gains[EACH];
    uint4* input = reinterpret_cast<uint4*>(block.state.work) + row * (COLUMNS / 8);
    words += row * stride;
    auto store = [&](int index, const uint4& eight) { input[place_of_eight<PHASE>(index)] = eight; };
#pragma unroll
    for (int each = 0; each < EACH; each++) {
        int index = member + each * TEAM;
        if (gain && index < columns / 8) gains[each] = reinterpret_cast<const uint4*>(gain)[index];
    }
    float squares = 0;
#pragma unroll
    for (int first = 0; first < EACH; first += BATCH) {
        uint4 found[BATCH] = {};
        auto index_of = [&](int each) { return first + each < EACH ? member + (first + each) * TEAM : columns; };
        auto read = [&](int each) { found[each] = read_words(words + 4 * index_of(each)); };
#pragma unroll
        for (int each = 0; each < BATCH; each++)
            if (index_of(each) < columns / 8) read(each);
        look_again<BATCH>(found, read);
#pragma unroll
        for (int each = first; each < at_most(first + BATCH, EACH); each++) {
            pairs[each] = found[each - first];
            if (gain) squares += squares_of(pairs[each]);
            else if (member + each * TEAM < columns / 8) store(member + each * TEAM, pairs[each]);
        }
    }
    if (gain) {
        constexpr int USED = at_most(WARPS / ROWS, ceiling(COLUMNS, 256));  // warps of a row that have some
        bool has_some = member < 32 * USED;
        if (has_some) {
            squares = sum_of_warp(squares);
            if (threadIdx.x % 32 == 0) block.state.squares[threadIdx.x / 32] = squares;
        }
        __syncthreads();
        if (has_some) {
            squares = 0;
            for (int warp = 0; warp < USED; warp++) squares += block.state.squares[row * (WARPS / ROWS) + warp];
            float inverse = rsqrtf(squares / COLUMNS + args.eps);
#pragma unroll
            for (int each = 0; each < EACH; each++) {
                int index = member + each * TEAM;
                if (index < columns / 8) store(index, normed(pairs[each], gains[each], inverse));
            }
        }
    }
    __syncthreads();
}
