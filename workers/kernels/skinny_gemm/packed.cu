// Skinny GEMMs y = x · Wᵀ of weights in 4 bits, packed as PackedLinear says, with up to 8 · OCTETS rows of x. They take as
// long as reading W takes: numbers become x's in registers, right where a tensor core wants them.
//
// A block has 16 · TILES rows of W, and its warps divide the columns. Of 128 columns each of the four threads that a
// tensor core gives a row has 32 neighbours: 16 bytes of numbers, one scale, and the same columns of x. Which column a
// tensor core thinks a thread has does not matter, as W and x agree. Numbers i and i + 4 of a word make one register.
// Weights do not wait for the kernels before, only x does.
//
// Numbers and scales of a warp's next AHEAD tiles are on their way while it multiplies. Beyond the last column a thread
// multiplies whatever it has by 0.
//
// With experts, each block of pairs (see ExpertBlocks) is multiplied by its expert's matrix, in parts of 8 · OCTETS.
// Parts and blocks of the same rows of W are neighbours, so that memory is read once.
//
// packed.py is the home of the constants that host and device share. It sets them on the compiler's command line: HALF,
// WARPS, and KERNELS, which has a KERNEL(…) for each of its tilings.
#include "../cuda/device.cuh"

constexpr int UNIT = 32;  // columns of a thread, which share a scale
constexpr int AHEAD = 4;  // tiles of a warp that are on their way

struct Arguments {
    const unsigned short* x;        // [pairs / fan_out, columns], rows x_row apart
    const unsigned char* numbers;   // [experts, rows, columns / 2]
    const void* scales;             // [experts, rows, groups]
    const unsigned char* zeros;     // the same, or null: 8
    const unsigned short* bias;     // [experts, rows], or null
    const float* factors;           // [pairs], or null
    unsigned short* y;              // [pairs, rows]
    const int* pairs;               // see ExpertBlocks; null: all of x
    const int* experts;             // of so many pairs each: width
    int num_pairs, num_experts, num_blocks, width, rows, columns, groups, x_row, fan_out;
    int shift;  // a group has UNIT << shift columns
};

// A group's scale and zero: fetched as they are stored, and made ready, twice each, where they are used.
template <bool E2M1>
struct Scale;

template <>
struct Scale<false> {
    static constexpr unsigned MAGIC = HALF ? 0x64006400 : 0x43004300;  // 1024 or 128, whose last bit counts ones
    unsigned scale, zero;

    __device__ static Scale fetch(const Arguments& a, long long at) {
        return {static_cast<const unsigned short*>(a.scales)[at], a.zeros ? a.zeros[at] : 8u};
    }

    __device__ Scale ready() const { return {scale | scale << 16, MAGIC | zero | zero << 16}; }

    // Numbers i and i + 4 of a word.
    __device__ unsigned weights(unsigned word, int i) const {
        unsigned both = (word >> 4 * i & 0x000f000f) | MAGIC;
        return multiply_pairs(subtract_pairs(both, zero), scale);
    }
};

#if !HALF
template <>
struct Scale<true> {
    unsigned scale, more;  // a number's bits are those of a bfloat16 2^126 times too small

    __device__ static Scale fetch(const Arguments& a, long long at) {
        return {static_cast<const unsigned char*>(a.scales)[at], 0};
    }

    __device__ Scale ready() const {
        unsigned most = scale < 128 ? scale : 128, first = (most + 126) << 7, second = (127 + scale - most) << 7;
        return {first | first << 16, second | second << 16};
    }

    __device__ unsigned weights(unsigned word, int i) const {
        unsigned both = word >> 4 * i;
        unsigned number = multiply_pairs((both & 0x00080008) << 12 | (both & 0x00070007) << 6, scale);
        return more == 0x3f803f80 ? number : multiply_pairs(number, more);
    }
};
#endif

template <int TILES, int OCTETS, bool E2M1>
__device__ inline void multiply_rows(const Arguments& a) {
    constexpr int HEIGHT = 16 * TILES, TOKENS = 8 * OCTETS, PITCH = TOKENS + 1, STEPS = AHEAD / TILES;
    SHARED_MEMORY(memory);
    float* sums = reinterpret_cast<float*>(memory);  // [WARPS][HEIGHT][PITCH]
    int block = blockIdx.x % a.num_blocks, tile = blockIdx.x / a.num_blocks;
    int warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, part = threadIdx.x % 4, units = a.columns / UNIT;
    launch_dependents();
    long long expert = 0;
    if (a.experts) {
        await_earlier_kernels();
        expert = a.experts[block * TOKENS / a.width];
        if (expert >= a.num_experts || a.pairs[block * TOKENS] >= a.num_pairs) return;
    }
    long long lines[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        int line = tile * HEIGHT + 8 * i + row;
        lines[i] = expert * a.rows + (line < a.rows ? line : a.rows - 1);
    }
    uint4 words[STEPS][2 * TILES];
    Scale<E2M1> scales[STEPS][2 * TILES];
    auto fetch = [&](int step, int unit) {
        int there = unit < units ? unit : 0;
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            words[step][i] = read_once(a.numbers + (lines[i] * units + there) * (UNIT / 2));
            scales[step][i] = Scale<E2M1>::fetch(a, lines[i] * a.groups + (there >> a.shift));
        }
    };
#pragma unroll
    for (int step = 0; step < STEPS; step++) fetch(step, 4 * (warp + step * WARPS) + part);
    await_earlier_kernels();
    const uint4* inputs[OCTETS];
#pragma unroll
    for (int octet = 0; octet < OCTETS; octet++) {
        int place = block * TOKENS + octet * 8 + row, pair = a.pairs ? a.pairs[place] : place;
        inputs[octet] =
            pair < a.num_pairs ? reinterpret_cast<const uint4*>(a.x + (long long)(pair / a.fan_out) * a.x_row) : nullptr;
    }
    float acc[TILES][OCTETS][4] = {};
    for (int first = 4 * warp + part; first - part < units; first += 4 * STEPS * WARPS) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            int unit = first + 4 * step * WARPS;
            Scale<E2M1> ready[2 * TILES];
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) ready[i] = scales[step][i].ready();
#pragma unroll
            for (int word = 0; word < 4; word++) {
                uint4 x[OCTETS];
#pragma unroll
                for (int octet = 0; octet < OCTETS; octet++)
                    x[octet] = inputs[octet] && unit < units ? inputs[octet][unit * (UNIT / 8) + word] : uint4{};
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        unsigned above = reinterpret_cast<const unsigned*>(&words[step][2 * i])[word];
                        unsigned below = reinterpret_cast<const unsigned*>(&words[step][2 * i + 1])[word];
                        TileA tile{ready[2 * i].weights(above, 2 * half), ready[2 * i + 1].weights(below, 2 * half),
                                   ready[2 * i].weights(above, 2 * half + 1),
                                   ready[2 * i + 1].weights(below, 2 * half + 1)};
#pragma unroll
                        for (int octet = 0; octet < OCTETS; octet++) {
                            unsigned low = half ? x[octet].y : x[octet].x, high = half ? x[octet].w : x[octet].z;
                            multiply_tiles(acc[i][octet], tile,
                                           TileB{__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)});
                        }
                    }
            }
            if (unit - part + 4 * STEPS * WARPS < units) fetch(step, unit + 4 * STEPS * WARPS);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++)
#pragma unroll
            for (int one = 0; one < 4; one++)
                sums[(warp * HEIGHT + 16 * i + row + one / 2 * 8) * PITCH + octet * 8 + 2 * part + one % 2] =
                    acc[i][octet][one];
    __syncthreads();
    for (int item = threadIdx.x; item < HEIGHT * TOKENS; item += 32 * WARPS) {
        int place = block * TOKENS + item / HEIGHT, height = item % HEIGHT, output = tile * HEIGHT + height;
        int pair = a.pairs ? a.pairs[place] : place;
        if (output >= a.rows || pair >= a.num_pairs) continue;
        float sum = 0;
#pragma unroll
        for (int one = 0; one < WARPS; one++) sum += sums[(one * HEIGHT + height) * PITCH + item / HEIGHT];
        if (a.bias) sum += unpack(a.bias[expert * a.rows + output]).x;
        if (a.factors) sum *= a.factors[pair];
        a.y[(long long)pair * a.rows + output] = pack(sum, 0);
    }
}

#define KERNEL(tiles, octets, e2m1) \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) \
        packed_gemm_##tiles##_##octets##_##e2m1(const __grid_constant__ Arguments arguments) { \
        multiply_rows<tiles, octets, e2m1>(arguments); \
    }
KERNELS
