// Products of the gathered input and a weight.
#pragma once
#include "row_exchange.cuh"

// One item: lanes 0 and 16 get the products of its two rows and a slice of the input.
//
// Tensor cores do it: eighths of the first row and of the second are the 16 rows of A, eighths of the input the 8
// columns of B, and what counts of the product is where an eighth meets itself. Lane 4 * g + t has columns of the g-th
// eighth, 8 of each 32; odd eighths take them in another order, so that no two lanes want the same bank at once.
template <int COLUMNS>
__device__ float multiply_slice(Warp& warp, int slice) {
    const unsigned char* rows = warp.take();
    const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + slice * (SLICE / 8);
    const uint4 *first = reinterpret_cast<const uint4*>(rows), *second = first + SLICE / 8;
    constexpr int EIGHTH = SLICE / 64;  // in units of 8 columns
    int group = warp.lane / 4, quad = warp.lane % 4;
    float sums[4] = {};
#pragma unroll
    for (int part = 0; part < EIGHTH / 4; part++) {
        int place = group * EIGHTH + (part ^ (group & 1)) * 4 + quad;
        uint4 x = {}, w = {}, v = {};
        if (COLUMNS % SLICE == 0 || slice * SLICE + place * 8 < COLUMNS)
            x = input[place], w = first[place], v = second[place];
        multiply_tiles(sums, w.x, v.x, w.y, v.y, x.x, x.y);
        multiply_tiles(sums, w.z, v.z, w.w, v.w, x.z, x.w);
    }
    bool here = quad == group / 2, odd = group & 1, upper = warp.lane & 16;
    float of_first = here ? (odd ? sums[1] : sums[0]) : 0, of_second = here ? (odd ? sums[3] : sums[2]) : 0;
    float kept = upper ? of_second : of_first, sent = upper ? of_first : of_second;
    kept += __shfl_xor_sync(~0u, sent, 16);
    for (int other = 8; other; other /= 2) kept += __shfl_xor_sync(~0u, kept, other);
    return kept;
}

// A product of the gathered input; `finish(pair, sums)` gets each pair of outputs once, sums[2] (GATE_UP: [4], gate
// first).
template <int PHASE, int COLUMNS, class Finish>
__device__ void multiply(Warp& warp, Finish finish) {
    constexpr int PARTS = slices(COLUMNS), UNITS = PHASE == GATE_UP ? 2 : 1;
    Block& block = warp.block;
    float* partial = reinterpret_cast<float*>(block.state.work + INPUT_BYTES);
    int units = block.state.counts[PHASE] * UNITS, item = warp.warp;
    for (int first = 0; first < units; first += ROUND) {
        int count = units - first < ROUND ? units - first : ROUND;
        for (; item < (first + count) * PARTS; item += WARPS) {
            float sum = multiply_slice<COLUMNS>(warp, item % PARTS);
            if (warp.lane % 16 == 0) partial[2 * (item - first * PARTS) + warp.lane / 16] = sum;
        }
        __syncthreads();
        if (threadIdx.x < count / UNITS) {
            float sums[2 * UNITS];
            for (int unit = 0; unit < UNITS; unit++) {
                const float* found = partial + 2 * PARTS * (threadIdx.x * UNITS + unit);
                float low = 0, high = 0;
                for (int part = 0; part < PARTS; part++) low += found[2 * part], high += found[2 * part + 1];
                sums[2 * unit] = low, sums[2 * unit + 1] = high;
            }
            finish(first / UNITS + threadIdx.x, sums);
        }
        if (first + ROUND < units) __syncthreads();
    }
}
