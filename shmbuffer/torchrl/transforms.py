"""Transforms of new data and of samples.

extend, add  ──inv, last to first──▶  storage  ──forward, first to last──▶  sample, rb[i]

``invert=True`` swaps the two directions of a transform.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from shmbuffer.tensors.form.tensor_nodes import is_collection, unlocked

Transform = Callable[[Any], Any]


class Inverted:
    """Wraps a transform and swaps its two directions."""

    def __init__(self, transform: Transform) -> None:
        self.transform = transform

    def __call__(self, data: Any) -> Any:
        """Transforms samples with the inverse of the wrapped transform."""
        return _inverse(self.transform)(data)

    def inv(self, data: Any) -> Any:
        """Transforms new data with the wrapped transform."""
        return self.transform(data)


class Compose:
    """A chain of transforms.

    Args:
        *transforms: the transforms. They are applied to samples in the given order, and to new
            data in reverse order.

    Source: ``torchrl.envs.transforms.Compose``. Unlike that class, it accepts any callable.
    """

    def __init__(self, *transforms: Transform) -> None:
        self.transforms: list[Transform] = []
        for transform in transforms:
            self.append(transform)

    def append(self, transform: Transform, *, invert: bool = False) -> None:
        """Adds a transform to the end of the chain."""
        self.insert(len(self.transforms), transform, invert=invert)

    def insert(self, index: int, transform: Transform, *, invert: bool = False) -> None:
        """Inserts a transform before the one at ``index``. Negative indices count from the end.

        Raises:
            TypeError: the transform is not callable.
            ValueError: ``index`` is out of range.
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
        """Transforms samples."""
        # Transforms can add entries, so a locked TensorDict is unlocked during the call.
        with unlocked(data) if is_collection(data) else contextlib.nullcontext():
            for transform in self.transforms:
                data = transform(data)
        return data

    def inv(self, data: Any) -> Any:
        """Transforms new data."""
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
        """Returns the states of all transforms that have a state, by position."""
        return {
            str(at): transform.state_dict()
            for at, transform in enumerate(self.transforms)
            if hasattr(transform, "state_dict")
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""
        for at, state in state_dict.items():
            self.transforms[int(at)].load_state_dict(state)  # type: ignore[attr-defined]


def compose(transform: Transform | Iterable[Transform] | None) -> Compose:
    """Converts the argument ``transform`` of a buffer to a chain of transforms."""
    if transform is None:
        return Compose()
    if isinstance(transform, Compose):
        return transform
    if isinstance(transform, (list, tuple)):
        return Compose(*transform)
    if hasattr(transform, "transforms") and hasattr(transform, "insert"):  # TorchRL's Compose
        return Compose(*transform.transforms)
    # Compose raises an error if the transform is not callable.
    return Compose(transform)  # type: ignore[arg-type]


def _inverse(transform: Transform) -> Transform:
    inverse = getattr(transform, "inv", None)
    return inverse if callable(inverse) else lambda data: data
