#include "core/layout.h"

#include <string.h>

static uint64_t on_a_cache_line(uint64_t offset) { return (offset + 63u) & ~(uint64_t)63u; }

static uint64_t whole_nodes(uint64_t nodes) { return (nodes + SHMB_FANOUT - 1) / SHMB_FANOUT * SHMB_FANOUT; }

void shmb_compute_sections(uint64_t capacity, uint64_t lanes, bool records, uint64_t own_rows, struct shmb_sections *out) {
    uint64_t leaves = capacity * lanes, at = 0;
    memset(out, 0, sizeof *out);
    out->words = at;
    at = on_a_cache_line(at + 8 * capacity);
    out->checksums = at;
    at = on_a_cache_line(at + 4 * capacity);
    out->sources = at;
    at = on_a_cache_line(at + 8 * capacity);
    out->raw = at;
    at = on_a_cache_line(at + 8 * leaves);
    out->mass = at;
    at = on_a_cache_line(at + 8 * whole_nodes(leaves));
    out->nodes[0] = leaves;
    do {
        unsigned level = ++out->depth;
        out->nodes[level] = (out->nodes[level - 1] + SHMB_FANOUT - 1) / SHMB_FANOUT;
        out->sum[level] = at;
        at = on_a_cache_line(at + 8 * whole_nodes(out->nodes[level]));
        out->min[level] = at;
        at = on_a_cache_line(at + 8 * whole_nodes(out->nodes[level]));
    } while (out->nodes[out->depth] > 1);
    out->extents = at;
    if (records) at = on_a_cache_line(at + sizeof(struct shmb_extent) * capacity);
    out->nexts = at;
    if (own_rows) at = on_a_cache_line(at + 8 * capacity);
    out->holders = at;
    if (own_rows) at = on_a_cache_line(at + 4 * own_rows);
    out->bytes = at;
}

static uint64_t whole_pages(uint64_t bytes) { return (bytes + SHMB_PAGE - 1) / SHMB_PAGE * SHMB_PAGE; }

void shmb_compute_parts(uint64_t capacity, struct shmb_ledger_parts *out) {
    out->reservations = sizeof(struct shmb_ledger);
    out->consumers = out->reservations + whole_pages(SHMB_RESERVATIONS * sizeof(struct shmb_reservation));
    out->deliveries = whole_pages(SHMB_LEASES * sizeof(struct shmb_lease));
    out->each = out->deliveries + whole_pages(capacity * sizeof(struct shmb_delivery));
    out->bytes = out->consumers + SHMB_CONSUMERS * out->each;
}
