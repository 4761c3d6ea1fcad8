/* The page tables of a forward, as look_up_pages of plan.py makes them.
 *
 * page_look_up.py mirrors Table and states what callers must see to; nothing is checked here.
 */
#include <stdint.h>
#include <string.h>

typedef struct {
    const int32_t *pages;  /* [max_sequences, max_pages] */
    const int64_t *begins; /* [max_sequences], the first place that each row holds */
    int64_t max_pages;
    int32_t page_size, unused;
} Table;

/* rows [n]: those of n sequences, which have tokens qo_indptr[i] … qo_indptr[i + 1] - 1, at `positions`, and are
 * seq_lens[i] long with them. Returns how many pages they hold. */
int64_t lay_out_tables(const Table *table, int32_t n, const int64_t *rows, const int32_t *qo_indptr,
                       const int32_t *positions, const int32_t *seq_lens, int32_t *slots, int32_t *kv_indptr,
                       int32_t *last_page_lens, int32_t *kv_lens) {
    const int32_t size = table->page_size;
    int32_t total = 0;
    for (int32_t i = 0; i < n; i++) {
        const int32_t *const pages = table->pages + rows[i] * table->max_pages;
        const int32_t begin = (int32_t)table->begins[rows[i]], last_place = (seq_lens[i] - 1) / size;
        for (int32_t t = qo_indptr[i]; t < qo_indptr[i + 1]; t++) {
            const int32_t place = positions[t] / size;
            slots[t] = (pages[place] - place) * size + positions[t];
        }
        kv_indptr[i] = total;
        total += last_place + 1 - begin;
        last_page_lens[i] = seq_lens[i] - last_place * size;
        kv_lens[i] = seq_lens[i] - begin * size;
    }
    kv_indptr[n] = total;
    return total;
}

/* kv_indices [kv_indptr[n]] of those n rows. */
void gather_pages(const Table *table, int32_t n, const int64_t *rows, const int32_t *kv_indptr, int32_t *kv_indices) {
    for (int32_t i = 0; i < n; i++)
        memcpy(kv_indices + kv_indptr[i], table->pages + rows[i] * table->max_pages + table->begins[rows[i]],
               sizeof(int32_t) * (kv_indptr[i + 1] - kv_indptr[i]));
}
