/* The page tables of a forward, as look_up_pages of plan.py makes them, and how they change by a step, as GroupPages
 * plans it.
 *
 * page_look_up.py mirrors Table, step_growth.py mirrors Group; they state what callers must see to; nothing is checked
 * here.
 */
#include <stdint.h>
#include <string.h>

typedef struct {
    const int32_t *pages;  /* [max_sequences, max_pages] */
    const int64_t *begins; /* [max_sequences], the first page index that each row holds */
    int64_t max_pages;
    int32_t page_size, chunk_pages; /* 0: sequences see what their rows hold, else the chunk that they end in */
} Table;

/* rows [n]: those of sequences that are seq_lens[i] long with their new tokens, qo_indptr[i + 1] - qo_indptr[i] each,
 * which may be none; without qo_indptr one each. tables: slots [num_tokens], kv_indptr [n + 1], kv_last_page_len [n],
 * kv_lens [n] and kv_indices [room] behind each other. Returns how many pages the rows hold; where those are more than
 * `room`, kv_indices is not complete. */
int64_t look_up(const Table *table, int32_t n, const int64_t *rows, const int32_t *seq_lens, const int32_t *qo_indptr,
                int32_t num_tokens, int32_t *tables, int64_t room) {
    const int32_t size = table->page_size;
    int32_t *const kv_indptr = tables + num_tokens, *const last_page_lens = kv_indptr + n + 1;
    int32_t *const kv_lens = last_page_lens + n, *const kv_indices = kv_lens + n;
    int32_t total = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t *const pages = table->pages + rows[i] * table->max_pages;
        const int32_t last = seq_lens[i] - 1, last_place = last < 0 ? -1 : last / size, chunk = table->chunk_pages;
        const int32_t begin = chunk ? last_place - last_place % chunk : (int32_t)table->begins[rows[i]];
        const int32_t count = last_place + 1 - begin;
        if (qo_indptr) {
            for (int32_t t = qo_indptr[i], position = seq_lens[i] - (qo_indptr[i + 1] - t); t < qo_indptr[i + 1];) {
                const int32_t page_index = position / size;
                tables[t++] = (pages[page_index] - page_index) * size + position++;
            }
        } else {
            tables[i] = (pages[last_place] - last_place) * size + last;
        }
        kv_indptr[i] = total;
        last_page_lens[i] = seq_lens[i] - last_place * size;
        kv_lens[i] = seq_lens[i] - begin * size;
        if (total + count <= room) memcpy(kv_indices + total, pages + begin, sizeof(int32_t) * count);
        total += count;
    }
    kv_indptr[n] = total;
    return total;
}

static int32_t *put_slots(const int32_t *pages, int32_t size, int64_t begin, int64_t end, int32_t *slots) {
    while (begin < end) {
        const int64_t first = begin / size * size, page_end = first + size < end ? first + size : end;
        const int32_t slot = pages[first / size] * size;
        for (; begin < page_end; begin++) *slots++ = slot + (int32_t)(begin - first);
    }
    return slots;
}

/* The slots of all indices that rows [n] use, which are streams: those before the row's sinks, and from behind its hole
 * on. lengths, sinks, holes: [max_sequences]. */
void stream_slots(const Table *table, int32_t n, const int64_t *rows, const int64_t *lengths, const int64_t *sinks,
                  const int64_t *holes, int32_t *slots) {
    for (int32_t i = 0; i < n; i++) {
        const int64_t row = rows[i], length = lengths[row], sink = sinks[row] < length ? sinks[row] : length;
        const int32_t *const pages = table->pages + row * table->max_pages;
        slots = put_slots(pages, table->page_size, 0, sink, slots);
        slots = put_slots(pages, table->page_size, sink + holes[row], length, slots);
    }
}

typedef struct {
    const int32_t *pages;                     /* [max_sequences, max_pages] */
    const int64_t *begins, *ends, *budgets;   /* [max_sequences] */
    int64_t max_pages, every, page_size;      /* an entry for `every` positions, page_size entries in a page */
    int64_t window, chunk, grain;             /* 0: keeps what is past; see Span */
} Group;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Of what is not below 0 and has 32 bits: a division of 64 takes several times as long. */
static int64_t divide(int64_t a, int64_t b) { return b == 1 ? a : (int64_t)((uint32_t)a / (uint32_t)b); }
static int64_t round_down(int64_t a, int64_t b) { return divide(a, b) * b; }

/* What changes in each group when rows [n], whose last pages are their own, grow from lengths to new_lengths, and what
 * queries do not see is let go of. reserved: [max_sequences].
 *
 * Of group g, sizes [num_groups, 4] counts rows that change, rows that begin a last page, pages that go and pages that
 * are taken. changes [num_groups, 6, n]: rows that change, the first page index that each holds then, where its new
 * pages begin and how many these are; rows that begin a last page, and its page index. gone [num_groups, room].
 * Returns 0, and has found nothing, where more than `room` pages of a group go; else 1 where nothing changes, or 2. */
int32_t plan_step(const Group *groups, int32_t num_groups, int32_t n, const int64_t *rows, const int64_t *lengths,
                  const int64_t *new_lengths, const int64_t *queries, const int64_t *reserved, int64_t *sizes,
                  int64_t *changes, int32_t *gone, int32_t room) {
    int32_t found = 1;
    for (int32_t g = 0; g < num_groups; g++, sizes += 4, changes += 6 * n, gone += room) {
        const Group *const group = groups + g;
        const int64_t every = group->every, size = group->page_size;
        int64_t changed = 0, opened = 0, going = 0, taken = 0;
        for (int32_t i = 0; i < n; i++) {
            const int64_t row = rows[i], begin = group->begins[row], end = group->ends[row];
            const int64_t used = divide(divide(lengths[i], every) + size - 1, size);
            const int64_t ends = divide(divide(new_lengths[i], every) + size - 1, size);
            int64_t first = begin, wanted = ends;
            if (reserved[row] > new_lengths[i]) wanted = divide(divide(reserved[row], every) + size - 1, size);
            if (group->window || group->chunk) {
                const int64_t query = round_down(queries[i], group->grain);
                const int64_t needed = group->window ? query - group->window + 1 : round_down(query, group->chunk);
                first = most(begin, divide(most(needed, 0), size));
                wanted = least(wanted, most(first + group->budgets[row], ends));
                for (int64_t at = begin; at < least(first, end); at++) {
                    if (going == room) return 0;
                    gone[going++] = group->pages[row * group->max_pages + at];
                }
            }
            const int64_t start = most(end, first), count = most(wanted - start, 0);
            if (ends > used && ends > first) {
                changes[4 * n + opened] = row;
                changes[5 * n + opened++] = ends - 1;
            }
            if (count || first > begin) {
                changes[changed] = row;
                changes[n + changed] = first;
                changes[2 * n + changed] = start;
                changes[3 * n + changed++] = count;
                taken += count;
            }
        }
        sizes[0] = changed, sizes[1] = opened, sizes[2] = going, sizes[3] = taken;
        if (changed || opened || going) found = 2;
    }
    return found;
}
