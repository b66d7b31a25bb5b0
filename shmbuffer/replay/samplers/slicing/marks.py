"""What a sample says about the steps of its slices: where one begins, and where it was cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shmbuffer.replay.samplers.slicing.entries import Key, path_of

if TYPE_CHECKING:
    from shmbuffer.numpy.arrays import Ints
    from shmbuffer.numpy.nodes import KeyPath
    from shmbuffer.replay.samplers.slicing.cutting import SliceRows
    from shmbuffer.replay.samplers.slicing.entries import Entries

MASK: KeyPath = ("collector", "mask")
"""Where steps are told from padding, as in TorchRL."""


class Marks(NamedTuple):
    """The entries that are marked.

    ``truncated`` and ``done`` are true on the last step of a slice and where they are stored so;
    ``terminated`` is as it is stored. ``init`` is true on the first step and where it is stored so,
    and is there only where it is stored. A mark has the shape of the entry that is stored, else
    that of another of the three, else ``[n, 1]``.
    """

    truncated: KeyPath | None
    done: KeyPath
    terminated: KeyPath
    init: KeyPath | None

    @classmethod
    def of(cls, truncated_key: Key | None, init_key: Key | None) -> Marks:
        """``done`` and ``terminated`` stand beside ``truncated_key``."""
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
            form = forms[0] if forms else torch.zeros(len(elements), 1, dtype=torch.bool)
            nothing = torch.zeros_like(form)
            last = torch.from_numpy(found.last)
            truncated = stored.get(self.truncated, nothing)
            if found.mask is not None:  # padding is no step: nothing is cut there
                truncated = truncated & _each(torch.from_numpy(found.mask), truncated)
            done, terminated = stored.get(self.done, nothing), stored.get(self.terminated, nothing)
            marks[_key(self.truncated)] = truncated | _each(last, truncated)
            marks[_key(self.done)] = done | _each(last, done)
            marks[_key(self.terminated)] = terminated
        if self.init is not None and self.init in stored:
            init = stored[self.init]
            marks[_key(self.init)] = init | _each(torch.from_numpy(found.first), init)
        if found.mask is not None:
            marks[MASK] = torch.from_numpy(found.mask)
        return marks


def _key(path: KeyPath) -> Key:
    return path[0] if len(path) == 1 else path


def _each(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """``[n]`` so that it can be combined with ``[n, *shape]``."""
    return rows.reshape(-1, *(1,) * (like.dim() - 1))
