/* The paged cache on a CPU, float32: append with rotary embedding, and attention of single queries ("decode").
 *
 * kernels.py mirrors Pool and Step and states what callers must see to; nothing is checked here.
 *
 *   pages  [num_pages, layers, 2 (K, V), num_kv_heads, page_size, head_dim], head_dim a multiple of LANES, at most
 *          LANES * MAX_VECTORS; a tile is what one page holds of one K or V head: page_size rows, side by side
 *   q, k, v  rows of `stride` floats, one a token; the heads of a row follow each other
 */
#include "crew.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

enum { MAX_VECTORS = 32, MAX_HEADS = 8, CHUNK = 256, PAGES_AHEAD = 2 };
enum { FLOATS_APIECE = 1 << 16 }; /* of a piece of a crew's work: some 20 µs */

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
    Crew *crew;
    int32_t num_tokens, num_decodes;
} Step;

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

typedef struct {
    const Pool *pool;
    const Step *step;
    const float *q, *k, *v, *factors;
    const int64_t *rows;
    float *q_out, *k_out;
    int64_t q_stride, k_stride, v_stride;
    int32_t layer, num_q_heads, rotary, tokens_apiece;
} Append;

static void append_token(const Append *a, int t) {
    const Pool *const pool = a->pool;
    const int dim = pool->head_dim, kv_heads = pool->num_kv_heads, size = pool->page_size, slot = a->step->slots[t];
    const size_t bytes = sizeof(float) * dim;
    const float *const row_k = a->k + t * a->k_stride, *const row_v = a->v + t * a->v_stride;
    const int64_t row = a->rows ? a->rows[t] : t;
    const float *const cos = a->factors ? a->factors + row * 2 * a->rotary : 0, *const sin = cos + a->rotary;
    float *const key = pool->pages + a->layer * pool->layer_stride + (slot / size) * pool->page_stride +
                       (int64_t)(slot % size) * dim;
    for (int head = 0; head < kv_heads; head++) {
        float *const to = key + (int64_t)head * size * dim;
        const float *from = row_k + head * dim;
        if (cos) {
            float *const rotated = a->k_out + ((int64_t)t * kv_heads + head) * dim;
            rotate(from, cos, sin, a->rotary, dim, rotated);
            from = rotated;
        }
        memcpy(to, from, bytes);
        memcpy(to + pool->value_offset, row_v + head * dim, bytes);
    }
    for (int head = 0; cos && head < a->num_q_heads; head++)
        rotate(a->q + t * a->q_stride + head * dim, cos, sin, a->rotary, dim,
               a->q_out + ((int64_t)t * a->num_q_heads + head) * dim);
}

static void append_piece(const void *job, int32_t index) {
    const Append *const a = job;
    const int first = index * a->tokens_apiece, end = first + a->tokens_apiece;
    for (int t = first; t < end && t < a->step->num_tokens; t++) append_token(a, t);
}

/* K and V of every token into its slot. With factors [n, 2, rotary] (cos and signed_sin, row rows[t] for token t, row t
 * where rows is NULL) q and k are rotated first, and also go to q_out [T, num_q_heads, dim] and k_out [T, num_kv_heads,
 * dim]; without (NULL) these are left alone. */
void append(const Pool *pool, const Step *step, int32_t layer, const float *q, int64_t q_stride, int32_t num_q_heads,
            const float *k, int64_t k_stride, const float *v, int64_t v_stride, const float *factors,
            const int64_t *rows, int32_t rotary, float *q_out, float *k_out) {
    const int apiece = 1 + FLOATS_APIECE / ((num_q_heads + 2 * pool->num_kv_heads) * pool->head_dim);
    const Append job = {pool,     step,     q,        k,     v,           factors, rows,  q_out, k_out,
                        q_stride, k_stride, v_stride, layer, num_q_heads, rotary,  apiece};
    RUN(step->crew, append_piece, &job, (step->num_tokens + apiece - 1) / apiece);
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
INLINE void prefetch(const Pool *pool, const float *keys, const int32_t *page_ids, int page_index) {
    const float *const tile = keys + page_ids[page_index] * pool->page_stride;
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
    for (int page_index = first; page_index < num_pages && page_index < first + PAGES_AHEAD; page_index++)
        prefetch(pool, keys, page_ids, page_index);
    for (int begin = start; begin < length; begin += CHUNK) {
        const int count = length - begin < CHUNK ? length - begin : CHUNK;
        for (int value = 0; value < 2; value++) {
            for (int done = 0, span; done < count; done += span) {
                const int page_index = (begin + done) / size, offset = (begin + done) % size;
                span = size - offset < count - done ? size - offset : count - done;
                const float *const tile = keys + page_ids[page_index] * pool->page_stride + (int64_t)offset * dim;
                if (!value && page_index + PAGES_AHEAD < num_pages)
                    prefetch(pool, keys, page_ids, page_index + PAGES_AHEAD);
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

typedef struct {
    const Pool *pool;
    const Step *step;
    const float *q, *sinks;
    float *o;
    int64_t q_stride;
    int32_t layer, num_q_heads, units_apiece;
} Attention;

static void attend_piece(const void *job, int32_t index) {
    const Attention *const a = job;
    const Pool *const pool = a->pool;
    const Step *const step = a->step;
    const int dim = pool->head_dim, kv_heads = pool->num_kv_heads, group = a->num_q_heads / kv_heads;
    const float *const base = pool->pages + a->layer * pool->layer_stride;
    const int first = index * a->units_apiece, end = first + a->units_apiece;
    for (int unit = first; unit < end && unit < step->num_decodes * kv_heads; unit++) {
        const int decode = unit / kv_heads, kv_head = unit % kv_heads;
        const int64_t token = step->tokens[decode];
        const float *const keys = base + (int64_t)kv_head * pool->page_size * dim;
        for (int done = 0; done < group; done += MAX_HEADS) {
            const int head = kv_head * group + done, count = group - done < MAX_HEADS ? group - done : MAX_HEADS;
            attend_sized(pool, keys, step->page_ids + step->first_page[decode], step->lengths[decode],
                         a->q + token * a->q_stride + head * dim, count, a->sinks ? a->sinks + head : NULL,
                         a->o + (token * a->num_q_heads + head) * dim);
        }
    }
}

/* Rows `tokens` of o [T, num_q_heads, dim] from those of q, already rotated; q head h reads K and V head
 * h / (num_q_heads / num_kv_heads). sinks: [num_q_heads] logits that only add to the softmax's denominator, or NULL. */
void decode_attention(const Pool *pool, const Step *step, int32_t layer, const float *q, int64_t q_stride,
                      int32_t num_q_heads, const float *sinks, float *o) {
    const int units = step->num_decodes * pool->num_kv_heads; /* a sequence's K and V head each */
    int64_t positions = 0;
    for (int decode = 0; decode < step->num_decodes; decode++)
        positions += step->lengths[decode] < pool->window ? step->lengths[decode] : pool->window;
    const int64_t floats = 2 * positions * pool->head_dim / (step->num_decodes ? step->num_decodes : 1) + 1;
    const int64_t wanted = (FLOATS_APIECE + floats - 1) / floats;
    const int apiece = wanted < units ? (int)wanted : units;
    const Attention job = {pool, step, q, sinks, o, q_stride, layer, num_q_heads, apiece};
    if (units) RUN(step->crew, attend_piece, &job, (units + apiece - 1) / apiece);
}
