// What packets (exchange.cu) and streamed sums (streams.cuh) share: the memory in which ranks meet, waits that end, and
// sums in float32.
//
// An area, one of each rank, zeroed before the first launch:
//
//   0        a Header
//   HEADER   slots [2 of even and odd epochs][2 phases][size] of slot_packets: packets that each rank has sent to this one
//   behind   buffers of streamed sums
//
// A wait looks at the clock and at an abort word in the host's memory now and then. To give up it leaves a word there,
// which says why, and traps: nothing behind it on the device runs, and the host's next call fails.
#pragma once
#ifdef EMULATED_DEVICE
#include EMULATED_DEVICE
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>

struct Packet {
    unsigned long long data, epoch;
};
struct alignas(16) Vector {
    unsigned long long low, high;
};

__device__ inline void store_packet(Packet* target, Packet packet) {
    asm volatile("{ .reg .b128 both; mov.b128 both, {%1, %2}; st.relaxed.sys.global.b128 [%0], both; }" ::"l"(target),
                 "l"(packet.data), "l"(packet.epoch)
                 : "memory");
}
__device__ inline Packet load_packet(const Packet* source) {
    Packet packet;
    asm volatile("{ .reg .b128 both; ld.relaxed.sys.global.b128 both, [%2]; mov.b128 {%0, %1}, both; }"
                 : "=l"(packet.data), "=l"(packet.epoch)
                 : "l"(source)
                 : "memory");
    return packet;
}
// Not from L1, which may be older than a peer's store.
__device__ inline Vector load_vector(const Vector* source) {
    Vector vector;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(vector.low), "=l"(vector.high)
                 : "l"(source)
                 : "memory");
    return vector;
}
// Who acquires this value sees all stores of this block before its last barrier.
__device__ inline void release_flag(unsigned long long* flag, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ inline unsigned long long acquire_flag(const unsigned long long* flag) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}
__device__ inline long long load_word(const long long* source) {
    long long word;
    asm volatile("ld.relaxed.sys.global.s64 %0, [%1];" : "=l"(word) : "l"(source) : "memory");
    return word;
}
__device__ inline void store_word(long long* target, long long word) {
    asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(target), "l"(word) : "memory");
}
__device__ inline unsigned long long nanoseconds() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void await_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ inline float widen(float number) { return number; }
__device__ inline float widen(__half number) { return __half2float(number); }
__device__ inline float widen(__nv_bfloat16 number) { return __bfloat162float(number); }
__device__ inline void narrow(float& number, float wide) { number = wide; }
__device__ inline void narrow(__half& number, float wide) { number = __float2half_rn(wide); }
__device__ inline void narrow(__nv_bfloat16& number, float wide) { number = __float2bfloat16_rn(wide); }
#endif

using Data = unsigned long long;

// The device counts, because the host replays launches in CUDA graphs. Each block has counts of its own, which no other
// block of its rank reads or writes. So none needs to know when the others are done.
struct Header {
    Data epochs[MOST_BLOCKS];             // of each block: exchanges of packets that are done
    Data rounds[MOST_BLOCKS];             // of each block: rounds of streamed sums that are done
    Data flags[MOST_BLOCKS][MAX_GPU_RANKS];  // rounds that each rank's block of that number has signaled
};
static_assert(sizeof(Header) == HEADER, "device_ranks.py has its size");

struct Ranks {
    char* areas[MAX_GPU_RANKS];
    long long* abort;    // in the host's memory, of all ranks
    long long* failure;  // the same, of this rank
    long long slot_packets, buffer_vectors;
    unsigned long long patience;  // nanoseconds
    int rank, size;
};

__device__ inline Header* header(const Ranks& ranks, int of) { return reinterpret_cast<Header*>(ranks.areas[of]); }

__device__ inline void give_up(const Ranks& ranks, long long why) {
    if (load_word(ranks.failure) == 0) store_word(ranks.failure, why);
    __threadfence_system();
    store_word(ranks.abort, 1);
    __threadfence_system();
    __trap();
}

// One thread's waits in one exchange.
struct Patience {
    unsigned looks = 0;
    Data began = 0;

    __device__ inline void look(const Ranks& ranks) {
        if (++looks % LOOKS) return;
        if (load_word(ranks.abort)) give_up(ranks, ABORTED);
        Data now = nanoseconds();
        if (began == 0) began = now;
        if (now - began > ranks.patience) give_up(ranks, LATE);
    }
};

// The sum of the first `size` of `found`, each a vector of T, in float32 and in their order.
template <class T, class Bits, int MOST>
__device__ inline Bits add_in_order(const Bits (&found)[MOST], int size) {
    constexpr int EACH = sizeof(Bits) / sizeof(T);
    float acc[EACH];
#pragma unroll
    for (int from = 0; from < MOST; from++) {
        if (from >= size) break;
        T numbers[EACH];
        memcpy(numbers, &found[from], sizeof numbers);
#pragma unroll
        for (int each = 0; each < EACH; each++)
            acc[each] = from ? acc[each] + widen(numbers[each]) : widen(numbers[each]);
    }
    T numbers[EACH];
#pragma unroll
    for (int each = 0; each < EACH; each++) narrow(numbers[each], acc[each]);
    Bits sum;
    memcpy(&sum, numbers, sizeof sum);
    return sum;
}
