/* What a program that callgrind runs asks of it: count from here to there, and write down how many it were. */
#include <valgrind/callgrind.h>

#define VISIBLE __attribute__((visibility("default")))

VISIBLE int counting(void) { return RUNNING_ON_VALGRIND != 0; }

VISIBLE void begin(void) { CALLGRIND_START_INSTRUMENTATION; }

/* Writes a file of its own, numbered from 1, and starts again at zero. */
VISIBLE void write_down(void) { CALLGRIND_DUMP_STATS; }

VISIBLE void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
