// Attention of the new token: SPLITS blocks share the positions of a KV head, as in flash-decoding (Dao et al., 2023).
#pragma once
#include "row_exchange.cuh"

// The new token's q (in units of log 2), k and v of this block's KV head, normed and rotated, into the work area.
__device__ void prepare_heads(Warp& warp, int layer, unsigned tag) {
    const Step& step = warp.step;
    const Share& share = warp.share;
    int head = blockIdx.x / SPLITS, which = warp.warp;
    if (which < GROUP + 2 && warp.lane < HEAD_DIM / 4) {
        int from = which < GROUP ? head * GROUP + which : Q_HEADS + (which - GROUP) * KV_HEADS + head;
        int low = warp.lane, high = low + HEAD_DIM / 4;  // pairs of dimensions that are rotated into each other
        const unsigned* cos = reinterpret_cast<const unsigned*>(step.cos + share.row * 2 * HEAD_DIM);
        const unsigned* sin = reinterpret_cast<const unsigned*>(step.sin + share.row * 2 * HEAD_DIM);
        float2 cos_a = unpack(cos[low]), cos_b = unpack(cos[high]), sin_a = unpack(sin[low]), sin_b = unpack(sin[high]);
        float2 by_a = {1, 1}, by_b = {1, 1};
        const Number* gain = which <= GROUP ? step.layers[layer * POINTERS + HEAD_NORMS] : nullptr;
        if (gain) {
            const unsigned* gains = reinterpret_cast<const unsigned*>(gain + from * HEAD_DIM);
            by_a = unpack(gains[low]), by_b = unpack(gains[high]);
        }
        const Word* words = step.words + QKV_AT + share.row * (QKV_ROWS / 2) + from * (HEAD_DIM / 2);
        unsigned bits[2];
        await({words + low, words + high}, tag, bits);
        float2 a = unpack(bits[0]), b = unpack(bits[1]);
        if (gain) {
            float squares = a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
            for (int other = HEAD_DIM / 8; other; other /= 2) squares += __shfl_xor_sync(HEAD_LANES, squares, other);
            float inverse = rsqrtf(squares / HEAD_DIM + step.head_eps);
            a = rounded({a.x * inverse, a.y * inverse}), b = rounded({b.x * inverse, b.y * inverse});
            a = rounded({a.x * by_a.x, a.y * by_a.y}), b = rounded({b.x * by_b.x, b.y * by_b.y});
        }
        if (which <= GROUP) {
            float2 x = a, y = b;
            a = rounded({x.x * cos_a.x + y.x * sin_a.x, x.y * cos_a.y + y.y * sin_a.y});
            b = rounded({y.x * cos_b.x + x.x * sin_b.x, y.y * cos_b.y + x.y * sin_b.y});
        }
        float factor = which < GROUP ? step.scale * 1.44269504f : 1;
        float2* row = reinterpret_cast<float2*>(warp.block.state.work) + which * (HEAD_DIM / 2);
        row[low] = {a.x * factor, a.y * factor}, row[high] = {b.x * factor, b.y * factor};
        int slot = step.slots[share.row];
        if (which >= GROUP && share.split == 0 && slot >= 0) {
            Number* own = step.pool + slot / step.page_size * step.page_elements + layer * step.layer_elements +
                          (((which - GROUP) * KV_HEADS + head) * step.page_size + slot % step.page_size) * HEAD_DIM;
            unsigned* pairs = reinterpret_cast<unsigned*>(own);
            pairs[low] = pack(a.x, a.y), pairs[high] = pack(b.x, b.y);
        }
    }
    __syncthreads();
}

// Scores, weights and sums of a warp's positions. A lane has DIMS dimensions of all heads' sums, and the scores of one
// position and head: lane = 4 * position + head.
struct Softmax {
    float query[GROUP][DIMS], sums[GROUP][DIMS];
    float most[HEAD_SETS], total[HEAD_SETS];
};

__device__ inline void load_dims(const Number* row, int lane, float (&dims)[DIMS]) {
    const unsigned* pairs = reinterpret_cast<const unsigned*>(row) + lane * (DIMS / 2);
    if constexpr (DIMS == 4) {
        uint2 both = *reinterpret_cast<const uint2*>(pairs);
        float2 a = unpack(both.x), b = unpack(both.y);
        dims[0] = a.x, dims[1] = a.y, dims[2] = b.x, dims[3] = b.y;
    } else {
        float2 a = unpack(pairs[0]);
        dims[0] = a.x, dims[1] = a.y;
    }
}

// The first warp of the first share begins with the new token, the others with nothing.
__device__ void begin_softmax(Softmax& softmax, Warp& warp) {
    auto heads = reinterpret_cast<const float(*)[HEAD_DIM]>(warp.block.state.work);
    bool with_new = warp.share.split == 0 && warp.warp == 0;
    for (int set = 0; set < HEAD_SETS; set++) softmax.most[set] = -INFINITY, softmax.total[set] = 0;
    for (int head = 0; head < GROUP; head++) {
        float score = 0;
        for (int dim = 0; dim < DIMS; dim++) {
            int at = warp.lane * DIMS + dim;
            softmax.query[head][dim] = heads[head][at];
            softmax.sums[head][dim] = with_new ? heads[GROUP + 1][at] : 0;
            score += softmax.query[head][dim] * heads[GROUP][at];
        }
        if (!with_new) continue;
        score = sum_of_warp(score);
        if (warp.lane % 4 == head % 4) {
            softmax.most[head / 4] = score;
            softmax.total[head / 4] = warp.lane < 4 ? 1 : 0;
        }
    }
}

// Of 2 * HALF_OF numbers in each lane, so at first of 32, the sum over lanes of the lane-th.
template <int HALF_OF = 16>
__device__ inline float transposed_sum(float* numbers, int lane) {
    bool upper = lane & HALF_OF;
#pragma unroll
    for (int place = 0; place < HALF_OF; place++) {
        if (HALF_OF >= 4 && place % 4 >= GROUP) continue;  // zeros
        float kept = upper ? numbers[place + HALF_OF] : numbers[place];
        float sent = upper ? numbers[place] : numbers[place + HALF_OF];
        numbers[place] = kept + __shfl_xor_sync(~0u, sent, HALF_OF);
    }
    if constexpr (HALF_OF > 1) return transposed_sum<HALF_OF / 2>(numbers, lane);
    return numbers[0];
}

// Goes on with `valid` of 8 positions, at least one. What lies behind them was never written.
__device__ void attend_to(Softmax& softmax, const Number* keys, const Number* values, int valid, int lane) {
#pragma unroll
    for (int set = 0; set < HEAD_SETS; set++) {
        float products[32];
#pragma unroll
        for (int position = 0; position < SHARE; position++) {
            float key[DIMS];
            load_dims(keys + position * HEAD_DIM, lane, key);
#pragma unroll
            for (int head = 0; head < 4; head++) {
                float product = 0;
#pragma unroll
                for (int dim = 0; dim < DIMS && 4 * set + head < GROUP; dim++)
                    product = fmaf(softmax.query[4 * set + head][dim], key[dim], product);
                products[4 * position + head] = product;
            }
        }
        float score = transposed_sum(products, lane);
        if (lane / 4 >= valid) score = -INFINITY;
        float most = fmaxf(score, softmax.most[set]);
        for (int other = 4; other < 32; other *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        float kept = exp2f(softmax.most[set] - most), weight = exp2f(score - most);
        softmax.most[set] = most;
        softmax.total[set] = softmax.total[set] * kept + weight;
#pragma unroll
        for (int head = 0; head < 4 && 4 * set + head < GROUP; head++) {
            float kept_of_head = __shfl_sync(~0u, kept, head);
#pragma unroll
            for (int dim = 0; dim < DIMS; dim++) softmax.sums[4 * set + head][dim] *= kept_of_head;
        }
#pragma unroll
        for (int position = 0; position < SHARE; position++) {
            if (position >= valid) break;
            float value[DIMS];
            load_dims(values + position * HEAD_DIM, lane, value);
#pragma unroll
            for (int head = 0; head < 4 && 4 * set + head < GROUP; head++) {
                float by = __shfl_sync(~0u, weight, 4 * position + head);
#pragma unroll
                for (int dim = 0; dim < DIMS; dim++)
                    softmax.sums[4 * set + head][dim] = fmaf(by, value[dim], softmax.sums[4 * set + head][dim]);
            }
        }
    }
}

// Sums up what the warps have found and tells it to the blocks of this KV head.
__device__ void tell_share(Softmax& softmax, Warp& warp, int warps, unsigned tag) {
    Block& block = warp.block;
    auto found = reinterpret_cast<float(*)[GROUP][HEAD_DIM]>(block.state.work);
    __syncthreads();  // all have read heads, which stood there
    for (int set = 0; set < HEAD_SETS; set++) {
        float total = softmax.total[set];
        for (int other = 4; other < 32; other *= 2) total += __shfl_xor_sync(~0u, total, other);
        int head = 4 * set + warp.lane;
        if (warp.lane < 4 && head < GROUP) {
            block.state.ends[warp.warp][head][0] = softmax.most[set];
            block.state.ends[warp.warp][head][1] = total;
        }
    }
    for (int head = 0; head < GROUP; head++)
        for (int dim = 0; dim < DIMS; dim++) found[warp.warp][head][warp.lane * DIMS + dim] = softmax.sums[head][dim];
    __syncthreads();
    Word* parts = warp.step.words + PARTS_AT + (long long)blockIdx.x * GROUP * PART;
    for (int place = threadIdx.x; place < GROUP * HEAD_DIM; place += THREADS) {
        int head = place / HEAD_DIM, dim = place % HEAD_DIM;  // a warp's places are of one head
        bool here = warp.lane < warps;
        float own = here ? block.state.ends[warp.lane][head][0] : -INFINITY, most = own, sum = 0;
        for (int other = 16; other; other /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        float by = exp2f(own - most), total = sum_of_warp(here ? by * block.state.ends[warp.lane][head][1] : 0);
#pragma unroll 4
        for (int other = 0; other < warps; other++) sum += __shfl_sync(~0u, by, other) * found[other][head][dim];
        write_word(parts + head * PART + dim, __float_as_uint(sum), tag);
        if (dim == 0) {
            write_word(parts + head * PART + HEAD_DIM, __float_as_uint(most), tag);
            write_word(parts + head * PART + HEAD_DIM + 1, __float_as_uint(total), tag);
        }
    }
}

// This block's part of the KV head's output, from what the row's blocks have found; those of a number are in
// neighbouring lanes.
__device__ void merge_shares(const Warp& warp, unsigned tag) {
    constexpr int PAIRS = GROUP * HEAD_DIM / 2;
    const Step& step = warp.step;
    const Share& share = warp.share;
    int head = blockIdx.x / SPLITS, used = share.splits, blocks = ROWS == 1 ? SPLITS : used, lanes = SPLITS;
    if (ROWS > 1)
        while (lanes / 2 >= blocks) lanes /= 2;
    int begin = PAIRS * share.split / blocks * 2, count = PAIRS * (share.split + 1) / blocks * 2 - begin;
    if (ROWS == 1) count = PAIRS / SPLITS * 2;  // the same, for the compiler
    const Word* parts = step.words + PARTS_AT + (long long)(blockIdx.x - share.split) * GROUP * PART;
    Word* words = step.words + HEADS_AT + share.row * (HEADS_WIDTH / 2) + head * GROUP * HEAD_DIM / 2;
    for (int first = 0; first < count * lanes; first += THREADS) {
        int place = first + threadIdx.x, split = place % lanes, element = begin + place / lanes;
        const Word* part = parts + (split * GROUP + element / HEAD_DIM) * PART;
        float most = -INFINITY, total = 0, sum = 0;
        if (split < used && element < begin + count) {
            unsigned bits[3];
            await({part + element % HEAD_DIM, part + HEAD_DIM, part + HEAD_DIM + 1}, tag, bits);
            sum = __uint_as_float(bits[0]), most = __uint_as_float(bits[1]), total = __uint_as_float(bits[2]);
        }
        float highest = most;
        for (int other = 1; other < lanes; other *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
        float by = exp2f(most - highest);
        total *= by, sum *= by;
        for (int other = 1; other < lanes; other *= 2) {
            total += __shfl_xor_sync(~0u, total, other);
            sum += __shfl_xor_sync(~0u, sum, other);
        }
        float result = sum / total, next = __shfl_down_sync(~0u, result, lanes);
        if (split == 0 && element % 2 == 0 && element < begin + count)
            write_word(words + element / 2, pack(result, next), tag);
    }
}

__device__ void attend(Warp& warp, int layer, unsigned tag) {
    const Share& share = warp.share;
    if (share.row < 0) return;
    prepare_heads(warp, layer, tag);
    Softmax softmax;
    begin_softmax(softmax, warp);
    for (int item = warp.warp; item < share.items; item += WARPS) {
        const Number* keys = reinterpret_cast<const Number*>(warp.take());
        int left = share.stored - (share.begin + item * SHARE);
        attend_to(softmax, keys, keys + SLOT / 4, at_most(left, SHARE), warp.lane);
    }
    if (share.items > 0 || share.split == 0) tell_share(softmax, warp, at_least(at_most(share.items, WARPS), 1), tag);
    warp.release();
    merge_shares(warp, tag);
    __syncthreads();  // what the warps have found is read: the next input may take its place
}
