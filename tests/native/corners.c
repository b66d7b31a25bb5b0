/* Two processes that act within one call, one case at a time and always in the same order. The second handle acts in
 * `may_block`, which the first one calls when it finds the mutex taken. */
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "core/check.h"
#include "core/crc32c.h"
#include "core/flow.h"
#include "core/pool.h"
#include "core/reserve.h"
#include "world.h"

static struct shmb_ring one, other;

struct call {
    struct shmb_call call; /* must be first, because the callbacks get its address */
    double alpha;          /* alpha that the other handle sets once, or 0 */
    bool interrupts;
};

/* Replaces the clock of the library: if it is not 0, each call increases the time since boot by 1 ns. */
static uint64_t boot_ns;

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (clock != CLOCK_BOOTTIME || boot_ns == 0) return (int)syscall(SYS_clock_gettime, clock, now);
    *now = (struct timespec){(time_t)(boot_ns / 1000000000), (long)(boot_ns % 1000000000)};
    boot_ns++;
    return 0;
}

static bool interrupted(struct shmb_call *call) { return ((struct call *)call)->interrupts; }
static void nothing(struct shmb_call *call) {}
static struct call plain_call(void) { return (struct call){{nothing, interrupted, 1000000000}, 0, false}; }

static void set_alpha_and_let_go(struct shmb_call *argument) {
    struct call *call = (struct call *)argument, own = plain_call();
    if (call->alpha == 0) return;
    double alpha = call->alpha;
    call->alpha = 0;
    shmb_unlock(&other);
    expect(shmb_set_alpha(&other, &own.call, alpha, 0, false), "set_alpha");
}

static struct call call_beside(double alpha) {
    struct call own = plain_call(), call = {{set_alpha_and_let_go, interrupted, 1000000000}, alpha, false};
    expect(shmb_lock(&other, &own.call), "lock");
    return call;
}

static void right(bool condition, const char *what) {
    if (!condition) fail("not so: %s", what);
}

static double total(void) { return shmb_tree_total(&one.tree); }

static void write_rows(struct shmb_ring *ring, struct call *call, uint64_t count, const double *priorities, int wanted) {
    unsigned char bytes[4 * 64] = {0};
    const unsigned char *sources[LEAVES];
    uint64_t first;
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) sources[leaf] = bytes;
    struct call own = plain_call();
    if (priorities) expect(shmb_check_priorities(ring, priorities, count), "priorities");
    expect(shmb_claim_ring(ring, &own.call, count, NULL, NULL, &first), "claim");
    shmb_fill(ring, sources, 0);
    if (priorities) shmb_fill_priorities(ring, priorities, 0);
    if (call->alpha) *call = call_beside(call->alpha);
    int status = shmb_commit(ring, &call->call, priorities != NULL);
    if (status != wanted) fail("commit: status %d, not %d", status, wanted);
}

static void check_whole(void) {
    struct call call = plain_call();
    struct shmb_check found;
    expect(shmb_check(&one, &call.call, true, 0, &found), "check");
    right(!(found.wrong_nodes | found.wrong_leaves | found.wrong_length | found.wrong_words | found.orphans), "whole");
}

static void an_update_under_a_greater_alpha(void) {
    struct call call = plain_call();
    const int64_t index[] = {1, 0};
    const double priorities[] = {1, 1e200};
    uint64_t applied = 0;
    write_rows(&one, &call, 3, NULL, SHMB_OK);
    call = call_beside(2);
    int status = shmb_update(&one, &call.call, index, NULL, priorities, 2, &applied);
    right(status == SHMB_BAD_PRIORITY, "the update is refused");
    right(shmb_refusal.bad_at == 1, "the refusal says which priority");
    right(applied == 0 && total() == 3, "nothing was changed");
    check_whole();
}

/* There are enough updates to be sorted by element. The error has the original position of the priority. */
static void a_large_update_under_a_greater_alpha(void) {
    enum { COUNT = 1024, BAD = 700 };
    struct call call = plain_call();
    int64_t index[COUNT];
    double priorities[COUNT];
    uint64_t applied = 0;
    for (int i = 0; i < COUNT; i++) index[i] = i % 3, priorities[i] = i == BAD ? 1e200 : 1;
    write_rows(&one, &call, 3, NULL, SHMB_OK);
    call = call_beside(2);
    int status = shmb_update(&one, &call.call, index, NULL, priorities, COUNT, &applied);
    right(status == SHMB_BAD_PRIORITY, "the update is refused");
    right(shmb_refusal.bad_at == BAD, "the refusal says which priority");
    right(applied == 0 && total() == 3, "nothing was changed");
    check_whole();
}

static void an_update_under_another_alpha(void) {
    struct call call = plain_call();
    const int64_t index[] = {1};
    const double priorities[] = {3};
    uint64_t applied = 0;
    write_rows(&one, &call, 2, NULL, SHMB_OK);
    call = call_beside(2);
    expect(shmb_update(&one, &call.call, index, NULL, priorities, 1, &applied), "update");
    right(applied == 1 && total() == 1 + 9, "the mass is that of the later alpha");
    check_whole();
}

static void a_write_under_a_greater_alpha(void) {
    struct call call = plain_call();
    const double priorities[] = {1, 1e200};
    uint64_t first;
    expect(shmb_check_priorities(&one, priorities, 2), "priorities");
    expect(shmb_claim_ring(&one, &call.call, 2, NULL, NULL, &first), "claim");
    expect(shmb_set_alpha(&other, &call.call, 2, 0, false), "set_alpha"); /* reads priorities that do not exist yet */
    shmb_fill_priorities(&one, priorities, 0);
    right(shmb_commit(&one, &call.call, true) == SHMB_BAD_PRIORITY, "the write is refused");
    right(shmb_refusal.bad_at == 1, "the refusal says which priority");
    right(isfinite(total()), "the sum of all masses is finite");
    right(atomic_load(&one.runtime->length) == 0 && atomic_load(&one.runtime->write_count) == 0, "nothing was written");
    check_whole();
    write_rows(&one, &call, 2, NULL, SHMB_OK);
    check_whole();
}

static void a_write_that_alpha_overtakes(void) {
    struct call call = plain_call();
    const double priorities[] = {1, 3};
    call.alpha = 2;
    write_rows(&one, &call, 2, priorities, SHMB_OK);
    right(total() == 1 + 9, "the masses are those of the later alpha");
    check_whole();
}

/* The ring has four slots. A reader finds that all of them were written again. */
static void write_all_again(int point) {
    if (point != SHMB_CP_sample_copy) return;
    struct call call = plain_call();
    world.at_point = NULL;
    write_rows(&other, &call, 4, NULL, SHMB_OK);
    world.at_point = write_all_again;
}

static void a_sample_that_writers_overtake(void) {
    struct call call = plain_call();
    unsigned char rows[LEAVES][64], *out[LEAVES];
    int64_t index[2], tickets[2];
    float weights[2];
    uint64_t redrawn = 0;
    for (unsigned leaf = 0; leaf < LEAVES; leaf++) out[leaf] = rows[leaf];
    write_rows(&one, &call, 4, NULL, SHMB_OK);
    world.at_point = write_all_again;
    int status = shmb_sample(&one, &call.call, 2, 7, out, index, tickets, weights, 0.5, true, &redrawn, NULL);
    world.at_point = NULL;
    right(status == SHMB_OK, "the last round is drawn and copied under the mutex");
    right(redrawn == 2 * 8, "both rows were drawn again in each round before it");
    for (unsigned row = 0; row < 2; row++)
        right(SHMB_WORD(tickets[row], SHMB_COMMITTED) == atomic_load(&one.words[index[row]]), "the items are there");
}

#define SHARED_ROWS 64

static _Thread_local bool is_caller;
static _Atomic uint64_t helped;

static void look_at_rows(void *what, uint64_t first, uint64_t end) {
    unsigned char *looked = what;
    for (uint64_t row = first; row < end; row++) looked[row]++;
    if (!is_caller) atomic_fetch_add(&helped, end - first);
    sched_yield();
}

/* Runs until other threads have helped often enough, or for ever. */
static void *share_rows(void *argument) {
    unsigned char looked[SHARED_ROWS + 1];
    is_caller = true;
    while (atomic_load(&helped) < 1000) {
        memset(looked, 0, sizeof looked);
        shmb_divide_among_threads(look_at_rows, looked, SHARED_ROWS, SHMB_SHARED_BYTES);
        for (unsigned row = 0; row < SHARED_ROWS; row++) right(looked[row] == 1, "each row is done once");
        right(looked[SHARED_ROWS] == 0, "there is nothing behind the last row");
    }
    return argument;
}

static void batches_that_threads_share(void) {
    pthread_t second;
    shmb_set_threads(4);
    expect(pthread_create(&second, NULL, share_rows, NULL), "pthread_create");
    share_rows(NULL);
    pthread_join(second, NULL);
}

/* The claim reads the time, finds the reservation, and reads the time again to find others that have expired. */
static void a_reservation_that_expires_under_its_claim(void) {
    struct call call = plain_call();
    const struct shmb_limiter ratio = {.samples_per_insert = 1, .error_buffer = 1 << 20, .min_size = 1, .limits = SHMB_RATIO, .when_no_peer = SHMB_ALONE_WAIT};
    const struct shmb_ages none = {0};
    uint32_t place = 0;
    uint64_t id = 0;
    boot_ns = 5000;
    expect(shmb_limit(&one, &call.call, &ratio, &none), "limit");
    expect(shmb_reserve(&one, &call.call, (struct shmb_request){.rows = 2, .elements = 2, .expires_ns = 6000}, &place, &id), "reserve");
    right(atomic_load(&one.runtime->reserved) == 2, "it is reserved");
    shmb_selected_reservation = (struct shmb_selected_reservation){&one, place, id, NULL, NULL, 0};
    boot_ns = 5999;
    write_rows(&one, &call, 2, NULL, SHMB_OK);
    right(boot_ns > 5999, "the claim looked at the time");
    right(atomic_load(&one.runtime->reserved) == 0, "nothing is reserved any more");
    right(shmb_count_reservation_faults(&one) == 0, "the reservations say so, too");
    check_whole();
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"an_update_under_a_greater_alpha", an_update_under_a_greater_alpha},
    {"a_large_update_under_a_greater_alpha", a_large_update_under_a_greater_alpha},
    {"an_update_under_another_alpha", an_update_under_another_alpha},
    {"a_write_under_a_greater_alpha", a_write_under_a_greater_alpha},
    {"a_write_that_alpha_overtakes", a_write_that_alpha_overtakes},
    {"a_sample_that_writers_overtake", a_sample_that_writers_overtake},
    {"a_reservation_that_expires_under_its_claim", a_reservation_that_expires_under_its_claim},
    {"batches_that_threads_share", batches_that_threads_share},
};

int main(int argc, char **argv) {
    struct options options = {.seed = 1, .capacity = 4, .lanes = 1};
    struct call call = plain_call();
    for (unsigned i = 0; argc == 2 && i < sizeof cases / sizeof cases[0]; i++)
        if (strcmp(argv[1], cases[i].name) == 0) {
            shmb_crc32c_init();
            world_begin(&options);
            handle_open(&one);
            handle_open(&other);
            expect(shmb_set_alpha(&one, &call.call, 1, 0, true), "set_alpha");
            cases[i].run();
            handle_free(&one);
            handle_free(&other);
            puts("{}");
            return 0;
        }
    return 2;
}
