/* Ring's methods, one row each: name, required kind of items, arguments (one letter each, see struct method in
 * binding.h), and documentation. The comment at each definition gives the result: a number, or a negated status. */
#ifndef SHMB_METHODS_H
#define SHMB_METHODS_H

#include "python/binding.h"

#define METHODS(X) \
    X(write, ROWS, "annnt", "(addresses, count, priorities, streams, timeout_ns): claims, fills and commits.") \
    X(write_loaded, ROWS, "annnt", "(addresses, count, priorities, sources, timeout_ns): like write(), for items with given sources.") \
    X(place, ROWS, "nnanbt", "(slots, count, addresses, priorities, in_place, timeout_ns): like write(), to named slots.") \
    X(claim, ROWS, "nnt", "(count, streams, timeout_ns): claims slots, which the caller fills.") \
    X(claim_slots, ROWS, "nnnnnt", "(slots, count, in_place, tickets or 0, accepted or 0, timeout_ns): claims named slots. in_place 2: no observation\n" \
                                   "and no next observation changes.") \
    X(fill, ROWS, "a", "(addresses): copies the payload into the claimed slots.") \
    X(commit, ANY, "nnt", "(priorities, skip_rows, timeout_ns): publishes the claimed slots.") \
    X(abort, ANY, "t", "(timeout_ns): aborts the claim.") \
    X(sample, ANY, "nkmnnnrbt", "(count, key, out, index, tickets, weights, beta, prioritized, timeout_ns): draws, copies and validates.") \
    X(read, ROWS, "nnant", "(index, count, out, tickets, timeout_ns): copies items by index, and validates the copies.") \
    X(update, ANY, "nnnnt", "(index, tickets, priorities, count, timeout_ns): sets raw priorities.") \
    X(update_arrays, ANY, "pppt", "(index, priorities, tickets or None, timeout_ns): like update(), from arrays or tensors. Returns (applied, stale), a\n" \
                                  "negated status, or None if they need conversion or an element does not exist.") \
    X(set_alpha, ANY, "oobt", "(alpha or None, eps or None, bind, timeout_ns): changes them, or enables priorities. None: unchanged.") \
    X(read_totals, ANY, "t", "(timeout_ns): returns mass, least, max_priority and length, which are consistent.") \
    X(raise_max_priority, ANY, "rt", "(value, timeout_ns): raises the largest priority to at least this value.") \
    X(empty, ANY, "bt", "(keep_write_count, timeout_ns): removes every item.") \
    X(restore, ANY, "nnrt", "(ticket, write_count, max_priority, timeout_ns): sets position and counts of a loaded buffer.") \
    X(check, ANY, "bnt", "(alive, slots, timeout_ns): counts faults in the written slots, and at least `slots`. alive False: takes no lock,\n" \
                         "because no client is alive.") \
    X(snapshot, ANY, "t", "(timeout_ns): returns a consistent copy of the runtime page and the registry.") \
    X(copy_slots, ROWS, "nnan", "(first, count, out, tickets): copies the slots that differ from tickets.") \
    X(finish_snapshot, ROWS, "annnt", "(out, tickets, sources, raw, timeout_ns): like copy_slots() under the mutex, and returns counters.") \
    X(compute_checksum, ANY, "sn", "(slot, ticket): returns the CRC32C of a slot.") \
    X(verify, ANY, "nn", "(first, count): returns the slots with a wrong checksum.") \
    X(seal, ANY, "nn", "(first, count): stores the checksum of each item in these slots; no other process may use the ring.") \
    X(repair_links, ROWS, "", "(): repairs the locations of next observations, or removes their items; no other client may be alive.") \
    X(rebuild, ANY, "", "(): recomputes leaves, length and parents; no other client may be alive.") \
    X(reap, ANY, "ent", "(entry, incarnation, timeout_ns): finishes the claim of a client proven dead, and frees its entry.") \
    X(forfeit, ANY, "ent", "(entry, turn, timeout_ns): moves an unused turn to the end of the queue.") \
    X(leave, ANY, "t", "(timeout_ns): frees the entry of this handle.") \
    X(wait, ANY, "t", "(timeout_ns): sleeps until another client makes progress.") \
    X(check_directory, ANY, "", "(): returns a status if the directory is gone; asks the system once a second.") \
    X(bypass, ANY, "n", "(calls): lets the next write or draw of this thread (1), all (2), or none (0) pass the ratio.") \
    X(admit_sample, ANY, "nnbt", "(count, min_size, chosen, timeout_ns): admits a draw, and counts it.") \
    X(cancel_draw, ANY, "nnt", "(count, version, timeout_ns): takes back the count of an admitted draw that was not made.") \
    X(dequeue, ANY, "nnnt", "(count, index, tickets, timeout_ns): takes the oldest items of a queue.") \
    X(release, ANY, "t", "(timeout_ns): ends the reading of dequeued items.") \
    X(set_limits, ANY, "nrrnnnnnt", "(limits, samples_per_insert, error_buffer, min_size, max_times_sampled, when_no_peer,\n" \
                                    "max_staleness, items_per_version, timeout_ns): sets the limits of both sides.") \
    X(reserve, ANY, "nnnnnt", "(rows, bytes, expires_ns, id or 0, address, timeout_ns): makes a reservation, and stores its name at the address.") \
    X(select_reservation, ANY, "nnnn", "(name or 0, versions or 0, young, count): selects the reservation of this thread's next claim.") \
    X(cancel_reservation, ANY, "nt", "(name, timeout_ns): ends a reservation that is not needed.") \
    X(note_partial, ANY, "nt", "(name, timeout_ns): records that the reservation has pieces in a file.") \
    X(partial_is_done, ANY, "nbt", "(id, forget, timeout_ns): returns 1 if a partial is committed. forget: its file was removed.") \
    X(count_refused, ANY, "n", "(elements): counts elements that were too old.") \
    X(open_consumer, ANY, "nnnbbnt", "(which, name, times, holds, newest, seed, timeout_ns): opens a consumer under init.lock, and returns its number.") \
    X(remove_consumer, ANY, "nnt", "(which, number, timeout_ns): removes a consumer.") \
    X(deliver, ANY, "nnnnnnnnt", "(which, number, count, least, lease_ns, slots, tickets, lease, timeout_ns): delivers the oldest available items\n" \
                                 "under a lease.") \
    X(claim_groups, ANY, "nnnnnnnnnt", "(which, number, slots, tickets, sizes, groups, lease_ns, accepted, lease, timeout_ns): delivers each group\n" \
                                       "completely or not at all. lease_ns 0: only tells which could be.") \
    X(drop_items, ANY, "nnnnnt", "(which, number, slots, tickets, count, timeout_ns): completes items without delivery, if no client has them.") \
    X(acknowledge, ANY, "nnnnnnt", "(which, number, leases, slots, tickets, count, timeout_ns): acknowledges each item under its lease.") \
    X(return_lease, ANY, "nnnt", "(which, number, lease, timeout_ns): returns the items of a lease.") \
    X(is_stuck, ANY, "nnnt", "(which, number, missing, timeout_ns): returns 1 if the batch cannot grow before its oldest item is taken.") \
    X(await_items, ANY, "nnnnt", "(which, number, wanted, since, timeout_ns): registers a caller that found fewer items than wanted. since: the\n" \
                                 "address of a uint64, 0 at first.") \
    X(count_deliverable, ANY, "nnnt", "(which, number, wanted, timeout_ns): counts how many of the wanted items could be delivered now.") \
    X(list_returned, ANY, "nnnnnnt", "(which, number, known, slots, tickets, room, timeout_ns): lists items returned since the previous call. known:\n" \
                                     "uint64 for each lease, zeros at first. room 0: returns an upper limit.") \
    X(find_oldest, ANY, "nnnt", "(which, number, oldest, timeout_ns): stores slot, ticket, head, room, and whether a writer waits for it. Returns 1\n" \
                                "if there is one.") \
    X(read_item_states, ANY, "nnnnnt", "(which, number, states, tickets, deliveries, timeout_ns): stores the state of every slot.") \
    X(find_queue_reason, ANY, "ent", "(entry, side, timeout_ns): returns why a queue makes a client wait, or 0.") \
    X(stop_waiting, ANY, "t", "(timeout_ns): stops waiting for a slot and for the other side.") \
    X(write_records, RECORDS, "nnnnnnnnnt", "(data, bytes, starts, sizes, count, outside, each, priorities, streams, timeout_ns): claims, fills and commits.") \
    X(place_records, RECORDS, "nnnnnnnnnbnnt", "(slots, data, bytes, starts, sizes, count, outside, each, priorities, in_place, tickets or 0,\n" \
                                             "accepted or 0, timeout_ns): like write_records(), to named slots in ascending order.") \
    X(sample_records, RECORDS, "nknnnnnnnnrbt", "(count, key, data, room, starts, sizes, positions, index, tickets, weights, beta,\n" \
                                                "prioritized, timeout_ns): draws, copies and validates.") \
    X(read_records, RECORDS, "nnnnnnnnt", "(index, count, data, room, starts, sizes, positions, tickets, timeout_ns): copies records by slot.") \
    X(read_span, RECORDS, "t", "(timeout_ns): returns the tail, the position below which no claim is writing, and the head of the byte ring.") \
    X(finish_records_snapshot, RECORDS, "nnnnnnnt", "(from, data, room, tickets, extents, sources, raw, timeout_ns): copies everything under one lock.") \
    X(relink, RECORDS, "nn", "(slots, count): restores the chain of headers; slots in the order of their positions.")

#define BODY(name, items, arguments, text) PyObject *shmb_ring_##name(struct ring_object *self, struct parsed *parsed);
METHODS(BODY)
#undef BODY

#endif
