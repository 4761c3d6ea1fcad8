// The sizes of the megakernel, what a launch is given, and what a block keeps in shared memory.
//
// megakernel.py is the home of the constants that host and device share. It sets them on the compiler's command line:
//   the model      HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, HALF, FP8 (K and V), WEIGHT8 (see weight_bytes())
//   the launch     ROWS, BLOCKS, WARPS, SHARED_BYTES
//   the tiling     TILE (outputs of a product that a warp computes at once), STAGE_BYTES (of a ring), MAX_GROUP,
//                  INPUT_LIMIT (bytes of a gathered input), ITEM_POSITIONS, MAX_SPLITS, STATS,
//                  SCALED_COLUMNS (of a weight in 8 bits, that share a scale, unless all do)
//   the contract   HOST_WORDS, HOST_ARGUMENT_BYTES, HOST_LAYER_POINTERS: what the host allocates and passes
#pragma once
#include "../cuda/device.cuh"

#if FP8
using Entry = unsigned char;  // of K and V, see entries.cuh
#else
using Entry = Number;
#endif

constexpr int THREADS = 32 * WARPS;
constexpr int GROUP = Q_HEADS / KV_HEADS;
constexpr int SLICE_BYTES = STAGE_BYTES / TILE;  // of a row of a tile of weights; a stage holds a tile, or K and V
constexpr int MMA_POSITIONS = 8;                 // positions that a warp attends to at once
constexpr int HEADS_WIDTH = Q_HEADS * HEAD_DIM, QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM;
static_assert(GROUP <= MAX_GROUP, "the accumulators of a KV head's heads must fit into registers");

__host__ __device__ constexpr int power_below(int n) { return n < 2 ? 1 : 2 * power_below(n / 2); }
__host__ __device__ constexpr int at_most(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int at_least(int a, int b) { return a > b ? a : b; }
__host__ __device__ constexpr int ceiling(int a, int b) { return (a + b - 1) / b; }
// ITEM_POSITIONS is the most positions of an item, which lie on one page. Several rows fill their stages with them;
// fewer than MANY_POSITIONS spread better by MMA_POSITIONS, as those of one row always do.
static_assert(ITEM_POSITIONS == (ROWS == 1 ? MMA_POSITIONS
                                           : at_most(STAGE_BYTES / (2 * HEAD_DIM * (int)sizeof(Entry)),
                                                     2 * MMA_POSITIONS)));
#ifndef MANY_POSITIONS
#define MANY_POSITIONS 4 * WARPS * MMA_POSITIONS
#endif
constexpr int SPLITS = at_most(MAX_SPLITS, power_below(BLOCKS / KV_HEADS));  // blocks of a KV head
static_assert(SPLITS >= ROWS && WARPS % ROWS == 0 && ROWS <= 8);

// Pointers of a layer, in the order of MegakernelLayer's fields. A product's index is its phase's number. SCALING, which
// is no pointer, and the scales are those of weights in 8 bits: see scales.cuh.
enum { QKV, QKV_BIAS, O, GATE_UP, DOWN, INPUT_NORM, POST_NORM, HEAD_NORMS, SCALING, QKV_SCALES, O_SCALES,
       GATE_UP_SCALES, DOWN_SCALES, POINTERS };
constexpr int ATTENTION = QKV_BIAS, HEAD = INPUT_NORM, PHASES = HEAD + 1;  // phases in order, the head being the last
static_assert(POINTERS == HOST_LAYER_POINTERS);

// Of a number of a phase's weight. WEIGHT8: the layers' weights are in 8 bits (e4m3), the head's is not. So a stage
// holds twice as many columns of them.
__host__ __device__ constexpr int weight_bytes(int phase) { return WEIGHT8 && phase != HEAD ? 1 : 2; }
__host__ __device__ constexpr int slice_of(int phase) { return SLICE_BYTES / weight_bytes(phase); }  // columns
__host__ __device__ constexpr int slices(int phase, int columns) { return ceiling(columns, slice_of(phase)); }

// The input of `down` is the widest. Several rows gather and multiply it in pieces, which leaves room for rings.
constexpr int PIECE = ROWS == 1 || INTERMEDIATE * ROWS * 2 <= INPUT_LIMIT
                          ? INTERMEDIATE
                          : slice_of(DOWN) * slices(DOWN, ceiling(INTERMEDIATE, ceiling(INTERMEDIATE * ROWS * 2, INPUT_LIMIT)));
constexpr int PIECES = ceiling(INTERMEDIATE, PIECE);

constexpr int WIDEST = at_least(at_least(HIDDEN, PIECE), HEADS_WIDTH);
// Where the input was: q of each head of the new token, then k and v as in a stage, also of the rows before that are
// of the same sequence.
constexpr int HEAD_BYTES = HEAD_DIM * 2, OWN_AT = GROUP * HEAD_BYTES;
constexpr int HEADS_BYTES = OWN_AT + STAGE_BYTES / 2 + ROWS * HEAD_BYTES;
static_assert(ROWS <= MMA_POSITIONS && ROWS * HEAD_BYTES <= STAGE_BYTES / 2, "new tokens of a sequence are one item");
constexpr int INPUT_BYTES = at_least((ROWS * WIDEST * 2 + 15) / 16 * 16, HEADS_BYTES);
constexpr int SUMS_BYTES = at_least(slices(DOWN, WIDEST), slices(HEAD, HIDDEN)) * TILE * ROWS * 4;  // of a tile
constexpr int MAX_DOWN_TILES = PIECES == 1 ? 2 : ceiling(HIDDEN / TILE, BLOCKS);  // tiles whose sums outlast a piece
constexpr int MAX_ROUND = at_most(64, THREADS / ROWS / (TILE / 2));               // a thread sums up a pair of a row
// Tiles between two barriers, an even number.
constexpr int ROUND =
    ROWS == 1 ? 64 : at_most(MAX_ROUND, ceiling(at_least(16 * 1024 / SUMS_BYTES, MAX_DOWN_TILES), 2) * 2);
static_assert(MAX_DOWN_TILES <= ROUND && ROUND % 2 == 0);
constexpr int PARTIAL_BYTES = ROUND * SUMS_BYTES;
constexpr int ACC_BYTES = WARPS * GROUP * HEAD_DIM * 4;
constexpr int WORK_BYTES = at_least(INPUT_BYTES + PARTIAL_BYTES, ACC_BYTES);
constexpr unsigned HEAD_LANES = HEAD_DIM == 128 ? ~0u : 0xffff;  // those that read a head
constexpr int MAX_STAGES = 8;
constexpr int PART = HEAD_DIM + STATS;  // words of a KV split of one head: acc, row_max, row_sum thrice

// Words of one of the two buffers of published activations: pairs of numbers of all rows, then the blocks' parts.
constexpr int X_AT = 0, QKV_AT = X_AT + ROWS * HIDDEN / 2, HEADS_AT = QKV_AT + ROWS * QKV_ROWS / 2;
constexpr int MID_AT = HEADS_AT + ROWS * HEADS_WIDTH / 2, INTERMEDIATE_AT = MID_AT + ROWS * HIDDEN / 2;
constexpr int PARTS_AT = INTERMEDIATE_AT + ROWS * INTERMEDIATE / 2;
constexpr int PUBLISHED_WORDS = PARTS_AT + SPLITS * Q_HEADS * PART;
static_assert(2 * PUBLISHED_WORDS <= HOST_WORDS, "the host allocates both buffers");

// MegakernelArguments has the same fields in the same order.
struct Arguments {
    const Number* const* layers;  // [num_layers][POINTERS]
    const Number *x, *final_norm, *lm_head, *cos, *sin;  // cos and sin: rows of 2 * HEAD_DIM
    const float* scales;  // of entries of 8 bits, [num_layers][K and V][KV_HEADS]
    Number* logits;
    Entry* pool;
    const int *slots, *kv_indptr, *kv_indices, *kv_last_page_len;
    const int* preceding;  // of each row, how many of those right before are of its sequence; null: none
    unsigned* published;  // [2][PUBLISHED_WORDS]
    unsigned* epoch;      // the layers before; how many blocks are done
    unsigned* tapped;     // [ROWS][MAX_TAPS][HIDDEN / 2]: what the layers `taps` take
    long long page_elements, layer_elements;
    int num_layers, vocab, page_size;
    int taps[MAX_TAPS];  // 0: none
    float eps, head_eps, scale;
};
static_assert(sizeof(Arguments) == HOST_ARGUMENT_BYTES);

// The positions of one row that a block attends to.
struct KVSplit {
    int row;         // negative: the block attends to nothing
    int index;       // among the row's `count` splits that have positions
    int count;
    int first_page;  // of the row, in kv_indices
    int stored;      // positions of the row in pages that this step does not write
    int preceding;   // rows right before that are of its sequence
    int begin;       // the split's first position
    int items;       // of `size` positions each, the last of fewer
    int size;

    __device__ int rows_before() const { return ROWS == 1 ? 0 : preceding; }
    __device__ int item_positions() const { return ITEM_POSITIONS == MMA_POSITIONS ? MMA_POSITIONS : size; }
};
#if ROWS == 1
using HeldSplit = const KVSplit;  // by each thread
#else
using HeldSplit = const KVSplit&;  // by the block: several rows leave no registers
#endif

// A block's shared memory besides its rings.
struct State {
    alignas(16) unsigned char work[WORK_BYTES];  // a product's input and sums; or heads; or the warps' acc
    unsigned long long arrivals[WARPS][MAX_STAGES];
    float softmax_stats[WARPS][GROUP][2];  // row_max and row_sum of each warp
    float squares[WARPS];
    float residual[ROWS][TILE * (HIDDEN / TILE / BLOCKS + 1)];  // the numbers of x that this block writes
    int begins[PHASES], counts[PHASES], items[PHASES];          // tiles of outputs; items of all warps
    KVSplit kv;                                                 // unless threads hold it
};
constexpr int STAGES = at_most(MAX_STAGES, (SHARED_BYTES - (int)sizeof(State) - 128) / (WARPS * STAGE_BYTES));
static_assert(STAGES >= 2, "no room for rings in shared memory");

struct Block {
    alignas(128) unsigned char ring[WARPS][STAGES][STAGE_BYTES];
    State state;
};
