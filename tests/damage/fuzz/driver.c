/* A small fuzzer that follows coverage, for compilers without one (gcc: -fsanitize-coverage=trace-pc).
 *
 *     driver replay FILE              runs every line of FILE, in hexadecimal, as an input
 *     driver fuzz FILE SEED INPUTS    runs these and INPUTS more, prints those that reach new edges, and
 *                                     then "inputs N edges M"; the inputs depend only on the seed
 *
 * The current input is stored in the file named by the environment variable SHMB_FUZZ_INPUT, so that it is known if
 * it ends the process. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LONGEST 128
#define EDGES 65536
#define KEPT 20000
#define WATCHDOG_S 20

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);
void __sanitizer_cov_trace_pc(void);

struct input {
    size_t size;
    unsigned char data[LONGEST];
};

static unsigned char reached[EDGES], known[EDGES];
static uintptr_t before;
static struct input *at_hand, kept[KEPT];
static size_t n_kept;
static uint64_t state;

__attribute__((no_sanitize_coverage)) void __sanitizer_cov_trace_pc(void) {
    uintptr_t here = (uintptr_t)__builtin_return_address(0);
    reached[(here ^ before << 3) * 0x9E3779B97F4A7C15u >> 48] = 1;
    before = here;
}

static uint64_t drawn(uint64_t below) { /* SplitMix64 */
    uint64_t z = (state += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % below;
}

static unsigned run(const struct input *input) {
    unsigned fresh = 0;
    *at_hand = *input;
    memset(reached, 0, sizeof reached);
    before = 0;
    alarm(WATCHDOG_S);
    LLVMFuzzerTestOneInput(at_hand->data, at_hand->size);
    for (size_t i = 0; i < EDGES; i++) fresh += reached[i] && !known[i], known[i] |= reached[i];
    return fresh;
}

static void print(const struct input *input) {
    for (size_t i = 0; i < input->size; i++) printf("%02x", input->data[i]);
    printf("\n");
}

static void mutate(struct input *input) {
    static const unsigned char numbers[] = {0, 1, 2, 3, 7, 8, 16, 32, 64, 127, 128, 192, 255};
    for (uint64_t times = 1 + drawn(6); times > 0; times--) {
        size_t at = input->size ? drawn(input->size) : 0;
        switch (drawn(6)) {
        case 0: input->data[at] ^= (unsigned char)(1u << drawn(8)); break;
        case 1: input->data[at] = (unsigned char)drawn(256); break;
        case 2: input->data[at] = numbers[drawn(sizeof numbers)]; break;
        case 3: /* append a call */
            if (input->size < LONGEST) input->data[input->size++] = (unsigned char)drawn(256);
            break;
        case 4: /* truncate */
            if (input->size > 3) input->size -= drawn(input->size / 2);
            break;
        case 5: { /* append the end of another input */
            const struct input *other = &kept[drawn(n_kept)];
            size_t cut = drawn(other->size + 1), room = LONGEST - at, more = other->size - cut;
            if (more > room) more = room;
            memcpy(input->data + at, other->data + cut, more);
            if (at + more > input->size) input->size = at + more;
            break;
        }
        }
    }
}

static void load(const char *path) {
    char line[4 * LONGEST];
    FILE *file = fopen(path, "r");
    if (file == NULL) exit(2);
    while (n_kept < KEPT && fgets(line, sizeof line, file)) {
        struct input *input = &kept[n_kept];
        unsigned byte;
        for (input->size = 0; input->size < LONGEST && sscanf(line + 2 * input->size, "%2x", &byte) == 1; input->size++)
            input->data[input->size] = (unsigned char)byte;
        n_kept += input->size > 0;
    }
    fclose(file);
}

int main(int argc, char **argv) {
    const char *path = getenv("SHMB_FUZZ_INPUT");
    int fd = path ? open(path, O_RDWR | O_CREAT | O_TRUNC, 0600) : -1;
    if (argc < 3 || (fd >= 0 && ftruncate(fd, sizeof *at_hand) != 0)) return 2;
    int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    at_hand = mmap(NULL, sizeof *at_hand, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (at_hand == MAP_FAILED) return 2;
    load(argv[2]);
    for (size_t i = 0; i < n_kept; i++) run(&kept[i]);
    uint64_t inputs = n_kept, edges = 0;
    if (strcmp(argv[1], "fuzz") == 0 && argc == 5 && n_kept > 0) {
        state = strtoull(argv[3], NULL, 10);
        for (uint64_t end = inputs + strtoull(argv[4], NULL, 10); inputs < end; inputs++) {
            struct input input = kept[drawn(n_kept)];
            mutate(&input);
            if (run(&input) == 0) continue;
            print(&input);
            if (n_kept < KEPT) kept[n_kept++] = input;
        }
    }
    for (size_t i = 0; i < EDGES; i++) edges += known[i];
    printf("inputs %llu edges %llu\n", (unsigned long long)inputs, (unsigned long long)edges);
    return 0;
}
