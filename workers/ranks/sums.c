/* Sums and gatherings of what processes put into shared memory.
 *
 *   0                        abort: not 0 ends every wait
 *   64 (1 + rank)            how many exchanges the rank has entered; behind it, on a GPU, why it has given up
 *   64 (1 + size)            2 · size slots of slot_bytes: those of even and of odd exchanges, in the order of ranks
 *
 * A rank fills its slot, counts, and waits until all have counted. A slot is filled again two exchanges later. By then
 * all ranks have entered the exchange between, and so have read it.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define LINE 64
#define SPINS 2000
enum { ABORTED = -1, LATE = -2 };

typedef struct {
    char *memory;
    int64_t slot_bytes;
    double seconds; /* longest wait for other ranks */
    int32_t rank, size;
} Area;

static _Atomic int64_t *word(const Area *area, int64_t line) { return (_Atomic int64_t *)(area->memory + LINE * line); }

static char *slot(const Area *area, int64_t exchange, int32_t rank) {
    return area->memory + LINE * (1 + area->size) + ((exchange & 1) * area->size + rank) * area->slot_bytes;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static int32_t meet(const Area *area, int64_t exchange) {
    atomic_store_explicit(word(area, 1 + area->rank), exchange + 1, memory_order_release);
    double begin = 0;
    for (int32_t rank = 0; rank < area->size; rank++) {
        for (int64_t spins = 0; atomic_load_explicit(word(area, 1 + rank), memory_order_acquire) <= exchange; spins++) {
            if (spins < SPINS) continue;
            if (atomic_load_explicit(word(area, 0), memory_order_acquire)) return ABORTED;
            if (begin == 0) begin = now();
            if (now() - begin > area->seconds) return LATE;
            sched_yield();
        }
    }
    return 0;
}

/* x [count] becomes the sum of all ranks' x, in the order of ranks. Returns the number of the next exchange. */
int64_t sum_ranks(const Area *area, int64_t exchange, float *x, int64_t count) {
    const int64_t most = area->slot_bytes / (int64_t)sizeof(float);
    for (int64_t begin = 0; begin < count; begin += most, exchange++) {
        const int64_t part = count - begin < most ? count - begin : most;
        float *const out = x + begin;
        memcpy(slot(area, exchange, area->rank), out, part * sizeof(float));
        const int32_t failed = meet(area, exchange);
        if (failed) return failed;
        memcpy(out, slot(area, exchange, 0), part * sizeof(float));
        for (int32_t rank = 1; rank < area->size; rank++) {
            const float *const other = (const float *)slot(area, exchange, rank);
            for (int64_t i = 0; i < part; i++) out[i] += other[i];
        }
    }
    return exchange;
}

/* out [rows, ends[size]] bytes gets columns ends[r] … ends[r + 1] - 1 from rank r's x [rows, ends[r + 1] - ends[r]].
 * A slot holds a row at least. Returns the number of the next exchange. */
int64_t gather_ranks(const Area *area, int64_t exchange, const char *x, int64_t rows, const int64_t *ends, char *out) {
    int64_t widest = 1;
    for (int32_t rank = 0; rank < area->size; rank++)
        if (ends[rank + 1] - ends[rank] > widest) widest = ends[rank + 1] - ends[rank];
    const int64_t most = area->slot_bytes / widest, own = ends[area->rank + 1] - ends[area->rank];
    for (int64_t begin = 0; begin < rows; begin += most, exchange++) {
        const int64_t part = rows - begin < most ? rows - begin : most;
        memcpy(slot(area, exchange, area->rank), x + begin * own, part * own);
        const int32_t failed = meet(area, exchange);
        if (failed) return failed;
        for (int32_t rank = 0; rank < area->size; rank++) {
            const int64_t width = ends[rank + 1] - ends[rank];
            const char *const other = slot(area, exchange, rank);
            for (int64_t row = 0; row < part; row++)
                memcpy(out + (begin + row) * ends[area->size] + ends[rank], other + row * width, width);
        }
    }
    return exchange;
}
