// device.cuh and what kernels built on it have of CUDA, for a CPU: a fiber a thread, all blocks at once, one after another.
// A fiber goes on until it waits, for its warp, its block or a word. Copies are done as soon as they are asked for: a
// slot that is fetched into too early is overwritten while it is read.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* name = emulated::current->memory

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };

namespace emulated {
struct Meeting { int here = 0, round = 0; };
struct BlockState { std::unique_ptr<unsigned char[]> memory; unsigned char* begin; Meeting meeting, of_cluster; };
struct WarpState { Meeting meeting; float numbers[2][32]; unsigned tiles[2][32][6]; };
struct Fiber {
    ucontext_t context;
    int thread, block;
    unsigned char* memory;
    BlockState* of_block;
    WarpState* of_warp;
    jmp_buf place;
    const int* awaited = nullptr;  // a meeting's round, which is this one until all have come
    int round;
    bool begun = false, done = false;
    bool waits() const { return awaited && *awaited == round; }
};
static Fiber* current;
static jmp_buf scheduler;
static long long switches;

inline void give_way() {
    if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
inline void go_on(Fiber& fiber) {
    current = &fiber;
    if (_setjmp(scheduler)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}
inline void meet(Meeting& meeting, int all) {
    int round = meeting.round;
    if (++meeting.here == all) {
        meeting.here = 0;
        meeting.round++;
    } else {
        current->awaited = &meeting.round, current->round = round;
        give_way();
        current->awaited = nullptr;
    }
}
inline float exchange(unsigned lanes, float value, int from) {
    WarpState& warp = *current->of_warp;
    float* numbers = warp.numbers[warp.meeting.round % 2];  // those of the last exchange may still be read
    numbers[current->thread % 32] = value;
    meet(warp.meeting, __builtin_popcount(lanes));
    return numbers[from];
}
struct Index { struct Axis { operator int() const; bool of_block; } x; };
inline Index::Axis::operator int() const { return of_block ? current->block : current->thread; }
extern int threads;
static int cluster = 1;
}  // namespace emulated

static const emulated::Index threadIdx{{false}}, blockIdx{{true}};

inline void __syncthreads() { emulated::meet(emulated::current->of_block->meeting, emulated::threads); }
inline void __threadfence() {}
inline void __syncwarp() { emulated::meet(emulated::current->of_warp->meeting, 32); }
inline float __shfl_xor_sync(unsigned lanes, float value, int other) {
    return emulated::exchange(lanes, value, emulated::current->thread % 32 ^ other);
}
inline float __shfl_sync(unsigned lanes, float value, int lane) { return emulated::exchange(lanes, value, lane); }
inline float __shfl_down_sync(unsigned lanes, float value, int by) {
    int lane = emulated::current->thread % 32;
    return emulated::exchange(lanes, value, lane + by < 32 ? lane + by : lane);
}
inline unsigned atomicAdd(unsigned* place, unsigned by) { unsigned old = *place; *place += by; return old; }
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline unsigned __shfl_sync(unsigned lanes, unsigned value, int lane) {
    return __float_as_uint(__shfl_sync(lanes, __uint_as_float(value), lane));
}
inline float rsqrtf(float value) { return 1 / std::sqrt(value); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
    unsigned long long both = (unsigned long long)high << 32 | low;
    unsigned bytes = 0;
    for (int place = 0; place < 4; place++) bytes |= (both >> (places >> 4 * place & 7) * 8 & 255) << 8 * place;
    return bytes;
}

inline long long clock64() { return 0; }
inline void check_patience(long long) {
    if (++emulated::switches > 100'000'000) std::abort();  // nobody comes
    emulated::give_way();
}

inline void write_word(unsigned* place, unsigned word) { *place = word; }
inline void write_words(unsigned* place, uint4 words) { std::memcpy(place, &words, sizeof words); }
inline unsigned read_word(const unsigned* place) { return *place; }
inline uint4 read_words(const unsigned* place) { return {place[0], place[1], place[2], place[3]}; }

// Of a barrier the lower half counts the bytes that are missing, the next bit says that they are known, the rest counts
// rounds.
inline void make_arrival(unsigned long long* barrier) { *barrier = 0; }
inline void publish_arrivals() {}
inline void expect(unsigned long long* barrier, int bytes, unsigned long long known) {
    unsigned missing = (unsigned)*barrier + bytes;
    unsigned long long rest = (*barrier >> 32 | known) << 32;
    *barrier = missing == 0 && (rest >> 32 & 1) ? rest + (1ull << 32) : rest | missing;
}
inline void expect_bytes(unsigned long long* barrier, unsigned bytes) { expect(barrier, (int)bytes, 1); }
inline unsigned long long streaming_policy() { return 0; }
inline void fetch(void* target, const void* source, unsigned bytes, unsigned long long* barrier, unsigned long long) {
    std::memcpy(target, source, bytes);
    expect(barrier, -(int)bytes, 0);
}
inline void prefetch(const void*) {}
inline uint4 read_once(const void* source) {
    uint4 words;
    std::memcpy(&words, source, sizeof words);
    return words;
}
inline bool has_arrived(unsigned long long* barrier, unsigned parity) { return (*barrier >> 33 & 1) != parity; }
inline void wait_for(unsigned long long* barrier, unsigned parity) {
    while (!has_arrived(barrier, parity)) check_patience(0);
}
inline void sync_cluster() {
    using namespace emulated;
    meet(current->of_block[-(current->block % cluster)].of_cluster, cluster * threads);
}
inline float2 read_pair(const float2* place, int rank) {
    using namespace emulated;
    long long offset = (const unsigned char*)place - current->memory;
    return *(const float2*)(current->of_block[rank - current->block % cluster].begin + offset);
}
inline void launch_dependents() {}
inline void await_earlier_kernels() {}

inline float half_of(unsigned short bits) { _Float16 value; std::memcpy(&value, &bits, 2); return value; }
inline unsigned bits_of_half(float value) {
    _Float16 number = value;
    unsigned short bits;
    std::memcpy(&bits, &number, 2);
    return bits;
}
inline float2 unpack_half(unsigned bits) { return {half_of(bits), half_of(bits >> 16)}; }
inline unsigned pack_half(float low, float high) { return bits_of_half(low) | bits_of_half(high) << 16; }

// e4m3: a sign, four bits of exponent, three of the number; 0x7f is NaN.
inline float of_entry(unsigned bits) {
    int exponent = bits >> 3 & 15, rest = bits & 7;
    float size = (bits & 127) == 127 ? NAN : exponent ? std::ldexp(8 + rest, exponent - 10) : std::ldexp(rest, -9);
    return bits & 128 ? -size : size;
}
inline unsigned entry_of(float value) {
    unsigned sign = std::signbit(value) ? 128 : 0;
    if (std::isnan(value)) return sign | 127;
    float size = std::fmin(std::fabs(value), 448.0f);
    int exponent = size < 0.015625f ? -6 : std::ilogb(size);
    return sign | ((exponent + 6) * 8 + (int)std::nearbyint(std::ldexp(size, 3 - exponent)));
}
inline unsigned widen(unsigned short both) { return pack_half(of_entry(both & 255), of_entry(both >> 8)); }
inline unsigned short narrow(float low, float high) { return entry_of(low) | entry_of(high) << 8; }

template <int FIRST>
inline unsigned extend_signs(unsigned four) {
    auto extended = [&](int place) { return (unsigned)(unsigned short)(signed char)(four >> 8 * place); };
    return extended(FIRST) | extended(FIRST + 1) << 16;
}

#if HALF
using Number = _Float16;
inline float number(unsigned short bits) { return half_of(bits); }
inline unsigned bits_of(float value) { return bits_of_half(value); }
#else
struct Number {
    unsigned short bits;
    operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
inline float number(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }
inline unsigned bits_of(float value) {
    unsigned bits = __float_as_uint(value);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
#endif
inline float2 unpack(unsigned bits) { return {number(bits), number(bits >> 16)}; }
inline unsigned pack(float low, float high) { return bits_of(low) | bits_of(high) << 16; }
inline float2 rounded(float2 both) { return unpack(pack(both.x, both.y)); }
inline unsigned multiply_pairs(unsigned one, unsigned other) {
    float2 a = unpack(one), b = unpack(other);
    return pack(a.x * b.x, a.y * b.y);
}
inline unsigned subtract_pairs(unsigned one, unsigned other) {
    float2 a = unpack(one), b = unpack(other);
    return pack(a.x - b.x, a.y - b.y);
}

struct TileA { unsigned upper, lower, upper_right, lower_right; };
struct TileB { unsigned left, right; };
inline void multiply_tiles(float (&sums)[4], TileA a, TileB b, float2 (*unpack)(unsigned)) {
    using namespace emulated;
    auto part_of = [&](unsigned bits, int column) { return column % 2 ? unpack(bits).y : unpack(bits).x; };
    WarpState& warp = *current->of_warp;
    auto& tiles = warp.tiles[warp.meeting.round % 2];
    int lane = current->thread % 32;
    unsigned own[] = {a.upper, a.lower, a.upper_right, a.lower_right, b.left, b.right};
    std::memcpy(tiles[lane], own, sizeof own);
    meet(warp.meeting, 32);
    for (int place = 0; place < 4; place++) {
        int row = lane / 4, other = 2 * (lane % 4) + place % 2;
        for (int column = 0; column < 16; column++) {
            int from = column % 8 / 2, right = column / 8;
            float one = part_of(tiles[4 * row + from][place / 2 + 2 * right], column);
            sums[place] += one * part_of(tiles[4 * other + from][4 + right], column);
        }
    }
}
inline void multiply_tiles(float (&sums)[4], TileA a, TileB b) { multiply_tiles(sums, a, b, unpack); }
inline void multiply_half_tiles(float (&sums)[4], TileA a, TileB b) { multiply_tiles(sums, a, b, unpack_half); }
inline void multiply_tiles(float (&sums)[4], uint2 a, unsigned b) { multiply_tiles(sums, TileA{a.x, a.y}, TileB{b}); }
inline void multiply_half_tiles(float (&sums)[4], uint2 a, unsigned b) {
    multiply_half_tiles(sums, TileA{a.x, a.y}, TileB{b});
}

namespace emulated {
static void (*kernel)();
inline void run_fiber() {
    kernel();
    current->done = true;
    give_way();
}

// All threads of so many blocks with so much shared memory, NaN at first, run `what`.
inline void run_blocks(int count, int shared_bytes, void (*what)()) {
    kernel = what;
    switches = 0;
    constexpr int STACK_BYTES = 64 << 10;
    static std::vector<std::unique_ptr<char[]>> stacks;  // kept, for memory that is new is slow
    while ((int)stacks.size() < count * threads) stacks.emplace_back(new char[STACK_BYTES]);
    std::vector<BlockState> blocks(count);
    std::vector<WarpState> warps(count * threads / 32);
    std::vector<Fiber> fibers(count * threads);
    for (BlockState& block : blocks) {
        block.memory = std::make_unique<unsigned char[]>(shared_bytes + 128);
        std::memset(block.memory.get(), 0xff, shared_bytes + 128);
        block.begin = (unsigned char*)(((unsigned long long)block.memory.get() + 127) / 128 * 128);
    }
    for (int index = 0; index < (int)fibers.size(); index++) {
        Fiber& fiber = fibers[index];
        fiber.thread = index % threads, fiber.block = index / threads;
        fiber.of_block = &blocks[fiber.block], fiber.of_warp = &warps[index / 32];
        fiber.memory = fiber.of_block->begin;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks[index].get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool busy = true; busy;) {
        bool moved = busy = false;
        for (Fiber& fiber : fibers) {
            if (fiber.done) continue;
            busy = true;
            if (fiber.waits()) continue;
            moved = true;
            go_on(fiber);
        }
        if (busy && !moved) std::abort();  // all wait for each other
    }
}
}  // namespace emulated
