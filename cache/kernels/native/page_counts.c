/* The pages of one pool, as PageAllocator of allocator.py counts them. Nothing is checked here but what is said. */
#include <stdint.h>
#include <string.h>

/* Takes `count` >= 1 pages, one reference each: the first of the shortest free runs that hold them all. is_free:
 * [num_pages] bytes of 0 or 1. pages: [count]. Returns 0, and changes nothing, where no run holds them. */
int32_t take_run(uint8_t *is_free, int32_t num_pages, int32_t count, int32_t *references, int32_t *pages) {
    int32_t best = -1, best_length = INT32_MAX;
    const uint8_t *at = is_free, *const end = is_free + num_pages;
    while (best_length > count && at < end && (at = memchr(at, 1, end - at))) {
        const uint8_t *stop = memchr(at, 0, end - at);
        if (!stop) stop = end;
        const int32_t length = (int32_t)(stop - at);
        if (length >= count && length < best_length) best = (int32_t)(at - is_free), best_length = length;
        at = stop;
    }
    if (best < 0) return 0;
    memset(is_free + best, 0, count);
    for (int32_t i = 0; i < count; i++) references[best + i] = 1, pages[i] = best + i;
    return 1;
}

static int32_t drains(const int32_t *references, const int32_t *writers, int32_t page) {
    return references[page] == 0 && writers[page] > 0;
}

/* Lowers the counts of pages [n] by one each; a page may be there more than once. One that has neither references nor
 * writers left becomes free. of_writers: writers are lowered, else references. changes [2]: by how many pages more are
 * free, and more drain. Returns 0, and changes nothing, where a count would fall below 0. */
int32_t lower_counts(int32_t *references, int32_t *writers, uint8_t *is_free, int32_t n, const int32_t *pages,
                     int32_t of_writers, int64_t *changes) {
    int32_t *const counts = of_writers ? writers : references;
    int64_t freed = 0, draining = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t page = pages[i], drained = drains(references, writers, page);
        if (counts[page] == 0) {
            while (i-- > 0) counts[pages[i]]++, is_free[pages[i]] = 0; /* what had a count was not free */
            return 0;
        }
        counts[page]--;
        draining += drains(references, writers, page) - drained;
        if (references[page] == 0 && writers[page] == 0) is_free[page] = 1, freed++;
    }
    changes[0] = freed, changes[1] = draining;
    return 1;
}
