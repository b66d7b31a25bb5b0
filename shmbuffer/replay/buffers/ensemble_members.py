"""The parts of an ensemble, which are those of its buffers, and what is done to all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch

from shmbuffer.replay.buffers.replay_buffer import ReplayBuffer
from shmbuffer.replay.buffers.saving import Saving
from shmbuffer.replay.samplers import Sampler, SamplerEnsemble
from shmbuffer.replay.storages import Storage, StorageEnsemble
from shmbuffer.replay.writers import ImmutableDatasetWriter, Writer, WriterEnsemble


class Members(ReplayBuffer):
    """Buffers, and three ensembles that always have the parts that these buffers have now."""

    _rbs: tuple[ReplayBuffer, ...]

    @property
    def _storage(self) -> StorageEnsemble:
        ensemble: StorageEnsemble = self._part("_storage")
        ensemble._storages = [rb._storage for rb in self._rbs]
        return ensemble

    @_storage.setter
    def _storage(self, storage: Storage) -> None:
        self.__dict__["_storage"] = storage

    @property
    def _sampler(self) -> SamplerEnsemble:
        ensemble: SamplerEnsemble = self._part("_sampler")
        ensemble._samplers = [rb._sampler for rb in self._rbs]
        return ensemble

    @_sampler.setter
    def _sampler(self, sampler: Sampler) -> None:
        self.__dict__["_sampler"] = sampler

    @property
    def _writer(self) -> WriterEnsemble:
        ensemble: WriterEnsemble = self._part("_writer")
        ensemble._writers = [rb._writer for rb in self._rbs]
        return ensemble

    @_writer.setter
    def _writer(self, writer: Writer) -> None:
        self.__dict__["_writer"] = writer

    def _part(self, name: str) -> Any:
        """A part, whose members are those that the buffers have now: they may be exchanged."""
        if name not in self.__dict__:
            raise AttributeError(name)  # `__getattr__` makes the parts of a delayed buffer
        return self.__dict__[name]

    def set_storage(
        self, storage: Storage, collate_fn: Callable[[Any], Any] | None = None
    ) -> Storage:
        """Use other storages from now on; the ensemble of those before is returned.

        Args:
            storage: a `StorageEnsemble`.
            collate_fn: of the ensemble, the new one; None is the default one.

        Raises:
            TypeError: it is no `StorageEnsemble`.
            ValueError: it has another number of members.
        """
        before = self._exchange("storage", storage, StorageEnsemble)
        self._collate_fn = collate_fn
        return before  # type: ignore[no-any-return]

    def set_sampler(self, sampler: Sampler) -> Sampler:
        """Use other samplers from now on; the ensemble of those before is returned.

        Args:
            sampler: a `SamplerEnsemble`; its ``p`` and numbers hold from now on.

        Raises:
            TypeError: it is no `SamplerEnsemble`.
            ValueError: it has another number of members; or see `ReplayBuffer.set_sampler`.
        """
        return self._exchange("sampler", sampler, SamplerEnsemble)  # type: ignore[no-any-return]

    def set_writer(self, writer: Writer) -> Writer:
        """Use other writers from now on; the ensemble of those before is returned.

        Args:
            writer: a `WriterEnsemble`.

        Raises:
            TypeError: it is no `WriterEnsemble`.
            ValueError: it has another number of members.
        """
        return self._exchange("writer", writer, WriterEnsemble)  # type: ignore[no-any-return]

    def _exchange(self, name: str, new: Any, cls: type) -> Any:
        if not isinstance(new, cls):
            raise TypeError(f"the {name} of an ensemble is a {cls.__name__}, got {new!r}")
        inner = getattr(new, f"_{name}s")
        if len(inner) != len(self._rbs):
            raise ValueError(f"{len(inner)} {name}s cannot serve {len(self._rbs)} buffers")
        self._drop_prefetched()
        before = getattr(self, f"_{name}")
        for rb, one in zip(self._rbs, list(inner), strict=True):
            getattr(rb, f"set_{name}")(one)
        setattr(self, f"_{name}", new)
        self._join()
        return before

    # -- all at once ---------------------------------------------------------------------------

    @property
    def generator(self) -> torch.Generator | None:
        """Of the choice of buffers, and, where it is set, of the draws in all of them."""
        return self._generator

    @generator.setter
    def generator(self, generator: torch.Generator | None) -> None:
        self._generator = self._sampler._rng = generator
        if generator is not None:
            for rb in self._rbs:
                rb.generator = generator

    def share(self, shared: bool = True) -> Self:
        """`ReplayBuffer.share` for each buffer."""
        for rb in self._rbs:
            rb.share(shared)
        return super().share(shared)

    def empty(self, empty_write_count: bool = True) -> None:
        """Forget the items of every buffer; see `ReplayBuffer.empty`.

        Raises:
            RuntimeError: the writer of one is an `ImmutableDatasetWriter`; nothing was changed.
        """
        self._drop_prefetched()
        for rb in self._rbs:
            if isinstance(rb._writer, ImmutableDatasetWriter):
                rb._writer._empty()  # refuses
        for rb in self._rbs:
            rb.empty(empty_write_count)

    def stats(self) -> dict[str, Any]:
        """TorchRL's keys, of all buffers together, and ``num_buffers``."""
        each = [rb.stats() for rb in self._rbs]
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
        for rb in self._rbs:
            rb.flush()

    def close(self) -> None:
        """Leave every buffer. Idempotent."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        for rb in self._rbs:
            rb.close()

    def _seeded(self) -> dict[str, Saving]:
        members = {f"rng_state_{at}": rb for at, rb in enumerate(self._rbs)}
        return {**super()._seeded(), **members}

    def state_dict(self) -> dict[str, Any]:
        """Everything of every buffer, in memory; see `ReplayBuffer.state_dict`."""
        own = [
            {
                "_transforms": rb._transform.state_dict(),
                "_rng": None
                if rb._generator in (None, self._generator)
                else rb._generator.get_state(),
            }
            for rb in self._rbs
        ]
        return {**super().state_dict(), "_buffers": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave, in place of what is there.

        Raises:
            ValueError: it is of another number of buffers; nothing was changed. Or see
                `ReplayBuffer.load_state_dict`.
        """
        for rb in self._rbs:
            rb._drop_prefetched()
        super().load_state_dict(state_dict)
        for rb, own in zip(self._rbs, state_dict["_buffers"], strict=True):
            rb._transform.load_state_dict(own["_transforms"])
            if own["_rng"] is not None:
                mine = rb._generator
                if mine is None or mine is self._generator:
                    mine = rb.generator = torch.Generator()
                mine.set_state(own["_rng"])
