"""Uniform sampling without replacement."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Ring
from shmbuffer.memory.format.array_types import Ints
from shmbuffer.samplers.passes import (
    Pass,
    described,
    draw_next,
    evictions,
    filled_elements,
    is_over,
    places_of,
    wait_for,
    wait_for_items,
)
from shmbuffer.samplers.permutation import FEWEST, Permutation
from shmbuffer.samplers.rank import Share, require_rank, share_rank
from shmbuffer.samplers.sampler import (
    ATTEMPTS,
    NOTHING_THERE,
    Sampler,
    ask_rank,
    drawn_by,
    lanes_of,
    random_numbers,
)
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.storages.indexing import ravel, tickets_at
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.sampler_files import PASS, moved_pass


class SamplerWithoutReplacement(Sampler):
    """Draws each item once per pass, then starts the next pass.

    With a batch size of 3, a pass over 10 items has batches of 3, 3, 3 and 1, or 3, 3 and 3 with
    ``drop_last``. After the last batch of a pass, `ran_out` is True, which ends an iteration over
    the buffer. The next draw starts a new pass. If an iteration is stopped in the middle of a pass,
    the next iteration continues the pass.

    Writes in the middle of a pass have these effects:

    - If the storage grows, a new pass starts, as in TorchRL. Items that other processes add to a
      shared storage are included in the next pass instead, so that a pass can end while other
      processes continue to write.
    - A slot that is overwritten is drawn once, with the item that it contains when it is drawn. A
      slot without an item, for example after an eviction, is skipped.
    - If the storage is emptied, a new pass starts.

    The pass belongs to this sampler in this process. With ``world_size``, several learners share
    each pass, and exactly one of them draws each item. The numbers of their items differ by at most
    one. With ``drop_last``, these numbers are equal, so that all learners get the same number of
    batches. The shares depend on ``seed``, the rank, the slot and the number of the pass, but not
    on a random generator. They are exact if all learners start the same passes with the same length
    of the storage. A learner that starts a new pass because of its own write is one pass ahead of
    the other learners. If a slot is overwritten, it still belongs to the same learner.

    Args:
        drop_last: if True, drops the last batch of a pass if it would be incomplete. Requires a
            ``batch_size`` of the buffer.
        shuffle: if True, each pass has a new random order. If False, items are drawn in storage
            order.
        world_size: number of learners that share each pass. None means that passes are not shared.
        rank: number of this learner, starting at 0. If None, uses the ``rank`` of the buffer, the
            rank in torch.distributed, or the environment variable ``RANK``; the first of these that
            is set.
        seed: seed of shared passes, which must be the same for all learners.

    Raises:
        ValueError: ``world_size`` is not an int or is below 1, or ``rank`` is not below
            ``world_size``.

    Cost: O(batch), even for the first batch of a pass and after a write. The start of a pass is
        O(items) with ``world_size``, or if there are empty slots after an eviction or an aborted
        write.

    Example:
        >>> import torch
        >>> from shmbuffer import LazyTensorStorage, ReplayBuffer
        >>> from shmbuffer import SamplerWithoutReplacement
        >>> rb = ReplayBuffer(
        ...     storage=LazyTensorStorage(10),
        ...     sampler=SamplerWithoutReplacement(shuffle=False),
        ...     batch_size=3,
        ... )
        >>> index = rb.extend(torch.arange(7))
        >>> [batch.tolist() for batch in rb]
        [[0, 1, 2], [3, 4, 5], [6]]

    Source: ``torchrl.data.replay_buffers.SamplerWithoutReplacement``.
    """

    _state_keys = ("_sample_list", "drop_last", "len_storage", "_ran_out")
    _torchrl_files = PASS

    def __init__(
        self,
        drop_last: bool = False,
        shuffle: bool = True,
        *,
        world_size: int | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        self.drop_last = bool(drop_last)
        self.shuffle = bool(shuffle)
        self.world_size, self._own_rank, self.seed = world_size, require_rank(rank), int(seed)
        if world_size is not None and (type(world_size) is not int or world_size < 1):
            raise ValueError(f"world_size must be an integer of at least 1, got {world_size!r}")
        if world_size is not None and (rank or 0) >= world_size:
            raise ValueError(
                f"rank must be between 0 and world_size - 1 (world_size={world_size}), got {rank}"
            )
        self._begun = 0  # number of shared passes that this learner has started
        self._pass = Pass()
        self._storage: weakref.ref[Any] | None = None  # storage of the current pass
        self._written = False  # True if this sampler's buffer has written since the last draw
        self._loaded = False  # True until a loaded pass has been compared with the storage

    # -- drawing -------------------------------------------------------------------------------

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Draws items; see `Sampler.sample`.

        Returns:
            The next ``batch_size`` items of the pass, or the remaining items if there are fewer. If
            the storage is shared, the dict has ``"index_generation"``.

        Raises:
            EmptyBufferError: the storage is empty.
            ValueError: with ``drop_last``, the batch size is larger than the number of items.
        """
        if self.world_size is None:
            ask_rank(self, storage)
        ring: Ring | None = ring_of(storage)
        now, whole = self._pass, batch_size if self.drop_last else min(batch_size, 1)
        if now.order is None or self._has_changed(storage, ring, now):
            now = self._new_pass(storage, ring, batch_size)
        for _ in range(ATTEMPTS):
            drawn = draw_next(ring, now, batch_size)
            if drawn is not None and len(drawn.elements) >= whole:
                break
            if drawn is None or not (drawn.filling and wait_for(ring, now.left())):
                now = self._new_pass(storage, ring, batch_size)
        else:
            raise EmptyBufferError(
                f"no batch of {batch_size} items could be sampled in {ATTEMPTS} attempts, because "
                "other clients keep emptying the storage or overwriting its items; use a larger "
                "storage or a smaller batch size"
            )
        now = now._replace(at=drawn.at, ran_out=False)
        ended = is_over(ring, now, max(whole, 1))
        self._pass = Pass(whole=now.whole, items=now.items, ran_out=True) if ended else now
        self._written = self._loaded = False
        if self._storage is None or self._storage() is not storage:
            self._storage = weakref.ref(storage)
        # A copy, because the elements can be a view of the order.
        return described(storage, drawn.elements.copy(), drawn.tickets)

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """True if the storage has an item or, with ``drop_last``, enough items for a full batch."""
        count = len(storage)
        if count and self.world_size is not None:
            count = len(self._ours(places_of(storage, ring_of(storage))))
        return count >= self._least(batch_size)

    def _least(self, wanted: int) -> int:
        """Returns the minimum size of a batch: ``wanted`` items with ``drop_last``, otherwise 1."""
        return max(1, wanted if self.drop_last else 1)

    def _has_changed(self, storage: Any, ring: Ring | None, now: Pass) -> bool:
        """True if a change of the storage, such as its growth, requires a new pass."""
        assert now.order is not None
        if self._storage is not None and self._storage() is not storage:
            return True
        length = len(storage)
        if ring is None:
            return length != now.items
        if self._loaded:
            return length != now.items or now.reaches(ring.elements)
        # A smaller length is no change, because a slot has no item while it is overwritten.
        return length > now.items and (self._written or not storage.shared)

    def _new_pass(self, storage: Any, ring: Ring | None, batch_size: int) -> Pass:
        """Returns a new pass over all items, or over this learner's share of them.

        See `filled_elements` and `places_of` for the cost.
        """
        wait_for_items(storage, ring, NOTHING_THERE)
        evicted = evictions(ring)  # must be read before the slots
        if self.world_size is None and (count := filled_elements(storage, ring)):
            self._require(batch_size, count)
            return Pass(self._order_of(count), 0, count, count, evicted=evicted)
        places = places_of(storage, ring)
        ours = self._ours(places)
        self._require(batch_size, len(ours))
        if not len(ours):
            raise EmptyBufferError(
                f"the storage has {len(places)} items for {self.world_size} learners, and this "
                "learner's share is empty; write more items first"
            )
        return Pass(self._in_order(ours), 0, len(ours), len(places), evicted=evicted)

    def _require(self, batch_size: int, count: int) -> None:
        """Raises ValueError if ``drop_last`` would drop all of the ``count`` items in a pass."""
        if self.drop_last and count < batch_size:
            raise ValueError(
                f"The batch size ({batch_size}) is greater than the storage capacity in use "
                f"({count} items), and drop_last=True drops incomplete batches; write more items "
                "first, use a smaller batch size, or pass drop_last=False"
            )

    def _order_of(self, count: int) -> Ints | Permutation:
        """Returns the order of a pass over the first ``count`` elements."""
        if not self.shuffle:
            return Permutation(count, None)
        if count < FEWEST:
            table: Ints = drawn_by(self, cpu.randperm, count).numpy()
            return table
        return Permutation(count, int(random_numbers(self, 1)[0]))

    def _ours(self, places: Ints) -> Ints:
        """Returns the elements in ``places`` that belong to this learner's share."""
        if self.world_size is None:
            return places
        rank = share_rank(self._given_rank, self.world_size)
        share = Share(rank, self.world_size, self.seed, self._begun)
        return share.of(places, shuffle=self.shuffle, even=self.drop_last)

    def _in_order(self, ours: Ints) -> Ints:
        """Returns the elements of a new pass in their order. Counts the passes that are shared."""
        if self.world_size is not None:
            self._begun += 1
        elif self.shuffle:  # the order depends only on the generator and the number of elements
            ours = ours[self._order_of(len(ours))[:]]
        return ours

    def _again(self, storage: Any, index: Any) -> tuple[Any, dict[str, Any]]:
        """Draws the same elements again, with their current items.

        Waits up to 5 s for elements that are being written. Elements without an item are left out.
        """
        ring: Ring | None = ring_of(storage)
        elements = ravel(index, lanes_of(storage))
        if ring is None:
            return index, {}
        wait_for(ring, elements)
        tickets = tickets_at(ring, elements // ring.width)
        held = tickets >= 0
        if not held.any():
            return self.sample(storage, len(elements))
        return described(storage, elements[held], tickets[held])

    @property
    def ran_out(self) -> bool:
        """True if the last draw ended a pass."""
        return self._pass.ran_out

    @ran_out.setter
    def ran_out(self, value: bool) -> None:
        self._pass = self._pass._replace(ran_out=bool(value))

    # -- called by the buffer ----------------------------------------------------------------------

    def add(self, index: Any) -> None:
        """Records that the buffer has written an item."""
        self._written = True

    def extend(self, index: Any) -> None:
        """Records that the buffer has written items."""
        self._written = True

    def _empty(self) -> None:
        self._pass, self._written = Pass(), False

    def _divide(self, worker: int, workers: int, rank: int, seed: int) -> None:
        if self.world_size is None:
            rank, self.seed = 0, seed
        elif self._own_rank is not None:
            rank = self._own_rank
        self.world_size = (self.world_size or 1) * workers
        self._own_rank = rank * workers + worker
        self._empty()

    def _position(self) -> Any:
        return self._pass, self._written, self._loaded, self._begun

    def _rewind(self, position: Any) -> None:
        self._pass, self._written, self._loaded, self._begun = position

    def _to_plain(self, position: Any, before: Any) -> Any:
        now, *flags = position
        same = before is not None and now.order is before[0].order  # True within one pass
        order: Any = None if same else now.order
        if isinstance(order, Permutation):
            order = [order.count, order.key]
        return [same, order, *now[1:], *flags]

    def _of_plain(self, plain: Any, before: Any) -> Any:
        same, order, *rest = plain
        if same:
            order = before[0].order
        elif isinstance(order, list):
            order = Permutation(*order)
        count = len(Pass._fields) - 1
        now = Pass(order, *rest[:count])
        return now, *rest[count:]

    # -- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the position in the pass, from which `load_state_dict` continues.

        Returns:
            A dict with ``drop_last`` and ``_ran_out``. ``len_storage`` is the number of items in
            the storage at the start of the pass. ``_sample_list`` contains the remaining elements
            in order, int64, or is None between passes. With ``world_size``, ``_begun`` is the
            number of started passes. ``_written`` exists if the buffer has written since the last
            draw.
        """
        left = self._pass.left()
        known = {} if self.world_size is None else {"_begun": self._begun}
        if self._written:
            known["_written"] = 1
        return {
            **known,
            "len_storage": self._pass.items,
            "_sample_list": None if left is None else torch.from_numpy(left.copy()),
            "drop_last": self.drop_last,
            "_ran_out": self._pass.ran_out,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, or of TorchRL's class.

        If the storage does not have the number of items that it had in the state, the next draw
        starts a new pass.
        """
        left = state_dict["_sample_list"]
        order = None
        if left is not None:
            order = cpu.as_tensor(left).to("cpu", torch.int64, copy=True).numpy()
        self.drop_last = bool(state_dict["drop_last"])
        items, self._begun = int(state_dict["len_storage"]), int(state_dict.get("_begun", 0))
        self._pass = Pass(order, 0, items, items, bool(state_dict["_ran_out"]))
        self._storage, self._loaded = None, True
        self._written = bool(state_dict.get("_written", False))

    def _apply(self, saved: dict[str, Any], loaded: Loaded | None) -> None:
        self.load_state_dict(moved_pass(saved, loaded))

    @property
    def len_storage(self) -> int:
        """Number of items in the storage at the start of the pass or, for slices, the last draw."""
        return self._pass.items

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_storage": None, "_loaded": True}

    def __repr__(self) -> str:
        whole = max(1, self._pass.whole)
        left = self._pass.count_left() if self._pass.whole else 1 - self._pass.ran_out
        return f"{type(self).__name__}({100 * (1 - left / whole): 4.4f}% sampled)"
