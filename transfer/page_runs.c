/* Runs of whole pages among pairs of slots: the usual copy, for which plan_copy of copy_plan.py has no time to lose. */
#include <stdint.h>

/* slots [2, num_pages * page_size], of the source and of the target; negative ones are large here. runs [3, num_pages]:
 * in each row as many first entries as are returned, first pages of the source, of the target, and how many consecutive
 * pages on both sides. Returns -1 where the slots are not whole pages, in order, on both sides, of pools of num_slots.
 */
int64_t page_runs(int64_t num_pages, uint32_t page_size, int64_t num_slots, const uint32_t *slots, int32_t *runs) {
    const uint32_t *sources = slots, *targets = slots + num_pages * page_size;
    int32_t *const first_sources = runs, *const first_targets = runs + num_pages, *const counts = runs + 2 * num_pages;
    int64_t count = 0;
    for (int64_t page = 0; page < num_pages; page++, sources += page_size, targets += page_size) {
        const uint32_t source = sources[0], target = targets[0];
        uint32_t broken = source % page_size | target % page_size | (source >= num_slots) | (target >= num_slots);
        for (uint32_t i = 0; i < page_size; i++) broken |= ((sources[i] - source) ^ i) | ((targets[i] - target) ^ i);
        if (broken) return -1;
        const int32_t source_page = (int32_t)(source / page_size), target_page = (int32_t)(target / page_size);
        if (count && source_page == first_sources[count - 1] + counts[count - 1] &&
            target_page == first_targets[count - 1] + counts[count - 1]) {
            counts[count - 1]++;
            continue;
        }
        first_sources[count] = source_page;
        first_targets[count] = target_page;
        counts[count++] = 1;
    }
    return count;
}
