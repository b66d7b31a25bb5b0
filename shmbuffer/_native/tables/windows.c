/* Windows of a run: consecutive groups of `steps` items from its first item on. A window is delivered once, after
 * all its items were written, in the order of completion.
 *
 *     run     0 1 2 3 4 5 6 7 8 9        steps = 4
 *             └─────┘ └─────┘ ╰─ cut, where the next window begins
 *     queue   0, 4                       delivered: those before `next`
 *
 * Always true
 *   1. The word of an item is stored in `used` once it is in a window, or in the rest of a lost window. So an item that is
 *      reported again gets no second window, and a new item in the same slot does.
 *   2. A window is delivered only if all its items have the stored words and are still consecutive.
 *   3. An item behind a slot that is being written enters no window before that write ends, because it may be a missing item.
 *   4. The windows of a run are aligned to its first item, even after that was overwritten. The rest of a window whose first
 *      item is lost does not become part of another window.
 */
#include "tables/windows.h"

#include <stdlib.h>
#include <string.h>

#include "core/layout.h"
#include "core/sync.h"
#include "tables/trajectories.h"

#define MAX_KEPT 1024u /* delivered windows that can be taken back */

static inline uint32_t at_index(const struct shmb_run *run, uint32_t index) { return run->items[index & run->mask]; }

static inline uint64_t current_word(const struct shmb_windows *w, uint32_t element) {
    uint32_t slot = w->width == 1 ? element : element / w->width;
    return atomic_load_explicit(&w->words[slot], SYNC_SLOT_COMMIT_ACQUIRE);
}

static inline bool is_used(const struct shmb_windows *w, uint32_t element) {
    return w->used[element] && w->used[element] == current_word(w, element);
}

static inline void mark_item_used(struct shmb_windows *w, uint32_t element) {
    uint64_t word = current_word(w, element);
    w->used[element] = SHMB_STATE(word) == SHMB_COMMITTED && SHMB_TICKET(word) < w->seen ? word : 0;
}

bool shmb_windows_make(struct shmb_windows *w, const _Atomic uint64_t *words, uint64_t elements, uint32_t width, uint32_t steps) {
    *w = (struct shmb_windows){.words = words, .elements = elements, .width = width, .steps = steps};
    w->used = calloc(elements, sizeof *w->used); /* pages that are never touched are not allocated */
    return w->used != NULL;
}

void shmb_windows_free(struct shmb_windows *w) {
    free(w->used);
    free(w->at);
    *w = (struct shmb_windows){0};
}

static inline struct shmb_window *window_of(const struct shmb_windows *w, uint64_t number) {
    return &w->at[w->begin + (number - w->number)];
}

/* Returns the run of a window if all its items are present and consecutive, and stores the index of the first one. */
static const struct shmb_run *run_of_window(const struct shmb_trajectories *all, const struct shmb_window *window, uint32_t *index) {
    const struct shmb_windows *w = all->windows;
    if (w->used[window->first] != window->word || all->where[window->first].run == 0) return NULL;
    const struct shmb_run *run = &all->runs[all->where[window->first].run - 1];
    *index = all->where[window->first].index;
    if (run->back - *index < w->steps) return NULL;
    for (uint32_t i = 0; i < w->steps; i++)
        if (!is_used(w, at_index(run, *index + i))) return NULL;
    return run;
}

/* Makes room for one more window: drops windows that were delivered long ago, and lost windows. */
static bool make_window_space(struct shmb_trajectories *all) {
    struct shmb_windows *w = all->windows;
    if (w->begin + w->count < w->capacity) return true;
    uint64_t end = w->number + w->count, from = w->next - w->number > MAX_KEPT ? w->next - MAX_KEPT : w->number;
    uint64_t remaining = w->begin + (w->next - w->number);
    for (uint64_t number = w->next; number < end; number++) {
        uint32_t index;
        if (run_of_window(all, window_of(w, number), &index))
            w->at[remaining++] = *window_of(w, number);
        else
            w->lost++;
    }
    w->begin += from - w->number;
    w->count = remaining - w->begin;
    w->number = from;
    memmove(w->at, w->at + w->begin, w->count * sizeof *w->at);
    w->begin = 0;
    if (2 * w->count < w->capacity) return true;
    uint64_t capacity = w->capacity ? 2 * w->capacity : 64;
    struct shmb_window *at = realloc(w->at, capacity * sizeof *at);
    if (at == NULL) return w->failed = true, false;
    w->at = at;
    w->capacity = capacity;
    return true;
}

/* Adds the window that begins at the cut. */
static void complete_window(struct shmb_trajectories *all, struct shmb_run *run) {
    struct shmb_windows *w = all->windows;
    uint32_t first = at_index(run, run->cut), end = run->cut + w->steps;
    if (!make_window_space(all)) return;
    while (run->cut != end) mark_item_used(w, at_index(run, run->cut++));
    w->at[w->begin + w->count++] = (struct shmb_window){.word = w->used[first], .first = first};
}

void shmb_windows_extend(struct shmb_trajectories *all, struct shmb_run *run) {
    struct shmb_windows *w = all->windows;
    uint32_t last = at_index(run, run->back - 1);
    if (is_used(w, last))
        run->cut = run->back;
    else if ((int32_t)(run->cut - run->back) >= 0) /* the rest of a lost window */
        mark_item_used(w, last);
    else
        while (run->back - run->cut >= w->steps && !w->failed) complete_window(all, run);
}

void shmb_windows_shrink(struct shmb_trajectories *all, struct shmb_run *run) {
    struct shmb_windows *w = all->windows;
    uint32_t from = run->cut;
    while ((int32_t)(run->front - run->cut) > 0) run->cut += w->steps;
    if (from == run->cut) return;
    for (uint32_t i = run->front; i != run->cut && i != run->back; i++) mark_item_used(w, at_index(run, i));
}

/* After a run was split or joined: windows continue behind the last item that was in a window. */
void shmb_windows_realign(struct shmb_trajectories *all, struct shmb_run *run) {
    run->cut = run->front;
    for (uint32_t i = run->back; i != run->front && run->cut == run->front; i--)
        if (is_used(all->windows, at_index(run, i - 1))) run->cut = i;
}

/* True if the element is in one of the newest `newest` slots at the last poll. */
static inline bool is_in_newest(const struct shmb_windows *w, uint32_t element, uint64_t newest) {
    uint64_t capacity = w->elements / w->width, head = w->seen % capacity;
    return (head + capacity - 1 - element / w->width) % capacity < newest;
}

uint64_t shmb_windows_claim(struct shmb_trajectories *all, uint64_t count, uint64_t newest, int64_t *firsts) {
    struct shmb_windows *w = all->windows;
    uint64_t delivered = 0;
    for (uint32_t index; delivered < count && w->next < w->number + w->count; w->next++) {
        const struct shmb_window *window = window_of(w, w->next);
        if (is_in_newest(w, window->first, newest) && run_of_window(all, window, &index))
            firsts[delivered++] = window->first;
        else
            w->lost++;
    }
    return delivered;
}

uint64_t shmb_windows_count_waiting(const struct shmb_windows *w) { return w->number + w->count - w->next; }

/* Takes back all deliveries since `next` had that value. */
void shmb_windows_take_back(struct shmb_windows *w, uint64_t next, uint64_t lost) {
    if (next > w->next) return;
    w->next = next < w->number ? w->number : next;
    w->lost = lost;
}

/* Marks items with tickets below `below` as used, so that they get no window. */
void shmb_windows_mark_used(struct shmb_windows *w, const int64_t *elements, uint64_t count, uint64_t below) {
    uint64_t seen = w->seen;
    w->seen = below;
    for (uint64_t i = 0; i < count; i++)
        if ((uint64_t)elements[i] < w->elements) mark_item_used(w, (uint32_t)elements[i]);
    w->seen = seen;
}

/* Stores for each element the ticket of its item if it needs no window, or is in a delivered window (`waiting`: in
 * any window), and -1 otherwise. */
void shmb_windows_list_used(const struct shmb_trajectories *all, int64_t *tickets, bool waiting) {
    const struct shmb_windows *w = all->windows;
    for (uint64_t element = 0; element < w->elements; element++)
        tickets[element] = is_used(w, (uint32_t)element) ? (int64_t)SHMB_TICKET(w->used[element]) : -1;
    for (uint64_t number = w->next; !waiting && number < w->number + w->count; number++) {
        uint32_t index;
        const struct shmb_run *run = run_of_window(all, window_of(w, number), &index);
        for (uint32_t i = 0; run && i < w->steps; i++) tickets[at_index(run, index + i)] = -1;
    }
}
