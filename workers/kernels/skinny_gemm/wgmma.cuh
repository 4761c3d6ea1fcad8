// Products on Hopper's tensor cores, and the tensor copies that feed them, for which C++ has no words.
//
// Operands stand in shared memory as the copies leave them with a swizzle of 128 bytes: rows of 64 numbers, 128 bytes
// each, in groups of eight rows (1,024 bytes, aligned so).
#pragma once
#include "../cuda/device.cuh"
#include <cuda.h>

constexpr int SLAB_BYTES = 2 * SLAB;  // of a row of an operand; SLAB is set by streamed.py
static_assert(SLAB_BYTES == 128, "the swizzle's");

__device__ inline void make_turnstile(unsigned long long* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void pass(unsigned long long* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// See streamed.py for the dimensions of both maps.
__device__ inline void fetch_weights(unsigned target, const CUtensorMap& map, int column, int block,
                                     unsigned long long* barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(target),
        "l"(&map), "r"(column), "r"(0), "r"(block), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

__device__ inline void fetch_inputs(unsigned target, const CUtensorMap& map, int column,
                                    unsigned long long* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            target),
        "l"(&map), "r"(column), "r"(0), "r"(shared_address(barrier))
        : "memory");
}

// The descriptor of an operand; the next 16 columns are 2 further.
__device__ inline unsigned long long matrix(unsigned address) {
    constexpr unsigned long long GROUP = 1024 >> 4, SWIZZLE_128 = 1ull << 62;
    return (unsigned long long)((address & 0x3FFFF) >> 4) | 1ull << 16 | GROUP << 32 | SWIZZLE_128;
}

#if HALF
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {"
#else
#define WGMMA(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {"
#endif
#define TEN(t) \
    "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define FIRST_TEN "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
#define SUMS(a, b, c, d) "+f"(acc[a]), "+f"(acc[b]), "+f"(acc[c]), "+f"(acc[d])
#define SUMS_16(n) \
    SUMS(n, n + 1, n + 2, n + 3), SUMS(n + 4, n + 5, n + 6, n + 7), SUMS(n + 8, n + 9, n + 10, n + 11), \
        SUMS(n + 12, n + 13, n + 14, n + 15)

// acc += a · bᵀ, asynchronously: a [64, 16], b [N, 16].
template <int N>
__device__ inline void multiply(float (&acc)[N / 2], unsigned long long a, unsigned long long b) {
    if constexpr (N == 64)
        asm volatile(WGMMA(64) FIRST_TEN TEN(1) TEN(2) "%30, %31}, %32, %33, 1, 1, 1, 0, 0;"
                     : SUMS_16(0), SUMS_16(16)
                     : "l"(a), "l"(b));
    else if constexpr (N == 96)
        asm volatile(WGMMA(96) FIRST_TEN TEN(1) TEN(2) TEN(3)
                     "%40, %41, %42, %43, %44, %45, %46, %47}, %48, %49, 1, 1, 1, 0, 0;"
                     : SUMS_16(0), SUMS_16(16), SUMS_16(32)
                     : "l"(a), "l"(b));
    else
        asm volatile(WGMMA(192) FIRST_TEN TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8)
                     "%90, %91, %92, %93, %94, %95}, %96, %97, 1, 1, 1, 0, 0;"
                     : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80)
                     : "l"(a), "l"(b));
}

// The compiler is not to move what touches these across this point.
template <int N>
__device__ inline void hold(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(acc[i])::"memory");
}

__device__ inline void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all groups of products are done but the last OPEN.
template <int OPEN>
__device__ inline void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(OPEN) : "memory");
}

__device__ inline void sync_threads(int count) { asm volatile("bar.sync 1, %0;" ::"r"(count) : "memory"); }

// Four numbers in shared memory, at this address, of block `rank` of the cluster.
__device__ inline float4 read_block(unsigned address, unsigned rank) {
    float4 numbers;
    asm volatile(
        "{ .reg .u32 there; mapa.shared::cluster.u32 there, %4, %5;"
        " ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there]; }"
        : "=f"(numbers.x), "=f"(numbers.y), "=f"(numbers.z), "=f"(numbers.w)
        : "r"(address), "r"(rank)
        : "memory");
    return numbers;
}
