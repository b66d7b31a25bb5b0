"""The nodes of a PyTree: dicts with any keys, tuples, lists and namedtuples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shmbuffer.replay.form.nodes import (
    BranchNode,
    FormDiffersError,
    Node,
    class_of,
    fields,
    is_collection,
)


class DictNode(BranchNode):
    """A dict of a PyTree."""

    kind = "dict"

    def collect(self, data: Any, out: list[Any]) -> None:
        """See `Node.collect`."""
        if is_collection(data):
            self._collect(fields(data), out)
        elif isinstance(data, Mapping):
            self._collect(data, out)
        else:
            raise FormDiffersError

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `Node.build`."""
        return self.children(leaves, lead, device)


class SequenceNode(BranchNode):
    """A tuple, list or namedtuple of a PyTree; its keys are the positions."""

    def __init__(self, items: dict[Any, Node], kind: str, name: str | None = None) -> None:
        super().__init__(items)
        self.kind = kind  # type: ignore[misc] # one class for the three
        self.name = name

    def collect(self, data: Any, out: list[Any]) -> None:
        """See `Node.collect`."""
        if not isinstance(data, (tuple, list)) or len(data) != self.size:
            raise FormDiffersError
        for value, (_, child) in zip(data, self.pairs, strict=True):
            child.collect(value, out)

    def build(self, leaves: Iterator[Any], lead: tuple[int, ...], device: torch.device) -> Any:
        """See `Node.build`."""
        values = self.children(leaves, lead, device).values()
        if self.kind == "list":
            return list(values)
        cls = None if self.name is None else class_of(self.name)
        return tuple(values) if cls is None else cls(*values)

    def to_json(self) -> dict[str, Any]:
        """See `Node.to_json`."""
        return {**super().to_json(), **({} if self.name is None else {"class": self.name})}
