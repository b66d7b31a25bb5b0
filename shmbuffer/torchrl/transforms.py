"""Transforms on the way in and out; ``invert=True`` swaps the two.

extend, add  ──inv, last to first──▶  storage  ──forward, first to last──▶  sample, rb[i]
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmbuffer.tensors.form.tensor_nodes import is_collection, unlocked

Transform = Callable[[Any], Any]


class Inverted:
    """A transform turned round."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, data: Any) -> Any:
        """On the way out."""
        return _inverse(self.transform)(data)

    def inv(self, data: Any) -> Any:
        """On the way in."""
        return self.transform(data)


class Compose:
    """Transforms in a row.

    Args:
        *transforms: called in this order on the way out, in the reverse order on the way in.

    Source: ``torchrl.envs.transforms.Compose``, for any callable.
    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform, *, invert: bool = False) -> None:
        """Adds at the end."""
        self.insert(len(self.transforms), transform, invert=invert)

    def insert(self, index: int, transform: Transform, *, invert: bool = False) -> None:
        """Adds before the transform at ``index``; negative indices count from the end.

        Raises:
            TypeError: it cannot be called.
            ValueError: there is no such place.
        """
        if not -len(self.transforms) <= index <= len(self.transforms):
            raise ValueError(
                f"a transform cannot be inserted at {index} of {len(self.transforms)}; use "
                "append_transform to add one at the end"
            )
        if not callable(transform):
            raise TypeError(f"a transform must be callable, got {transform!r}")
        self.transforms.insert(index, Inverted(transform) if invert else transform)

    def __call__(self, data: Any) -> Any:
        """The way out."""
        # Transforms add entries; a locked TensorDict takes them for the time of the call.
        with unlocked(data) if is_collection(data) else contextlib.nullcontext():
            for transform in self.transforms:
                data = transform(data)
        return data

    def inv(self, data: Any) -> Any:
        """The way in."""
        for transform in reversed(self.transforms):
            data = _inverse(transform)(data)
        return data

    def __len__(self) -> int:
        return len(self.transforms)

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.transforms)

    def __getitem__(self, index: int) -> Transform:
        return self.transforms[index]

    def state_dict(self) -> dict[str, Any]:
        """The states of those that have one."""
        return {
            str(at): transform.state_dict()
            for at, transform in enumerate(self.transforms)
            if hasattr(transform, "state_dict")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`."""
        for at, state in state_dict.items():
            self.transforms[int(at)].load_state_dict(state)  # type: ignore[attr-defined]


def compose(transform: Transform | Iterable[Transform] | None) -> Compose:
    """The chain of a buffer from its constructor's argument."""
    if transform is None:
        return Compose()
    if isinstance(transform, Compose):
        return transform
    if isinstance(transform, (list, tuple)):
        return Compose(*transform)
    if hasattr(transform, "transforms") and hasattr(transform, "insert"):  # TorchRL's Compose
        return Compose(*transform.transforms)
    return Compose(transform)  # type: ignore[arg-type] # Compose says it where it cannot be called


def _inverse(transform: Transform) -> Transform:
    inverse = getattr(transform, "inv", None)
    return inverse if callable(inverse) else lambda data: data
