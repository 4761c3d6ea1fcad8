/* What a decoder layer does outside attention, float32 on a CPU.
 *
 * native_layer.py states what callers must see to; nothing is checked here. Rows lie `stride` floats apart.
 *
 *   packed  a weight [outputs, inputs] cut into panels of PANEL outputs: [ceil(outputs / PANEL), inputs, PANEL], the
 *           last one filled up with zeros. One row streams through it, many rows share each panel while it is in the
 *           cache nearest to the core.
 */
#include "crew.h"
#include "vectors.h"

#include <math.h>
#include <string.h>

enum { PANEL = 2 * LANES, MAX_ROWS = 6, ROW_BLOCK = 16 * MAX_ROWS, DEPTH = 1024 };
const int32_t panel = PANEL; /* native/layer.py reads it when it loads this */
enum { WIDENED = 256 }; /* inputs of a weight in 8 bits that are floats at once */
enum { AHEAD = 16 }; /* inputs, whose weights are fetched before they are needed */
/* A piece of a crew's work takes some 10 µs; the products of one row of a small model are less. */
enum { PRODUCTS_APIECE = 400000 };
enum { ELEMENTS_APIECE = 1 << 13 };

typedef struct {
    const float *x, *packed, *bias;
    float *y;
    int64_t x_stride;
    int32_t rows, inputs, outputs;
    int32_t panels_apiece;
} Product;

/* The sums of `count` <= PANEL outputs go to y; those of earlier inputs stand there already unless `first`. */
INLINE void store(Vector low, Vector high, const float *bias, int first, int count, float *y) {
    float sums[PANEL];
    *(Vector *)sums = low, *(Vector *)(sums + LANES) = high;
    for (int i = 0; i < count; i++) y[i] = sums[i] + (first ? (bias ? bias[i] : 0) : y[i]);
}

/* What a panel has for the inputs from `begin` on, and how far the next panel is. */
typedef struct {
    const float *w;
    int64_t next_panel;
} Panels;

INLINE Panels packed_panels(const Product *p, int panel, int begin) {
    return (Panels){p->packed + ((int64_t)panel * p->inputs + begin) * PANEL, (int64_t)p->inputs * PANEL};
}

/* `rows` rows times `panels` neighbouring panels, inputs begin … begin + depth - 1. Each output is one running sum over
 * the inputs in their order, so that it does not depend on how many rows or panels go together. */
INLINE void multiply(const Product *p, Panels at, int row, const int rows, int panel, const int panels, int begin,
                     int depth) {
    Vector sums[MAX_ROWS][8] = {};
    const float *const x = p->x + row * p->x_stride + begin, *const w = at.w;
    const int64_t next_panel = at.next_panel;
    for (int k = 0; k < depth; k++) {
#pragma GCC unroll 8
        for (int i = 0; i < panels; i++) {
            __builtin_prefetch(w + i * next_panel + (k + AHEAD) * PANEL);
            const Vector low = load(w + i * next_panel + k * PANEL), high = load(w + i * next_panel + k * PANEL + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                sums[r][2 * i] += x[r * p->x_stride + k] * low;
                sums[r][2 * i + 1] += x[r * p->x_stride + k] * high;
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < panels; i++) {
            const int output = (panel + i) * PANEL, left = p->outputs - output;
            store(sums[r][2 * i], sums[r][2 * i + 1], p->bias ? p->bias + output : 0, begin == 0,
                  left < PANEL ? left : PANEL, p->y + (int64_t)(row + r) * p->outputs + output);
        }
}

static void multiply_rows(const Product *p, Panels at, int row, int rows, int panel, int begin, int depth) {
    switch (rows) {
    case 1: multiply(p, at, row, 1, panel, 1, begin, depth); break;
    case 2: multiply(p, at, row, 2, panel, 1, begin, depth); break;
    case 3: multiply(p, at, row, 3, panel, 1, begin, depth); break;
    case 4: multiply(p, at, row, 4, panel, 1, begin, depth); break;
    case 5: multiply(p, at, row, 5, panel, 1, begin, depth); break;
    default: multiply(p, at, row, 6, panel, 1, begin, depth);
    }
}

/* Rows first_row … last_row - 1 times one panel, in groups as even as can be: small ones leave the processor waiting. */
static void multiply_panel(const Product *p, Panels at, int first_row, int last_row, int panel, int begin, int depth) {
    for (int groups = (last_row - first_row + MAX_ROWS - 1) / MAX_ROWS, row = first_row; groups; groups--) {
        const int rows = (last_row - row + groups - 1) / groups;
        multiply_rows(p, at, row, rows, panel, begin, depth);
        row += rows;
    }
}

static void multiply_piece(const void *job, int32_t index) {
    const Product *const p = job;
    const int all = (p->outputs + PANEL - 1) / PANEL, first = index * p->panels_apiece;
    const int last = first + p->panels_apiece < all ? first + p->panels_apiece : all;
    for (int begin = 0; begin < p->inputs; begin += DEPTH) {
        const int depth = p->inputs - begin < DEPTH ? p->inputs - begin : DEPTH;
        for (int row = 0; row < p->rows; row += ROW_BLOCK) {
            const int end = p->rows - row < ROW_BLOCK ? p->rows : row + ROW_BLOCK;
            int panel = first;
            if (p->rows == 1)
                for (; panel + 4 <= last; panel += 4)
                    multiply(p, packed_panels(p, panel, begin), 0, 1, panel, 4, begin, depth);
            for (; panel < last; panel++)
                multiply_panel(p, packed_panels(p, panel, begin), row, end, panel, begin, depth);
        }
    }
}

static int panels_apiece(int32_t rows, int32_t inputs, int all) {
    const int64_t of_panel = (int64_t)inputs * PANEL * (rows ? rows : 1);
    const int64_t wanted = (PRODUCTS_APIECE / of_panel + 4) / 4 * 4; /* one row takes four panels at a time */
    return wanted < all ? (int)wanted : all;
}

/* y [rows, outputs] = x [rows, inputs] · weightᵀ + bias (NULL: none). */
void linear(Crew *crew, const float *x, int64_t x_stride, int32_t rows, int32_t inputs, const float *packed,
            int32_t outputs, const float *bias, float *y) {
    const int all = (outputs + PANEL - 1) / PANEL, apiece = panels_apiece(rows, inputs, all);
    const Product product = {x, packed, bias, y, x_stride, rows, inputs, outputs, apiece};
    RUN(crew, multiply_piece, &product, (all + apiece - 1) / apiece);
}

/* A weight in 8 bits, E4M3: packed numbers, and packed scales [panels, groups, PANEL] of `group` inputs each. */
typedef struct {
    Product product;
    const uint8_t *numbers;
    const float *scales;
    int32_t group, groups;
} Scaled;

/* `panels` panels from inputs begin … begin + depth - 1 as floats, WIDENED inputs apart. */
INLINE void widen(const Scaled *s, int panel, int panels, int begin, int depth, float *wide) {
    for (int i = 0; i < panels; i++) {
        const uint8_t *from = s->numbers + ((int64_t)(panel + i) * s->product.inputs + begin) * PANEL;
        float *to = wide + (int64_t)i * WIDENED * PANEL;
        for (int k = 0, end; k < depth; k = end) {
            const int group = (begin + k) / s->group, next = (group + 1) * s->group - begin;
            const float *const scale = s->scales + ((int64_t)(panel + i) * s->groups + group) * PANEL;
            end = next < depth ? next : depth;
            for (int j = k; j < end; j++)
                for (int one = 0; one < PANEL; one++) {
                    const uint32_t number = from[j * PANEL + one], size = number & 127;
                    /* Exponents are 120 less than a float's; 127 is not a number. */
                    const uint32_t bits = (number & 128) << 24 | size << 20 | (size == 127 ? 0x7fc00000u : 0u);
                    float value;
                    memcpy(&value, &bits, sizeof value);
                    to[j * PANEL + one] = value * 0x1p120f * scale[one];
                }
        }
    }
}

static void scaled_piece(const void *job, int32_t index) {
    const Scaled *const s = job;
    const Product *const p = &s->product;
    const int all = (p->outputs + PANEL - 1) / PANEL, first = index * p->panels_apiece;
    const int last = first + p->panels_apiece < all ? first + p->panels_apiece : all;
    float wide[4 * WIDENED * PANEL];
    const Panels at = {wide, (int64_t)WIDENED * PANEL};
    for (int panel = first, panels; panel < last; panel += panels) {
        panels = p->rows == 1 && panel + 4 <= last ? 4 : 1;
        for (int begin = 0; begin < p->inputs; begin += WIDENED) {
            const int depth = p->inputs - begin < WIDENED ? p->inputs - begin : WIDENED;
            widen(s, panel, panels, begin, depth, wide);
            if (panels == 4) multiply(p, at, 0, 1, panel, 4, begin, depth);
            else multiply_panel(p, at, 0, p->rows, panel, begin, depth);
        }
    }
}

/* As linear(). */
void scaled_linear(Crew *crew, const float *x, int64_t x_stride, int32_t rows, int32_t inputs, const uint8_t *numbers,
                   const float *scales, int32_t group, int32_t groups, int32_t outputs, const float *bias, float *y) {
    const int all = (outputs + PANEL - 1) / PANEL, apiece = panels_apiece(rows, inputs, all);
    const Product product = {x, 0, bias, y, x_stride, rows, inputs, outputs, apiece};
    const Scaled scaled = {product, numbers, scales, group, groups};
    RUN(crew, scaled_piece, &scaled, (all + apiece - 1) / apiece);
}

typedef struct {
    const float *x, *delta, *weight;
    float *out;
    int64_t stride, weight_stride;
    int32_t rows, heads, width, rows_apiece;
    float eps;
} Norm;

INLINE void add_and_normalise(float *restrict x, const float *restrict delta, const float *restrict weight, int width,
                              float eps, float *restrict out) {
    float squares = 0;
    if (delta)
        for (int i = 0; i < width; i++) x[i] += delta[i];
    for (int i = 0; i < width; i++) squares += x[i] * x[i];
    const float factor = 1 / sqrtf(squares / width + eps);
    for (int i = 0; i < width; i++) out[i] = x[i] * factor * weight[i];
}

static void norm_piece(const void *job, int32_t index) {
    const Norm *const n = job;
    const int first = index * n->rows_apiece, end = first + n->rows_apiece;
    for (int row = first; row < end && row < n->rows; row++)
        for (int head = 0; head < n->heads; head++) {
            const int64_t offset = ((int64_t)row * n->heads + head) * n->width;
            add_and_normalise((float *)n->x + row * n->stride + head * n->width, n->delta ? n->delta + offset : 0,
                              n->weight + head * n->weight_stride, n->width, n->eps, n->out + offset);
        }
}

/* Each of `heads` parts of a row of x, after += delta (NULL: none) in offset, / its rms · its row of weight. out and
 * delta are [rows, heads, width]; x is only written with delta. */
void rms_norm(Crew *crew, float *x, int64_t stride, const float *delta, const float *weight, int64_t weight_stride,
              int32_t rows, int32_t heads, int32_t width, float eps, float *out) {
    const int apiece = 1 + ELEMENTS_APIECE / (heads * width);
    const Norm job = {x, delta, weight, out, stride, weight_stride, rows, heads, width, apiece, eps};
    RUN(crew, norm_piece, &job, (rows + apiece - 1) / apiece);
}

typedef struct {
    const float *gate_up;
    float *out;
    int32_t rows, width, rows_apiece;
} Gate;

/* x · sigmoid(x), by a power of two that cannot overflow. */
INLINE Vector silu(Vector x) {
    const Integers negative = x < 0.0f;
    const Vector magnitude = (Vector)((Integers)x & 0x7fffffff), power = exp2_of_negative(magnitude * -1.44269504f);
    const Vector above = (Vector)(((Integers)power & negative) | ((Integers)broadcast(1.0f) & ~negative));
    return x * above / (power + 1.0f);
}

static void gate_piece(const void *job, int32_t index) {
    const Gate *const g = job;
    const int first = index * g->rows_apiece, end = first + g->rows_apiece, width = g->width;
    for (int row = first; row < end && row < g->rows; row++) {
        const float *const gate = g->gate_up + (int64_t)row * 2 * width, *const up = gate + width;
        float *const out = g->out + (int64_t)row * width;
        int i = 0;
        for (; i + LANES <= width; i += LANES) *(Vector *)(out + i) = silu(load(gate + i)) * load(up + i);
        for (; i < width; i++) out[i] = silu(broadcast(gate[i]))[0] * up[i];
    }
}

/* silu(gate) · up [rows, width] of gate_up [rows, 2 · width]. */
void silu_mul(Crew *crew, const float *gate_up, int32_t rows, int32_t width, float *out) {
    const int apiece = 1 + ELEMENTS_APIECE / width;
    const Gate job = {gate_up, out, rows, width, apiece};
    RUN(crew, gate_piece, &job, (rows + apiece - 1) / apiece);
}
