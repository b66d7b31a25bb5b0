/* zstd frames: reading their headers, grouping them into steps of expansion, and distributing their contents.
 *
 *     leaves of records ──take apart──▶ frames, each with its parts ──▶ runs of frames
 *
 * The core does not contain zstd; this file has the code around it. items/records/places.py has a diagram. */
#include "tables/frames.h"

#include <string.h>

#define MAGIC 0xFD2FB528u
#define LARGEST_WINDOW 31 /* of zstd, as a power of two */

void shmb_distribute_pieces(const struct shmb_leaves *leaves, const int64_t *to, bool of_each, int64_t *out, uint64_t space, uint64_t *frames,
                     uint64_t *parts) {
    const uint64_t pieces = leaves->pieces;
    for (uint64_t row = 0; row < leaves->count; row++) {
        const int64_t *offsets = leaves->offsets + row * pieces;
        const int64_t *stored = leaves->stored + row * pieces;
        const int64_t *expanded = leaves->expanded + row * pieces;
        const int64_t *numbers = leaves->numbers + row * leaves->width;
        for (uint64_t p = 0; p < pieces; p++) {
            const enum shmb_piece_kind kind = (enum shmb_piece_kind)leaves->storage[p].kind;
            const int64_t from = leaves->base + offsets[p];
            const uint64_t before = *parts;
            int64_t whole = 0;
            if (kind == SHMB_JOINED) continue; /* handled with the piece that has its frame */
            for (int64_t q = (int64_t)p; q >= 0; q = leaves->storage[q].next) {
                const int64_t planes = leaves->storage[q].planes, nbytes = expanded[q];
                const int64_t target = of_each ? to[(uint64_t)q * leaves->count + row] : to[q] + (int64_t)row * nbytes;
                if (target && nbytes && kind == SHMB_RAW) memcpy((void *)(uintptr_t)target, (const void *)(uintptr_t)from, (size_t)nbytes);
                if (target && nbytes && kind == SHMB_FRAME) {
                    const int64_t part[] = {(int64_t)*frames, whole, nbytes, target, planes < 0 ? 1 : numbers[planes]};
                    for (uint64_t column = 0; column < sizeof part / sizeof *part; column++)
                        out[(SHMB_IN_FRAME + column) * space + *parts] = part[column];
                    ++*parts;
                }
                whole += nbytes;
            }
            if (*parts == before) continue;
            out[SHMB_FRAME_AT * space + *frames] = from;
            out[SHMB_FRAME_STORED * space + *frames] = stored[p];
            out[SHMB_FRAME_EXPANDED * space + *frames] = whole;
            ++*frames;
        }
    }
}

/* Finds the interleaved frames from `run` on, an even number, of at most `max_bytes` bytes. False: there are none. */
static bool find_interleaved(const struct shmb_places *places, int64_t max_bytes, struct shmb_frame_run *run) {
    const uint64_t first = (uint64_t)run->first;
    uint64_t part = (uint64_t)run->part, frames = 0;
    if (part + 2 > places->parts) return false;
    const int64_t whole = places->expanded[first], half = whole / 2, into = places->to[part], other = places->to[part + 1];
    for (uint64_t frame = first; frame < places->frames && (frames < 2 || (int64_t)(frames + 1) * whole <= max_bytes); frame++, frames++, part += 2) {
        bool fits = places->expanded[frame] == 2 * half && half > 0 && part + 2 <= places->parts;
        for (uint64_t side = 0; fits && side < 2; side++) {
            const int64_t to = (side ? other : into) + (int64_t)frames * half;
            fits = places->frame[part + side] == (int64_t)frame && places->before[part + side] == (int64_t)side * half &&
                   places->nbytes[part + side] == half && places->to[part + side] == to && places->planes[part + side] <= 1;
        }
        if (!fits || (part + 2 < places->parts && places->frame[part + 2] == (int64_t)frame)) break;
    }
    frames -= frames % 2;
    const int64_t reach = (int64_t)frames * half, distance = into < other ? other - into : into - other;
    if (frames == 0 || distance < reach) return false;
    run->end = run->first + (int64_t)frames;
    run->bytes = 2 * reach;
    run->into = into;
    run->other = other;
    run->parts_end = run->part + 2 * (int64_t)frames;
    return true;
}

/* Exchanges the bytes at two places. */
static void exchange(unsigned char *one, unsigned char *other, uint64_t nbytes) {
    unsigned char kept[1 << 12];
    for (uint64_t at = 0; at < nbytes; at += sizeof kept) {
        const size_t n = nbytes - at < sizeof kept ? (size_t)(nbytes - at) : sizeof kept;
        memcpy(kept, one + at, n);
        memcpy(one + at, other + at, n);
        memcpy(other + at, kept, n);
    }
}

void shmb_deinterleave(unsigned char *into, unsigned char *other, uint64_t half, uint64_t frames) {
    for (uint64_t at = 0; at + 1 < frames; at += 2) exchange(into + (at + 1) * half, other + at * half, half);
}

uint64_t shmb_group_frames(const struct shmb_places *places, int64_t max_bytes, int64_t interleaved, int64_t *at, struct shmb_frame_run *runs) {
    uint64_t count = 0, part = 0;
    for (uint64_t frame = 0; frame < places->frames;) {
        struct shmb_frame_run run = {.first = (int64_t)frame, .part = (int64_t)part};
        if (find_interleaved(places, interleaved, &run)) {
            frame = (uint64_t)run.end, part = (uint64_t)run.parts_end;
            runs[count++] = run;
            continue;
        }
        bool whole = true; /* the destinations of the parts are contiguous and in the same order */
        int64_t done = 0;
        do {
            for (; part < places->parts && places->frame[part] == (int64_t)frame; part++) {
                at[part] = run.bytes + places->before[part];
                run.planar |= places->planes[part] > 1;
                if (part == (uint64_t)run.part) run.into = places->to[part];
                whole = whole && at[part] == done && places->to[part] == run.into + done;
                done = at[part] + places->nbytes[part];
            }
            run.bytes += places->expanded[frame++];
        } while (frame < places->frames && run.bytes + places->expanded[frame] <= max_bytes);
        run.end = (int64_t)frame;
        run.parts_end = (int64_t)part;
        if (run.planar || !whole || done != run.bytes) run.into = 0;
        if (run.bytes) runs[count++] = run;
    }
    return count;
}

bool shmb_check_frame(const unsigned char *frame, uint64_t nbytes, uint64_t whole, uint32_t dictionary) {
    static const unsigned char of_dictionary[] = {0, 1, 2, 4}, of_size[] = {0, 2, 4, 8};
    unsigned char header[18] = {0}; /* the longest possible header */
    uint32_t magic, needs = 0;
    uint64_t expanded = 0;
    if (whole == 0) return nbytes == 0;
    if (nbytes) memcpy(header, frame, nbytes < sizeof header ? nbytes : sizeof header);
    memcpy(&magic, header, sizeof magic);
    const unsigned descriptor = header[4], single = descriptor >> 5 & 1, size_code = descriptor >> 6;
    const unsigned dictionary_bytes = of_dictionary[descriptor & 3], size_bytes = size_code == 0 ? single : of_size[size_code];
    const unsigned char *at = header + 5;
    if (magic != MAGIC || descriptor & 8 || size_bytes == 0) return false;
    if (!single && (*at++ >> 3) + 10 > LARGEST_WINDOW) return false;
    memcpy(&needs, at, dictionary_bytes);
    memcpy(&expanded, at += dictionary_bytes, size_bytes);
    if (size_bytes == 2) expanded += 256;
    return nbytes >= (uint64_t)(at - header) + size_bytes && expanded == whole && (needs == 0 || needs == dictionary);
}
