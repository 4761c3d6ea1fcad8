// Attention of the new token: SPLITS blocks share the positions of a KV head, as in flash-decoding (Dao et al., 2023).
#pragma once
#include "row_entries.cuh"
#include "row_exchange.cuh"

// The new token's q, k and v of this block's KV head, normed and rotated, into the work area: k and v as in a slot.
__device__ void prepare_heads(Warp& warp, int layer, const Scales& scales, unsigned* told) {
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
        const unsigned* words = told + QKV_AT + share.row * (QKV_ROWS / 2) + from * (HEAD_DIM / 2);
        unsigned pairs[2];
        await({words + low, words + high}, pairs);
        float2 a = unpack(pairs[0]), b = unpack(pairs[1]);
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
        unsigned char* work = warp.block.state.work;
        if (which < GROUP) {
            unsigned* query = reinterpret_cast<unsigned*>(work + which * HEAD_BYTES);
            query[low] = as_factors(a), query[high] = as_factors(b);
        } else {
            float by = 1 / (which == GROUP ? scales.of_keys : scales.of_values);
            auto store = [&](void* place) {
                Pair* pairs = reinterpret_cast<Pair*>(place);
                pairs[low] = as_stored(a, by), pairs[high] = as_stored(b, by);
            };
            store(work + OWN_AT + (which - GROUP) * (SLOT / 2));
            int slot = step.slots[share.row];
            if (share.split == 0 && slot >= 0)
                store(step.pool + slot / step.page_size * step.page_elements + layer * step.layer_elements +
                      (((which - GROUP) * KV_HEADS + head) * step.page_size + slot % step.page_size) * HEAD_DIM);
        }
    }
    __syncthreads();
}

// What a warp has found of its positions. A lane has, of one head, lane / 4, as many of q's dimensions as tiles of the
// tensor cores ask of it, the highest score and its share of the total; and of two heads, its columns', sums of V: two
// dimensions a tile, the first of both heads, then the second.
struct Softmax {
    uint4 query[HEAD_DIM / 32];
    float sums[TILES][4];
    float most, total;
};

__device__ void begin_softmax(Softmax& softmax, Warp& warp) {
    const uint4* query = reinterpret_cast<const uint4*>(warp.block.state.work) + warp.lane / 4 * (HEAD_DIM / 8);
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 32; part++) {
        int place = (4 * (part / EIGHTS) + warp.lane % 4) * EIGHTS + part % EIGHTS;
        softmax.query[part] = warp.lane / 4 < GROUP ? query[place] : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        for (float& sum : softmax.sums[tile]) sum = 0;
    softmax.most = -INFINITY, softmax.total = 0;
}

// Adds NEAR positions of V to the sums, with weights of head lane / 4 and positions 2 * (lane % 4) and the one behind.
// Behind `valid` positions weights are 0, and another position's V is taken: what stands there was never written.
__device__ void add_values(Softmax& softmax, const Entry* values, int valid, float2 weights, int lane) {
    int span = lane % SPANS;
    auto line = [&](int position) {
        const Entry* row = values + (position < valid ? position : 0) * HEAD_DIM;
        return reinterpret_cast<const Line*>(row)[lane / 4 * SPANS + span];
    };
    unsigned own = as_factors(weights);
#pragma unroll
    for (int first = 0; first < NEAR; first += BESIDE) {
        int pair = first / 2 + lane % 4 / SPANS;
        unsigned factors = __shfl_sync(~0u, own, 4 * (lane / 4 % COLUMNS) + pair);
        factors = lane / 4 / COLUMNS == span ? factors : 0;
        Line one = line(2 * pair), other = line(2 * pair + 1);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply_stored(softmax.sums[tile], tile_of(one, other, tile), factors);
    }
}

// Goes on with NEAR positions of which `valid`, at least one, are there. keys: in a slot, or as in one. scale: of the
// scores, in units of log 2.
__device__ void attend_to(Softmax& softmax, const Entry* keys, int valid, float scale, int lane) {
    __syncwarp();  // tiles are multiplied by all lanes at once
    const uint4* key = reinterpret_cast<const uint4*>(keys + lane / 4 * HEAD_DIM) + lane % 4;
    float even[4] = {}, odd[4] = {};  // of head lane / 4 and positions 2 * (lane % 4) and the one behind; zeros
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 32; part++) {
        uint4 q = softmax.query[part], k = eight_of(key[4 * (part / EIGHTS)], part % EIGHTS);
        multiply_stored(even, TileA{q.x, 0, q.y, 0}, TileB{k.x, k.y});
        multiply_stored(odd, TileA{q.z, 0, q.w, 0}, TileB{k.z, k.w});
    }
    int position = lane % 4 * 2;
    float low = position < valid ? (even[0] + odd[0]) * scale : -INFINITY;
    float high = position + 1 < valid ? (even[1] + odd[1]) * scale : -INFINITY;
    float most = fmaxf(fmaxf(low, high), softmax.most);
    for (int other = 1; other < 4; other *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
    float kept = exp2f(softmax.most - most);
    float2 weights = {exp2f(low - most), exp2f(high - most)};
    softmax.most = most;
    softmax.total = softmax.total * kept + weights.x + weights.y;
    int column = lane % 4 * 2 % COLUMNS;  // a head, of two whose sums this lane has
    float of_one = __shfl_sync(~0u, kept, 4 * column), of_other = __shfl_sync(~0u, kept, 4 * column + 4);
#pragma unroll
    for (auto& sums : softmax.sums) sums[0] *= of_one, sums[1] *= of_other, sums[2] *= of_one, sums[3] *= of_other;
    add_values(softmax, keys + SLOT / 2 / sizeof(Entry), valid, weights, lane);
}

// Sums up what the warps have found and tells it to the blocks of this KV head.
__device__ void tell_share(Softmax& softmax, Warp& warp, int warps, unsigned* told) {
    Block& block = warp.block;
    auto found = reinterpret_cast<float(*)[GROUP][HEAD_DIM]>(block.state.work);
    __syncthreads();  // all have read heads, which stood there
    float all = softmax.total;
    for (int other = 1; other < 4; other *= 2) all += __shfl_xor_sync(~0u, all, other);
    if (warp.lane % 4 == 0 && warp.lane / 4 < GROUP) {
        block.state.ends[warp.warp][warp.lane / 4][0] = softmax.most;
        block.state.ends[warp.warp][warp.lane / 4][1] = all;
    }
    int column = warp.lane % 4 * 2, line = warp.lane / 4 * SPANS + column / COLUMNS;
#pragma unroll
    for (int next = 0; next < 2; next++) {
        int head = column % COLUMNS + next;
        if (head >= GROUP) break;
        float2* pairs = reinterpret_cast<float2*>(&found[warp.warp][head][line * DIMS]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) pairs[tile] = {softmax.sums[tile][next], softmax.sums[tile][2 + next]};
    }
    __syncthreads();
    int parts = PARTS_AT + (int)blockIdx.x * GROUP * PART;
    for (int place = threadIdx.x; place < GROUP * HEAD_DIM; place += THREADS) {
        int head = place / HEAD_DIM, dim = place % HEAD_DIM;  // a warp's places are of one head
        bool here = warp.lane < warps;
        float own = here ? block.state.ends[warp.lane][head][0] : -INFINITY, most = own, sum = 0;
        for (int other = 16; other; other /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
        float by = exp2f(own - most), total = sum_of_warp(here ? by * block.state.ends[warp.lane][head][1] : 0);
#pragma unroll 4
        for (int other = 0; other < warps; other++) sum += __shfl_sync(~0u, by, other) * found[other][head][dim];
        write_word(told + parts + head * PART + dim, __float_as_uint(sum));
        if (dim < 4) write_word(told + parts + head * PART + HEAD_DIM + dim, __float_as_uint(dim ? total : most));
    }
}

// This block's part of the KV head's output, from what the row's blocks have found; those of four numbers are in
// neighbouring lanes, of which even ones go on with the first two and odd ones with the others.
__device__ void merge_shares(const Warp& warp, const Scales& scales, unsigned* told) {
    constexpr int OF_HEAD = HEAD_DIM / 4, QUADS = GROUP * OF_HEAD;
    const Share& share = warp.share;
    int head = blockIdx.x / SPLITS, used = share.splits, blocks = ROWS == 1 ? SPLITS : used;
    int lanes = at_least(SPLITS, 2);
    if (ROWS > 1)
        while (lanes > 2 && lanes / 2 >= blocks) lanes /= 2;
    int begin = QUADS * share.split / blocks, count = QUADS * (share.split + 1) / blocks - begin;
    if (ROWS == 1) count = QUADS / SPLITS;  // the same, for the compiler
    const unsigned* parts = told + PARTS_AT + ((int)blockIdx.x - share.split) * GROUP * PART;
    int heads = HEADS_AT + share.row * (HEADS_WIDTH / 2) + head * GROUP * HEAD_DIM / 2;
    for (int first = 0; first < count * lanes; first += THREADS) {
        int place = first + threadIdx.x, split = place % lanes, quad = begin + place / lanes;
        const unsigned* part = parts + (split * GROUP + quad / OF_HEAD) * PART;
        float most = -INFINITY, total = 0;
        float2 kept = {0, 0}, given = {0, 0};
        bool is_used = split < used && quad < begin + count, is_odd = split % 2;
        if (is_used) {
            uint4 found[2];
            auto read = [&](int each) { found[each] = read_words(part + (each ? HEAD_DIM : quad % OF_HEAD * 4)); };
            read(0), read(1);
            look_again<2>(found, read);
            float2 low = {__uint_as_float(found[0].x), __uint_as_float(found[0].y)};
            float2 high = {__uint_as_float(found[0].z), __uint_as_float(found[0].w)};
            kept = is_odd ? high : low, given = is_odd ? low : high;
            most = __uint_as_float(found[1].x), total = __uint_as_float(found[1].y);
        }
        float highest = most;
        for (int other = 1; other < lanes; other *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
        float by = exp2f(most - highest), x = kept.x * by, y = kept.y * by;
        x += __shfl_xor_sync(~0u, given.x * by, 1), y += __shfl_xor_sync(~0u, given.y * by, 1);
        for (int other = 2; other < lanes; other *= 2)
            x += __shfl_xor_sync(~0u, x, other), y += __shfl_xor_sync(~0u, y, other);
        total *= by;
        for (int other = 1; other < lanes; other *= 2) total += __shfl_xor_sync(~0u, total, other);
        if (split > 1 || quad >= begin + count) continue;
        float inverse = scales.of_values / total;
        write_word(told + heads + 2 * quad + split, pack(x * inverse, y * inverse));
    }
}

__device__ void attend(Warp& warp, int layer, unsigned* told) {
    const Share& share = warp.share;
    if (share.row < 0) return;
    Scales scales(warp.step, layer, blockIdx.x / SPLITS);
    prepare_heads(warp, layer, scales, told);
    Softmax softmax;
    begin_softmax(softmax, warp);
    float scale = warp.step.scale * scales.of_keys * 1.44269504f;
    // The new token is an item like others, of a warp that has none, or fewest.
    bool with_new = share.split == 0 && warp.warp == at_most(share.items, WARPS - 1);
    int item = with_new ? warp.warp - WARPS : warp.warp, shares = at_most(share.items + (share.split == 0), WARPS);
    const unsigned char* slot = nullptr;
    for (int first = 0, done = false; !done;) {  // of an item's positions
        if (item < share.items) {
            bool is_new = item < 0;
            if (first == 0) slot = is_new ? warp.block.state.work + OWN_AT : warp.wait_for_item();
            int valid = is_new ? 1 : share.stored - (share.begin + item * share.of_item() + first);
            attend_to(softmax, reinterpret_cast<const Entry*>(slot) + first * HEAD_DIM, valid, scale, warp.lane);
            first = first + NEAR < share.of_item() && NEAR < valid ? first + NEAR : 0;
            if (first == 0) item += WARPS;
        }
        done = item >= share.items;
        if (done && shares) tell_share(softmax, warp, shares, told);
        if (first == 0) warp.release();
    }
    merge_shares(warp, scales, told);
    __syncthreads();  // what the warps have found is read: the next input may take its place
}
