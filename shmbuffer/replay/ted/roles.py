"""Which entries of episode data are flags, which are rewards, and where the ring's state goes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shmbuffer.replay.ted.entries import CUT_SHAPE, CUTS, LENGTH, NEXT, STORAGE_SHAPE, Path, path_of

Key = str | tuple[Any, ...]

DONE_KEYS = ("done", "truncated", "terminated")
REWARD_KEYS = ("reward",)


class Roles:
    """Which entries say that an episode ended, which are rewards, and where the ring's state goes.

    Args:
        done_key: where the end of an episode is read.
        shift_key: where the slot after the last item is written.
        is_full_key: where it is written whether the ring has gone round.
        done_keys: entries that are flags; they are taken from under ``"next"``.
        reward_keys: entries that are rewards; likewise.
    """

    def __init__(
        self,
        done_key: Key,
        shift_key: Key = "shift",
        is_full_key: Key = "is_full",
        done_keys: Iterable[Key] = DONE_KEYS,
        reward_keys: Iterable[Key] = REWARD_KEYS,
    ) -> None:
        self.done_key = done_key
        self.shift_key = shift_key
        self.is_full_key = is_full_key
        self.done_keys: set[Any] = _unravelled(done_keys)
        self.reward_keys: set[Any] = _unravelled(reward_keys)
        self._done = path_of(done_key)
        self._shift_path = path_of(shift_key)
        self._is_full_path = path_of(is_full_key)
        end = self._done[1:] if self._done[0] == NEXT else self._done
        self._flags = {path_of(key) for key in self.done_keys} | {end}
        self._rewards = {path_of(key) for key in self.reward_keys}

    @property
    def _taken(self) -> set[Path]:
        return {self._shift_path, self._is_full_path, STORAGE_SHAPE, CUT_SHAPE, CUTS, LENGTH}


def _unravelled(keys: Iterable[Key]) -> set[Any]:
    given = (keys,) if isinstance(keys, str) else keys
    return {path[0] if len(path := path_of(key)) == 1 else path for key in given}
