/* Frames of zstd, of which records have many: see frames.c. */
#ifndef SHMB_FRAMES_H
#define SHMB_FRAMES_H

#include <stdbool.h>
#include <stdint.h>

/* Columns of what `shmb_take_apart` finds, with room for so many each: three of frames, then five of parts. */
enum { SHMB_FRAME_AT, SHMB_FRAME_STORED, SHMB_FRAME_WHOLE, SHMB_IN_FRAME, SHMB_IN_BEFORE, SHMB_IN_BYTES, SHMB_IN_TO, SHMB_IN_PLANES };

/* A piece is raw, or has a frame of zstd, or is in the frame of another piece. */
enum shmb_holding { SHMB_RAW = 0, SHMB_FRAME = 1, SHMB_JOINED = 2 };

/* How a piece of a form is stored. */
struct shmb_piece_storage {
    int64_t holding; /* enum shmb_holding */
    int64_t next;    /* the piece behind it in its frame, or -1 */
    int64_t planes;  /* the number that says how many lie in it one behind the other; -1: it is no plane */
};

/* Located records of one form: rows of numbers, and of pieces. */
struct shmb_leaves {
    int64_t base; /* the address that offsets count from */
    const struct shmb_piece_storage *held;
    uint64_t pieces;
    const int64_t *numbers;
    uint64_t width;
    const int64_t *offsets, *stored, *expanded;
    uint64_t count;
};

/* What each piece holds, on its way to an address of `to`, [pieces][count]; 0: nobody wants it. Where these are not `of_each`,
 * but [pieces], the first ones go there, and the others behind them. Copies what is raw. Writes the frames of what is compressed, and
 * the parts of each in their order, behind those that are there; there is room for so many of both. */
void shmb_take_apart(const struct shmb_leaves *leaves, const int64_t *to, bool of_each, int64_t *out, uint64_t room, uint64_t *frames,
                     uint64_t *parts);

/* What frames expand to, and where it goes: as items/records/places.py tells. */
struct shmb_places {
    const int64_t *whole;
    uint64_t frames;
    const int64_t *frame, *before, *nbytes, *to, *planes;
    uint64_t parts;
};

/* Frames that are expanded in one step, or in two where they are woven:
 *
 *     frames     a = [a0 a1]  b = [b0 b1]  c = [c0 c1]  d = [d0 d1]     of each one half here, one there
 *     expanded   into  a0 a1 c0 c1     other  b0 b1 d0 d1               every second frame to either place
 *     unwoven    into  a0 b0 c0 d0     other  a1 b1 c1 d1               half of them lie there already
 */
struct shmb_frame_run {
    int64_t first, end, bytes;
    int64_t into; /* the address that all of them go to, one behind the other; 0: they go there in parts */
    int64_t other; /* of woven frames; else 0 */
    int64_t part, parts_end;
    int64_t planar; /* whether some of them are to be joined */
};

/* Runs of at most `most` bytes, or `woven` ones, or of one frame. Writes them, and where each part is in the bytes of its run;
 * returns how many. */
uint64_t shmb_runs(const struct shmb_places *places, int64_t most, int64_t woven, int64_t *at, struct shmb_frame_run *runs);

/* Of so many woven frames that have been expanded, the other halves to their places. */
void shmb_unweave(unsigned char *into, unsigned char *other, uint64_t half, uint64_t frames);

/* Whether a frame says that it expands to so many bytes, with that dictionary or none. False may also mean that it says so in
 * another way: ask zstd. */
bool shmb_frame_says(const unsigned char *frame, uint64_t nbytes, uint64_t whole, uint32_t dictionary);

#endif
