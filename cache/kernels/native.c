/* The paged cache on a CPU, float32: append with rotary embedding, and attention of single queries ("decode").
 *
 * native_kernels.py mirrors Pool and Step and states what callers must see to; nothing is checked here.
 *
 *   pages  [num_pages, layers, 2 (K, V), num_kv_heads, page_size, head_dim], head_dim a multiple of LANES, at most
 *          LANES * MAX_VECTORS; a tile is what one page holds of one K or V head: page_size rows, side by side
 *   q, k, v  rows of `stride` floats, one a token; the heads of a row follow each other
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8, MAX_VECTORS = 32, MAX_HEADS = 8, CHUNK = 256, PAGES_AHEAD = 2 };
enum { PARALLEL_FLOATS = 1 << 17 }; /* below this, some 50 µs of work, a second thread costs more than it brings */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    float *pages;
    int64_t page_stride, layer_stride, value_offset; /* in floats */
    int32_t num_kv_heads, page_size, head_dim;
    int32_t window; /* positions that a query sees, its own included */
    float scale, softcap; /* scores are softcap * tanh(score / softcap); 0: as they are */
} Pool;

typedef struct {
    const int32_t *slots;      /* [num_tokens], where each token's K and V go */
    const int32_t *page_ids;   /* the pages of all sequences, one after another */
    const int32_t *tokens;     /* [num_decodes], the row of q and o of each single query */
    const int32_t *first_page; /* [num_decodes], where its sequence begins in page_ids */
    const int32_t *lengths;    /* [num_decodes], positions in those pages, the query's own last */
    int64_t num_positions;     /* sum of those attended to */
    int32_t num_tokens, num_decodes, num_threads;
} Step;

#define INLINE static inline __attribute__((always_inline))

/* x * cos + roll(x, rotary / 2) * signed_sin; from `rotary` on x as it is. */
INLINE void rotate(const float *restrict x, const float *restrict cos, const float *restrict sin, int rotary, int dim,
                   float *restrict out) {
    const int half = rotary / 2;
    for (int i = 0; i < half; i++) {
        out[i] = x[i] * cos[i] + x[i + half] * sin[i];
        out[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
    for (int i = rotary; i < dim; i++) out[i] = x[i];
}

/* K and V of every token into its slot. With cos and signed_sin (rows of factor_stride floats, one a token) q and k are
 * rotated first, and also go to q_out [T, num_q_heads, dim] and k_out [T, num_kv_heads, dim]; without (NULL) these are
 * left alone. */
void append(const Pool *pool, const Step *step, int32_t layer, const float *q, int64_t q_stride, int32_t num_q_heads,
            const float *k, int64_t k_stride, const float *v, int64_t v_stride, const float *cos, const float *sin,
            int64_t factor_stride, int32_t rotary, float *q_out, float *k_out) {
    const int dim = pool->head_dim, kv_heads = pool->num_kv_heads, size = pool->page_size;
    const size_t bytes = sizeof(float) * dim;
    float *const base = pool->pages + layer * pool->layer_stride;
    const int64_t work = (int64_t)step->num_tokens * (num_q_heads + 2 * kv_heads) * dim;
    (void)work;
#pragma omp parallel for schedule(static) num_threads(step->num_threads) if (work > PARALLEL_FLOATS)
    for (int t = 0; t < step->num_tokens; t++) {
        const int slot = step->slots[t];
        float *const key = base + (slot / size) * pool->page_stride + (int64_t)(slot % size) * dim;
        const float *const row_k = k + t * k_stride, *const row_v = v + t * v_stride;
        for (int head = 0; head < kv_heads; head++) {
            float *const to = key + (int64_t)head * size * dim;
            const float *from = row_k + head * dim;
            if (cos) {
                float *const rotated = k_out + ((int64_t)t * kv_heads + head) * dim;
                rotate(from, cos + t * factor_stride, sin + t * factor_stride, rotary, dim, rotated);
                from = rotated;
            }
            memcpy(to, from, bytes);
            memcpy(to + pool->value_offset, row_v + head * dim, bytes);
        }
        for (int head = 0; cos && head < num_q_heads; head++)
            rotate(q + t * q_stride + head * dim, cos + t * factor_stride, sin + t * factor_stride, rotary, dim,
                   q_out + ((int64_t)t * num_q_heads + head) * dim);
    }
}

INLINE Vector load(const float *from) { return *(const Vector *)from; }

INLINE Vector broadcast(float x) { return x - (Vector){}; }

/* b where it is NaN. */
INLINE Vector larger(Vector a, Vector b) {
    const Integers is_a = a > b;
    return (Vector)(((Integers)a & is_a) | ((Integers)b & ~is_a));
}

INLINE float sum_lanes(Vector s) { return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])); }

/* 2^x for x <= 0, at least 2^-126; NaN stays NaN. The Taylor polynomial of 2^f on [-1/2, 1/2] is exact to 2e-7. */
INLINE Vector exp2_of_negative(Vector x) {
    x = larger(broadcast(-126.0f), x);
    const Integers whole = __builtin_convertvector(x - 0.5f, Integers);
    const Vector f = x - __builtin_convertvector(whole, Vector);
    Vector p = f * 1.54035304e-4f + 1.33335581e-3f;
    p = p * f + 9.61812911e-3f;
    p = p * f + 5.55041087e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147181e-1f;
    p = p * f + 1.0f;
    return p * (Vector)((whole + 127) << 23);
}

INLINE Vector products(const float *a, const float *b, int dim) {
    Vector sum = load(a) * load(b);
#pragma GCC unroll 32
    for (int i = LANES; i < dim; i += LANES) sum += load(a + i) * load(b + i);
    return sum;
}

#define LANES_OF(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define ADD_PAIRS(a, b) (LANES_OF(a, b, 0, 8, 2, 10, 4, 12, 6, 14) + LANES_OF(a, b, 1, 9, 3, 11, 5, 13, 7, 15))
#define ADD_FOURS(a, b) (LANES_OF(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + LANES_OF(a, b, 2, 3, 10, 11, 6, 7, 14, 15))
#define ADD_HALVES(a, b) (LANES_OF(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + LANES_OF(a, b, 4, 5, 6, 7, 12, 13, 14, 15))

/* scores[i] = q · keys[i] for `count` rows. Eight rows at a time are summed across lanes together, which takes a third
 * of the shuffles that eight sums would. */
INLINE void score(const float *q, const float *keys, int count, int dim, float *scores) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        Vector s[LANES];
#pragma GCC unroll 8
        for (int row = 0; row < LANES; row++) s[row] = products(q, keys + (i + row) * dim, dim);
        const Vector low = ADD_FOURS(ADD_PAIRS(s[0], s[1]), ADD_PAIRS(s[2], s[3]));
        const Vector high = ADD_FOURS(ADD_PAIRS(s[4], s[5]), ADD_PAIRS(s[6], s[7]));
        *(Vector *)(scores + i) = ADD_HALVES(low, high);
    }
    for (; i < count; i++) {
        const Vector s = products(q, keys + i * dim, dim);
        scores[i] = sum_lanes(s);
    }
}

/* sums += weights[i] * values[i] for `count` rows. */
INLINE void accumulate(const float *weights, const float *values, int count, int dim, float *sums) {
    Vector s[MAX_VECTORS];
#pragma GCC unroll 32
    for (int i = 0; i < dim / LANES; i++) s[i] = load(sums + i * LANES);
    for (int row = 0; row < count; row++)
#pragma GCC unroll 32
        for (int i = 0; i < dim / LANES; i++) s[i] += weights[row] * load(values + row * dim + i * LANES);
#pragma GCC unroll 32
    for (int i = 0; i < dim / LANES; i++) *(Vector *)(sums + i * LANES) = s[i];
}

/* Scores, which are in powers of 2, to those that the cap leaves. */
INLINE void cap_scores(float *scores, int count, float softcap) {
    const float cap = softcap * 1.44269504f, twice = 2.0f * 1.44269504f / cap;
    for (int i = count; i % LANES; i++) scores[i] = 0;
    for (int i = 0; i < count; i += LANES) {
        const Vector x = load(scores + i);
        const Integers is_negative = x < broadcast(0.0f);
        const Vector size = (Vector)((Integers)x & 0x7fffffff), rest = exp2_of_negative(size * -twice);
        const Vector tanh = (1.0f - rest) / (1.0f + rest) * cap;
        *(Vector *)(scores + i) = (Vector)((Integers)tanh | (is_negative & (int32_t)0x80000000));
    }
}

/* Scores to softmax weights, as far as known: the largest score so far and the sum of weights go on from chunk to
 * chunk, and what was summed up under an earlier largest score is scaled down (online softmax; Milakov, Gimelshein).
 * Room for whole vectors of scores is needed. */
INLINE void weigh(float *scores, int count, int dim, float *top, float *total, float *sums) {
    for (int i = count; i % LANES; i++) scores[i] = -INFINITY;
    Vector largest = broadcast(*top), added = {};
    for (int i = 0; i < count; i += LANES) largest = larger(largest, load(scores + i));
    float most = largest[0];
    for (int lane = 1; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    for (int i = 0; i < count; i += LANES) {
        const Vector weights = exp2_of_negative(load(scores + i) - most);
        *(Vector *)(scores + i) = weights;
        added += weights;
    }
    const float kept = exp2_of_negative(broadcast(*top - most))[0];
    *total = *total * kept + sum_lanes(added);
    *top = most;
    for (int i = 0; i < dim; i++) sums[i] *= kept;
}

/* The tiles of K and V, which are short and far apart: left to itself the processor waits for most of them. */
INLINE void prefetch(const Pool *pool, const float *keys, const int32_t *page_ids, int place) {
    const float *const tile = keys + page_ids[place] * pool->page_stride;
    for (int i = 0; i < pool->page_size * pool->head_dim; i += 64 / (int)sizeof(float)) {
        __builtin_prefetch(tile + i);
        __builtin_prefetch(tile + pool->value_offset + i, 0, 2);
    }
}

/* Up to MAX_HEADS query heads of one token, which share the K and V head whose tile in page 0 begins at `keys`. */
INLINE void attend_heads(const Pool *pool, const float *keys, const int32_t *page_ids, int length, const float *q,
                         int num_heads, const float *sinks, float *o, const int dim) {
    float queries[MAX_HEADS][LANES * MAX_VECTORS], sums[MAX_HEADS][LANES * MAX_VECTORS];
    float scores[MAX_HEADS][CHUNK], top[MAX_HEADS], total[MAX_HEADS];
    const int size = pool->page_size, num_pages = (length + size - 1) / size;
    const float scale = pool->scale * 1.44269504f; /* weights are powers of 2, not of e */
    for (int head = 0; head < num_heads; head++) {
        for (int i = 0; i < dim; i++) queries[head][i] = q[head * dim + i] * scale, sums[head][i] = 0;
        /* A sink is a key of its own, whose value is 0. */
        top[head] = sinks ? sinks[head] * 1.44269504f : -INFINITY, total[head] = sinks ? 1 : 0;
    }
    const int start = length > pool->window ? length - pool->window : 0, first = start / size;
    for (int place = first; place < num_pages && place < first + PAGES_AHEAD; place++)
        prefetch(pool, keys, page_ids, place);
    for (int begin = start; begin < length; begin += CHUNK) {
        const int count = length - begin < CHUNK ? length - begin : CHUNK;
        for (int value = 0; value < 2; value++) {
            for (int done = 0, span; done < count; done += span) {
                const int place = (begin + done) / size, offset = (begin + done) % size;
                span = size - offset < count - done ? size - offset : count - done;
                const float *const tile = keys + page_ids[place] * pool->page_stride + (int64_t)offset * dim;
                if (!value && place + PAGES_AHEAD < num_pages) prefetch(pool, keys, page_ids, place + PAGES_AHEAD);
                for (int head = 0; head < num_heads; head++) {
                    if (value)
                        accumulate(scores[head] + done, tile + pool->value_offset, span, dim, sums[head]);
                    else
                        score(queries[head], tile, span, dim, scores[head] + done);
                }
            }
            for (int head = 0; !value && pool->softcap != 0 && head < num_heads; head++)
                cap_scores(scores[head], count, pool->softcap);
            for (int head = 0; !value && head < num_heads; head++)
                weigh(scores[head], count, dim, &top[head], &total[head], sums[head]);
        }
    }
    for (int head = 0; head < num_heads; head++)
        for (int i = 0; i < dim; i++) o[head * dim + i] = sums[head][i] / total[head];
}

/* With the size known the compiler keeps a row in registers. */
static void attend_sized(const Pool *pool, const float *keys, const int32_t *page_ids, int length, const float *q,
                         int num_heads, const float *sinks, float *o) {
    switch (pool->head_dim) {
    case 32: attend_heads(pool, keys, page_ids, length, q, num_heads, sinks, o, 32); break;
    case 64: attend_heads(pool, keys, page_ids, length, q, num_heads, sinks, o, 64); break;
    case 128: attend_heads(pool, keys, page_ids, length, q, num_heads, sinks, o, 128); break;
    default: attend_heads(pool, keys, page_ids, length, q, num_heads, sinks, o, pool->head_dim);
    }
}

/* Rows `tokens` of o [T, num_q_heads, dim] from those of q, already rotated; q head h reads K and V head
 * h / (num_q_heads / num_kv_heads). sinks: [num_q_heads] logits that only add to the softmax's denominator, or NULL. */
void decode_attention(const Pool *pool, const Step *step, int32_t layer, const float *q, int64_t q_stride,
                      int32_t num_q_heads, const float *sinks, float *o) {
    const int dim = pool->head_dim, kv_heads = pool->num_kv_heads, group = num_q_heads / kv_heads;
    const float *const base = pool->pages + layer * pool->layer_stride;
    const int64_t work = step->num_positions * kv_heads * dim;
    (void)work;
#pragma omp parallel for schedule(dynamic) num_threads(step->num_threads) if (work > PARALLEL_FLOATS)
    for (int unit = 0; unit < step->num_decodes * kv_heads; unit++) {
        const int decode = unit / kv_heads, kv_head = unit % kv_heads;
        const int64_t token = step->tokens[decode];
        const float *const keys = base + (int64_t)kv_head * pool->page_size * dim;
        for (int first = 0; first < group; first += MAX_HEADS) {
            const int head = kv_head * group + first, count = group - first < MAX_HEADS ? group - first : MAX_HEADS;
            attend_sized(pool, keys, step->page_ids + step->first_page[decode], step->lengths[decode],
                         q + token * q_stride + head * dim, count, sinks ? sinks + head : NULL,
                         o + (token * num_q_heads + head) * dim);
        }
    }
}
