// Products of the gathered input and a weight.
#pragma once
#include "row_exchange.cuh"

__device__ inline void multiply_pair(float& sum, unsigned weights, float2 x) {
    float2 w = unpack(weights);
    sum = fmaf(w.x, x.x, sum);
    sum = fmaf(w.y, x.y, sum);
}

// One item: lanes 0 and 16 get the products of its two rows and a slice of the input.
template <int COLUMNS>
__device__ float multiply_slice(Warp& warp, int slice) {
    const unsigned char* rows = warp.take();
    const uint4* input = reinterpret_cast<const uint4*>(warp.block.state.work) + slice * (SLICE / 8);
    const uint4 *first = reinterpret_cast<const uint4*>(rows), *second = first + SLICE / 8;
    float sum = 0, second_sum = 0;
#pragma unroll
    for (int part = 0; part < SLICE / 256; part++) {
        int place = part * 32 + warp.lane;
        if (COLUMNS % SLICE && slice * SLICE + place * 8 >= COLUMNS) break;
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
    warp.release();
}
