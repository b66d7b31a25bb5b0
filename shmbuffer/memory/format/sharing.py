"""Storage of next observations that are usually equal to another observation (``share_next``).

    SharingRequest (stored before the first write) ──leaves are known──▶ Sharing (in the schema)

The leaf ``("next", k)`` of an item is usually equal to the leaf ``k`` of the following item, so it
is stored only once. A number for each slot specifies where its next observations are. This number
is either a *link*, the distance to the slot of the following item, or the index of an *own row* in
a separate file. The rules for changing these numbers are in ``_native/core/sharing.c``.
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
# Keys that are not observations. The value of such a key seldom equals that of the root key.
_NO_OBSERVATION = frozenset({"done", "terminated", "truncated", "reward"})
# The bytes that are stored per slot to find its next observations. Sharing smaller leaves would
# save nothing.
_WORD_BYTES = 8


@dataclass(frozen=True)
class Sharing:
    """The leaves that are stored once, because the following item contains the same bytes."""

    paths: tuple[tuple[str, ...], ...] = ()  # paths of the leaves, all below "next"
    own_rows: int = 0  # rows for next observations that no other slot contains

    def __bool__(self) -> bool:
        return bool(self.paths)

    def __str__(self) -> str:
        if not self.paths:
            return "no shared leaves"
        names = ", ".join(".".join(path) for path in self.paths)
        return f"shared leaves ({names}) with {self.own_rows} own rows"

    def require_fits(self, leaves: tuple[Leaf, ...], capacity: int, lanes: tuple[int, ...]) -> None:
        """Raises SchemaMismatchError if a buffer with this schema cannot share these leaves.

        Args:
            leaves: All leaves of the schema.
            capacity: Number of slots.
            lanes: Storage dimensions after the first.
        """
        if not self.paths and not self.own_rows:
            return
        if lanes:
            raise SchemaMismatchError(
                "share_next needs a storage with one dimension (ndim=1), but this storage has the"
                f" shape {[capacity, *lanes]}; write the steps of several environments as streams"
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
        """Maps the index of each shared leaf to the index of the leaf with the same bytes.

        The shared leaf is ``("next", k)``, and the other leaf is ``k``.
        """
        number = {leaf.path: at for at, leaf in enumerate(leaves)}
        return {number[path]: number[path[1:]] for path in self.paths}

    def file_of(self, leaf: Leaf) -> str:
        """Returns the name of a leaf's file.

        The file of a shared leaf contains its own rows. No key of a leaf can lead to its name.
        """
        if leaf.path not in self.paths:
            return leaf.file
        return "/".join(quote(part, safe="") for part in leaf.path) + "+own_rows.memmap"

    def to_json(self) -> dict[str, Any]:
        """Converts the sharing to JSON for the schema file."""
        return {"paths": [list(path) for path in self.paths], "own_rows": self.own_rows}

    @classmethod
    def from_json(cls, data: Any) -> Sharing:
        """Parses the output of `to_json`. None means that no leaf is shared.

        Raises:
            ValueError, KeyError, TypeError: ``data`` is not valid.
        """
        if data is None:
            return NOT_SHARED
        paths = tuple(tuple(map(str, path)) for path in data["paths"])
        if not paths:
            raise ValueError("'sharing' does not name any leaf")
        return cls(paths, size_of(data["own_rows"]))


NOT_SHARED = Sharing()


@dataclass(frozen=True)
class SharingRequest:
    """The sharing that was requested at the creation of a buffer, before its leaves are known."""

    keys: tuple[tuple[str, ...], ...] = ()  # paths below "next"; empty: all suitable leaves
    room: int | None = None  # number of own rows; None: the default number

    @classmethod
    def from_arguments(cls, share_next: Any, room: Any, ndim: int) -> SharingRequest | None:
        """Parses the arguments of a storage.

        Args:
            share_next: True, False, None, or a list of keys.
            room: The argument ``share_next_room``, the number of own rows.
            ndim: Number of storage dimensions.

        Returns:
            The request, or None if no leaf is shared.

        Raises:
            ValueError: An argument is invalid.
        """
        if share_next is False or share_next is None:
            if room is not None:
                raise ValueError(
                    f"share_next_room={room!r} has no effect without share_next; leave it out, or"
                    " pass share_next=True"
                )
            return None
        if ndim != 1:
            raise ValueError(
                f"share_next needs ndim=1, but ndim is {ndim}; write the steps of several"
                " environments as streams"
            )
        if room is not None and not (type(room) is int and 0 < room < NEXT_LIMIT):
            raise ValueError(f"share_next_room must be from 1 to {NEXT_LIMIT - 1}, but is {room!r}")
        keys = [] if share_next is True else list(map(_path, share_next))
        if share_next is not True and not keys:
            raise ValueError(
                "share_next must be True or name at least one key, but is empty; leave it out, or"
                " pass True"
            )
        return cls(tuple(keys), room)

    def choose_leaves(self, leaves: Iterable[Leaf], capacity: int) -> Sharing:
        """Chooses the leaves that are shared: the requested ones, or all suitable ones.

        Raises:
            SchemaMismatchError: A requested leaf cannot be shared, or no leaf can.
        """
        known = {leaf.path: leaf for leaf in leaves}
        if not known:
            raise SchemaMismatchError(
                "share_next: the items contain values that are not tensors, so they are stored in"
                " this process only; leave out either these values or share_next"
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
                "share_next: no leaf ('next', key) has the dtype and shape of a leaf 'key' with at "
                f"least {_WORD_BYTES} bytes; the leaves are {sorted(map('.'.join, known))}. Leave"
                " share_next out, or pass the keys to share"
            )
        room = max(_LEAST, capacity // _SHARE) if self.room is None else self.room
        return Sharing(tuple(named), room)

    def to_json(self) -> dict[str, Any]:
        """Converts the request to JSON for the settings of the buffer."""
        return {"keys": [list(key) for key in self.keys], "room": self.room}

    @classmethod
    def from_settings(cls, extra: dict[str, Any]) -> SharingRequest | None:
        """Parses the request in the settings of a buffer. Returns None if there is none."""
        found = extra.get("share_next")
        if found is None:
            return None
        return cls(tuple(tuple(map(str, key)) for key in found["keys"]), found["room"])


def _path(key: Any) -> tuple[str, ...]:
    """Converts a key from ``share_next`` to a path below "next"."""
    path = (key,) if isinstance(key, str) else key
    if not isinstance(path, tuple) or not path or not all(isinstance(part, str) for part in path):
        raise ValueError(f"share_next: {key!r} is not a key; pass a string, or a tuple of strings")
    return path if path[0] == "next" else ("next", *path)


def _reason_not_shareable(path: tuple[str, ...], known: dict[tuple[str, ...], Leaf]) -> str | None:
    """Returns the reason why a leaf cannot be shared, as a phrase, or None if it can be shared.

    Args:
        path: Path of the leaf.
        known: All leaves of the schema, by path.
    """
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
