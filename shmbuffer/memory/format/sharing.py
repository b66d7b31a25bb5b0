"""Next observations that are stored once (``share_next``).

    SharingRequest (recorded before the first write) ──leaves are known──▶ Sharing (in the schema)

A leaf ``("next", k)`` of an item usually equals the leaf ``k`` of the following item. Each slot has
a word that says where its next observations are. It is either a *link*, which gives the number of
slots to the following item, or an *own row*, which is a row of a file beside the ring. The rules
for changing these words are in ``_native/core/sharing.c``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from shmbuffer.errors import SchemaMismatchError
from shmbuffer.memory.format.layout import NEXT_LIMIT
from shmbuffer.memory.format.leaf import Leaf, size_of

# The default number of own rows: one for every 20 slots, but at least 64.
_LEAST, _SHARE = 64, 20
# Keys that are no observations. They mark the ends of trajectories, and their values seldom repeat.
_NO_OBSERVATION = frozenset({"done", "terminated", "truncated", "reward"})
# The size of a slot's word. Sharing smaller leaves would save nothing.
_WORD_BYTES = 8


@dataclass(frozen=True)
class Sharing:
    """Leaves that are stored once, because the following item has their bytes in another leaf."""

    paths: tuple[tuple[str, ...], ...] = ()  # paths of the leaves, all below "next"
    own_rows: int = 0  # rows for next observations that no other slot contains

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __str__(self) -> str:
        if not self.paths:
            return "a column for each leaf"
        names = ", ".join(".".join(path) for path in self.paths)
        return f"{names} stored once, with {self.own_rows} own rows for next observations"

    def require_fits(self, leaves: tuple[Leaf, ...], capacity: int, lanes: tuple[int, ...]) -> None:
        """Raises SchemaMismatchError if a buffer with these leaves cannot store them once."""
        if not self.paths and not self.own_rows:
            return
        if lanes:
            raise SchemaMismatchError(
                f"share_next needs a storage of one dimension (ndim=1), but this storage has "
                f"{[capacity, *lanes]}; write environments side by side as streams"
            )
        if not (0 < self.own_rows < NEXT_LIMIT and capacity < NEXT_LIMIT):
            raise SchemaMismatchError(
                f"share_next: capacity={capacity} and share_next_room={self.own_rows} must both be "
                f"from 1 to {NEXT_LIMIT - 1}"
            )
        known = {leaf.path: leaf for leaf in leaves}
        for path in self.paths:
            if (reason := _reason_not_shareable(path, known)) is not None:
                raise SchemaMismatchError(
                    f"share_next: {'.'.join(path)!r} {reason}", leaf=".".join(path)
                )

    def roots(self, leaves: tuple[Leaf, ...]) -> dict[int, int]:
        """Maps the number of each leaf that is stored once to that of its observation."""
        number = {leaf.path: at for at, leaf in enumerate(leaves)}
        return {number[path]: number[path[1:]] for path in self.paths}

    def file_of(self, leaf: Leaf) -> str:
        """Returns the name of a leaf's file; files of own rows have names that no leaf can have."""
        if leaf.path not in self.paths:
            return leaf.file
        return "/".join(quote(part, safe="") for part in leaf.path) + "+own_rows.memmap"

    def to_json(self) -> dict[str, Any]:
        """Converts to JSON."""
        return {"paths": [list(path) for path in self.paths], "own_rows": self.own_rows}

    @classmethod
    def from_json(cls, data: Any) -> Sharing:
        """Parses the output of `to_json`; ValueError, KeyError or TypeError if it is invalid."""
        if data is None:
            return NOT_SHARED
        paths = tuple(tuple(map(str, path)) for path in data["paths"])
        if not paths:
            raise ValueError("no leaf is stored once")
        return cls(paths, size_of(data["own_rows"]))


NOT_SHARED = Sharing()


@dataclass(frozen=True)
class SharingRequest:
    """The sharing that was requested at creation, before the leaves are known."""

    keys: tuple[tuple[str, ...], ...] = ()  # below "next"; (): all suitable leaves
    room: int | None = None  # number of own rows; None: the default

    @classmethod
    def from_arguments(cls, share_next: Any, room: Any, ndim: int) -> SharingRequest | None:
        """Parses a storage's arguments; ValueError if invalid, None if each leaf has a column."""
        if share_next is False or share_next is None:
            if room is not None:
                raise ValueError(
                    f"share_next_room={room!r} has no effect without share_next; leave it out, or"
                    " pass share_next=True"
                )
            return None
        if ndim != 1:
            raise ValueError(
                f"share_next needs ndim=1, but ndim is {ndim}; write environments side by side as"
                " streams"
            )
        if room is not None and not (type(room) is int and 0 < room < NEXT_LIMIT):
            raise ValueError(f"share_next_room must be from 1 to {NEXT_LIMIT - 1}, but is {room!r}")
        keys = [] if share_next is True else list(map(_path, share_next))
        if share_next is not True and not keys:
            raise ValueError("share_next=[] names no key; leave it out, or pass True")
        return cls(tuple(keys), room)

    def choose_leaves(self, leaves: Iterable[Leaf], capacity: int) -> Sharing:
        """Chooses the shared leaves; SchemaMismatchError if one cannot be shared, or none can."""
        known = {leaf.path: leaf for leaf in leaves}
        if not known:
            raise SchemaMismatchError(
                "share_next: the items contain values that are not tensors, so they stay in this "
                "process; leave these values or share_next out"
            )
        named = self.keys or tuple(
            path
            for path, leaf in known.items()
            if _reason_not_shareable(path, known) is None
            and path[-1] not in _NO_OBSERVATION
            and leaf.nbytes >= _WORD_BYTES
        )
        if not named:
            raise SchemaMismatchError(
                "share_next: no leaf ('next', key) has the dtype and shape of a leaf 'key' of at "
                f"least {_WORD_BYTES} bytes, and there are {sorted(map('.'.join, known))}; leave "
                "share_next out, or name the keys"
            )
        room = max(_LEAST, capacity // _SHARE) if self.room is None else self.room
        return Sharing(tuple(named), room)

    def to_json(self) -> dict[str, Any]:
        """Converts to the JSON that is recorded."""
        return {"keys": [list(key) for key in self.keys], "room": self.room}

    @classmethod
    def from_settings(cls, extra: dict[str, Any]) -> SharingRequest | None:
        """Returns the recorded request; None if there was none."""
        found = extra.get("share_next")
        if found is None:
            return None
        return cls(tuple(tuple(map(str, key)) for key in found["keys"]), found["room"])


def _path(key: Any) -> tuple[str, ...]:
    """Converts a key of ``share_next`` to a path below "next"."""
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(part, str) for part in path):
        raise ValueError(f"share_next: {key!r} is not a key; pass a string, or a tuple of strings")
    return path if path[0] == "next" else ("next", *path)


def _reason_not_shareable(path: tuple[str, ...], known: dict[tuple[str, ...], Leaf]) -> str | None:
    """Returns why a leaf cannot be stored once; None if it can."""
    if path[0] != "next" or len(path) < 2:
        return "is not below 'next'"
    leaf, root = known.get(path), known.get(path[1:])
    if leaf is None or root is None:
        missing = ".".join(path if leaf is None else path[1:])
        return f"needs a leaf {missing!r}, which does not exist"
    if (leaf.dtype, leaf.shape) != (root.dtype, root.shape):
        return f"is {leaf}, but {root.name!r} is {root}"
    if root.path[0] == "next":
        return "is below 'next' twice"
    return None if leaf.nbytes else "has no bytes"
