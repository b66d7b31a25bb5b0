/* Ring's methods, one row each: name, required kind of items, arguments (one letter each, see struct method in
 * binding.h), and documentation. The comment at each definition gives the result: a number, or a negated status. */
#ifndef SHMB_METHODS_H
#define SHMB_METHODS_H

#include "python/binding.h"

#define METHODS(X) \
    X(write, ROWS, "annnt", "(addresses, count, priorities, streams, timeout_ns): claim, fill, commit.") \
    X(write_loaded, ROWS, "annnt", "(addresses, count, priorities, sources, timeout_ns): the same, of items of other sources.") \
    X(place, ROWS, "nnanbt", "(slots, count, addresses, priorities, in_place, timeout_ns): the same for named slots.") \
    X(claim, ROWS, "nnt", "(count, streams, timeout_ns): take slots; the caller fills them.") \
    X(claim_slots, ROWS, "nnnnnt", "(slots, count, in_place, tickets or 0, kept or 0, timeout_ns): take named slots; in_place 2\n" \
                                   "where neither observations nor next ones change.") \
    X(fill, ROWS, "a", "(addresses): the payload of what was claimed.") \
    X(commit, ANY, "nnt", "(priorities, skip_rows, timeout_ns): publish what was claimed.") \
    X(abort, ANY, "t", "(timeout_ns): give the claimed slots back, empty.") \
    X(sample, ANY, "nkmnnnrbt", "(count, key, out, index, tickets, weights, beta, prioritized, timeout_ns): draw, copy, validate.") \
    X(read, ROWS, "nnant", "(index, count, out, tickets, timeout_ns): validated copies by index.") \
    X(update, ANY, "nnnnt", "(index, tickets, priorities, count, timeout_ns): raw priorities.") \
    X(update_given, ANY, "pppt", "(index given, priorities given, tickets given, timeout_ns): the same, of arrays or tensors as they lie, or\n" \
                                 "no tickets; (applied, stale), a status below 0, or None: others, or no such elements.") \
    X(set_alpha, ANY, "oobt", "(alpha or None, eps or None, bind, timeout_ns): change them, or switch the tree on; None: as it is.") \
    X(totals, ANY, "t", "(timeout_ns): mass, least, max_priority and length of one moment.") \
    X(raise_max_priority, ANY, "rt", "(value, timeout_ns): the largest priority ever given is at least this one.") \
    X(empty, ANY, "bt", "(keep_write_count, timeout_ns): forget every item.") \
    X(restore, ANY, "nnrt", "(ticket, write_count, max_priority, timeout_ns): position and counts of a buffer that is loaded.") \
    X(check, ANY, "bnt", "(alive, slots, timeout_ns): what is not as it should be in those that were written and in so many,\n" \
                       "counted; without a lock where nobody is alive.") \
    X(snapshot, ANY, "t", "(timeout_ns): runtime page and registry of one moment.") \
    X(copy_slots, ROWS, "nnan", "(first, count, out, tickets): copy the slots that differ from tickets.") \
    X(copy_moment, ROWS, "annnt", "(out, tickets, sources, raw, timeout_ns): the same under the mutex, and the counters.") \
    X(checksum, ANY, "sn", "(slot, ticket): CRC32C of a slot's bytes.") \
    X(verify, ANY, "nn", "(first, count): slots whose checksum is wrong.") \
    X(seal, ANY, "nn", "(first, count): store the checksum of each item in these slots; no other process may use the ring.") \
    X(mend, ROWS, "", "(): next observations are where their slots say, or their items go; nobody else may be alive.") \
    X(rebuild, ANY, "", "(): recomputes leaves, length and parents; nobody else may be alive.") \
    X(reap, ANY, "ent", "(entry, incarnation, timeout_ns): finish the claim of a client proven dead, free its entry.") \
    X(forfeit, ANY, "ent", "(entry, turn, timeout_ns): send a turn that is not used to the end of the queue.") \
    X(leave, ANY, "t", "(timeout_ns): free our entry.") \
    X(wait, ANY, "t", "(timeout_ns): sleep until somebody makes progress.") \
    X(check_directory, ANY, "", "(): whether the directory is there; asked of the system once a second.") \
    X(bypass, ANY, "n", "(calls): whatever the ratio, this thread's next write or draw goes on (1), all (2), or none (0).") \
    X(admit_sample, ANY, "nnbt", "(count, min_size, chosen, timeout_ns): the draw may be made, and counts.") \
    X(cancel, ANY, "nnt", "(count, version, timeout_ns): a draw that was admitted was not made.") \
    X(dequeue, ANY, "nnnt", "(count, index, tickets, timeout_ns): the oldest of a queue.") \
    X(release, ANY, "t", "(timeout_ns): what was taken is read.") \
    X(limit, ANY, "nrrnnnnnt", "(limits, samples_per_insert, error_buffer, min_size, max_times_sampled, when_no_peer,\n" \
                               "max_staleness, items_per_version, timeout_ns).") \
    X(reserve, ANY, "nnnnnt", "(rows, bytes, expires_ns, id or 0, name, timeout_ns): room for items to come; what names it is\n" \
                              "written to the address as it is granted.") \
    X(hold, ANY, "nnnn", "(name or 0, versions or 0, young, count): this thread's next claim is made from what it names.") \
    X(give_back, ANY, "nt", "(name, timeout_ns): it is not needed any more.") \
    X(note_partial, ANY, "nt", "(name, timeout_ns): it has pieces in a file.") \
    X(partial_is_done, ANY, "nbt", "(id, forget, timeout_ns): whether pieces are committed; forget: their file is gone.") \
    X(refuse, ANY, "n", "(elements): so many were too old.") \
    X(open_consumer, ANY, "nnnbbnt", "(which, name, times, holds, newest, seed, timeout_ns): under init.lock; returns its number.") \
    X(remove_consumer, ANY, "nnt", "(which, number, timeout_ns): it holds nothing any more.") \
    X(deliver, ANY, "nnnnnnnnt", "(which, number, count, least, lease_ns, slots, tickets, lease, timeout_ns): the oldest that it has\n" \
                                 "not been given, under a lease.") \
    X(claim_groups, ANY, "nnnnnnnnnt", "(which, number, slots, tickets, sizes, groups, lease_ns, kept, lease, timeout_ns): each group\n" \
                                       "whole or not at all; lease_ns 0: which could be.") \
    X(drop_items, ANY, "nnnnnt", "(which, number, slots, tickets, count, timeout_ns): what nobody has, without delivery.") \
    X(acknowledge, ANY, "nnnnnnt", "(which, number, leases, slots, tickets, count, timeout_ns): each under its lease.") \
    X(return_lease, ANY, "nnnt", "(which, number, lease, timeout_ns): what is under it is given to others.") \
    X(is_stuck, ANY, "nnnt", "(which, number, missing, timeout_ns): 1: no more comes before the oldest item is taken.") \
    X(await_items, ANY, "nnnnt", "(which, number, wanted, since, timeout_ns): a caller that chooses has not found so many; since: uint64,\n" \
                                 "0 at first; again behind another look.") \
    X(to_give, ANY, "nnnt", "(which, number, wanted, timeout_ns): how many of them could be given now.") \
    X(returned, ANY, "nnnnnnt", "(which, number, known, slots, tickets, room, timeout_ns): what came back since the call before; known:\n" \
                                "uint64 for each lease, zeros at first. Without room: how many may come.") \
    X(oldest_to_give, ANY, "nnnt", "(which, number, oldest, timeout_ns): 1: slot, ticket, head, room, and whether a writer waits for it.") \
    X(item_states, ANY, "nnnnnt", "(which, number, states, tickets, notes, timeout_ns): of every slot, at one moment.") \
    X(waits_in_queue, ANY, "ent", "(entry, side, timeout_ns): why a queue makes a client wait, or 0.") \
    X(give_up, ANY, "t", "(timeout_ns): stop waiting, for a slot and for the other side.") \
    X(write_records, RECORDS, "nnnnnnnt", "(data, bytes, starts, sizes, count, priorities, streams, timeout_ns): claim, fill, commit.") \
    X(place_records, RECORDS, "nnnnnnnbnnt", "(slots, data, bytes, starts, sizes, count, priorities, in_place, tickets or 0,\n" \
                                             "kept or 0, timeout_ns): the same for named slots, in ascending order.") \
    X(sample_records, RECORDS, "nknnnnnnnnrbt", "(count, key, data, room, starts, sizes, positions, index, tickets, weights, beta,\n" \
                                                "prioritized, timeout_ns): draw, copy, validate.") \
    X(read_records, RECORDS, "nnnnnnnnt", "(index, count, data, room, starts, sizes, positions, tickets, timeout_ns): by slot.") \
    X(span, RECORDS, "t", "(timeout_ns): tail, where nobody writes below, and head of the byte ring.") \
    X(records_moment, RECORDS, "nnnnnnnt", "(from, data, room, tickets, extents, sources, raw, timeout_ns): all of one moment.") \
    X(relink, RECORDS, "nn", "(slots, count): one way from record to record; slots in the order of their positions.")

#define BODY(name, items, arguments, text) PyObject *shmb_ring_##name(struct ring_object *self, struct asked *asked);
METHODS(BODY)
#undef BODY

#endif
