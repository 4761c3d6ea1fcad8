// Instructions of a Hopper GPU for which C++ has no words. Nothing waits without bound: a wait that outlasts PATIENCE
// ends the kernel with a trap, and the host's next call fails. EMULATED_DEVICE: a header with the same functions for a
// CPU, in which tests run the kernels.
#pragma once
#ifdef EMULATED_DEVICE
#include EMULATED_DEVICE
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

constexpr long long PATIENCE = 1LL << 34;  // cycles: nine seconds

__device__ inline void check_patience(long long began) {
    if (clock64() - began > PATIENCE) __trap();
}

// Words of 32 bits that blocks write and read at the same time.
__device__ inline void write_word(unsigned* target, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(target), "r"(word) : "memory");
}

__device__ inline void write_words(unsigned* target, uint4 words) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(target), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w)
                 : "memory");
}

__device__ inline unsigned read_word(const unsigned* source) {
    unsigned word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(source) : "memory");
    return word;
}

__device__ inline uint4 read_words(const unsigned* source) {
    uint4 words;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(source)
                 : "memory");
    return words;
}

// Copies to shared memory that a barrier there counts the bytes of.
__device__ inline unsigned shared_address(const void* pointer) { return (unsigned)__cvta_generic_to_shared(pointer); }

__device__ inline void make_arrival(unsigned long long* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ inline void publish_arrivals() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void expect_bytes(unsigned long long* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ inline unsigned long long streaming_policy() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ inline void fetch(void* target, const void* source, unsigned bytes, unsigned long long* barrier,
                             unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

// 16 bytes that nobody reads again.
__device__ inline uint4 read_once(const void* source) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(source));
    return words;
}

__device__ inline void prefetch(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

__device__ inline bool has_arrived(unsigned long long* barrier, unsigned parity) {
    unsigned done;
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return done;
}

__device__ inline void wait_for(unsigned long long* barrier, unsigned parity) {
    long long began = clock64();
    while (!has_arrived(barrier, parity)) check_patience(began);
}

__device__ inline void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Two numbers in shared memory, at this address, of block `rank` of the cluster.
__device__ inline float2 read_pair(const float2* source, unsigned rank) {
    float2 numbers;
    asm volatile(
        "{ .reg .u32 there; mapa.shared::cluster.u32 there, %2, %3; ld.shared::cluster.v2.f32 {%0, %1}, [there]; }"
        : "=f"(numbers.x), "=f"(numbers.y)
        : "r"(shared_address(source)), "r"(rank)
        : "memory");
    return numbers;
}

// Programmatic dependent launch: see dependent_launch.py.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Two numbers of float16 in one register.
__device__ inline float2 unpack_half(unsigned bits) { return __half22float2(*reinterpret_cast<__half2*>(&bits)); }
__device__ inline unsigned pack_half(float low, float high) {
    __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned*>(&both);
}

// Two numbers of 8 bits (e4m3): as float16, which has them all; and rounded, saturated (NaN stays NaN).
__device__ inline unsigned widen(unsigned short both) {
    unsigned wide;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(both));
    return wide;
}
__device__ inline unsigned short narrow(float low, float high) {
    unsigned short both;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
    return both;
}

// Byte FIRST of four and the next one, as 16 bits each, of which the upper eight repeat the byte's sign.
template <int FIRST>
__device__ inline unsigned extend_signs(unsigned four) {
    unsigned both;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(both) : "r"(four), "n"(0x9180 + 0x1111 * FIRST));
    return both;
}

// Two of the kernel's numbers.
#if HALF
using Number = __half;
__device__ inline float2 unpack(unsigned bits) { return unpack_half(bits); }
__device__ inline unsigned pack(float low, float high) { return pack_half(low, high); }
__device__ inline unsigned multiply_pairs(unsigned one, unsigned other) {
    __half2 both = __hmul2(*reinterpret_cast<__half2*>(&one), *reinterpret_cast<__half2*>(&other));
    return *reinterpret_cast<unsigned*>(&both);
}
__device__ inline unsigned subtract_pairs(unsigned one, unsigned other) {
    __half2 both = __hsub2(*reinterpret_cast<__half2*>(&one), *reinterpret_cast<__half2*>(&other));
    return *reinterpret_cast<unsigned*>(&both);
}
#else
using Number = __nv_bfloat16;
__device__ inline float2 unpack(unsigned bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
__device__ inline unsigned pack(float low, float high) {
    __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned*>(&both);
}
__device__ inline unsigned multiply_pairs(unsigned one, unsigned other) {
    __nv_bfloat162 both = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&one), *reinterpret_cast<__nv_bfloat162*>(&other));
    return *reinterpret_cast<unsigned*>(&both);
}
__device__ inline unsigned subtract_pairs(unsigned one, unsigned other) {
    __nv_bfloat162 both = __hsub2(*reinterpret_cast<__nv_bfloat162*>(&one), *reinterpret_cast<__nv_bfloat162*>(&other));
    return *reinterpret_cast<unsigned*>(&both);
}
#endif
__device__ inline float2 rounded(float2 both) { return unpack(pack(both.x, both.y)); }

// Adds a product of tiles to acc, by the whole warp: 16 rows of `a` and 8 of `b`, of 16 columns (mma.m16n8k16: a
// lane has columns 2 * (lane % 4) and the one behind, here and 8 further on, of rows lane / 4, and of `a` 8 further
// down), or of 8 (mma.m16n8k8).
struct TileA {
    unsigned upper, lower, upper_right, lower_right;
};
struct TileB {
    unsigned left, right;
};
#define MULTIPLY_TILES(name, type)                                                                             \
    __device__ inline void name(float (&acc)[4], TileA a, TileB b) {                                           \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                    \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                    \
                     : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                                  \
                     : "r"(a.upper), "r"(a.lower), "r"(a.upper_right), "r"(a.lower_right), "r"(b.left),        \
                       "r"(b.right));                                                                          \
    }                                                                                                          \
    __device__ inline void name(float (&acc)[4], uint2 a, unsigned b) {                                        \
        asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                                     \
                     ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                                \
                     : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])                                  \
                     : "r"(a.x), "r"(a.y), "r"(b));                                                            \
    }
MULTIPLY_TILES(multiply_half_tiles, "f16")
#if HALF
MULTIPLY_TILES(multiply_tiles, "f16")
#else
MULTIPLY_TILES(multiply_tiles, "bf16")
#endif
#endif  // EMULATED_DEVICE
