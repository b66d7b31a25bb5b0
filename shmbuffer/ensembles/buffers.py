"""Several buffers: calls for all of them, and writes into one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from shmbuffer.buffers.calls.saving import Saving
from shmbuffer.ensembles.changes import Changes
from shmbuffer.ensembles.members import Ensemble, PartsOf
from shmbuffer.ensembles.sampler import SamplerEnsemble
from shmbuffer.ensembles.stacked_rows import BUFFER_IDS, routed, written_tickets
from shmbuffer.ensembles.storage import StorageEnsemble
from shmbuffer.ensembles.turns import Turns
from shmbuffer.ensembles.writer import WriterEnsemble, refusal
from shmbuffer.items.keys import GENERATION, INDEX
from shmbuffer.memory.format.streams import checked, of_each
from shmbuffer.memory.system import deadline
from shmbuffer.samplers import Sampler
from shmbuffer.storages import Storage
from shmbuffer.storages.storage import ring_of
from shmbuffer.tensors.eager import eager
from shmbuffer.tensors.form import cpu
from shmbuffer.writers import Writer


class Buffers(Changes):
    """Buffers, and three ensembles of the parts that these buffers have at the time."""

    _sampler: SamplerEnsemble
    _writer: WriterEnsemble
    _routing_key: str | tuple[str, ...] | None
    _routing_dim: int | None
    _turns: Turns

    __len__ = Ensemble.__len__

    def _join(self) -> None:
        for name in ("_storage", "_sampler", "_writer"):
            getattr(self, name)._members = PartsOf(self._members, name)
        super()._join()

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Use other storages, and another ``collate_fn``; returns the ensemble of the old ones.

        Raises:
            TypeError: ``storage`` is no `StorageEnsemble`.
            ValueError: it has another number of members.
        """
        before = self._exchange("storage", storage, StorageEnsemble)
        self._collate_fn = collate_fn
        return before  # type: ignore[no-any-return]

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Use the samplers of a `SamplerEnsemble`, and its choice; see `set_storage`."""
        return self._exchange("sampler", sampler, SamplerEnsemble)  # type: ignore[no-any-return]

    def set_writer(self, writer: Writer) -> Writer:
        """Use the writers of a `WriterEnsemble`; see `set_storage`."""
        return self._exchange("writer", writer, WriterEnsemble)  # type: ignore[no-any-return]

    def _exchange(self, name: str, new: Any, cls: type[Ensemble]) -> Any:
        if not isinstance(new, cls):
            raise TypeError(f"the {name} of an ensemble is a {cls.__name__}, got {new!r}")
        if len(new) != len(self._members):
            raise ValueError(f"{len(new)} {name}s cannot serve {len(self._members)} buffers")
        self._drop_prefetched()
        before = getattr(self, f"_{name}")
        parts = list(before._members)
        for rb, one in zip(self._members, list(new._members), strict=True):
            getattr(rb, f"set_{name}")(one)
        before._members = parts
        setattr(self, f"_{name}", new)
        self._join()
        return before

    # -- writes --------------------------------------------------------------------------------

    @eager
    def add(self, data: Any, timeout: float | None = None, streams: int | None = None) -> Any:
        """Write one item into the buffer of its ``routing_key``; see `extend`."""
        if self._routing_key is None:
            raise RuntimeError(refusal("an item was given to the ensemble"))
        if not isinstance(data, TensorDictBase) or data.batch_dims:
            raise ValueError("add() takes one item, a TensorDict with batch size []; use extend()")
        return self.extend(data.unsqueeze(0), timeout=timeout, streams=streams)[0]

    @eager
    def extend(
        self,
        data: Any,
        update_priority: bool | None = None,
        timeout: float | None = None,
        streams: Any = None,
        stream_dim: int | None = None,
    ) -> Any:
        """Write each item of a batch into the buffer of its ``routing_key`` or ``routing_dim``.

        Args:
            data: a TensorDict ``[...]``; it is flattened.
            update_priority: see `TensorDictReplayBuffer.extend`.
            timeout: seconds to wait, in all; see `ReplayBuffer.add`.
            streams: of the flat items, ``[n]``; see `ReplayBuffer.extend`.
            stream_dim: has to be None.

        Returns:
            A TensorDict ``[n]``, in the order of the flat data: ``"buffer_ids"``, ``"index"`` in
            that buffer, and, if samples of all buffers have it, ``"index_generation"``.

        Raises:
            RuntimeError: the ensemble has neither; write into ``ensemble[i]``.
            TypeError, ValueError: invalid numbers of buffers; nothing was changed.
            SchemaMismatchError, ...: see `ReplayBuffer.extend`; other buffers may have been written
                already.
        """
        if self._routing_key is None and self._routing_dim is None:
            raise RuntimeError(refusal("a batch was given to the ensemble"))
        if stream_dim is not None:
            raise TypeError(
                "stream_dim: an ensemble takes items in any order apart by their buffer; give each "
                "item its stream with streams. Nothing was written"
            )
        if len(self._transform):
            data = self._transform.inv(data)
        items, ids = routed(data, len(self._members), self._routing_key, self._routing_dim)
        known: dict[str, Any] = (
            {} if update_priority is None else {"update_priority": update_priority}
        )
        of = None if streams is None else of_each(checked(streams), len(ids))
        written: list[tuple[torch.Tensor, torch.Tensor]] = []
        tickets = cpu.full((len(ids),), -1, dtype=torch.int64)
        with deadline.within(timeout):
            for at in range(len(self._members)):
                rows = torch.nonzero(ids == at).flatten()
                if len(rows):
                    if of is not None:
                        known["streams"] = of[rows.numpy()]
                    rb = self._members[at]
                    ring = ring_of(rb._storage)
                    before = 0 if ring is None else ring.head
                    written.append((rows, rb.extend(items[rows], **known)))
                    tickets[rows] = written_tickets(rb, before, written[-1][1])
        index = cpu.zeros(
            (len(ids), *(written[0][1].shape[1:] if written else ())), dtype=torch.int64
        )
        for rows, where in written:
            index[rows] = where
        found = TensorDict({BUFFER_IDS: ids, INDEX: index}, [len(ids)])
        return found.set(GENERATION, tickets) if self._writer.tracks_generations else found

    def _draws_now(self, count: int) -> bool:
        sampler = self._sampler
        share, rest = divmod(count, sampler.num_buffer_sampled)
        most = share if sampler.sample_from_all else count  # one buffer may get all rows
        return not rest and sampler._all_can(
            self._storage._members,
            share,
            lambda at: self._members[at]._admits(most) and self._can_give(at, share),
        )

    def _can_give(self, at: int, share: int) -> bool:
        """True if a buffer has so many rows to give."""
        rb = self._members[at]
        return rb._is_queue or bool(self._sampler._members[at].can_sample(rb._storage, share))

    # -- all at once ---------------------------------------------------------------------------

    @property
    def generator(self) -> torch.Generator | None:
        """The generator of the choice of buffers and, once it is set, of all draws."""
        return self._generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._generator = self._sampler._rng = generator
        self._ask_rank()
        if generator is not None:
            for rb in self._members:
                rb.generator = generator

    def share(self, shared: bool = True) -> Self:
        """`ReplayBuffer.share` for each buffer."""
        for rb in self._members:
            rb.share(shared)
        return super().share(shared)

    def empty(self, empty_write_count: bool = True) -> None:
        """`ReplayBuffer.empty` for each buffer, unless one has an `ImmutableDatasetWriter`."""
        self._drop_prefetched()
        self._writer.require_no_data_set()
        for rb in self._members:
            rb.empty(empty_write_count)
        self._turns.forget()

    def stats(self) -> dict[str, Any]:
        """TorchRL's keys, summed over all buffers, and ``num_buffers``."""
        each = [rb.stats() for rb in self._members]
        size, capacity = (sum(one[name] for one in each) for name in ("size", "capacity"))
        return {
            "size": size,
            "capacity": capacity,
            "utilization": size / capacity,
            "write_count": sum(one["write_count"] for one in each),
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "initialized": self.initialized,
            "num_buffers": len(each),
        }

    def flush(self) -> None:
        """`ReplayBuffer.flush` for each buffer."""
        for rb in self._members:
            rb.flush()

    def close(self) -> None:
        """Leave every buffer. Idempotent."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        for rb in self._members:
            rb.close()
        self._closed = True

    def _seeded(self) -> dict[str, Saving]:
        members = {f"rng_state_{at}": rb for at, rb in enumerate(self._members)}
        return {**super()._seeded(), **members}

    def state_dict(self) -> dict[str, Any]:
        """Everything of every buffer, in memory; see `ReplayBuffer.state_dict`."""
        own = []
        for rb in self._members:
            rng = rb._generator
            state = None if rng is None or rng is self._generator else rng.get_state()
            own.append({"_transforms": rb._transform.state_dict(), "_rng": state})
        return {**super().state_dict(), "_buffers": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ReplayBuffer.load_state_dict`; ValueError: another number of buffers."""
        for rb in self._members:
            rb._drop_prefetched()
        super().load_state_dict(state_dict)
        for rb, own in zip(self._members, state_dict["_buffers"], strict=True):
            rb._transform.load_state_dict(own["_transforms"])
            if own["_rng"] is not None:
                mine = rb._generator
                if mine is None or mine is self._generator:
                    mine = rb.generator = torch.Generator()
                mine.set_state(own["_rng"])
