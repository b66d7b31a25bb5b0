"""A buffer saved and loaded: to a directory in TorchRL's layout, or to a dict.

    <path>/
      storage/              see the storage's checkpointer
      sampler/, writer/     if they have a state
      rng_state/            of the generator, if any
      transform.t           state of the transforms, if any
      buffer_metadata.json  batch size, and the program that wrote this
      shmbuffer.extra.*     saved by the user; see `extra`
      shmbuffer.consumers.* progress of consumers; see `consumed`
      shmbuffer.ahead.*     prefetched batches; see `prefetched`
      shmbuffer.files.json  the list of these files

Storage, sampler and writer are of one moment. The directory appears as a whole; see `publication`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shmbuffer.buffers.data_path.parts import Parts
from shmbuffer.buffers.data_path.prefetched import (
    fits,
    read_prefetched,
    restored,
    write_prefetched,
)
from shmbuffer.buffers.flow.consumed import read_consumed, restore_consumed, write_consumed
from shmbuffer.errors import CorruptBufferError, ShmBufferError
from shmbuffer.memory import LIVE_READS
from shmbuffer.memory.system.progress import OnProgress, hearing, is_of_callback
from shmbuffer.samplers.sampler import between_forks
from shmbuffer.saves.checkpoints import (
    Loaded,
    Saves,
    apply_part,
    dump_part,
    read_part,
    require_no_buffer,
)
from shmbuffer.saves.extra import read_extra, require_plain, write_extra
from shmbuffer.saves.publication import finish, publish
from shmbuffer.saves.safe_files import make_folder
from shmbuffer.saves.values import reading
from shmbuffer.saves.work_directory import is_being_published, located
from shmbuffer.storages.storage import ring_of
from shmbuffer.torchrl.compat.buffers import (
    METADATA,
    read_generator,
    read_metadata,
    read_states,
    write_generator,
    write_metadata,
    write_states,
)
from shmbuffer.torchrl.compat.writers import read_counts

_PREFETCHED = "prefetch.pkl"  # TorchRL's batches that were made ahead
_PARTS = ("_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_rng")  # of a state
_TRANSFORM = "transform.t"
_RNG = "rng_state"
# Files of ours, listed under our key of the metadata.
_EXTRA, _AHEAD, _CONSUMERS = "extra", "ahead", "consumers"
# Files of an older save by TorchRL, to be removed where the new save has none of that name.
_STALE = (_PREFETCHED, _TRANSFORM, f"{_RNG}/meta.json", f"{_RNG}/rng_state.memmap")
_ATTEMPTS = 5  # at loading what another process replaces at the same time

_log = logging.getLogger(__name__)


class Saving(Saves, Parts):
    """``dumps`` and ``loads``, ``state_dict`` and ``load_state_dict``."""

    def dumps(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Any = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Save everything into a directory, in TorchRL's layout, which TorchRL loads too.

        Items, priorities, cursor and counts are of one moment, also while other processes write. A
        crash or a full disk leaves the earlier save in ``path``, or this one.

        If ``path / "storage"`` is the ``scratch_dir`` of the storage, nothing is copied: the items
        are made durable, and the directory has the live buffer, not a moment of it.

        Args:
            path: the directory, made if needed. An earlier save in it is replaced, other files
                stay.
            extra: returned by `loads`: the ``state_dict()`` of networks, optimizers, schedulers,
                random states, counts. Tensors, arrays, numbers, text, None, and dicts, lists and
                tuples of them; nothing is pickled. Tensors that share memory are saved separately.
            on_progress: called with a `ProgressReport` several times a second, while data are
                copied and then synced. If it raises, this call does, and the earlier save stays.

        Raises:
            RuntimeError: the storage was never written to.
            TypeError: an item (see `ListStorageCheckpointer`) or a value in ``extra`` could only be
                pickled; the earlier save stays.
            ValueError: ``extra`` has more than 128 levels, or an int of more than 4,300 digits;
                nothing was written.
            BufferExistsError: the directory has another buffer's files.
            BufferInUseError: another process is saving there.
            SpaceError, OSError: no room, or no permission; the earlier save stays.

        Cost: all bytes once, straight into files, and a sync of each.
        """
        require_plain(extra)
        if self._prefetcher is not None:
            self._prefetcher.wait_for_changes()
        target = Path(path)
        in_place = self._storage._has_files_in(target / "storage")
        require_no_buffer(target)
        if not in_place:
            require_no_buffer(target / "storage")
        with (
            hearing(on_progress),
            located(target),
            publish(target, within=in_place, stale=_STALE) as directory,
        ):
            moment: Any
            if in_place:
                make_folder(directory / "storage", exist_ok=False)
                self._storage._dump_in_place(directory / "storage")
                moment = LIVE_READS
            else:
                moment = dump_part(self._storage, directory / "storage")
            dump_part(self._writer, directory / "writer", moment)
            beside: list[str] = []
            with self._as_delivered(directory, beside):
                dump_part(self._sampler, directory / "sampler", moment)
                for name, one in self._seeded().items():
                    rng = one._generator
                    if rng is not None and (one is self or rng is not self._generator):
                        state = between_forks(rng.get_state)
                        write_generator(directory / name, state, rng.device)
            write_states(directory / _TRANSFORM, self._transform)
            if not in_place and write_consumed(directory, ring_of(self._storage), moment):
                beside.append(_CONSUMERS)
            if extra is not None:
                write_extra(directory, extra)
                beside.append(_EXTRA)
            write_metadata(directory, self._batch_size, beside)

    @contextmanager
    def _as_delivered(self, directory: Path, beside: list[str]) -> Iterator[None]:
        """Take the draws back to the last delivered batch, and save the prefetched ones."""
        prefetcher = self._prefetcher
        if prefetcher is None:
            yield
            return
        with prefetcher.waiting() as made:
            now = self._draws()
            if made and write_prefetched(directory, made, now, self._sampler):
                beside.append(_AHEAD)
                self._go_to(made[0].before)
            else:
                self._drop_prefetched()
                now = self._draws()
            try:
                yield
            finally:
                self._go_to(now)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Any:
        """Replace the content of the buffer by a save of `dumps`, or of TorchRL.

        It restores items and their places, cursor and counts, priorities, the states of sampler,
        generator and transforms, and the batch size, if saved. The save defines an empty storage.
        Prefetched batches of this buffer are dropped, and those of the save come next. Nothing is
        unpickled, so TorchRL's prefetched batches (``prefetch.pkl``) are ignored.

        Args:
            path: the directory.
            on_progress: see `dumps`. If it raises, nothing was changed, or a note on the exception
                tells that the buffer is empty now.

        Returns:
            The ``extra`` of `dumps`, its tensors on the CPU; else None.

        Raises:
            FileNotFoundError: no buffer was saved there.
            SchemaMismatchError: the buffer has other leaves; nothing was changed.
            ValueError: more items than there is room for (nothing was changed); or something that
                could only be unpickled.
            BufferInUseError: other processes use the buffer; nothing was changed.
            CorruptBufferError: the files are damaged.
            ShmBufferError: the buffer is a queue (``max_times_sampled``); nothing was changed.

        Cost: all bytes once; none if ``path / "storage"`` is the storage's ``scratch_dir``.
        """
        self._require_no_queue("loads")
        self._drop_prefetched()
        with hearing(on_progress):
            return self._loads_one_save(Path(path).absolute())

    def _loads_one_save(self, path: Path) -> Any:
        """`loads`, repeated if another process saves there meanwhile."""
        for attempt in range(_ATTEMPTS):
            finish(path)
            before = _identity(path)
            try:
                with located(path):
                    extra = self._loads(path)
            except (FileNotFoundError, CorruptBufferError) as error:
                if attempt == _ATTEMPTS - 1 or _is_still(path, before) or is_of_callback(error):
                    raise
                continue  # another process replaced it while this one was reading
            if _is_still(path, before):
                return extra
        raise RuntimeError(
            f"{path}: was replaced each of the {_ATTEMPTS} times that it was read; load it when "
            "the other process is done"
        )

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """See `StorageCheckpointerBase.register_save_hook`. Hooks are not saved."""
        self._storage.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """See `StorageCheckpointerBase.register_load_hook`. Hooks are not saved."""
        self._storage.register_load_hook(hook)

    def state_dict(self) -> dict[str, Any]:
        """Items, priorities, cursor, counts, transforms and generator, as tensors and numbers."""
        self._drop_prefetched()
        rng = self._generator
        return {
            "_storage": self._storage.state_dict(),
            "_sampler": self._sampler.state_dict(),
            "_writer": self._writer.state_dict(),
            "_transforms": self._transform.state_dict(),
            "_batch_size": self._batch_size,
            "_rng": None if rng is None else (between_forks(rng.get_state), str(rng.device)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the content of the buffer by a state.

        Raises:
            SchemaMismatchError: the buffer has other leaves.
            ValueError: it has another capacity.
            ShmBufferError: the buffer is a queue (``max_times_sampled``); nothing was changed.
            KeyError: it is no state of a buffer; nothing was changed.
        """
        self._require_no_queue("load_state_dict")
        _require_keys("a buffer", _PARTS, state_dict)
        sampler = type(self._sampler)
        _require_keys(f"a {sampler.__name__}", sampler._state_keys, state_dict["_sampler"])
        self._drop_prefetched()
        self._storage.load_state_dict(state_dict["_storage"])
        self._writer.load_state_dict(state_dict["_writer"])
        self._sampler.load_state_dict(state_dict["_sampler"])
        self._sampler._loaded_into(self._storage)
        self._transform.load_state_dict(state_dict["_transforms"])
        self._batch_size = state_dict["_batch_size"]
        self._measure_hand_over()
        if state_dict["_rng"] is not None:
            state, device = state_dict["_rng"]
            self._seed_with(state, torch.device(device))

    def _require_no_queue(self, what: str) -> None:
        """ShmBufferError before anything is changed: a queue is written at its end only."""
        limiter = self.rate_limiter
        if limiter is not None and limiter.max_times_sampled is not None:
            raise ShmBufferError(
                f"{what}: the buffer is a queue (max_times_sampled), which is written at its end "
                "only; load into one that is not a queue. Nothing was changed"
            )

    def _loads(self, path: Path) -> Any:
        batch_size, beside = read_metadata(path)
        if (path / _PREFETCHED).exists():
            _log.info("%s: ignored: it is pickled, and nothing is unpickled", path / _PREFETCHED)
        transforms = read_states(path / _TRANSFORM, self._transform)
        sampler = read_part(self._sampler, path / "sampler")  # before anything is changed
        writer = read_part(self._writer, path / "writer")
        storage = read_part(self._storage, path / "storage")
        extra = read_extra(path) if _EXTRA in beside else None
        consumed = read_consumed(path) if _CONSUMERS in beside else []
        ahead = read_prefetched(path) if _AHEAD in beside and self._prefetcher is not None else []
        states = {name: state for name in self._seeded() if (state := read_generator(path / name))}
        loaded = apply_part(self._storage, storage, read_counts(path / "writer"))
        if isinstance(loaded, Loaded):
            restore_consumed(ring_of(self._storage), consumed, loaded)
        self._sampler._empty()
        apply_part(self._sampler, sampler, loaded)
        self._sampler._loaded_into(self._storage)
        apply_part(self._writer, writer, loaded)
        for name, one in self._seeded().items():
            if name in states:
                if one is not self and one._generator is self._generator:
                    one.generator = None  # it had one of its own
                one._seed_with(*states[name])
        if transforms is not None:
            with reading(path / _TRANSFORM):
                self._transform.load_state_dict(transforms)
        if batch_size is not None:
            self._batch_size = batch_size
        self._measure_hand_over()
        if self._prefetcher is not None and ahead and fits(ahead, loaded):
            made, draws = restored(ahead, self._draws(), self._sampler)
            self._prefetcher.put_back(made)
            self._go_to(draws)
        return extra

    def _seeded(self) -> dict[str, Saving]:
        """The buffers whose generators are saved, by the name of the directory."""
        return {_RNG: self}

    def _seed_with(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the state of the generator, or of a new one if it is on another device."""
        if self._generator is None or self._generator.device.type != device.type:
            self.generator = torch.Generator(device)
        assert self._generator is not None
        between_forks(self._generator.set_state, state)


def _is_still(path: Path, save: tuple[int, int, int] | None) -> bool:
    return _identity(path) == save and not is_being_published(path)


def _identity(path: Path) -> tuple[int, int, int] | None:
    """The identity of a save: each one writes a new file."""
    try:
        found = os.stat(path / METADATA)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _require_keys(of: str, keys: tuple[str, ...], state: Any) -> None:
    """KeyError where a state has not all that it is loaded from."""
    found = set(getattr(state, "keys", set)())
    if missing := [key for key in keys if key not in found]:
        raise KeyError(
            f"load_state_dict: the state of {of} has {missing} too, and this one has "
            f"{sorted(map(str, found))}; give what state_dict() of the same kind returned. "
            "Nothing was changed"
        )
