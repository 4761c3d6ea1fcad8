// All layers and the head of a decode step of one row, in one launch of a block on each multiprocessor.
//
// A step of one row takes as long as its weights take to read. So each warp fetches its shares of all weights, and of the
// stored K and V, in the order in which it will need them, into a ring of its own in shared memory; what a phase must know
// of the phases before is small, and travels from block to block in words that carry the layer that wrote them: whoever
// finds the tag it looks for has the number (as NCCL's LL protocol does). The stream of weights never waits for it.
//
//   qkv -> attention -> o + residual -> gate and up -> down + residual -> ... -> head
//
// A buffer of words is written once a layer. Every block has outputs in every phase, so whoever writes a buffer anew has,
// by way of its inputs, waited for all that read it the layer before.
//
// Set by the compiler's command line: HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCKS, WARPS, HALF.
#ifdef __CUDACC__
#include "device.cuh"
#else
#include EMULATED_DEVICE
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int GROUP = Q_HEADS / KV_HEADS;
constexpr int HEAD_SETS = (GROUP + 3) / 4;   // of four q heads, whose scores of eight positions fill a warp
constexpr int SHARE = 8;                     // positions that a warp attends to at once
constexpr int SLICE = 1024;                  // columns of a product that a warp multiplies at once, of two rows
constexpr int SLOT = 2 * SLICE * 2;          // bytes of a ring's slot: two rows' slices, or K and V
constexpr int ROUND = 64;                    // pairs of rows between two barriers
constexpr int DIMS = HEAD_DIM / 32;          // of a head, a lane's
constexpr int HEADS_WIDTH = Q_HEADS * HEAD_DIM, QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;

__host__ __device__ constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }
__host__ __device__ constexpr int at_most(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int at_least(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int slices(int columns) { return (columns + SLICE - 1) / SLICE; }
constexpr int SPLITS = at_most(16, power_below(BLOCKS / KV_HEADS));  // blocks that share a KV head's positions

// Pointers of a layer, in this order; a product's place is its phase's number.
enum { QKV, QKV_BIAS, O, GATE_UP, DOWN, INPUT_NORM, POST_NORM, HEAD_NORMS, POINTERS };
constexpr int ATTENTION = QKV_BIAS, HEAD = INPUT_NORM, PHASES = HEAD + 1;  // phases in order, the head being the last

constexpr int WIDEST = at_least(at_least(HIDDEN, INNER), HEADS_WIDTH);
constexpr int HEADS_BYTES = (GROUP + 2) * HEAD_DIM * 4;  // q, k and v of the new token, where the input was
constexpr int INPUT_BYTES = at_least((WIDEST * 2 + 15) / 16 * 16, HEADS_BYTES), PARTIAL_BYTES = ROUND * slices(WIDEST) * 8;
constexpr int FOUND_BYTES = WARPS * GROUP * HEAD_DIM * 4;
constexpr int WORK_BYTES = at_least(INPUT_BYTES + PARTIAL_BYTES, FOUND_BYTES);
constexpr unsigned HEAD_LANES = HEAD_DIM == 128 ? ~0u : 0xffff;  // those that read a head
constexpr int SHARED_BYTES = 227 * 1024, MOST_DEPTH = 4;
constexpr int PART = HEAD_DIM + 2;  // words of a share of one head: sums, highest score, total

// Words, one after another in `words`.
constexpr int X_AT = 0, QKV_AT = X_AT + HIDDEN / 2, HEADS_AT = QKV_AT + QKV_ROWS / 2, MID_AT = HEADS_AT + HEADS_WIDTH / 2,
              INNER_AT = MID_AT + HIDDEN / 2, PARTS_AT = INNER_AT + INNER / 2;

struct Step {
    const Number* const* layers;  // [num_layers][POINTERS]
    const Number *x, *final_norm, *lm_head, *cos, *sin;
    Number *logits, *pool;
    const int *slots, *kv_indptr, *kv_indices, *kv_last_page_len;
    Word* words;
    unsigned* epoch;  // the next tag; how many blocks are done
    long long page_elements, layer_elements;
    int vocab, page_size;
    float eps, head_eps, scale;
};

// A block's shared memory: what it holds besides the rings leaves room for DEPTH slots a warp.
struct State {
    alignas(16) unsigned char work[WORK_BYTES];  // a product's input and sums; or heads; or what warps found
    unsigned long long arrivals[WARPS][MOST_DEPTH];
    float ends[WARPS][GROUP][2];  // highest score and total of each warp
    float squares[WARPS];
    float residual[2 * (HIDDEN / 2 / BLOCKS + 1)];  // the rows of x that this block writes
    int begins[PHASES], counts[PHASES];             // pairs of outputs; items of 8 positions
    const Number* weights[LAYERS][DOWN + 1];        // by phase
};
constexpr int DEPTH = at_most(MOST_DEPTH, (SHARED_BYTES - (int)sizeof(State) - 16) / (WARPS * SLOT));
static_assert(DEPTH >= 2, "no room for rings in shared memory");

struct Block {
    alignas(128) unsigned char ring[WARPS][DEPTH][SLOT];
    State state;
};

struct Warp {
    const Step& step;
    Block& block;
    int warp, lane;
    int layer, phase, item;  // what is fetched next
    unsigned fetched, taken;
    unsigned long long policy;
    int first_page, stored, split_begin;
    bool holds;

    __device__ int num_items(int of) const {
        int count = block.state.counts[of];
        switch (of) {
            case ATTENTION: return count;
            case O: return count * slices(HEADS_WIDTH);
            case GATE_UP: return 2 * count * slices(HIDDEN);
            case DOWN: return count * slices(INNER);
            default: return count * slices(HIDDEN);
        }
    }

    // Fetches the next item of this warp, if there is one, into the slot that was freed longest ago.
    __device__ void fetch_next() {
        while (phase < PHASES && item >= num_items(phase)) {
            item = warp;
            if (phase == DOWN && layer + 1 < LAYERS) {
                layer++;
                phase = QKV;
            } else {
                phase++;
            }
        }
        if (phase == PHASES) return;
        unsigned slot = fetched % DEPTH;
        if (lane == 0) {
            if (phase == ATTENTION) fetch_positions(slot);
            else fetch_rows(slot);
        }
        fetched++;
        item += WARPS;
    }

    __device__ void fetch_rows(unsigned slot) {
        if (phase == O) fetch_slice<HEADS_WIDTH>(slot);
        else if (phase == DOWN) fetch_slice<INNER>(slot);
        else fetch_slice<HIDDEN>(slot);
    }

    template <int COLUMNS>
    __device__ void fetch_slice(unsigned slot) {
        unsigned unit = (unsigned)item / slices(COLUMNS), column = (unsigned)item % slices(COLUMNS) * SLICE;
        int row = phase == GATE_UP ? 2 * (block.state.begins[phase] + unit / 2) + (unit & 1) * INNER
                                   : 2 * (block.state.begins[phase] + unit);
        const Number* weight = phase == HEAD ? step.lm_head : block.state.weights[layer][phase];
        const Number* source = weight + (long long)row * COLUMNS + column;
        copy(slot, source, source + COLUMNS, (COLUMNS - column < SLICE ? COLUMNS - column : SLICE) * 2);
    }

    __device__ void fetch_positions(unsigned slot) {
        int position = split_begin + item * SHARE, head = blockIdx.x / SPLITS;
        long long page = step.kv_indices[first_page + position / step.page_size];
        const Number* keys = step.pool + page * step.page_elements + layer * step.layer_elements +
                             (head * step.page_size + position % step.page_size) * HEAD_DIM;
        copy(slot, keys, keys + KV_HEADS * step.page_size * HEAD_DIM, SHARE * HEAD_DIM * 2);
    }

    __device__ void copy(unsigned slot, const Number* first, const Number* second, unsigned bytes) {
        unsigned long long* arrival = &block.state.arrivals[warp][slot];
        expect_bytes(arrival, 2 * bytes);
        fetch(block.ring[warp][slot], first, bytes, arrival, policy);
        fetch(block.ring[warp][slot] + SLOT / 2, second, bytes, arrival, policy);
    }

    // The next item's slot; the one before is freed.
    __device__ const unsigned char* take() {
        release();
        unsigned slot = taken % DEPTH;
        long long began = clock64();
        while (!has_arrived(&block.state.arrivals[warp][slot], taken / DEPTH & 1)) check_patience(began);
        holds = true;
        return block.ring[warp][slot];
    }

    // Frees the slot that was taken last, if one is. Who waits for a warp's result should not wait for this.
    __device__ void release() {
        if (!holds) return;
        __syncwarp();
        holds = false;
        taken++;
        fetch_next();
    }
};

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

// Puts the input of a product, COLUMNS numbers, into shared memory as pairs: words of `tag`, or `plain` where that is not
// null, normed where `gain` is not null. Behind it all threads see it.
template <int COLUMNS>
__device__ void gather(Warp& warp, const Word* words, unsigned tag, const unsigned* plain, const Number* gain) {
    Block& block = warp.block;
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
    warp.release();  // while the words are on their way
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
        for (int other = 0; other < WARPS; other++) squares += block.state.squares[other];
        inverse = rsqrtf(squares / COLUMNS + warp.step.eps);
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

// One item: lanes 0 and 16 get the products of its two rows and a slice of the input.
//
// Tensor cores do it: eighths of the first row and of the second are the 16 rows of A, eighths of the input the 8 columns
// of B, and what counts of the product is where an eighth meets itself. Lane 4 * g + t has columns of the g-th eighth, 8
// of each 32; odd eighths take them in another order, so that no two lanes want the same bank at once.
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
        if (COLUMNS % SLICE == 0 || slice * SLICE + place * 8 < COLUMNS) x = input[place], w = first[place], v = second[place];
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

// A product of the gathered input; `finish(pair, sums)` gets each pair of outputs once, sums[2] (GATE_UP: [4], gate first).
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

// The new token's q (in units of log 2), k and v of this block's KV head, normed and rotated, into block.heads.
__device__ void prepare_heads(Warp& warp, int layer, const Number* gains_of_heads, unsigned tag) {
    const Step& step = warp.step;
    int head = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, which = warp.warp;
    if (which < GROUP + 2 && warp.lane < HEAD_DIM / 4) {
        int from = which < GROUP ? head * GROUP + which : Q_HEADS + (which - GROUP) * KV_HEADS + head;
        int low = warp.lane, high = low + HEAD_DIM / 4;  // pairs of dimensions that are rotated into each other
        const unsigned *cos = reinterpret_cast<const unsigned*>(step.cos), *sin = reinterpret_cast<const unsigned*>(step.sin);
        float2 cos_a = unpack(cos[low]), cos_b = unpack(cos[high]), sin_a = unpack(sin[low]), sin_b = unpack(sin[high]);
        float2 by_a = {1, 1}, by_b = {1, 1};
        const Number* gain = which <= GROUP ? gains_of_heads : nullptr;
        if (gain) {
            const unsigned* gains = reinterpret_cast<const unsigned*>(gain + from * HEAD_DIM);
            by_a = unpack(gains[low]), by_b = unpack(gains[high]);
        }
        const Word* words = step.words + QKV_AT + from * (HEAD_DIM / 2);
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
        int slot = step.slots[0];
        if (which >= GROUP && split == 0 && slot >= 0) {
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
    float query[4 * HEAD_SETS][DIMS], sums[4 * HEAD_SETS][DIMS];
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
    bool with_new = blockIdx.x % SPLITS == 0 && warp.warp == 0;
    for (int set = 0; set < HEAD_SETS; set++) softmax.most[set] = -INFINITY, softmax.total[set] = 0;
    for (int head = 0; head < 4 * HEAD_SETS; head++) {
        float score = 0;
        for (int dim = 0; dim < DIMS; dim++) {
            int at = warp.lane * DIMS + dim;
            softmax.query[head][dim] = head < GROUP ? heads[head][at] : 0;
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

// Of 2 * HALF numbers in each lane, and with HALF = 16 of 32, the sum over lanes of the lane-th.
template <int HALF_OF = 16>
__device__ inline float transposed_sum(float* numbers, int lane) {
    bool upper = lane & HALF_OF;
#pragma unroll
    for (int place = 0; place < HALF_OF; place++) {
        float kept = upper ? numbers[place + HALF_OF] : numbers[place], sent = upper ? numbers[place] : numbers[place + HALF_OF];
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
                for (int dim = 0; dim < DIMS; dim++) product = fmaf(softmax.query[4 * set + head][dim], key[dim], product);
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
        for (int head = 0; head < 4; head++) {
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
            for (int head = 0; head < 4; head++) {
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
        if (warp.lane < 4 && head < GROUP) block.state.ends[warp.warp][head][0] = softmax.most[set], block.state.ends[warp.warp][head][1] = total;
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

// This block's part of the KV head's output, from what `used` blocks have found; a split's numbers are in neighbouring lanes.
__device__ void merge_shares(const Step& step, int used, unsigned tag) {
    constexpr int EACH = GROUP * HEAD_DIM / SPLITS;
    int head = blockIdx.x / SPLITS;
    for (int place = threadIdx.x; place < GROUP * HEAD_DIM; place += THREADS) {
        int split = place % SPLITS, element = blockIdx.x % SPLITS * EACH + place / SPLITS;
        const Word* part = step.words + PARTS_AT + ((long long)(head * SPLITS + split) * GROUP + element / HEAD_DIM) * PART;
        float most = -INFINITY, total = 0, sum = 0;
        if (split < used) {
            unsigned bits[3];
            await({part + element % HEAD_DIM, part + HEAD_DIM, part + HEAD_DIM + 1}, tag, bits);
            sum = __uint_as_float(bits[0]), most = __uint_as_float(bits[1]), total = __uint_as_float(bits[2]);
        }
        float highest = most;
        for (int other = 1; other < SPLITS; other *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, other));
        float by = exp2f(most - highest);
        total *= by, sum *= by;
        for (int other = 1; other < SPLITS; other *= 2) {
            total += __shfl_xor_sync(~0u, total, other);
            sum += __shfl_xor_sync(~0u, sum, other);
        }
        float result = sum / total, next = __shfl_down_sync(~0u, result, SPLITS);
        if (split == 0 && element % 2 == 0)
            write_word(step.words + HEADS_AT + (head * GROUP * HEAD_DIM + element) / 2, pack(result, next), tag);
    }
}

__device__ void attend(Warp& warp, int layer, const Number* gains_of_heads, unsigned tag) {
    if (blockIdx.x >= KV_HEADS * SPLITS) return;
    prepare_heads(warp, layer, gains_of_heads, tag);
    Softmax softmax;
    begin_softmax(softmax, warp);
    int items = warp.block.state.counts[ATTENTION], split = blockIdx.x % SPLITS;
    for (int item = warp.warp; item < items; item += WARPS) {
        const Number* keys = reinterpret_cast<const Number*>(warp.take());
        int left = warp.stored - (warp.split_begin + item * SHARE);
        attend_to(softmax, keys, keys + SLOT / 4, left < SHARE ? left : SHARE, warp.lane);
    }
    if (items > 0 || split == 0) tell_share(softmax, warp, at_least(at_most(items, WARPS), 1), tag);
    int share = (warp.stored + SPLITS * SHARE - 1) / (SPLITS * SHARE) * SHARE;
    merge_shares(warp.step, share ? (warp.stored + share - 1) / share : 1, tag);
    __syncthreads();  // what the warps have found is read: the next input may take its place
}

// Which outputs and positions are this block's.
__device__ void share_out(const Step& step, Block& block, Warp& warp) {
    warp.first_page = step.kv_indptr[0];
    warp.stored = (step.kv_indptr[1] - warp.first_page - 1) * step.page_size + step.kv_last_page_len[0] - 1;
    int share = (warp.stored + SPLITS * SHARE - 1) / (SPLITS * SHARE) * SHARE, split = blockIdx.x % SPLITS;
    warp.split_begin = split * share;
    int positions = blockIdx.x < KV_HEADS * SPLITS ? at_most(warp.stored - warp.split_begin, share) : 0;
    if (threadIdx.x == 0) {
        const int pairs[] = {QKV_ROWS / 2, 0, HIDDEN / 2, INNER / 2, HIDDEN / 2, step.vocab / 2};
        for (int phase = 0; phase < PHASES; phase++) {
            block.state.begins[phase] = (long long)pairs[phase] * blockIdx.x / BLOCKS;
            block.state.counts[phase] = (int)((long long)pairs[phase] * (blockIdx.x + 1) / BLOCKS) - block.state.begins[phase];
        }
        block.state.counts[ATTENTION] = positions > 0 ? (positions + SHARE - 1) / SHARE : 0;
        for (int warp = 0; warp < WARPS; warp++)
            for (int slot = 0; slot < DEPTH; slot++) make_arrival(&block.state.arrivals[warp][slot]);
        publish_arrivals();
    }
    __syncthreads();
    for (int place = threadIdx.x; place < LAYERS * (DOWN + 1); place += THREADS)
        block.state.weights[place / (DOWN + 1)][place % (DOWN + 1)] = step.layers[place / (DOWN + 1) * POINTERS + place % (DOWN + 1)];
    int begin = 2 * block.state.begins[DOWN], count = 2 * block.state.counts[DOWN];
    for (int row = threadIdx.x; row < count; row += THREADS) block.state.residual[row] = (float)step.x[begin + row];
    __syncthreads();
}

// Brings the gains of a layer near: all blocks read them, at moments when each waits for the others.
__device__ void warm_up(const Step& step, int layer) {
    if (layer >= LAYERS || threadIdx.x != THREADS - 1) return;
    constexpr int NORM = (HIDDEN + 63) / 64, HEADS = ((Q_HEADS + KV_HEADS) * HEAD_DIM + 63) / 64;  // lines of 128 bytes
    for (int line = blockIdx.x; line < 2 * NORM + HEADS; line += BLOCKS) {
        int which = line < NORM ? INPUT_NORM : line < 2 * NORM ? POST_NORM : HEAD_NORMS;
        const Number* gain = step.layers[layer * POINTERS + which];
        if (gain) prefetch(gain + 64 * (which == INPUT_NORM ? line : which == POST_NORM ? line - NORM : line - 2 * NORM));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) row_step(const __grid_constant__ Step step) {
    SHARED_MEMORY(shared);
    Block& block = *reinterpret_cast<Block*>(shared);
    Warp warp{step, block, (int)threadIdx.x / 32, (int)threadIdx.x % 32, 0, QKV, (int)threadIdx.x / 32, 0, 0,
              streaming_policy(), 0, 0, 0, false};
    unsigned first_tag = step.epoch[0];
    share_out(step, block, warp);
    for (int slot = 0; slot < DEPTH; slot++) warp.fetch_next();
    warm_up(step, 0);
    Word* words = step.words;
    const Number* input_norm = step.layers[INPUT_NORM];
    const unsigned* embedded = reinterpret_cast<const unsigned*>(step.x);
    for (int layer = 0; layer < LAYERS; layer++) {
        const Number* const* of_layer = step.layers + layer * POINTERS;  // loaded long before it is needed
        const Number *bias = of_layer[QKV_BIAS], *gains_of_heads = of_layer[HEAD_NORMS], *post_norm = of_layer[POST_NORM];
        unsigned tag = first_tag + layer;
        auto add_to_residual = [&](int to, int phase) {
            return [&, to, phase](int pair, const float* sums) {
                float* row = block.state.residual + 2 * pair;
                float2 sum = rounded({sums[0], sums[1]});
                unsigned bits = pack(row[0] + sum.x, row[1] + sum.y);
                row[0] = unpack(bits).x, row[1] = unpack(bits).y;
                write_word(words + to + block.state.begins[phase] + pair, bits, tag);
            };
        };
        gather<HIDDEN>(warp, words + X_AT, tag - 1, layer ? nullptr : embedded, input_norm);
        input_norm = layer + 1 < LAYERS ? of_layer[POINTERS + INPUT_NORM] : step.final_norm;
        multiply<QKV, HIDDEN>(warp, [&](int pair, const float* sums) {
            int place = block.state.begins[QKV] + pair;
            float2 more = bias ? unpack(reinterpret_cast<const unsigned*>(bias)[place]) : float2{0, 0};
            write_word(words + QKV_AT + place, pack(sums[0] + more.x, sums[1] + more.y), tag);
        });
        attend(warp, layer, gains_of_heads, tag);
        warm_up(step, layer + 1);
        gather<HEADS_WIDTH>(warp, words + HEADS_AT, tag, nullptr, nullptr);
        multiply<O, HEADS_WIDTH>(warp, add_to_residual(MID_AT, O));
        gather<HIDDEN>(warp, words + MID_AT, tag, nullptr, post_norm);
        multiply<GATE_UP, HIDDEN>(warp, [&](int pair, const float* sums) {
            float2 gate = rounded({sums[0], sums[1]}), up = rounded({sums[2], sums[3]});
            float2 active = rounded({gate.x / (1 + expf(-gate.x)), gate.y / (1 + expf(-gate.y))});
            write_word(words + INNER_AT + block.state.begins[GATE_UP] + pair, pack(active.x * up.x, active.y * up.y), tag);
        });
        gather<INNER>(warp, words + INNER_AT, tag, nullptr, nullptr);
        multiply<DOWN, INNER>(warp, add_to_residual(X_AT, DOWN));
    }
    gather<HIDDEN>(warp, words + X_AT, first_tag + LAYERS - 1, nullptr, input_norm);
    multiply<HEAD, HIDDEN>(warp, [&](int pair, const float* sums) {
        reinterpret_cast<unsigned*>(step.logits)[block.state.begins[HEAD] + pair] = pack(sums[0], sums[1]);
    });
    if (threadIdx.x == 0 && atomicAdd(step.epoch + 1, 1) == BLOCKS - 1) {
        step.epoch[0] = first_tag + LAYERS;
        step.epoch[1] = 0;
    }
}
