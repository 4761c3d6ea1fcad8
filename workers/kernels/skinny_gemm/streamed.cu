// Skinny GEMMs, y = x · Wᵀ, whose weights stream through a ring in shared memory. The few rows of a decode step take as
// long as reading W takes, so memory must never be idle.
//
// A block has HEIGHT rows of W and all rows of x, TOKENS at most. One warp fetches both, 64 columns at a time, into the
// ring. The others multiply, 64 rows of x a warpgroup; with a smaller TOKENS the rest of these rows is ignored. Weights
// do not wait for the kernels before, only x does: a ring is full when the norm before it is done. SPLITS blocks of a
// cluster divide the columns, and add up each other's sums.
//
// GATED: y = silu(gate) · up, rounded where LayerKernels.silu_mul rounds. Blocks of 16 rows then are 8 of gate and the
// same 8 of up, as the map of W gathers them.
//
// streamed.py is the home of the constants that host and device part. It sets them on the compiler's command line:
// HALF, SLAB (columns at once), RING_ALIGNMENT, and KERNELS, which has a KERNEL(…) for each of its tilings.
#include "wgmma.cuh"

template <int TOKENS>
constexpr int GROUPS_OF = TOKENS < 64 ? 1 : TOKENS / 64;

template <int HEIGHT, int TOKENS, int ROOM>
struct Ring {
    // A product reads 64 rows of inputs: behind the last of a small TOKENS whatever stands there.
    static constexpr int SPARE = TOKENS < 64 ? (64 - TOKENS) * SLAB_BYTES : 0;
    static constexpr int BYTES = (HEIGHT + TOKENS) * SLAB_BYTES, STAGES = (ROOM - SPARE) / BYTES;
    unsigned begin;
    unsigned long long *full, *empty;  // [STAGES]

    __device__ unsigned weights(int stage) const { return begin + stage * BYTES; }
    __device__ unsigned inputs(int stage) const { return weights(stage) + HEIGHT * SLAB_BYTES; }
};

struct Part {  // of the product, a block's
    int tile, split, first_slab, slabs;
};

template <int HEIGHT, class R>
__device__ inline void fetch_all(const R& ring, const Part& part, const CUtensorMap& weights,
                                 const CUtensorMap& inputs) {
    unsigned long long policy = streaming_policy();
    int early = part.slabs < R::STAGES ? part.slabs : R::STAGES;
    auto fetch_slab = [&](int slab) {
        expect_bytes(&ring.full[slab % R::STAGES], R::BYTES);
        fetch_weights(ring.weights(slab % R::STAGES), weights, (part.first_slab + slab) * SLAB,
                      part.tile * (HEIGHT / 16), &ring.full[slab % R::STAGES], policy);
    };
    auto fetch_rows = [&](int slab) {
        fetch_inputs(ring.inputs(slab % R::STAGES), inputs, (part.first_slab + slab) * SLAB,
                     &ring.full[slab % R::STAGES]);
    };
    for (int slab = 0; slab < early; slab++) fetch_slab(slab);
    await_earlier_kernels();
    for (int slab = 0; slab < early; slab++) fetch_rows(slab);
    for (int slab = early; slab < part.slabs; slab++) {
        wait_for(&ring.empty[slab % R::STAGES], slab / R::STAGES - 1 & 1);
        fetch_slab(slab);
        fetch_rows(slab);
    }
}

template <int HEIGHT, class R>
__device__ inline void multiply_all(const R& ring, int slabs, int group, float (&acc)[HEIGHT / 2]) {
#pragma unroll
    for (int i = 0; i < HEIGHT / 2; i++) acc[i] = 0;
    for (int slab = 0; slab < slabs; slab++) {
        wait_for(&ring.full[slab % R::STAGES], slab / R::STAGES & 1);
        unsigned long long b = matrix(ring.weights(slab % R::STAGES));
        unsigned long long a = matrix(ring.inputs(slab % R::STAGES) + group * 64 * SLAB_BYTES);
        hold(acc);
        start_products();
#pragma unroll
        for (int k = 0; k < SLAB / 16; k++) multiply<HEIGHT>(acc, a + 2 * k, b + 2 * k);
        commit_products();
        hold(acc);
        await_products<1>();  // the slab before has been read
        if (slab > 0 && threadIdx.x % 32 == 0) pass(&ring.empty[(slab - 1) % R::STAGES]);
    }
    await_products<0>();
    hold(acc);
}

// Eight numbers of y from the sums of all blocks of the cluster. address: of the sums, the same in each block.
template <int SPLITS, bool GATED>
__device__ inline uint4 finish(unsigned address) {
    float values[16];
#pragma unroll
    for (int i = 0; i < (GATED ? 16 : 8); i += 4) {
        float4 sum = {0, 0, 0, 0};
#pragma unroll
        for (int block = 0; block < SPLITS; block++) {
            float4 one = SPLITS > 1 ? read_block(address + 4 * i, block)
                                    : *reinterpret_cast<float4*>(__cvta_shared_to_generic(address + 4 * i));
            sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        values[i] = sum.x, values[i + 1] = sum.y, values[i + 2] = sum.z, values[i + 3] = sum.w;
    }
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        float2 pair = {values[i], values[i + 1]};
        if constexpr (GATED) {
            float2 gate = rounded(pair), up = rounded({values[i + 8], values[i + 9]});
            float2 active = rounded({gate.x / (1 + __expf(-gate.x)), gate.y / (1 + __expf(-gate.y))});
            pair = {active.x * up.x, active.y * up.y};
        }
        words[i / 2] = pack(pair.x, pair.y);
    }
    return {words[0], words[1], words[2], words[3]};
}

// This warp's sums, as wgmma has them in registers, to where finish() finds them: [TOKENS, PITCH].
template <int HEIGHT, int TOKENS, int PITCH>
__device__ inline void leave_sums(unsigned begin, const float (&acc)[HEIGHT / 2]) {
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < HEIGHT / 2; i += 2) {
        int token = row + i / 2 % 2 * 8, output = i / 4 * 8 + threadIdx.x % 4 * 2;
        if (TOKENS >= 64 || token < TOKENS)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(begin + 4 * (token * PITCH + output)),
                         "f"(acc[i]), "f"(acc[i + 1])
                         : "memory");
    }
}

template <int HEIGHT, int TOKENS, int SPLITS, int ROOM, bool GATED>
__device__ inline void multiply_rows(const CUtensorMap& weights, const CUtensorMap& inputs, Number* y, int rows,
                                     int outputs, int columns) {
    using R = Ring<HEIGHT, TOKENS, ROOM>;
    constexpr int GROUPS = GROUPS_OF<TOKENS>, THREADS = 128 * GROUPS;
    constexpr int PITCH = HEIGHT + 4, OCTETS = HEIGHT / (GATED ? 16 : 8), TURN = (TOKENS + SPLITS - 1) / SPLITS;
    static_assert(4 * PITCH * TOKENS <= R::STAGES * R::BYTES, "sums overwrite the ring");
    SHARED_MEMORY(shared);
    __shared__ unsigned long long full[R::STAGES], empty[R::STAGES];
    R ring{(shared_address(shared) + RING_ALIGNMENT - 1) / RING_ALIGNMENT * RING_ALIGNMENT, full, empty};
    int slabs = columns / SLAB / SPLITS, split = blockIdx.x % SPLITS;
    Part part{(int)blockIdx.x / SPLITS, split, split * slabs, slabs};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < R::STAGES; stage++) {
            make_turnstile(&full[stage], 1);
            make_turnstile(&empty[stage], 4 * GROUPS);
        }
        publish_arrivals();
    }
    __syncthreads();
    launch_dependents();
    if (threadIdx.x >= THREADS) {
        if (threadIdx.x == THREADS) fetch_all<HEIGHT>(ring, part, weights, inputs);
        __syncwarp();
        if constexpr (SPLITS > 1) sync_cluster(), sync_cluster();
    } else {
        float acc[HEIGHT / 2];
        multiply_all<HEIGHT>(ring, slabs, threadIdx.x / 128, acc);
        sync_threads(THREADS);  // all of the ring has been read
        leave_sums<HEIGHT, TOKENS, PITCH>(ring.begin, acc);
        if constexpr (SPLITS > 1) sync_cluster();
        else sync_threads(THREADS);
        await_earlier_kernels();  // they may still read what stood in y
        for (int item = threadIdx.x; item < TURN * OCTETS; item += THREADS) {
            int token = split * TURN + item / OCTETS, octet = item % OCTETS, output = (part.tile * OCTETS + octet) * 8;
            if (token < rows && output < outputs)
                *reinterpret_cast<uint4*>(y + (long long)token * outputs + output) =
                    finish<SPLITS, GATED>(ring.begin + 4 * (token * PITCH + octet * (GATED ? 16 : 8)));
        }
        if constexpr (SPLITS > 1) sync_cluster();  // others read these sums
    }
}

// room: KiB.
#define KERNEL(height, tokens, splits, room, gated) \
    extern "C" __global__ void __launch_bounds__(128 * GROUPS_OF<tokens> + 32, 1) \
        streamed_gemm_##height##_##tokens##_##splits##_##gated(const __grid_constant__ CUtensorMap weights, \
                                                             const __grid_constant__ CUtensorMap inputs, Number* y, \
                                                             int rows, int outputs, int columns) { \
        multiply_rows<height, tokens, splits, room * 1024, gated>(weights, inputs, y, rows, outputs, columns); \
    }
KERNELS
