/* zstd frames in records: see frames.c. */
#ifndef SHMB_FRAMES_H
#define SHMB_FRAMES_H

#include <stdbool.h>
#include <stdint.h>

/* Columns of the output of `shmb_distribute_pieces`: three for frames, then five for parts. */
enum { SHMB_FRAME_AT, SHMB_FRAME_STORED, SHMB_FRAME_EXPANDED, SHMB_IN_FRAME, SHMB_IN_BEFORE, SHMB_IN_BYTES, SHMB_IN_TO, SHMB_IN_PLANES };

/* A piece is stored raw, in a zstd frame, or together with other pieces in the frame of the first of them. */
enum shmb_piece_kind { SHMB_RAW = 0, SHMB_FRAME = 1, SHMB_JOINED = 2 };

/* Storage of one piece of a form. */
struct shmb_piece_storage {
    int64_t kind; /* enum shmb_piece_kind */
    int64_t next;    /* the next piece in the same frame, or -1 */
    /* column of the number of byte planes in the piece; -1: it has no planes */
    int64_t planes;
};

/* Located records of one form, as rows of numbers and of pieces. */
struct shmb_leaves {
    int64_t base; /* address that the offsets are relative to */
    const struct shmb_piece_storage *storage;
    uint64_t pieces;
    const int64_t *numbers;
    uint64_t width;
    const int64_t *offsets, *stored, *expanded;
    uint64_t count;
};

/* Copies raw pieces to their addresses, and lists the frames and parts of compressed pieces. `to` is
 * [pieces][count]; 0 skips a piece. If `of_each` is false, `to` is [pieces], the address of the first record's
 * piece, and the others follow it. Frames and their parts are appended to `out`, which has room for `space` of each. */
void shmb_distribute_pieces(const struct shmb_leaves *leaves, const int64_t *to, bool of_each, int64_t *out, uint64_t space, uint64_t *frames,
                     uint64_t *parts);

/* Frames with their expanded sizes, and the destinations of their parts: see items/records/places.py. */
struct shmb_places {
    const int64_t *expanded;
    uint64_t frames;
    const int64_t *frame, *before, *nbytes, *to, *planes;
    uint64_t parts;
};

/* Frames that are expanded in one step, or in two if they are interleaved:
 *
 *     frames     a = [a0 a1]  b = [b0 b1]  c = [c0 c1]  d = [d0 d1]     the halves of each go to two destinations
 *     expanded   into  a0 a1 c0 c1     other  b0 b1 d0 d1               every second frame to either destination
 *     unwoven    into  a0 b0 c0 d0     other  a1 b1 c1 d1               half of the halves are in place already
 */
struct shmb_frame_run {
    int64_t first, end, bytes;
    int64_t into; /* destination of all frames, one after another; 0: the parts have separate destinations */
    int64_t other; /* second destination of interleaved frames; otherwise 0 */
    int64_t part, parts_end;
    int64_t planar; /* nonzero if some parts have byte planes to join */
};

/* Groups frames into runs of at most `max_bytes` bytes, at most `interleaved` bytes if they are interleaved, or one frame.
 * Stores the runs, and the offset of each part within its run. Returns the number of runs. */
uint64_t shmb_group_frames(const struct shmb_places *places, int64_t max_bytes, int64_t interleaved, int64_t *at, struct shmb_frame_run *runs);

/* Moves the other halves of expanded, interleaved frames to their places. */
void shmb_deinterleave(unsigned char *into, unsigned char *other, uint64_t half, uint64_t frames);

/* True if the frame's header has this expanded size and this dictionary or none. False can also mean that the header
 * does not contain the size, so the caller must ask zstd. */
bool shmb_check_frame(const unsigned char *frame, uint64_t nbytes, uint64_t whole, uint32_t dictionary);

#endif
