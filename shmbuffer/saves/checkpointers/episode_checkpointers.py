"""Saves episodes so that each observation is stored once, with the hooks in `ted`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tensordict import NonTensorData, PersistentTensorDict, is_non_tensor

from shmbuffer.memory.system.path_checks import resolve_path
from shmbuffer.saves.checkpointers.saved_storage import SavedStorage
from shmbuffer.saves.checkpointers.tensor_checkpointer import TensorStorageCheckpointer
from shmbuffer.saves.publication import publish_file
from shmbuffer.saves.safe_files import create_file, exists, open_file, require_own_content
from shmbuffer.saves.values import reading
from shmbuffer.tensors.form.tensor_nodes import fields
from shmbuffer.torchrl.ted.entries import LENGTH, ROOT, NestedKey, entries, shape_of
from shmbuffer.torchrl.ted.flat import TED2Flat
from shmbuffer.torchrl.ted.hdf5 import H5Combine, H5Split
from shmbuffer.torchrl.ted.items import Flat2TED
from shmbuffer.torchrl.ted.nested import Nested2TED, TED2Nested

_MARK = "shmbuffer"
"""Attribute of an HDF5 file that this package has written.

If the attribute is missing, TorchRL has replaced the file, and the additional files next to it are
outdated.
"""


class FlatStorageCheckpointer(TensorStorageCheckpointer):
    """Saves episodes in memory-mapped files, with each observation stored once.

    If an item does not continue the previous item, because several collectors write alternately or
    because items span several steps, both observations of the item are saved. TorchRL cannot read
    such a file, and writes such data incorrectly.

    Args:
        done_keys: entries under ``"next"`` that are flags. None stands for ``("done", "truncated",
            "terminated")``.
        reward_keys: entries under ``"next"`` that are rewards. None stands for ``("reward",)``.

    Source: ``torchrl.data.FlatStorageCheckpointer``; see `TED2Flat` for what is in the files.
    """

    _hooks: tuple[type, type] = (TED2Flat, Flat2TED)

    def __init__(
        self,
        done_keys: Iterable[NestedKey] | None = None,
        reward_keys: Iterable[NestedKey] | None = None,
    ) -> None:
        super().__init__()
        names = _without_none(done_keys=done_keys, reward_keys=reward_keys)
        saving, loading = self._hooks
        self._save_hooks = [saving(**names)]
        self._load_hooks = [loading(**names)]

    def _apply_load_hooks(self, data: Any, out: Any) -> Any:
        if out is not None:
            found: dict[tuple[str, ...], Any] = {(name,): data.get(name) for name in [*data.keys()]}
            if list(out.batch_size) != shape_of(found, type(self).__name__):
                out = None  # the size differs, so the hook must not write into ``out``
        return super()._apply_load_hooks(data, out)


class NestedStorageCheckpointer(FlatStorageCheckpointer):
    """Saves episodes as nested tensors, with one row per trajectory and each observation once.

    The arguments are those of `FlatStorageCheckpointer`.

    Source: ``torchrl.data.NestedStorageCheckpointer``; see `TED2Nested`.
    """

    _hooks = (TED2Nested, Nested2TED)


class H5StorageCheckpointer(NestedStorageCheckpointer):
    """Saves episodes in an HDF5 file, with one group per trajectory and each observation once.

    Args:
        checkpoint_file: name of the file in the directory of the save. It is ignored if the path of
            the save ends with ``.h5``.
        done_keys, reward_keys: see `FlatStorageCheckpointer`.
        h5_kwargs: options for every dataset of the file, such as ``{"compression": "gzip"}``; see
            ``h5py.Group.create_dataset``.
        kwargs: the other arguments of `TED2Nested`.

    Raises:
        ImportError: h5py is not installed; ``pip install shmbuffer[h5]``.
        ValueError: ``checkpoint_file`` is outside of the directory of the save.

    Source: ``torchrl.data.H5StorageCheckpointer``; see `H5Split`.
    """

    def __init__(
        self,
        *,
        checkpoint_file: str = "checkpoint.h5",
        done_keys: Iterable[NestedKey] | None = None,
        reward_keys: Iterable[NestedKey] | None = None,
        h5_kwargs: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if Path(checkpoint_file).name != checkpoint_file or checkpoint_file in ("", ".."):
            raise ValueError(
                "checkpoint_file must be a file name without folders, because the file is created "
                f"in the directory of the save, got {checkpoint_file!r}"
            )
        _h5py()  # raises an error now if h5py is missing, instead of at the first save
        names = {**kwargs, **_without_none(done_keys=done_keys, reward_keys=reward_keys)}
        self._save_hooks = [TED2Nested(**names), H5Split()]
        self._load_hooks = [H5Combine(), Nested2TED(**names)]
        self.kwargs = {} if h5_kwargs is None else dict(h5_kwargs)
        self.checkpoint_file = checkpoint_file

    def _apply_save_hooks(self, data: Any, path: Any, *, shift: int, is_full: bool) -> Any:
        for hook in self._save_hooks:
            if hasattr(hook, "shift"):
                hook.shift = shift
            if hasattr(hook, "is_full"):
                hook.is_full = is_full
            data = hook(data)  # without a path, because the hooks must not write files
        return data

    def _apply_load_hooks(self, data: Any, out: Any) -> Any:
        try:
            return super()._apply_load_hooks(data, out)
        finally:
            data.close()

    def _folder(self, path: Path) -> Path | None:
        return None if self.saves_to_file(path) else super()._folder(path)

    def saves_to_file(self, path: str | os.PathLike[str]) -> bool:
        """True if ``path`` is the path of the HDF5 file instead of its directory."""
        return Path(path).suffix == ".h5" and not Path(path).is_dir()

    def _file(self, path: Path) -> Path:
        """Returns the path of the HDF5 file of a save."""
        return resolve_path(path) if self.saves_to_file(path) else path / self.checkpoint_file

    def _write(self, data: Any, path: Path, length: int) -> None:
        if not self.saves_to_file(path):
            where = self._file(path)
            create_file(where).close()  # safely, because HDF5 would write through a link
            self._write_file(data, where, length)
            return
        # the file is the whole save, so it is published without a directory
        with publish_file(path) as beside:
            self._write_file(data, beside, length)

    def _write_file(self, data: Any, where: Path, length: int) -> None:
        constants: dict[tuple[str, ...], Any] = {LENGTH: NonTensorData(length)}
        with _h5py().File(where, "w") as file:
            file.attrs[_MARK] = 1
            if ROOT[0] in fields(data):
                file.create_group(ROOT[0])
            for path, leaf in entries(data).items():
                # HDF5 rejects options such as compression for a single number.
                if is_non_tensor(leaf):
                    constants[path] = leaf
                else:
                    file.create_dataset("/".join(path), data=leaf.numpy(), **self.kwargs)
        with closing(PersistentTensorDict.from_h5(where, mode="r+")) as rest:
            for path, value in constants.items():
                rest[path] = value

    def _read(self, path: Path) -> tuple[Any, int]:
        where = self._file(path)
        if not exists(where):
            raise FileNotFoundError(f"{where}: no such file, so no episodes were saved there")
        with open_file(where), reading(where):  # rejects a FIFO, for which HDF5 would wait
            require_own_content(where)
        file = PersistentTensorDict.from_h5(where)
        return file, int(file[LENGTH[0]])

    def _record(self, path: Path) -> SavedStorage | None:
        with _h5py().File(self._file(path), "r") as file:
            ours = _MARK in file.attrs
        return super()._record(path) if ours else None


def _without_none(**names: Any) -> dict[str, Any]:
    """Returns the arguments that are not None."""
    return {name: value for name, value in names.items() if value is not None}


def _h5py() -> Any:
    try:
        import h5py  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            "H5StorageCheckpointer needs h5py to write HDF5 files, but h5py is not installed; run "
            "pip install shmbuffer[h5]"
        ) from error
    return h5py
