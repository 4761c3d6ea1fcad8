// The sizes of row_step.cu, what a launch is given, and what a block keeps in shared memory.
//
// Set by the compiler's command line: ROWS, HIDDEN, INNER, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCKS, WARPS, HALF, FP8.
#pragma once
#ifdef __CUDACC__
#include "../cuda/device.cuh"
#else
#include EMULATED_DEVICE
#endif

#if FP8
using Entry = unsigned char;  // of K and V, see row_entries.cuh
#else
using Entry = Number;
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int GROUP = Q_HEADS / KV_HEADS;
constexpr int TILE = ROWS == 1 ? 2 : 4;      // outputs of a product, rows of its weight, that a warp computes at once
constexpr int SLICE = 2048 / TILE;           // columns of them
constexpr int SLOT = TILE * SLICE * 2;       // bytes of a ring's slot: a tile's slice, or K and V
constexpr int NEAR = 8;                      // positions that a warp attends to at once
constexpr int HEADS_WIDTH = Q_HEADS * HEAD_DIM, QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;

__host__ __device__ constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }
__host__ __device__ constexpr int at_most(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int at_least(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int slices(int columns) { return (columns + SLICE - 1) / SLICE; }
// The most positions of an item. Of several rows items of many positions fill their slots; few are shared out better
// by NEAR, and those of one row always are.
constexpr int SHARE = ROWS == 1 ? NEAR : at_most(SLOT / (2 * HEAD_DIM * (int)sizeof(Entry)), 2 * NEAR);
#ifndef MANY
#define MANY 4 * WARPS * NEAR
#endif
constexpr int SPLITS = at_most(16, power_below(BLOCKS / KV_HEADS));  // blocks that share a KV head's positions
static_assert(SPLITS >= ROWS && WARPS % ROWS == 0 && ROWS <= 8);

// Pointers of a layer, in this order; a product's place is its phase's number.
enum { QKV, QKV_BIAS, O, GATE_UP, DOWN, INPUT_NORM, POST_NORM, HEAD_NORMS, POINTERS };
constexpr int ATTENTION = QKV_BIAS, HEAD = INPUT_NORM, PHASES = HEAD + 1;  // phases in order, the head being the last

__host__ __device__ constexpr int ceiling(int a, int b) { return (a + b - 1) / b; }

// The input of `down` is the widest: of several rows it is gathered and multiplied in pieces, to leave room for rings.
#ifndef INPUT_LIMIT
#define INPUT_LIMIT 64 * 1024
#endif
constexpr int PIECE = ROWS == 1 || INNER * ROWS * 2 <= INPUT_LIMIT
                          ? INNER
                          : slices(ceiling(INNER, ceiling(INNER * ROWS * 2, INPUT_LIMIT))) * SLICE;
constexpr int PIECES = ceiling(INNER, PIECE);

constexpr int WIDEST = at_least(at_least(HIDDEN, PIECE), HEADS_WIDTH);
// Of the new token, where the input was: q of each head, then k and v as in a slot.
constexpr int HEAD_BYTES = HEAD_DIM * 2, OWN_AT = GROUP * HEAD_BYTES, HEADS_BYTES = OWN_AT + SLOT / 2 + HEAD_BYTES;
constexpr int INPUT_BYTES = at_least((ROWS * WIDEST * 2 + 15) / 16 * 16, HEADS_BYTES);
constexpr int SUMS_BYTES = slices(WIDEST) * TILE * ROWS * 4;                 // of a tile
constexpr int MOST_DOWN = PIECES == 1 ? 2 : ceiling(HIDDEN / TILE, BLOCKS);  // tiles whose sums outlast a piece
constexpr int MOST_ROUND = at_most(64, THREADS / ROWS / (TILE / 2));         // a thread sums up a pair of a row
// Tiles between two barriers, an even number.
constexpr int ROUND =
    ROWS == 1 ? 64 : at_most(MOST_ROUND, ceiling(at_least(16 * 1024 / SUMS_BYTES, MOST_DOWN), 2) * 2);
static_assert(MOST_DOWN <= ROUND && ROUND % 2 == 0);
constexpr int PARTIAL_BYTES = ROUND * SUMS_BYTES;
constexpr int FOUND_BYTES = WARPS * GROUP * HEAD_DIM * 4;
constexpr int WORK_BYTES = at_least(INPUT_BYTES + PARTIAL_BYTES, FOUND_BYTES);
constexpr unsigned HEAD_LANES = HEAD_DIM == 128 ? ~0u : 0xffff;  // those that read a head
constexpr int SHARED_BYTES = 227 * 1024, MOST_DEPTH = 8;
constexpr int PART = HEAD_DIM + 4;  // words of a share of one head: sums, highest score, total thrice

// Words of one of the two buffers: pairs of numbers of all rows, then the blocks' parts.
constexpr int X_AT = 0, QKV_AT = X_AT + ROWS * HIDDEN / 2, HEADS_AT = QKV_AT + ROWS * QKV_ROWS / 2;
constexpr int MID_AT = HEADS_AT + ROWS * HEADS_WIDTH / 2, INNER_AT = MID_AT + ROWS * HIDDEN / 2;
constexpr int PARTS_AT = INNER_AT + ROWS * INNER / 2, NUM_WORDS = PARTS_AT + SPLITS * Q_HEADS * PART;

struct Step {
    const Number* const* layers;  // [num_layers][POINTERS]
    const Number *x, *final_norm, *lm_head, *cos, *sin;  // cos and sin: rows of 2 * HEAD_DIM
    const float* scales;  // of entries of 8 bits, [num_layers][K and V][KV_HEADS]
    Number* logits;
    Entry* pool;
    const int *slots, *kv_indptr, *kv_indices, *kv_last_page_len;
    unsigned* words;  // [2][NUM_WORDS]
    unsigned* epoch;  // the layers before; how many blocks are done
    long long page_elements, layer_elements;
    int num_layers, vocab, page_size;
    float eps, head_eps, scale;
};

// Whose positions a block attends to, nobody's where row < 0; its place among the `splits` blocks that have some; the
// row's first page, how many positions it has stored, and which are the block's: `items` of `size`, the last of fewer.
struct Share {
    int row, split, splits, first_page, stored, begin, items, size;

    __device__ int of_item() const { return SHARE == NEAR ? NEAR : size; }
};
#if ROWS == 1
using HeldShare = const Share;  // by each thread
#else
using HeldShare = const Share&;  // by the block: several rows leave no registers
#endif

// A block's shared memory: what it holds besides the rings leaves room for DEPTH slots a warp.
struct State {
    alignas(16) unsigned char work[WORK_BYTES];  // a product's input and sums; or heads; or what warps found
    unsigned long long arrivals[WARPS][MOST_DEPTH];
    float ends[WARPS][GROUP][2];  // highest score and total of each warp
    float squares[WARPS];
    float residual[ROWS][TILE * (HIDDEN / TILE / BLOCKS + 1)];  // the numbers of x that this block writes
    int begins[PHASES], counts[PHASES], items[PHASES];          // tiles of outputs; items of all warps
    Share share;                                                // unless threads hold it
};
constexpr int DEPTH = at_most(MOST_DEPTH, (SHARED_BYTES - (int)sizeof(State) - 128) / (WARPS * SLOT));
static_assert(DEPTH >= 2, "no room for rings in shared memory");

struct Block {
    alignas(128) unsigned char ring[WARPS][DEPTH][SLOT];
    State state;
};
