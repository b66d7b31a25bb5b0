"""Items by how stale they are: for collectors that lag behind the policy."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shmbuffer._native._core import address
from shmbuffer.errors import EmptyBufferError
from shmbuffer.memory import Ring
from shmbuffer.memory.flow.consumer import Consumer
from shmbuffer.memory.flow.consumers import Start
from shmbuffer.memory.format.array_types import Bytes, Flags, Floats, Ints
from shmbuffer.memory.format.leaf import Key, path_of
from shmbuffer.samplers.claiming import ClaimingSampler, Units
from shmbuffer.samplers.labelled.index import LabelIndex
from shmbuffer.samplers.labelled.source import LabelSource
from shmbuffer.samplers.labelled.versions import ConsumerVersion, versions_of
from shmbuffer.samplers.passes import described
from shmbuffer.samplers.sampler import draw_key, unchanged
from shmbuffer.samplers.taking import Taking
from shmbuffer.saves.checkpoints import Loaded
from shmbuffer.tensors.form import cpu
from shmbuffer.torchrl.compat.samplers import INTEGERS

_LARGEST = 2**62


class StalenessAwareSampler(ClaimingSampler):
    """Items in proportion to a weight that falls with their staleness, and none that is too stale.

    The staleness of an item is `consumer_version` less the version that the item has under
    ``version_key``: how many updates ago the policy was that made it. Collectors lag differently,
    so versions lie in the storage in any order; every item is weighed by its own.

    No item comes twice in a batch, unless fewer than the batch are fresh enough: then with
    replacement, as in TorchRL. The next item is each of those that are left with probability
    ``weight / sum(weights)``, exactly.

    A sample has the staleness of its items under ``"staleness"``, float32 ``[n]``, and where the
    storage is shared their tickets under ``"index_generation"``.

    Args:
        max_staleness: items that are staler are never drawn; -1: none is too stale.
        staleness_weight_fn: of float32 ``[versions]``, the staleness of each version that is there;
            gives as many weights, not negative. None: ``1 / (staleness + 1)``, and 1 of items that
            are newer than `consumer_version`.
        version_key: entry of an item with the version, one whole number.
        freshest_first: the freshest items instead, the newest of a version first, without chance.
        consumer: a name: every item is given once among all learners with a sampler of this name,
            under leases, as by a `ConsumingSampler`. What is too stale is given to nobody.
        start: where a consumer begins that is not there yet: ``"oldest"`` or ``"newest"``.

    Raises:
        ValueError: ``max_staleness`` is below -1.

    Cost: 20 ns an item that was written since the draw before, of records 1 µs; 80 µs a batch of
        256 tensors, a quarter of them the choice; 10 µs for each
        thousand different versions that are there, however many items have them. The first draw
        looks at every item, 100 ms a million. 12 to 16 bytes an item.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from shmbuffer import LazyTensorStorage, StalenessAwareSampler
        >>> from shmbuffer import TensorDictReplayBuffer
        >>> sampler = StalenessAwareSampler(max_staleness=1)
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(4), sampler=sampler, batch_size=2
        ... )
        >>> version = torch.tensor([3, 1, 2, 1])
        >>> index = rb.extend(TensorDict({"policy_version": version}, [4]))
        >>> sampler.consumer_version = 3
        >>> sample = rb.sample()
        >>> sorted(zip(sample["index"].tolist(), sample["staleness"].tolist()))
        [(0, 0.0), (2, 1.0)]

    Source: ``torchrl.data.replay_buffers.StalenessAwareSampler``.
    """

    _state_keys = ("max_staleness", "consumer_version")
    _torchrl_files = INTEGERS

    def __init__(
        self,
        max_staleness: int = -1,
        staleness_weight_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
        version_key: Key = "policy_version",
        *,
        freshest_first: bool = False,
        consumer: str | None = None,
        start: Start = "oldest",
    ) -> None:
        super().__init__(consumer, start)
        self.max_staleness = max_staleness
        self.staleness_weight_fn = staleness_weight_fn
        self.version_key = version_key
        self.freshest_first = bool(freshest_first)
        self._version = ConsumerVersion()
        self._index = LabelIndex(path_of(version_key), versions_of)
        self._index.is_claimed = consumer is not None

    # -- the consumer's version ----------------------------------------------------------------

    @property
    def consumer_version(self) -> int:
        """The version of the policy that learners have.

        On a storage that processes share it is one number for all of them, which a learner sets,
        and which ``buffer.publish`` raises to the version of the weights. 0 until then.

        Raises:
            ValueError, TypeError: set to something that is no number from 0 to 2**62 - 1.
        """
        return self._version.read()

    @consumer_version.setter
    def consumer_version(self, value: int) -> None:
        self._version.store(value)

    def increment_consumer_version(self) -> None:
        """Add 1 to it; two learners that do so at once add 2."""
        self._version.increment()

    @property
    def max_staleness(self) -> int:
        """The largest staleness of an item that is drawn; -1: any.

        Raises:
            ValueError: below -1.
        """
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, value: int) -> None:
        number = operator.index(value)
        if number < -1:
            raise ValueError(f"max_staleness is at least 0, or -1 for no limit; got {value}")
        self._max_staleness = number

    def bind(self, storage: Any) -> Consumer | None:
        """Share the version of the consumer with who else has this storage; see `Consumes.bind`."""
        self._version.bind(storage)
        return super().bind(storage)

    # -- drawing -------------------------------------------------------------------------------

    def sample(
        self, storage: Any, batch_size: int, taking: Taking | None = None
    ) -> tuple[Any, dict[Any, Any]]:
        """Draws; see `Consumes.sample`.

        Returns:
            Indices, and the staleness of each item under ``"staleness"``, float32 ``[n]``.

        Raises:
            EmptyBufferError: nothing to draw from; with a consumer: nothing is left, and nobody
                writes.
            KeyError: items have no ``version_key``.
            RuntimeError: without a consumer: all items are too stale, or weigh nothing.
            RateLimitTimeout, RateLimitError: with a consumer; see `ReplayBuffer.sample`.
        """
        self.bind(storage)
        if self.consumer is not None:
            return self._claimed(storage, batch_size, 1, taking)

        def draw() -> tuple[Ints, NDArray[np.float32], Ints | None] | None:
            ring = self._index.look(storage)
            return self._drawn(ring, draw_key(self, storage), batch_size)

        with self._index.lock:
            elements, staleness, tickets = unchanged(storage, draw, "items")
        index, info = described(storage, elements, tickets)
        return index, {"staleness": torch.from_numpy(staleness), **info}

    @property
    def _lock(self) -> Any:
        return self._index.lock

    def _source(self, storage: Any, consumer: Consumer) -> FreshItems:
        ring = self._index.look(storage)
        assert ring is not None  # or there was no consumer
        return FreshItems(self, storage, ring)

    def _exhausted(self) -> str:
        return "was given every item that is fresh enough"

    def _drawable(self, version: int) -> int:
        """Items that are fresh enough, and weigh anything."""
        staleness, counts = self._stalenesses(version)
        there = self._are_fresh(staleness)
        if self.staleness_weight_fn is not None and there.any():
            there = self._given_weights(staleness) * there > 0
        return int(counts[there].sum())

    def _too_stale(self, version: int) -> Ints:
        """Elements that are too stale; they will not become fresher."""
        staleness, counts = self._stalenesses(version)
        old = ~self._are_fresh(staleness)
        if not old.any():
            return staleness[:0]
        elements = np.empty(int(counts[old].sum()), np.int64)
        mask = old.astype(np.float64)
        count = self._index.table.freshest(address(mask), len(elements), address(elements))
        return elements[:count]

    def _drawn(
        self, ring: Ring | None, key: int, count: int
    ) -> tuple[Ints, NDArray[np.float32], Ints | None] | None:
        """Elements, staleness and tickets (None without a ring); None if one was written over."""
        index, version = self._index, self.consumer_version
        chosen, stale = np.empty(count, np.int64), np.empty(count, np.float32)
        held: Ints | None = np.empty(count, np.int64)
        there = None
        if self.staleness_weight_fn is None and not self.freshest_first and ring is not None:
            out = address(chosen), address(stale), address(held)
            there = index.fresh(version, self._limit, key, count, *out)
        if there is None:
            chosen, whole = self._choose(key, version, count)
            stale = whole.astype(np.float32)
            held = None if ring is None else index.tickets(chosen)
        if there is False or (held is None and ring is not None):
            return None
        return chosen, stale, held

    def can_sample(self, storage: Any, batch_size: int) -> bool:
        """See `Sampler.can_sample`: an item is fresh enough."""
        consumer = self.bind(storage)
        if not len(storage):
            return False
        if consumer is not None:
            return self._can_claim(storage, consumer, batch_size)
        with self._index.lock:
            try:
                self._index.look(storage)
            except EmptyBufferError:
                return False
            staleness, counts = self._stalenesses(self.consumer_version)
            return bool(counts[self._are_fresh(staleness)].any())

    def _stalenesses(self, version: int) -> tuple[Ints, Ints]:
        """The staleness of each version, the smallest first, and the number of its items."""
        labels, counts = self._index.table.order()
        return version - np.frombuffer(labels, np.int64), np.frombuffer(counts, np.int64)

    def _are_fresh(self, staleness: Ints) -> Any:
        return staleness <= self._limit

    @property
    def _limit(self) -> int:
        return _LARGEST if self._max_staleness < 0 else self._max_staleness

    def _choose(self, key: int, version: int, batch_size: int) -> tuple[Ints, Ints]:
        """Elements, and how stale each is."""
        table = self._index.table
        staleness, counts = self._stalenesses(version)
        weights = self._weights(staleness, counts, version)
        elements, labels = np.empty((2, batch_size), np.int64)
        if self.freshest_first:
            found = table.freshest(address(weights), batch_size, address(elements))
            elements = np.ascontiguousarray(np.resize(elements[:found], batch_size))
        elif batch_size:
            again = batch_size > int(counts[weights > 0].sum())
            table.draw(address(weights), key, batch_size, again, address(elements))
        table.read(address(elements), batch_size, address(labels))
        return elements, version - labels

    def _weights(self, staleness: Ints, counts: Ints, version: int) -> Floats:
        """The weight of an item of each version; 0 if it is not drawn."""
        if self.staleness_weight_fn is None:
            weights = 1.0 / (np.maximum(staleness, 0) + 1.0)
        else:
            weights = self._given_weights(staleness)
        weights[~self._are_fresh(staleness)] = 0.0
        if not weights.any():
            raise RuntimeError(
                f"All {counts.sum()} entries in the buffer exceed max_staleness="
                f"{self._max_staleness} (consumer_version={version}), or weigh nothing; the "
                f"freshest is {staleness.min()} versions old. Raise max_staleness, or have "
                "collectors take newer weights"
            )
        return weights

    def _given_weights(self, staleness: Ints) -> Floats:
        """Call the user's function, and check the weights that it returns."""
        assert self.staleness_weight_fn is not None
        given = self.staleness_weight_fn(torch.from_numpy(staleness.astype(np.float32)))
        weights: Floats = cpu.as_tensor(given).detach().to("cpu", torch.float64).numpy().copy()
        if weights.shape != staleness.shape or not (weights >= 0).all():
            raise ValueError(
                "staleness_weight_fn gives a weight for each number that it is given, which "
                f"is not negative and not NaN; of {staleness.tolist()[:4]} it gave "
                f"{weights.tolist()[:4] if weights.ndim else weights.item()}"
            )
        if not np.isfinite(weights).all():
            raise ValueError("staleness_weight_fn gives finite weights, and one is infinite")
        return weights

    # -- state ---------------------------------------------------------------------------------

    def _empty(self) -> None:
        self._index.forget()
        super()._empty()

    def state_dict(self) -> dict[str, Any]:
        """``consumer_version`` and ``max_staleness``."""
        return {"consumer_version": self.consumer_version, "max_staleness": self._max_staleness}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, of this class or of TorchRL's."""
        self.max_staleness = int(state_dict["max_staleness"])
        self.consumer_version = int(state_dict["consumer_version"])

    def _apply(self, saved: dict[str, Any], loaded: Loaded | None) -> None:
        if loaded is not None and loaded.in_place:  # the buffer there knows its version better
            self.max_staleness = saved["max_staleness"]
            return
        self.load_state_dict(saved)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(consumer_version={self.consumer_version}, "
            f"max_staleness={self._max_staleness})"
        )


class FreshItems(LabelSource):
    """Items that are fresh enough for the consumer's version as it is now."""

    def __init__(self, sampler: StalenessAwareSampler, storage: Any, ring: Ring) -> None:
        super().__init__(sampler._index, ring, 1)
        self._sampler, self._storage, self._version = sampler, storage, sampler.consumer_version
        self._staleness: dict[int, int] = {}  # of elements that were chosen

    def count(self) -> int:
        """See `Source.count`."""
        return self._sampler._drawable(self._version)

    def choose(self, most: int) -> Units:
        """See `Source.choose`."""
        if not (there := min(most, self.count())):
            return self.with_tickets(np.empty((0, 1), np.int64))
        key = draw_key(self._sampler, self._storage)
        elements, stale = self._sampler._choose(key, self._version, there)
        self._staleness.update(zip(elements.tolist(), stale.tolist(), strict=True))
        return self.with_tickets(elements[:, None])

    def leave_out(self, chosen: Units, which: Flags) -> None:
        """See `Source.leave_out`."""
        self._index.leave_out(chosen.elements[which, 0])

    def lost(self) -> Units | None:
        """See `Source.lost`: items that are too stale."""
        stale = self._sampler._too_stale(self._version)
        if not len(stale):
            return None
        units = self.with_tickets(stale[:, None])
        self._index.leave_out(stale)
        return units

    def add(self, elements: Ints) -> None:
        """See `LabelSource.add`."""
        if len(back := elements[self._index.kins(elements) < 0]):
            self._index.tell(self.ring, back)

    def remove_taken(self, given: Ints, free: Ints, states: Bytes) -> Ints:
        """See `LabelSource.remove_taken`."""
        self._index.leave_out(given[self._index.kins(given) >= 0])
        return free[:0]

    def facts(self, elements: Ints) -> dict[Any, torch.Tensor]:
        """See `Source.facts`."""
        stale = [self._staleness[one] for one in elements.tolist()]
        return {"staleness": cpu.tensor(stale, dtype=torch.float32)}
