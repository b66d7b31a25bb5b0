"""Creates or opens the directory of a coordinator, and removes it at the end if requested.

Invariants:
  1. A directory has at most one coordinator, which holds ``coordinator.lock``. The constructor of a
     second coordinator raises an error before it changes anything.
  2. If the constructor raises an error, it removes a buffer that it has created, unless the buffer
     has items.
  3. A temporary directory is removed at the end, also after a signal (memory/directory/removal.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

from shmbuffer.errors import AttachTimeout, BufferInUseError
from shmbuffer.memory import Engine, RateLimiter
from shmbuffer.memory.clients.locks import Lock
from shmbuffer.memory.directory import cleanup, removal
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.beneath import remove_if_empty
from shmbuffer.memory.system.path_checks import explain_errors
from shmbuffer.memory.system.prefault import Prefault
from shmbuffer.memory.system.progress import report_to
from shmbuffer.memory.system.region import Directory
from shmbuffer.service.buffer_config import BufferConfig
from shmbuffer.service.main_module import refuse_while_imported

OnExisting = Literal["error", "recover", "overwrite"]

log = logging.getLogger("shmbuffer.service")


class RunDirectory:
    """The directory of a coordinator. See ``Coordinator`` for the arguments and errors."""

    def __init__(
        self,
        scratch_dir: str | os.PathLike[str] | None,
        config: BufferConfig,
        *,
        existing: OnExisting,
        auto_cleanup: bool | None,
        limiter: RateLimiter | None,
        timeout: float,
        prefault: Prefault,  # its progress callback is also used for the recovery
    ) -> None:
        if existing not in get_args(OnExisting):
            raise ValueError(
                f"on_existing must be 'error', 'recover' or 'overwrite', got {existing!r}"
            )
        if config.capacity is None and (scratch_dir is None or existing != "recover"):
            raise ValueError(
                "capacity, the maximum number of items, is required to create a buffer"
            )
        if not (limiter is None or isinstance(limiter, RateLimiter)):
            raise TypeError(f"rate_limiter must be a RateLimiter or None, got {limiter!r}")
        settings = config.settings()
        if limiter is not None and settings is not None and existing != "recover":
            prioritized, where = settings.alpha is not None, str(scratch_dir or "a new buffer")
            limiter.require_fits(settings.capacity, where, prioritized=prioritized)
        self._is_temporary = scratch_dir is None
        self._auto_cleanup = auto_cleanup
        self._remove: Callable[[], object] | None = None
        with ExitStack() as undo:
            if scratch_dir is None:
                path = cleanup.temporary_directory()
                undo.callback(remove_if_empty, path)
            else:
                path = Path(scratch_dir)
                refuse_while_imported(path)
                with explain_errors(path):
                    had_one = (path / layout.COORDINATOR_LOCK).exists()
                if had_one:  # raises an error before the buffer is recovered or removed
                    hold_lock(path).close()
            with report_to(prefault.on_progress):
                self.engine = Engine.open(
                    path,
                    settings,
                    existing=existing,
                    role="coordinator",
                    timeout=timeout,
                    temporary=self._is_temporary and auto_cleanup is not False,
                    prefault=prefault,
                )
            undo.callback(self.engine.close)
            self._has_created = self._is_temporary or existing != "recover"
            undo.callback(self._remove_new_buffer)
            self.path: Path = path if self.engine.path is None else self.engine.path
            self._lock = undo.enter_context(hold_lock(self.path))
            config.agree(self.engine)
            kept = self.engine.limiter
            if limiter is None and kept is not None:
                _log_limiter(self.path, kept)
            elif limiter is not None and not limiter.has_same_limits(kept):
                self.engine.set_limiter(limiter)
            self._undo = undo.pop_all()

    def abandon(self) -> None:
        """Undoes the constructor after a later step of the start has failed."""
        self._undo.close()

    def begin(self) -> None:
        """Completes the start. From now on, `leave` removes the buffer if this was requested."""
        if self._auto_cleanup is not False:
            if self._is_temporary or self.engine.take_ownership():
                self._remove = self.engine.cleanup
            elif self._auto_cleanup:
                self._remove = removal.own(self.path, self.engine.superblock.uuid).remove
        self._undo.pop_all()

    def leave(self) -> None:
        """Removes the buffer if requested, and releases the lock. The engine stays open."""
        try:
            if self._remove is not None:
                self._remove()
        finally:
            self._lock.close()

    def forget_if_unused(self) -> None:
        """Removes a new buffer that has no items and that no other process has used."""
        if len(self.engine.clients()) == 1 and not self.engine.stats()["weights_version"]:
            self._remove_new_buffer()

    def _remove_new_buffer(self) -> None:
        """Removes a new buffer without items, so that the next coordinator can create it again."""
        if self._has_created and self.engine.ring() is None:
            self.engine.cleanup()


def hold_lock(scratch_dir: Path) -> Lock:
    """Acquires ``coordinator.lock``, which child processes do not inherit.

    Returns the lock, which is held until it is closed. Raises BufferInUseError if another process
    holds it.
    """
    # The file is never removed, because a lock on a new file would not exclude the old lock.
    purpose = "is its coordinator"
    with Directory.open(scratch_dir) as directory:
        try:
            return Lock().hold(directory, layout.COORDINATOR_LOCK, timeout=0, purpose=purpose)
        except AttachTimeout as error:
            pids = getattr(error, "pids", [])
    who = f"pid {pids[0]}" if pids else "a process that is not shown in /proc/locks"
    raise BufferInUseError(
        f"{scratch_dir}: {who} is already the coordinator of this directory; stop this process "
        "first, or use attach()",
        path=scratch_dir,
        pids=pids,
    )


def _log_limiter(path: Path, kept: RateLimiter) -> None:
    """Logs the rate limiter of an existing buffer, which stays in effect."""
    values = [f"{name}={value!r}" for name, value in asdict(kept).items() if value is not None]
    log.warning(
        "%s: the buffer keeps its rate limiter, RateLimiter(%s); pass rate_limiter= or call "
        "set_rate(...) to change it, or call set_rate(None) to remove it",
        path,
        ", ".join(values),
    )
