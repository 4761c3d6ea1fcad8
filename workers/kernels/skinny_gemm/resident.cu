// Skinny GEMMs of up to 32 rows whose weights are resident in shared memory, and the operations around them: the norm of
// the rows before, and silu or the sum with the residual behind.
//
// The weights of a narrow layer fit into the shared memories of all multiprocessors. A block fetches its part of W,
// whole, while the kernels before run. Once these are done its warps read its columns of all rows of x into registers.
// So little more than the time to fetch x once stands between two kernels. PARTS blocks of a cluster have columns of
// their own of the same rows of W: more blocks then have fewer columns of x each.
//
// resident.py is the home of the constants that host and device share. It sets them on the compiler's command line:
//   the model      HIDDEN, INTERMEDIATE, HEADS, HALF, and OCTETS of each product
//   the launch     WARPS, SPLITS, HOST_ARGUMENT_BYTES, and BYTES_1 and BYTES_2 of each product: shared memory by TILES
//   the tiling     CHUNK (columns at once: 8 of four rows of W and x for each lane), SPREAD (bytes behind a row of W in
//                  shared memory: neighbours stand in unlike banks), BARRIER_BYTES
#include "../cuda/device.cuh"

enum Kind { normed, gated, added };  // norm(x) · Wᵀ; silu(gate) · up of such; y + x · Wᵀ

constexpr int THREADS = 32 * WARPS;
constexpr int LOADS = 8;  // tiles of a chunk that are under way at once, where x need not be normed

struct Arguments {
    const Number *weights, *gains, *x;
    Number* y;
    int rows, outputs;
    float eps;
};
static_assert(sizeof(Arguments) == HOST_ARGUMENT_BYTES);

// A block has OCTETS times eight rows of W (gated: half of them gates, then their ups) and TILES times 16 rows of x.
template <int KIND, int COLUMNS, int OCTETS, int PARTS, int TILES, int HOST_BYTES>
struct Product {
    static constexpr bool NORM = KIND != added;
    static constexpr int TOKENS = 16 * TILES, ROWS = 8 * OCTETS, OUTPUTS = KIND == gated ? ROWS / 2 : ROWS;
    static constexpr int PART = COLUMNS / PARTS, CHUNKS = PART / CHUNK, TURNS = (CHUNKS + WARPS - 1) / WARPS;
    static constexpr int AHEAD = NORM || TURNS < LOADS / TILES ? TURNS : LOADS / TILES;
    static constexpr int PITCH = 2 * PART + SPREAD, GAIN_BYTES = NORM ? 2 * COLUMNS : 0;
    static constexpr int SUM_PITCH = 8 * (OCTETS | 1);  // floats; of lanes that store at once all banks are unlike
    static constexpr int SETS = WARPS + (PARTS > 1);  // of sums: each warp's, and the block's
    static constexpr int SUM_BYTES = 4 * SETS * TOKENS * SUM_PITCH;
    static constexpr int WEIGHT_BYTES = ROWS * PITCH > SUM_BYTES ? ROWS * PITCH : SUM_BYTES;  // sums overwrite them
    static constexpr int SQUARE_BYTES = NORM ? 4 * TOKENS * WARPS : 0;
    static constexpr int BYTES = BARRIER_BYTES + WEIGHT_BYTES + GAIN_BYTES + SQUARE_BYTES;
    static_assert(BYTES == HOST_BYTES, "the host launches with shared_bytes()");
    static constexpr int PAIRS = OUTPUTS / 2, TURN = TOKENS / PARTS, ITEMS = TURN * PAIRS;  // that a block finishes
    static_assert(COLUMNS % (CHUNK * PARTS) == 0 && (KIND != gated || OCTETS % 2 == 0));
    static_assert(PARTS == 1 || KIND == added);
    static_assert(KIND != added || ITEMS <= THREADS, "a thread keeps one residual");

    const Arguments& args;
    unsigned char* shared;
    int warp, lane, tile, split;
    uint4 held[AHEAD][TILES][2];
    float acc[TILES][OCTETS][4];

    __device__ Product(const Arguments& args, unsigned char* shared)
        : args(args), shared(shared), warp(threadIdx.x / 32), lane(threadIdx.x % 32), tile(blockIdx.x / PARTS),
          split(blockIdx.x % PARTS) {}

    __device__ unsigned long long* barrier() const { return reinterpret_cast<unsigned long long*>(shared); }
    __device__ unsigned char* weights() const { return shared + BARRIER_BYTES; }
    __device__ unsigned char* gains() const { return weights() + WEIGHT_BYTES; }
    __device__ float* squares() const { return reinterpret_cast<float*>(gains() + GAIN_BYTES); }
    __device__ int chunk(int turn) const { return turn * WARPS + warp; }
    __device__ bool inside(int turn) const { return CHUNKS % WARPS == 0 || chunk(turn) < CHUNKS; }

    // By the first warp: all weights are on their way.
    __device__ void fetch_weights() {
        if (lane == 0) {
            make_arrival(barrier());
            publish_arrivals();
            expect_bytes(barrier(), ROWS * 2 * PART + GAIN_BYTES);
        }
        __syncwarp();
        unsigned long long policy = streaming_policy();
        for (int row = lane; row < ROWS; row += 32) {
            bool up = KIND == gated && row >= OUTPUTS;
            long long output = (long long)tile * OUTPUTS + (up ? row - OUTPUTS + args.outputs : row);
            const Number* source = args.weights + output * COLUMNS + split * PART;
            fetch(weights() + row * PITCH, source, 2 * PART, barrier(), policy);
        }
        if (NORM && lane == 0) fetch(gains(), args.gains, GAIN_BYTES, barrier(), policy);
    }

    // Of rows lane / 4 and 8 further on of each tile, 8 columns of the turn's chunk.
    __device__ void load(int turn) {
#pragma unroll
        for (int half = 0; half < 2 * TILES; half++) {
            int row = 8 * half + lane / 4;
            uint4 numbers = {0, 0, 0, 0};
            if (row < args.rows && inside(turn))
                numbers = read_words(reinterpret_cast<const unsigned*>(args.x + row * COLUMNS + split * PART) +
                                     chunk(turn) * (CHUNK / 2) + lane % 4 * 4);
            held[turn % AHEAD][half / 2][half % 2] = numbers;
        }
    }

    // All of x is held: it becomes itself ÷ its root mean square · gains, rounded where LayerKernels.add_rms_norm rounds.
    __device__ void normalize() {
#pragma unroll
        for (int half = 0; half < 2 * TILES; half++) {
            float sum = 0;
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                uint4 numbers = held[turn][half / 2][half % 2];
                const unsigned words[] = {numbers.x, numbers.y, numbers.z, numbers.w};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float2 pair = unpack(words[i]);
                    sum += pair.x * pair.x + pair.y * pair.y;
                }
            }
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) squares()[(8 * half + lane / 4) * WARPS + warp] = sum;
        }
        __syncthreads();
        wait_for(barrier(), 0);
#pragma unroll
        for (int half = 0; half < 2 * TILES; half++) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < WARPS; i++) sum += squares()[(8 * half + lane / 4) * WARPS + i];
            float inverse = 1 / sqrtf(sum / COLUMNS + args.eps);
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++)
                if (inside(turn)) weigh(held[turn][half / 2][half % 2], inverse, turn);
        }
    }

    __device__ void weigh(uint4& numbers, float inverse, int turn) const {
        uint4 gain = *reinterpret_cast<const uint4*>(gains() + chunk(turn) * (2 * CHUNK) + lane % 4 * 16);
        const unsigned words[] = {numbers.x, numbers.y, numbers.z, numbers.w};
        const unsigned factors[] = {gain.x, gain.y, gain.z, gain.w};
        unsigned made[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 pair = unpack(words[i]);
            made[i] = multiply_pairs(pack(pair.x * inverse, pair.y * inverse), factors[i]);
        }
        numbers = {made[0], made[1], made[2], made[3]};
    }

    // A lane's columns are its own of x and W alike, so that it reads 16 bytes of each at once.
    __device__ void multiply(int turn) {
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++) {
            uint4 w = *reinterpret_cast<const uint4*>(weights() + (8 * octet + lane / 4) * PITCH +
                                                      chunk(turn) * (2 * CHUNK) + lane % 4 * 16);
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                uint4 upper = held[turn % AHEAD][tile][0], lower = held[turn % AHEAD][tile][1];
                multiply_tiles(acc[tile][octet], {upper.x, lower.x, upper.y, lower.y}, {w.x, w.y});
                multiply_tiles(acc[tile][octet], {upper.z, lower.z, upper.w, lower.w}, {w.z, w.w});
            }
        }
    }

    __device__ void multiply_all() {
#pragma unroll
        for (int turn = 0; turn < AHEAD; turn++) load(turn);
        if constexpr (NORM) normalize();
        else wait_for(barrier(), 0);
#pragma unroll
        for (int i = 0; i < TILES * OCTETS * 4; i++) acc[i / 4 / OCTETS][i / 4 % OCTETS][i % 4] = 0;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
            if (inside(turn)) multiply(turn);
            if (turn + AHEAD < TURNS) load(turn + AHEAD);
        }
    }

    __device__ float2* sum_at(int of_warp, int token, int output) const {
        return reinterpret_cast<float2*>(weights()) + ((of_warp * TOKENS + token) * SUM_PITCH + output) / 2;
    }

    __device__ void leave_sums() const {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int octet = 0; octet < OCTETS; octet++) {
                const float* own = acc[tile][octet];
                int token = 16 * tile + lane / 4, output = 8 * octet + lane % 4 * 2;
                *sum_at(warp, token, output) = {own[0], own[1]};
                *sum_at(warp, token + 8, output) = {own[2], own[3]};
            }
    }

    // Of the sets of sums from `first` on.
    __device__ float2 sum_of(int first, int sets, int token, int output) const {
        float2 all = {0, 0};
#pragma unroll
        for (int set = first; set < first + sets; set++) {
            float2 one = *sum_at(set, token, output);
            all.x += one.x, all.y += one.y;
        }
        return all;
    }

    // Each block's sums of all its warps, where the others of its cluster read them.
    __device__ void publish_sums() const {
        for (int item = threadIdx.x; item < TOKENS * PAIRS; item += THREADS) {
            int token = item / PAIRS, output = item % PAIRS * 2;
            *sum_at(WARPS, token, output) = sum_of(0, WARPS, token, output);
        }
        sync_cluster();
    }

    __device__ float2 collect(int token, int output) const {
        if constexpr (PARTS == 1) return rounded(sum_of(0, WARPS, token, output));
        float2 all = {0, 0};
#pragma unroll
        for (int block = 0; block < PARTS; block++) {
            float2 one = read_pair(sum_at(WARPS, token, output), block);
            all.x += one.x, all.y += one.y;
        }
        return rounded(all);
    }

    __device__ int token_of(int item) const { return split * TURN + item / PAIRS; }

    __device__ unsigned* output_of(int item) const {
        return reinterpret_cast<unsigned*>(args.y + token_of(item) * args.outputs) + tile * PAIRS + item % PAIRS;
    }

    __device__ void finish(unsigned residual) const {
        for (int item = threadIdx.x; item < ITEMS && token_of(item) < args.rows; item += THREADS) {
            int token = token_of(item), output = item % PAIRS * 2;
            float2 pair = collect(token, output);
            if (KIND == gated) {
                float2 up = collect(token, OUTPUTS + output);
                float2 active = rounded({pair.x / (1 + expf(-pair.x)), pair.y / (1 + expf(-pair.y))});
                pair = {active.x * up.x, active.y * up.y};
            }
            if (KIND == added) {
                float2 before = unpack(residual);
                pair.x += before.x, pair.y += before.y;
            }
            *output_of(item) = pack(pair.x, pair.y);
        }
    }

    __device__ void run() {
        if (warp == 0) fetch_weights();
        __syncthreads();
        launch_dependents();
        await_earlier_kernels();
        unsigned residual = 0;
        if (KIND == added && threadIdx.x < ITEMS && token_of(threadIdx.x) < args.rows)
            residual = read_word(output_of(threadIdx.x));
        multiply_all();
        __syncthreads();  // all weights have been read
        leave_sums();
        __syncthreads();
        if constexpr (PARTS > 1) publish_sums();
        finish(residual);
        if constexpr (PARTS > 1) sync_cluster();  // others read these sums
    }
};

// The four products of a layer, of a model for which this is compiled.
#define KERNEL(name, kind, columns, octets, splits, tiles, bytes) \
    using name##_##tiles##_product = Product<kind, columns, octets, splits, tiles, bytes>; \
    extern "C" __global__ void __launch_bounds__(THREADS) name##_##tiles(const __grid_constant__ Arguments args) { \
        SHARED_MEMORY(shared); \
        name##_##tiles##_product(args, shared).run(); \
    }
#define LAYER(tiles) \
    KERNEL(qkv, normed, HIDDEN, QKV_OCTETS, 1, tiles, QKV_BYTES_##tiles) \
    KERNEL(o, added, HEADS, O_OCTETS, SPLITS, tiles, O_BYTES_##tiles) \
    KERNEL(gate_up, gated, HIDDEN, GATE_UP_OCTETS, 1, tiles, GATE_UP_BYTES_##tiles) \
    KERNEL(down, added, INTERMEDIATE, DOWN_OCTETS, SPLITS, tiles, DOWN_BYTES_##tiles)
LAYER(1)
LAYER(2)
