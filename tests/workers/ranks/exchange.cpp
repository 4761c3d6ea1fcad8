// exchange.cu for a CPU: a rank runs the blocks of a launch in order, each by a few threads.
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

using Data = unsigned long long;
struct Index { unsigned x; };
static thread_local Index blockIdx{0}, gridDim{1}, threadIdx{0}, blockDim{1};
constexpr unsigned FEW_THREADS = 3;  // of a block
struct Trap {};

// The threads of one rank. One that traps ends the others' waits.
struct Team {
    std::atomic<unsigned> arrived{0}, passed{0};
    std::atomic<bool> trapped{false};

    void wait() {
        unsigned barrier = passed;
        if (++arrived == FEW_THREADS) {
            arrived = 0;
            passed++;
        }
        while (passed == barrier) {
            if (trapped) throw Trap();
            sched_yield();
        }
    }
};
static thread_local Team* team;

struct alignas(16) Packet { Data data, epoch; };
inline void store_packet(Packet* target, Packet packet) {
    __atomic_store_n(&target->data, packet.data, __ATOMIC_RELAXED);
    __atomic_store_n(&target->epoch, packet.epoch, __ATOMIC_RELEASE);
}
inline Packet load_packet(const Packet* source) {
    Data epoch = __atomic_load_n(&source->epoch, __ATOMIC_ACQUIRE);
    sched_yield();
    return {__atomic_load_n(&source->data, __ATOMIC_RELAXED), epoch};
}
// A thread that is given a seed stops now and then, so that ranks differ in speed from one place to another.
static thread_local unsigned noise = 0;
extern "C" void be_uneven(unsigned seed) { noise = seed; }
inline void stumble(unsigned one_in) {
    if (noise == 0) return;
    noise = noise * 1664525u + 1013904223u;
    if ((noise >> 16) % one_in == 0) std::this_thread::sleep_for(std::chrono::microseconds(noise >> 26));
}

struct alignas(16) Vector { Data low, high; };
inline Vector load_vector(const Vector* source) {
    stumble(64);
    return *source;
}
inline void release_flag(Data* flag, Data value) {
    stumble(4);
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}
inline Data acquire_flag(const Data* flag) {
    Data value = __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    sched_yield();
    return value;
}
inline long long load_word(const long long* source) { return __atomic_load_n(source, __ATOMIC_ACQUIRE); }
inline void store_word(long long* target, long long word) { __atomic_store_n(target, word, __ATOMIC_RELEASE); }
inline Data nanoseconds() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void launch_dependents() {}
inline void await_earlier_kernels() {}
inline void __syncthreads() { team->wait(); }
inline void __threadfence_system() {}
inline void __trap() { throw Trap(); }

using __half = _Float16;
struct __nv_bfloat16 { unsigned short bits; };
inline float widen(float number) { return number; }
inline float widen(__half number) { return number; }
inline float widen(__nv_bfloat16 number) {
    unsigned wide = (unsigned)number.bits << 16;
    float found;
    std::memcpy(&found, &wide, 4);
    return found;
}
inline void narrow(float& number, float wide) { number = wide; }
inline void narrow(__half& number, float wide) { number = (__half)wide; }
inline void narrow(__nv_bfloat16& number, float wide) {  // to the nearest, else to even
    unsigned bits;
    std::memcpy(&bits, &wide, 4);
    number.bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define EMULATED_DEVICE <cstring>  // all of it stands above
#include "exchange.cu"

// Whether the kernel came to its end.
template <class Kernel, class... Arguments>
static bool run(Kernel kernel, unsigned blocks, Arguments... arguments) {
    Team own;
    unsigned seed = noise;
    auto body = [&](unsigned thread) {
        team = &own;
        threadIdx.x = thread, blockDim.x = FEW_THREADS, gridDim.x = blocks;
        if (seed) noise = seed + thread;
        try {
            for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) kernel(arguments...);
        } catch (Trap) {
            own.trapped = true;
        }
    };
    std::vector<std::thread> others;
    for (unsigned thread = 1; thread < FEW_THREADS; thread++) others.emplace_back(body, thread);
    body(0);
    for (std::thread& other : others) other.join();
    return !own.trapped;
}

#define RUN_SUM(kernel, type)                                                                                         \
    extern "C" bool run_##kernel(unsigned blocks, const Ranks* ranks, const type* x, type* out, long long count,      \
                                 long long first, long long last) {                                                  \
        return run(kernel, blocks, *ranks, x, out, count, first, last);                                               \
    }
RUN_SUM(sum_at_once_float32, float)
RUN_SUM(sum_at_once_float16, __half)
RUN_SUM(sum_at_once_bfloat16, __nv_bfloat16)
RUN_SUM(sum_by_parts_float32, float)
RUN_SUM(sum_by_parts_float16, __half)
RUN_SUM(sum_by_parts_bfloat16, __nv_bfloat16)

#define RUN_STREAMED(kernel)                                                                                          \
    extern "C" bool run_##kernel(unsigned blocks, const Ranks* ranks, const Vector* x, Vector* out, long long count, \
                                 int length) {                                                                       \
        return run(kernel, blocks, *ranks, x, out, count, length);                                                   \
    }
RUN_STREAMED(sum_streamed_2_float32)
RUN_STREAMED(sum_streamed_2_float16)
RUN_STREAMED(sum_streamed_2_bfloat16)
RUN_STREAMED(sum_streamed_4_float32)
RUN_STREAMED(sum_streamed_4_float16)
RUN_STREAMED(sum_streamed_4_bfloat16)
RUN_STREAMED(sum_streamed_8_float32)
RUN_STREAMED(sum_streamed_8_float16)
RUN_STREAMED(sum_streamed_8_bfloat16)

#define RUN_GATHER(kernel, type)                                                                                      \
    extern "C" bool run_##kernel(unsigned blocks, const Ranks* ranks, const type* x, type* out, int rows,             \
                                 int columns, int part, int parts) {                                                  \
        return run(kernel, blocks, *ranks, x, out, rows, columns, part, parts);                                       \
    }
RUN_GATHER(gather_2, unsigned short)
RUN_GATHER(gather_4, unsigned)
