// Attention of the new tokens: SPLITS blocks share the positions of a KV head, as in flash-decoding (Dao et al., 2023).
#pragma once
#include "entries.cuh"
#include "exchange.cuh"

// The new token's q, k and v of this block's KV head, normed and rotated, into the work area: k and v as in a stage. The
// first split also prepares k and v of the rows before that are of its sequence, which other blocks store.
__device__ void prepare_heads(Warp& warp, int layer, const Scales& scales, unsigned* published) {
    const Arguments& args = warp.args;
    const KVSplit& kv = warp.kv;
    int head = blockIdx.x / SPLITS;
    auto prepare = [&](int which) {
        bool is_query = which < GROUP, is_value = !is_query && (which - GROUP) % 2;
        int age = is_query ? 0 : (which - GROUP) / 2, row = kv.row - age;
        int from = is_query ? head * GROUP + which : Q_HEADS + is_value * KV_HEADS + head;
        int low = warp.lane, high = low + HEAD_DIM / 4;  // pairs of dimensions that are rotated into each other
        const unsigned* cos = reinterpret_cast<const unsigned*>(args.cos + row * 2 * HEAD_DIM);
        const unsigned* sin = reinterpret_cast<const unsigned*>(args.sin + row * 2 * HEAD_DIM);
        float2 cos_a = unpack(cos[low]), cos_b = unpack(cos[high]), sin_a = unpack(sin[low]), sin_b = unpack(sin[high]);
        float2 by_a = {1, 1}, by_b = {1, 1};
        const Number* gain = !is_value ? args.layers[layer * POINTERS + HEAD_NORMS] : nullptr;
        if (gain) {
            const unsigned* gains = reinterpret_cast<const unsigned*>(gain + from * HEAD_DIM);
            by_a = unpack(gains[low]), by_b = unpack(gains[high]);
        }
        const unsigned* words = published + QKV_AT + row * (QKV_ROWS / 2) + from * (HEAD_DIM / 2);
        unsigned pairs[2];
        await({words + low, words + high}, pairs);
        float2 a = unpack(pairs[0]), b = unpack(pairs[1]);
        if (gain) {
            float squares = a.x * a.x + a.y * a.y + b.x * b.x + b.y * b.y;
            for (int other = HEAD_DIM / 8; other; other /= 2) squares += __shfl_xor_sync(HEAD_LANES, squares, other);
            float inverse = rsqrtf(squares / HEAD_DIM + args.head_eps);
            a = rounded({a.x * inverse, a.y * inverse}), b = rounded({b.x * inverse, b.y * inverse});
            a = rounded({a.x * by_a.x, a.y * by_a.y}), b = rounded({b.x * by_b.x, b.y * by_b.y});
        }
        if (!is_value) {
            float2 x = a, y = b;
            a = rounded({x.x * cos_a.x + y.x * sin_a.x, x.y * cos_a.y + y.y * sin_a.y});
            b = rounded({y.x * cos_b.x + x.x * sin_b.x, y.y * cos_b.y + x.y * sin_b.y});
        }
        unsigned char* work = warp.block.state.work;
        if (is_query) {
            unsigned* query = reinterpret_cast<unsigned*>(work + which * HEAD_BYTES);
            query[low] = as_factors(a), query[high] = as_factors(b);
        } else {
            float by = 1 / (is_value ? scales.of_values : scales.of_keys);
            auto store = [&](void* target) {
                Pair* pairs = reinterpret_cast<Pair*>(target);
                pairs[low] = as_stored(a, by), pairs[high] = as_stored(b, by);
            };
            store(work + OWN_AT + is_value * (STAGE_BYTES / 2) + age * HEAD_DIM * (int)sizeof(Entry));
            int slot = args.slots[row];
            if (kv.index == 0 && age == 0 && slot >= 0)
                store(args.pool + slot / args.page_size * args.page_elements + layer * args.layer_elements +
                      ((is_value * KV_HEADS + head) * args.page_size + slot % args.page_size) * HEAD_DIM);
        }
    };
    if (warp.lane < HEAD_DIM / 4) {
        int count = GROUP + 2 * (kv.index == 0 ? 1 + kv.rows_before() : 1);
        if (ROWS == 1 && warp.warp < GROUP + 2) prepare(warp.warp);
        if (ROWS > 1)
            for (int which = warp.warp; which < count; which += WARPS) prepare(which);
    }
    __syncthreads();
}

// A warp's online softmax over its positions.
struct Softmax {
    uint4 query[HEAD_DIM / 32];  // head lane / 4: the dimensions that a tile of the tensor cores takes from this lane
    float acc[TILES][4];         // the lane's two columns, a head each: two dimensions a tile, the first of both heads
    float row_max;               // head lane / 4
    float row_sum;               // head lane / 4, this lane's part
};

__device__ void begin_softmax(Softmax& softmax, Warp& warp) {
    const uint4* query = reinterpret_cast<const uint4*>(warp.block.state.work) + warp.lane / 4 * (HEAD_DIM / 8);
#pragma unroll
    for (int part = 0; part < HEAD_DIM / 32; part++) {
        int index = (4 * (part / EIGHTS) + warp.lane % 4) * EIGHTS + part % EIGHTS;
        softmax.query[part] = warp.lane / 4 < GROUP ? query[index] : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int tile = 0; tile < TILES; tile++)
        for (float& sum : softmax.acc[tile]) sum = 0;
    softmax.row_max = -INFINITY, softmax.row_sum = 0;
}

// Adds MMA_POSITIONS positions of V to acc. weights: of head lane / 4, positions 2 * (lane % 4) and the next one.
// Behind `valid` positions weights are 0, and another position's V is read: those slots were never written.
__device__ void add_values(Softmax& softmax, const Entry* values, int valid, float2 weights, int lane) {
    int span = lane % SPANS;
    auto line = [&](int position) {
        const Entry* row = values + (position < valid ? position : 0) * HEAD_DIM;
        return reinterpret_cast<const Line*>(row)[lane / 4 * SPANS + span];
    };
    unsigned own = as_factors(weights);
#pragma unroll
    for (int first = 0; first < MMA_POSITIONS; first += BESIDE) {
        int pair = first / 2 + lane % 4 / SPANS;
        unsigned factors = __shfl_sync(~0u, own, 4 * (lane / 4 % COLUMNS) + pair);
        factors = lane / 4 / COLUMNS == span ? factors : 0;
        Line one = line(2 * pair), other = line(2 * pair + 1);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
            multiply_stored(softmax.acc[tile], tile_of(one, other, tile), factors);
    }
}

// Attends to MMA_POSITIONS more positions, of which `valid`, at least one, are stored. keys: in a stage, or laid out as
// in one. scale: of the scores, in units of log 2.
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
    float row_max = fmaxf(fmaxf(low, high), softmax.row_max);
    for (int other = 1; other < 4; other *= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, other));
    float kept = exp2f(softmax.row_max - row_max);
    float2 weights = {exp2f(low - row_max), exp2f(high - row_max)};
    softmax.row_max = row_max;
    softmax.row_sum = softmax.row_sum * kept + weights.x + weights.y;
    int column = lane % 4 * 2 % COLUMNS;  // a head, of two whose acc this lane has
    float of_one = __shfl_sync(~0u, kept, 4 * column), of_other = __shfl_sync(~0u, kept, 4 * column + 4);
#pragma unroll
    for (auto& acc : softmax.acc) acc[0] *= of_one, acc[1] *= of_other, acc[2] *= of_one, acc[3] *= of_other;
    add_values(softmax, keys + STAGE_BYTES / 2 / sizeof(Entry), valid, weights, lane);
}

// Merges the warps' softmaxes and publishes the result to the blocks of this KV head.
__device__ void publish_split(Softmax& softmax, Warp& warp, int warps, unsigned* published) {
    Block& block = warp.block;
    auto warp_acc = reinterpret_cast<float(*)[GROUP][HEAD_DIM]>(block.state.work);
    __syncthreads();  // all have read heads, which stood there
    float row_sum = softmax.row_sum;
    for (int other = 1; other < 4; other *= 2) row_sum += __shfl_xor_sync(~0u, row_sum, other);
    if (warp.lane % 4 == 0 && warp.lane / 4 < GROUP) {
        block.state.softmax_stats[warp.warp][warp.lane / 4][0] = softmax.row_max;
        block.state.softmax_stats[warp.warp][warp.lane / 4][1] = row_sum;
    }
    int column = warp.lane % 4 * 2, line = warp.lane / 4 * SPANS + column / COLUMNS;
#pragma unroll
    for (int next = 0; next < 2; next++) {
        int head = column % COLUMNS + next;
        if (head >= GROUP) break;
        float2* pairs = reinterpret_cast<float2*>(&warp_acc[warp.warp][head][line * DIMS]);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) pairs[tile] = {softmax.acc[tile][next], softmax.acc[tile][2 + next]};
    }
    __syncthreads();
    int parts = PARTS_AT + (int)blockIdx.x * GROUP * PART;
    for (int index = threadIdx.x; index < GROUP * HEAD_DIM; index += THREADS) {
        int head = index / HEAD_DIM, dim = index % HEAD_DIM;  // all of a warp are of one head
        bool here = warp.lane < warps;
        float own = here ? block.state.softmax_stats[warp.lane][head][0] : -INFINITY, row_max = own, acc = 0;
        for (int other = 16; other; other /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, other));
        float by = exp2f(own - row_max);
        float row_sum = sum_of_warp(here ? by * block.state.softmax_stats[warp.lane][head][1] : 0);
#pragma unroll 4
        for (int other = 0; other < warps; other++) acc += __shfl_sync(~0u, by, other) * warp_acc[other][head][dim];
        write_word(published + parts + head * PART + dim, __float_as_uint(acc));
        if (dim < STATS)
            write_word(published + parts + head * PART + HEAD_DIM + dim, __float_as_uint(dim ? row_sum : row_max));
    }
}

// Merges the KV splits of a row into this block's part of the KV head's output. Neighbouring lanes hold the splits of
// the same four numbers: even lanes go on with the first two, odd ones with the others.
__device__ void merge_splits(const Warp& warp, const Scales& scales, unsigned* published) {
    constexpr int OF_HEAD = HEAD_DIM / 4, QUADS = GROUP * OF_HEAD;
    const KVSplit& kv = warp.kv;
    int head = blockIdx.x / SPLITS, used = kv.count, blocks = ROWS == 1 ? SPLITS : used;
    int lanes = at_least(SPLITS, 2);
    if (ROWS > 1)
        while (lanes > 2 && lanes / 2 >= blocks) lanes /= 2;
    int begin = QUADS * kv.index / blocks, count = QUADS * (kv.index + 1) / blocks - begin;
    if (ROWS == 1) count = QUADS / SPLITS;  // the same, for the compiler
    const unsigned* parts = published + PARTS_AT + ((int)blockIdx.x - kv.index) * GROUP * PART;
    int heads = HEADS_AT + kv.row * (HEADS_WIDTH / 2) + head * GROUP * HEAD_DIM / 2;
    for (int first = 0; first < count * lanes; first += THREADS) {
        int index = first + threadIdx.x, split = index % lanes, quad = begin + index / lanes;
        const unsigned* part = parts + (split * GROUP + quad / OF_HEAD) * PART;
        float row_max = -INFINITY, row_sum = 0;
        float2 kept = {0, 0}, given = {0, 0};
        bool is_used = split < used && quad < begin + count, is_odd = split % 2;
        if (is_used) {
            uint4 quads[2];
            auto read = [&](int each) { quads[each] = read_words(part + (each ? HEAD_DIM : quad % OF_HEAD * 4)); };
            read(0), read(1);
            look_again<2>(quads, read);
            float2 low = {__uint_as_float(quads[0].x), __uint_as_float(quads[0].y)};
            float2 high = {__uint_as_float(quads[0].z), __uint_as_float(quads[0].w)};
            kept = is_odd ? high : low, given = is_odd ? low : high;
            row_max = __uint_as_float(quads[1].x), row_sum = __uint_as_float(quads[1].y);
        }
        float highest = row_max;
        for (int other = 1; other < lanes; other *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
        float by = exp2f(row_max - highest), x = kept.x * by, y = kept.y * by;
        x += __shfl_xor_sync(~0u, given.x * by, 1), y += __shfl_xor_sync(~0u, given.y * by, 1);
        for (int other = 2; other < lanes; other *= 2)
            x += __shfl_xor_sync(~0u, x, other), y += __shfl_xor_sync(~0u, y, other);
        row_sum *= by;
        for (int other = 1; other < lanes; other *= 2) row_sum += __shfl_xor_sync(~0u, row_sum, other);
        if (split > 1 || quad >= begin + count) continue;
        float inverse = scales.of_values / row_sum;
        write_word(published + heads + 2 * quad + split, pack(x * inverse, y * inverse));
    }
}

__device__ void attend(Warp& warp, int layer, unsigned* published) {
    const KVSplit& kv = warp.kv;
    if (kv.row < 0) return;
    Scales scales(warp.args, layer, blockIdx.x / SPLITS);
    prepare_heads(warp, layer, scales, published);
    Softmax softmax;
    begin_softmax(softmax, warp);
    float scale = warp.args.scale * scales.of_keys * 1.44269504f;
    // The new token, and those of the rows before, are an item like others, of a warp that has none, or fewest.
    bool with_new = kv.index == 0 && warp.warp == at_most(kv.items, WARPS - 1);
    int item = with_new ? warp.warp - WARPS : warp.warp, publishing = at_most(kv.items + (kv.index == 0), WARPS);
    const unsigned char* stage = nullptr;
    for (int first = 0, done = false; !done;) {  // of an item's positions
        if (item < kv.items) {
            bool is_new = item < 0;
            if (first == 0) stage = is_new ? warp.block.state.work + OWN_AT : warp.wait_for_item();
            int valid = is_new ? 1 + kv.rows_before() : kv.stored - (kv.begin + item * kv.item_positions() + first);
            attend_to(softmax, reinterpret_cast<const Entry*>(stage) + first * HEAD_DIM, valid, scale, warp.lane);
            first = first + MMA_POSITIONS < kv.item_positions() && MMA_POSITIONS < valid ? first + MMA_POSITIONS : 0;
            if (first == 0) item += WARPS;
        }
        done = item >= kv.items;
        if (done && publishing) publish_split(softmax, warp, publishing, published);
        if (first == 0) warp.release();
    }
    merge_splits(warp, scales, published);
    __syncthreads();  // the warps' acc is read: the next input may overwrite it
}
