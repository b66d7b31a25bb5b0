"""Saves a buffer to a directory or a dict, and loads it again.

    <path>/storage/                     the items: a buffer directory, which `attach` opens
    <path>/storage/.shmbuffer/parts/    sampler, writer, buffer, extra, consumers, ahead

All files belong to one snapshot. The directory ``storage`` is replaced atomically, and all other
files in ``path`` are kept; see `publication`. If ``storage`` is the scratch directory of the buffer
itself, only the folder ``parts`` is replaced. `torchrl_layout` writes and reads TorchRL's layout.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from shmbuffer.memory.system.progress import OnProgress, is_from_callback, report_to
from shmbuffer.samplers.sampler import between_forks
from shmbuffer.saves.checkpoints import (
    Loaded,
    apply_part,
    dump_part,
    read_part,
    require_no_buffer,
    save_part,
    saved_part,
)
from shmbuffer.saves.plain import require_plain
from shmbuffer.saves.publication import publish, settle
from shmbuffer.saves.safe_files import make_folders, make_folders_below, without_leftover
from shmbuffer.saves.saved_parts import (
    SavedBuffer,
    checked_batch_size,
    checked_generator,
    optional_parts,
    require_states,
)
from shmbuffer.saves.values import read_value, reading, write_value
from shmbuffer.saves.work_directory import located
from shmbuffer.storages.storage import ring_of
from shmbuffer.torchrl.compat.buffer_files import METADATA

# Keys of the result of `state_dict`.
_PARTS = ("_storage", "_sampler", "_writer", "_transforms", "_batch_size", "_rng")
_RNG = "rng_state"
_LAYOUTS = ("shmbuffer", "torchrl")
_Path = str | os.PathLike[str]
_ATTEMPTS = 5  # number of attempts to load a save that another process keeps replacing


class Saving:
    """Implements the methods of a buffer that save and load it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def dumps(self, path: _Path, extra: Any, layout: str, on_progress: OnProgress | None) -> None:
        """Saves the buffer; `ReplayBuffer.dumps` describes the arguments."""
        require_plain(extra)
        if layout not in _LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
        if self.parts.prefetcher is not None:
            self.parts.prefetcher.wait_for_changes()
        target = Path(path)
        place = target / "storage"
        in_place = self.parts.storage._has_files_in(place)
        require_no_buffer(target)
        if not in_place:
            require_no_buffer(place)
        with report_to(on_progress), located(target), without_leftover(target):
            if in_place:
                if layout != "shmbuffer":
                    raise ValueError(
                        f"{place} contains the live files of this buffer's storage, which cannot "
                        f"be saved in place with layout={layout!r}. Nothing was written. Save to "
                        "another directory"
                    )
                self.parts.storage._flush_in_place(place)
                with publish(place / PARTS, "sampler and writer") as folder:
                    self._write_parts(folder, LIVE_READS, extra)
            elif layout == "torchrl" or not self.parts.storage.saves_snapshots:
                with publish(target, "buffer in TorchRL's layout") as directory:
                    export(self, directory, extra)
            else:
                make_folders(target)
                with publish(place, "storage") as directory:
                    moment = dump_part(self.parts.storage, directory)
                    make_folders_below(directory, directory / PARTS / "sampler")
                    self._write_parts(directory / PARTS, moment, extra)

    def _write_parts(self, folder: Path, moment: Any, extra: Any) -> None:
        """Writes everything except the items into ``folder``.

        Args:
            folder: the folder ``parts`` of the save.
            moment: the `ItemSnapshot` of the saved items, or `LIVE_READS` for live files.
            extra: the user's data, or None.
        """
        parts = self.parts
        write_value(
            folder, "writer", save_part(parts.writer, folder / "writer", moment), "the writer"
        )
        with self.as_delivered(folder):
            sampler = save_part(parts.sampler, folder / "sampler", moment)
            write_value(folder, "sampler", sampler, f"the state of the {_name(parts.sampler)}")
            states = self.generator_states()
        if moment is not LIVE_READS:
            write_consumed(folder, ring_of(parts.storage), moment)
        if extra is not None:
            write_value(folder, "extra", extra, "extra")
        known = {
            "batch_size": parts.batch_size,
            "generators": states,
            "transforms": {at: dict(one) for at, one in parts.transform.state_dict().items()},
            "beside": optional_parts(folder),
        }
        write_value(folder, "buffer", known, "the state of the transforms")

    def generator_states(self) -> dict[str, tuple[torch.Tensor, str]]:
        """Returns the state and the device of each generator, by its name in a save."""
        return {
            name: (between_forks(one.generator.get_state), str(one.generator.device))
            for name, one in self.seeded().items()
            if one.generator is not None
            and (one is self.parts or one.generator is not self.parts.generator)
        }

    @contextmanager
    def as_delivered(self, folder: Path) -> Iterator[None]:
        """Rewinds the sampler to the last delivered batch while the block runs.

        Prefetched batches are written into ``folder``. If they cannot be saved, they are dropped.
        """
        prefetcher = self.parts.prefetcher
        if prefetcher is None:
            yield
            return
        with prefetcher.waiting() as made:
            now = self.parts.draws()
            if made and write_prefetched(folder, made, now, self.parts.sampler):
                self.parts.go_to(made[0].before)
            else:
                self.parts.drop_prefetched()
                now = self.parts.draws()
            try:
                yield
            finally:
                self.parts.go_to(now)

    def loads(self, path: _Path, on_progress: OnProgress | None) -> Any:
        """Loads a save; `ReplayBuffer.loads` describes the arguments and the result."""
        self._require_no_queue("loads")
        self.parts.drop_prefetched()
        with report_to(on_progress):
            return self._loads_one_save(Path(path).absolute())

    def _loads_one_save(self, path: Path) -> Any:
        """Loads a save. If another process replaces it in the meantime, loads the new save."""
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
                if attempt == _ATTEMPTS - 1 or _identity(path) == before or is_from_callback(error):
                    raise
                continue  # another process replaced the save while this process was reading
            if _identity(path) == before:
                return extra
        raise RuntimeError(
            f"{path} was replaced by another process during each of {_ATTEMPTS} attempts to load "
            "it; load it when the other process has finished"
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the storage, sampler, writer, transforms and generator."""
        parts = self.parts
        parts.drop_prefetched()
        rng = parts.generator
        return {
            "_storage": parts.storage.state_dict(),
            "_sampler": parts.sampler.state_dict(),
            "_writer": parts.writer.state_dict(),
            "_transforms": parts.transform.state_dict(),
            "_batch_size": parts.batch_size,
            "_rng": None if rng is None else (between_forks(rng.get_state), str(rng.device)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`; see `ReplayBuffer.load_state_dict`."""
        self._require_no_queue("load_state_dict")
        _require_keys("a buffer", _PARTS, state_dict)
        parts = self.parts
        for name, part in (("_sampler", parts.sampler), ("_writer", parts.writer)):
            kind = type(part)
            _require_keys(f"a {kind.__name__}", kind._state_keys, state_dict[name])
        parts.drop_prefetched()
        parts.storage.load_state_dict(state_dict["_storage"])
        parts.writer.load_state_dict(state_dict["_writer"])
        parts.sampler.load_state_dict(state_dict["_sampler"])
        parts.sampler._loaded_into(parts.storage)
        parts.transform.load_state_dict(state_dict["_transforms"])
        parts.batch_size = state_dict["_batch_size"]
        parts.measure_hand_over()
        if state_dict["_rng"] is not None:
            state, device = state_dict["_rng"]
            parts.seed_with(state, torch.device(device))

    def _require_no_queue(self, what: str) -> None:
        """Raises ShmBufferError if the buffer is a queue, because items can only be appended to it.

        Args:
            what: name of the calling method, for the message.
        """
        limiter = self.parts.rate_limiter
        if limiter is not None and limiter.max_times_sampled is not None:
            raise ShmBufferError(
                f"{what}: the buffer is a queue (max_times_sampled), which can only be written at "
                "its end. Nothing was changed. Load into a buffer that is not a queue"
            )

    def _load(self, saved: SavedBuffer) -> Any:
        """Replaces the contents and the state of the buffer with a save. Returns its ``extra``."""
        parts = self.parts
        loaded = apply_part(parts.storage, saved.storage, saved.written)
        if isinstance(loaded, Loaded):
            restore_consumed(ring_of(parts.storage), saved.consumers, loaded)
        parts.sampler._empty()
        apply_part(parts.sampler, saved.sampler, loaded)
        parts.sampler._loaded_into(parts.storage)
        apply_part(parts.writer, saved.writer, loaded)
        for name, one in self.seeded().items():
            if name in saved.generators:
                if one is not self.parts and one.generator is parts.generator:
                    one.set_generator(None)  # the part had its own generator
                one.seed_with(*saved.generators[name])
        if saved.transforms is not None:
            with reading(saved.where):
                parts.transform.load_state_dict(saved.transforms)
        if saved.batch_size is not None:
            parts.batch_size = saved.batch_size
        parts.measure_hand_over()
        if parts.prefetcher is not None and saved.ahead and fits(saved.ahead, loaded):
            made, draws = restored(saved.ahead, parts.draws(), parts.sampler)
            parts.prefetcher.put_back(made)
            parts.go_to(draws)
        return saved.extra

    def _read_parts(self, place: Path) -> SavedBuffer:
        """Reads a save in the layout of this package, without changing the buffer.

        Args:
            place: the directory with the items.
        """
        parts = self.parts
        folder = place / PARTS
        known = read_value(folder, "buffer")
        with reading(folder / "buffer.jsonl"):
            found, beside = known["generators"], set(known["beside"])
            generators = {name: checked_generator(*one) for name, one in found.items()}
            batch_size, transforms = checked_batch_size(known["batch_size"]), known["transforms"]
        if parts.prefetcher is None:
            beside.discard("ahead")
        require_states(folder / "buffer.jsonl", transforms, parts.transform)
        return SavedBuffer(
            where=folder / "buffer.jsonl",
            storage=read_part(parts.storage, place),
            sampler=saved_part(parts.sampler, read_value(folder, "sampler"), folder / "sampler"),
            writer=saved_part(parts.writer, read_value(folder, "writer"), folder / "writer"),
            generators=generators,
            transforms=transforms or None,
            batch_size=batch_size,
            extra=read_value(folder, "extra") if "extra" in beside else None,
            consumers=read_consumed(folder) if "consumers" in beside else [],
            ahead=read_prefetched(folder) if "ahead" in beside else [],
        )

    def seeded(self) -> dict[str, Parts]:
        """Returns the objects whose generators are saved, by the name of the generator in a save.

        These are this buffer and, for an ensemble, its members.
        """
        members = {f"{_RNG}_{at}": parts for at, parts in enumerate(self.parts.members)}
        return {_RNG: self.parts, **members}


def _identity(path: Path) -> list[tuple[int, int, int]]:
    """Returns the identities of the files of a save.

    Each save creates new files, so the result changes when a save is replaced.
    """
    found = []
    for name in ("", f"storage/{PARTS}", METADATA):
        with suppress(OSError):
            one = os.stat(path / name)
            found.append((one.st_dev, one.st_ino, one.st_mtime_ns if name else 0))
    return found


def _name(part: Any) -> str:
    return type(part).__name__


def _require_keys(owner: str, keys: tuple[str, ...], state: Any) -> None:
    """Raises KeyError if ``state`` lacks required keys.

    Args:
        owner: name of the object to which the state belongs, for the message.
        keys: the required keys.
        state: the state to check.
    """
    found = set(getattr(state, "keys", set)())
    if missing := [key for key in keys if key not in found]:
        raise KeyError(
            f"load_state_dict: the state of {owner} has the keys {missing}, but this state has "
            f"{sorted(map(str, found))}. Nothing was changed. Pass the result of state_dict() from "
            "a buffer with the same classes of storage, sampler and writer"
        )
