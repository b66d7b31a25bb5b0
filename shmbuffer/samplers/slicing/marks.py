"""The flags that a sample has for its steps: where a slice begins, and where it was cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shmbuffer.memory.format.array_types import Ints
from shmbuffer.memory.format.leaf import Key, KeyPath, key_of, path_of
from shmbuffer.samplers.slicing.cuts import SliceRows
from shmbuffer.samplers.slicing.single_entries import Entries
from shmbuffer.tensors.form import cpu

MASK: KeyPath = ("collector", "mask")
"""Where steps are told from padding, as in TorchRL."""


class Marks(NamedTuple):
    """The entries that are marked."""

    # On the last step of a slice ``truncated`` and ``done`` are true, on the first ``init``, if it
    # is stored; otherwise, as is ``terminated``, they are as stored. A mark has the shape of the
    # stored entry, else that of another of the first three, else ``[n, 1]``.

    truncated: KeyPath | None
    done: KeyPath
    terminated: KeyPath
    init: KeyPath | None

    @classmethod
    def of(cls, truncated_key: Key | None, init_key: Key | None) -> Marks:
        """With ``done`` and ``terminated`` next to ``truncated_key``."""
        truncated = None if truncated_key is None else path_of(truncated_key)
        beside = truncated[:-1] if truncated is not None else ()
        return cls(
            truncated,
            (*beside, "done"),
            (*beside, "terminated"),
            None if init_key is None else path_of(init_key),
        )

    @property
    def paths(self) -> tuple[KeyPath, ...]:
        """The entries that have to be read."""
        flags = () if self.truncated is None else (self.truncated, self.done, self.terminated)
        return flags if self.init is None else (*flags, self.init)

    def of_rows(
        self, entries: Entries, elements: Ints, found: SliceRows
    ) -> dict[Any, torch.Tensor]:
        """The marks of drawn items, bool ``[n, *shape]``, by string or tuple key."""
        stored = {
            path: entries.take(path, elements) != 0 for path in self.paths if entries.has(path)
        }
        marks: dict[Any, torch.Tensor] = {}
        if self.truncated is not None:
            forms = [stored[path] for path in self.paths[:3] if path in stored]
            form = forms[0] if forms else cpu.zeros(len(elements), 1, dtype=torch.bool)
            nothing = torch.zeros_like(form)
            last = torch.from_numpy(found.last)
            truncated = stored.get(self.truncated, nothing)
            if found.mask is not None:  # padding is no step: nothing is cut there
                truncated = truncated & _each(torch.from_numpy(found.mask), truncated)
            done, terminated = stored.get(self.done, nothing), stored.get(self.terminated, nothing)
            marks[key_of(self.truncated)] = truncated | _each(last, truncated)
            marks[key_of(self.done)] = done | _each(last, done)
            marks[key_of(self.terminated)] = terminated
        if self.init is not None and self.init in stored:
            init = stored[self.init]
            marks[key_of(self.init)] = init | _each(torch.from_numpy(found.first), init)
        if found.mask is not None:
            marks[MASK] = torch.from_numpy(found.mask)
        return marks


def _each(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[n]`` in a form that broadcasts with ``[n, *shape]``."""
    return rows.reshape(-1, *(1,) * (like.dim() - 1))
