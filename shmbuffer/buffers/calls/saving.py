"""A buffer saved and loaded: to a directory, or to a dict.

    <path>/storage/                     the items: a buffer directory, which `attach` opens
    <path>/storage/.shmbuffer/parts/    sampler, writer, buffer, extra, consumers, ahead

All parts are of one moment. ``storage`` appears as a whole, and everything else in ``path`` stays;
see `publication`. If ``storage`` is the scratch directory of the buffer itself, only the folder of
the parts is replaced. TorchRL's layout is written and read by `torchrl_layout`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from shmbuffer.buffers.calls.torchrl_layout import export, is_ours, read_export
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
from shmbuffer.memory.format.layout import PARTS
from shmbuffer.memory.system.progress import OnProgress, hearing, is_of_callback
from shmbuffer.samplers.sampler import between_forks
from shmbuffer.saves.checkpoints import (
    Loaded,
    Saves,
    apply_part,
    dump_part,
    read_part,
    require_no_buffer,
    save_part,
    saved_part,
)
from shmbuffer.saves.parts import (
    SavedBuffer,
    checked_batch_size,
    checked_generator,
    optional_parts,
    require_states,
)
from shmbuffer.saves.plain import require_plain
from shmbuffer.saves.publication import publish, settle
from shmbuffer.saves.safe_files import make_folders, make_folders_below, without_leftover
from shmbuffer.saves.values import read_value, reading, write_value
from shmbuffer.saves.work_directory import located
from shmbuffer.storages.storage import ring_of
from shmbuffer.torchrl.compat.buffers import METADATA

_PARTS = ("_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_rng")  # of a state
_RNG = "rng_state"
_LAYOUTS = ("shmbuffer", "torchrl")
_ATTEMPTS = 5  # at loading what another process replaces at the same time


class Saving(Saves, Parts):
    """``dumps`` and ``loads``, ``state_dict`` and ``load_state_dict``."""

    def dumps(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Any = None,
        layout: str = "shmbuffer",
        on_progress: OnProgress | None = None,
    ) -> None:
        """Saves everything into the directory ``path / "storage"``, which `attach` opens.

        Items, priorities, cursor and counts are of one moment, also while other processes write. A
        crash or a full disk leaves the earlier save in ``path``, or this one.

        If ``path / "storage"`` is the ``scratch_dir`` of the storage, nothing is copied: the items
        are made durable, and the directory has the live buffer, not a moment of it.

        A storage with save hooks or a checkpointer for episodes is saved in TorchRL's layout.

        Args:
            path: the directory, made if needed. An earlier save in it is replaced, other files
                stay.
            extra: returned by `loads`: the ``state_dict()`` of networks, optimizers, schedulers,
                random states, counts. Tensors, arrays, numbers, text, None, and dicts, lists and
                tuples of them; nothing is pickled. Tensors that share memory are saved separately.
            layout: ``"torchrl"`` writes what TorchRL loads. It takes the place of the whole
                directory ``path``.
            on_progress: called with a `ProgressReport` several times a second, while data are
                copied and then synced. If it raises, this call does, and the earlier save stays.

        Raises:
            RuntimeError: the storage was never written to.
            TypeError: an item (see `ListStorageCheckpointer`) or a value in ``extra`` could only be
                pickled; the earlier save stays.
            ValueError: ``extra`` has more than 128 levels, or an int of more than 4,300 digits; or
                there is no such layout; nothing was written.
            BufferExistsError: the directory has another buffer's files, or files that no save made.
            SpaceError, OSError: no room, or no permission; the earlier save stays.

        Cost: all bytes once, straight into files, and a sync of each.
        """
        require_plain(extra)
        if layout not in _LAYOUTS:
            raise ValueError(f"layout is one of {', '.join(_LAYOUTS)}, not {layout!r}")
        if self._prefetcher is not None:
            self._prefetcher.wait_for_changes()
        target = Path(path)
        place = target / "storage"
        in_place = self._storage._has_files_in(place)
        require_no_buffer(target)
        if not in_place:
            require_no_buffer(place)
        with hearing(on_progress), located(target), without_leftover(target):
            if in_place:
                if layout != "shmbuffer":
                    raise ValueError(
                        f"{place}: is where the storage itself has its files, which are not in "
                        f"layout={layout!r}; save to another directory. Nothing was written"
                    )
                self._storage._flush_in_place(place)
                with publish(place / PARTS, "sampler and writer") as folder:
                    self._write_parts(folder, LIVE_READS, extra)
            elif layout == "torchrl" or not self._storage.saves_snapshots:
                with publish(target, "buffer in TorchRL's layout") as directory:
                    export(self, directory, extra)
            else:
                make_folders(target)
                with publish(place, "storage") as directory:
                    moment = dump_part(self._storage, directory)
                    make_folders_below(directory, directory / PARTS / "sampler")
                    self._write_parts(directory / PARTS, moment, extra)

    def _write_parts(self, folder: Path, moment: Any, extra: Any) -> None:
        """Writes everything but the items of a storage."""
        write_value(
            folder, "writer", save_part(self._writer, folder / "writer", moment), "the writer"
        )
        with self._as_delivered(folder):
            sampler = save_part(self._sampler, folder / "sampler", moment)
            write_value(folder, "sampler", sampler, f"the state of the {_name(self._sampler)}")
            states = self._generator_states()
        if moment is not LIVE_READS:
            write_consumed(folder, ring_of(self._storage), moment)
        if extra is not None:
            write_value(folder, "extra", extra, "extra")
        known = {
            "batch_size": self._batch_size,
            "generators": states,
            "transforms": {at: dict(state) for at, state in self._transform.state_dict().items()},
            "beside": optional_parts(folder),
        }
        write_value(folder, "buffer", known, "the state of the transforms")

    def _generator_states(self) -> dict[str, tuple[torch.Tensor, str]]:
        """State and device of each generator, by name."""
        return {
            name: (between_forks(one._generator.get_state), str(one._generator.device))
            for name, one in self._seeded().items()
            if one._generator is not None and (one is self or one._generator is not self._generator)
        }

    @contextmanager
    def _as_delivered(self, folder: Path) -> Iterator[None]:
        """Takes the draws back to the last delivered batch, and saves the prefetched ones."""
        prefetcher = self._prefetcher
        if prefetcher is None:
            yield
            return
        with prefetcher.waiting() as made:
            now = self._draws()
            if made and write_prefetched(folder, made, now, self._sampler):
                self._go_to(made[0].before)
            else:
                self._drop_prefetched()
                now = self._draws()
            try:
                yield
            finally:
                self._go_to(now)

    def loads(self, path: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Any:
        """Replaces the content of the buffer by a save of `dumps`, or of TorchRL.

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
        place = path / "storage"
        for attempt in range(_ATTEMPTS):
            for each in (path, place, place / PARTS):
                settle(each)
            before = _identity(path)
            try:
                with located(path):
                    if is_ours(place):
                        extra = self._load(self._read_parts(place))
                    else:
                        extra = self._load(read_export(self, path))
            except (FileNotFoundError, CorruptBufferError) as error:
                if attempt == _ATTEMPTS - 1 or _identity(path) == before or is_of_callback(error):
                    raise
                continue  # another process replaced it while this one was reading
            if _identity(path) == before:
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
        for part in ("_sampler", "_writer"):
            kind = type(getattr(self, part))
            _require_keys(f"a {kind.__name__}", kind._state_keys, state_dict[part])
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

    def _load(self, saved: SavedBuffer) -> Any:
        """Becomes what was read; returns the ``extra``."""
        loaded = apply_part(self._storage, saved.storage, saved.written)
        if isinstance(loaded, Loaded):
            restore_consumed(ring_of(self._storage), saved.consumers, loaded)
        self._sampler._empty()
        apply_part(self._sampler, saved.sampler, loaded)
        self._sampler._loaded_into(self._storage)
        apply_part(self._writer, saved.writer, loaded)
        for name, one in self._seeded().items():
            if name in saved.generators:
                if one is not self and one._generator is self._generator:
                    one.generator = None  # it had one of its own
                one._seed_with(*saved.generators[name])
        if saved.transforms is not None:
            with reading(saved.where):
                self._transform.load_state_dict(saved.transforms)
        if saved.batch_size is not None:
            self._batch_size = saved.batch_size
        self._measure_hand_over()
        if self._prefetcher is not None and saved.ahead and fits(saved.ahead, loaded):
            made, draws = restored(saved.ahead, self._draws(), self._sampler)
            self._prefetcher.put_back(made)
            self._go_to(draws)
        return saved.extra

    def _read_parts(self, place: Path) -> SavedBuffer:
        """Reads a save whose items are in a directory; nothing is changed yet."""
        folder = place / PARTS
        known = read_value(folder, "buffer")
        with reading(folder / "buffer.jsonl"):
            found, beside = known["generators"], set(known["beside"])
            generators = {name: checked_generator(*one) for name, one in found.items()}
            batch_size, transforms = checked_batch_size(known["batch_size"]), known["transforms"]
        if self._prefetcher is None:
            beside.discard("ahead")
        require_states(folder / "buffer.jsonl", transforms, self._transform)
        return SavedBuffer(
            where=folder / "buffer.jsonl",
            storage=read_part(self._storage, place),
            sampler=saved_part(self._sampler, read_value(folder, "sampler"), folder / "sampler"),
            writer=saved_part(self._writer, read_value(folder, "writer"), folder / "writer"),
            generators=generators,
            transforms=transforms or None,
            batch_size=batch_size,
            extra=read_value(folder, "extra") if "extra" in beside else None,
            consumers=read_consumed(folder) if "consumers" in beside else [],
            ahead=read_prefetched(folder) if "ahead" in beside else [],
        )

    def _seeded(self) -> dict[str, Saving]:
        """The buffers whose generators are saved, by the name of the directory."""
        return {_RNG: self}

    def _seed_with(self, state: torch.Tensor, device: torch.device) -> None:
        """Set the state of the generator, or of a new one if it is on another device."""
        if self._generator is None or self._generator.device.type != device.type:
            self.generator = torch.Generator(device)
        assert self._generator is not None
        between_forks(self._generator.set_state, state)


def _identity(path: Path) -> list[tuple[int, int, int]]:
    """The identity of a save: each one makes new files."""
    found = []
    for name in ("", f"storage/{PARTS}", METADATA):
        with suppress(OSError):
            one = os.stat(path / name)
            found.append((one.st_dev, one.st_ino, one.st_mtime_ns if name else 0))
    return found


def _name(part: Any) -> str:
    return type(part).__name__


def _require_keys(of: str, keys: tuple[str, ...], state: Any) -> None:
    """KeyError where a state has not all that it is loaded from."""
    found = set(getattr(state, "keys", set)())
    if missing := [key for key in keys if key not in found]:
        raise KeyError(
            f"load_state_dict: the state of {of} has {missing} too, and this one has "
            f"{sorted(map(str, found))}; give what state_dict() of the same kind returned. "
            "Nothing was changed"
        )
