/* Exact random draws without replacement: each draw selects one of the remaining items in proportion to its weight.
 *
 * Within a set of equal weights this is the beginning of a shuffle. Number i of the remaining ones is swapped with
 * the last of them, and only the swaps are stored. A set is proposed by its original weight and accepted with the
 * share of it that is left. If most proposals are rejected, the weights are summed again. */
#include "tables/choosing.h"

#include <stdlib.h>
#include <string.h>

#define MAX_REJECTED 32u /* proposals in a row before the weights are summed again */

struct shmb_swap {
    /* set: 1 + its number, 0: unused entry; all numbers are below SHMB_MAX_ITEMS */
    uint32_t set, number, is;
};

/* SplitMix64, as in sample.c. */
static uint64_t next_number(struct shmb_choice *choice) {
    uint64_t z = choice->key + ++choice->next * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double next_fraction(struct shmb_choice *choice) { return (double)(next_number(choice) >> 11) * 0x1p-53; }

static uint64_t draw_number_below(struct shmb_choice *choice, uint64_t bound) {
    return (uint64_t)(((unsigned __int128)next_number(choice) * bound) >> 64);
}

bool shmb_choice_begin(struct shmb_choice *choice, uint64_t key, uint64_t count) {
    uint64_t capacity = 16;
    /* at least half of the table stays unused, because each draw adds at most one entry */
    while (capacity < 2 * count) capacity *= 2;
    *choice = (struct shmb_choice){.key = key, .swapped = calloc(capacity, sizeof *choice->swapped), .mask = capacity - 1};
    return choice->swapped != NULL;
}

void shmb_choice_end(struct shmb_choice *choice) { free(choice->swapped); }

static struct shmb_swap *find_swap(const struct shmb_choice *choice, uint64_t set, uint64_t number) {
    uint64_t at = (set * 0xC2B2AE3D27D4EB4Fu ^ number) * 0x9E3779B97F4A7C15u;
    for (at = (at ^ at >> 32) & choice->mask;; at = (at + 1) & choice->mask) {
        struct shmb_swap *one = &choice->swapped[at];
        if (one->set == 0 || (one->set == set + 1 && one->number == number)) return one;
    }
}

uint64_t shmb_choose(struct shmb_choice *choice, uint64_t set, uint64_t left) {
    uint64_t number = draw_number_below(choice, left), last = left - 1;
    const struct shmb_swap *end = find_swap(choice, set, last);
    uint64_t moved = end->set ? end->is : last;
    struct shmb_swap *one = find_swap(choice, set, number);
    uint64_t chosen = one->set ? one->is : number;
    *one = (struct shmb_swap){(uint32_t)set + 1, (uint32_t)number, (uint32_t)moved};
    return chosen;
}

uint64_t shmb_choose_any(struct shmb_choice *choice, uint64_t bound) { return draw_number_below(choice, bound); }

struct sums {
    double *upto;    /* cumulative weights of the sets */
    uint32_t *left;  /* items left in each set */
    uint32_t *base;  /* items in each set when the weights were summed */
    uint64_t sets;
};

static bool add_up(struct sums *sums, const double *weights) {
    double sum = 0;
    for (uint64_t i = 0; i < sums->sets; i++) {
        sums->base[i] = sums->left[i];
        sum += weights[i] > 0 ? weights[i] * sums->left[i] : 0;
        sums->upto[i] = sum;
    }
    return sum > 0;
}

/* The first set whose cumulative weight is greater. A set without weight is never returned. */
static uint64_t set_above(const struct sums *sums, double sum) {
    uint64_t first = 0;
    /* without a branch, which would be mispredicted half of the time */
    for (uint64_t left = sums->sets, half; left > 1; left -= half) {
        half = left / 2;
        first += half & (0 - (uint64_t)(sums->upto[first + half - 1] <= sum));
    }
    return first;
}

/* Returns the number of sets if no remaining set has a weight. */
static uint64_t next_set(struct shmb_choice *choice, struct sums *sums, const double *weights, bool with_replacement) {
    for (uint32_t rejected = 1;; rejected++) {
        if (rejected % MAX_REJECTED == 0 && !add_up(sums, weights)) return sums->sets;
        uint64_t set = set_above(sums, next_fraction(choice) * sums->upto[sums->sets - 1]);
        /* the set is empty, or rounding led beyond the last one */
        if (!(weights[set] > 0) || sums->left[set] == 0) continue;
        if (with_replacement || sums->left[set] == sums->base[set]) return set;
        if (draw_number_below(choice, sums->base[set]) < sums->left[set]) return set;
    }
}

bool shmb_draw_labelled(struct shmb_labels *all, const double *weights, uint64_t key, uint64_t count, bool with_replacement, int64_t *out,
                        int64_t *labels) {
    uint64_t sets = shmb_labels_order(all);
    struct shmb_choice choice;
    struct sums sums = {.upto = malloc(sets * sizeof *sums.upto), .sets = sets};
    sums.left = malloc(2 * sets * sizeof *sums.left);
    bool ok = shmb_choice_begin(&choice, key, with_replacement ? 0 : count) && sums.upto && sums.left;
    if (ok) {
        sums.base = sums.left + sets;
        for (uint64_t i = 0; i < sets; i++) sums.left[i] = all->order[i].count;
        ok = add_up(&sums, weights);
    }
    for (uint64_t i = 0; i < count && ok; i++) { /* pointers first, so that the cache misses overlap */
        uint64_t set = next_set(&choice, &sums, weights, with_replacement);
        if (set == sets) {
            ok = false;
            break;
        }
        uint64_t left = sums.left[set];
        uint64_t number = with_replacement ? draw_number_below(&choice, left) : shmb_choose(&choice, set, left);
        sums.left[set] -= !with_replacement;
        const uint32_t *item = shmb_group_item_at(shmb_group_at(all, set), (uint32_t)number);
        __builtin_prefetch(item);
        out[i] = (int64_t)(uintptr_t)item;
        if (labels) labels[i] = all->order[set].label;
    }
    for (uint64_t i = 0; i < count && ok; i++) out[i] = *(const uint32_t *)(uintptr_t)out[i];
    shmb_choice_end(&choice);
    free(sums.upto);
    free(sums.left);
    return ok;
}
