"""Removes temporary directories when their owner exits, or after it was killed.

    temporary_directory ──own──▶ Ownership ──▶ removed, only by the process that owns it
                                     ├── remove()               on request
                                     ├── process exits          atexit
                                     ├── SIGTERM, SIGINT        if they end the process directly
                                     └── process is killed      janitor, at the user's next start

The name of a temporary directory identifies the process that created it. Another process can
therefore tell an abandoned directory from a directory that is still empty because its buffer is
being created:

    shmbuffer-<uid>-<pid namespace, hex>-<pid>-<start time>-<random>

Always true
  1. The pid and the start time are compared before every removal. Forked and spawned children own
     no directory.
  2. A signal that does not end the program removes no directory. `_on_signal` replaces only the
     default action, which ends the process immediately. The program's own handlers, such as the
     one that raises KeyboardInterrupt, are kept. If the process then exits, atexit removes the
     directory. If the process continues, as a notebook does, the buffer is kept.
  3. The exit status is that of the signal, because the signal is raised again with its default
     action after the removal.
If the owner dies here, one of its directories may remain, complete or in part, until `janitor`
removes it.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

from shmbuffer.memory.clients.locks import INIT_LOCK
from shmbuffer.memory.system.beneath import make_temporary, remove_if_empty
from shmbuffer.memory.system.identity import UNKNOWN_BOOT, Identity, current, prove_dead

PREFIX = "shmbuffer-"
PATIENCE_S = 10.0
"""Maximum time to wait for another thread that is removing the same directory."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)

_owned: list[Ownership] = []
_deferred: list[int] = []  # signals that arrived while the main thread was removing a directory
_thread = threading.local()  # the signal mask that a thread had before it forked


class Ownership:
    """A directory that the current process has to remove when it exits; created by `own`."""

    def __init__(self, path: Path, remove: Callable[[], object]) -> None:
        self.path = path
        self.owner = current()
        self._remove = remove
        self._state: Literal["owned", "removing", "ended"] = "owned"
        self._busy = threading.RLock()  # reentrant: a signal may arrive during a removal
        self._remover = 0

    def remove(self) -> bool:
        """Removes the directory, and returns True if this call removed it.

        If the removal fails, the process tries again when it exits.
        """
        if not self.is_ours() or not self._busy.acquire(timeout=PATIENCE_S):
            return False
        try:
            if self._state != "owned":
                return False
            self._state, self._remover = "removing", threading.get_ident()
            try:
                done = self._remove()
            except BaseException:
                self._state = "owned"
                raise
            self._end()
            return done is not False
        finally:
            self._busy.release()
            _deliver_deferred()

    def release(self) -> bool:
        """Ends the ownership without removing the directory.

        Returns True if this call ended it.
        """
        if not self.is_ours():
            return False
        with self._busy:
            if self._state != "owned":
                return False
            self._end()
            return True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.path}: the ownership of a directory cannot be pickled, because only process "
            f"{self.owner.pid} may remove it; pickle the path instead"
        )

    def is_ours(self) -> bool:
        """True if this process is the owner; False in a forked child of the owner."""
        me = current()
        return (me.pid, me.start_time) == (self.owner.pid, self.owner.start_time)

    def _is_being_removed_here(self) -> bool:
        return self._state == "removing" and self._remover == threading.get_ident()

    def _end(self) -> None:
        """Ends the ownership, and restores the default handlers after the last one."""
        self._state = "ended"
        _owned.remove(self)
        if not _owned:
            _restore_default_handlers()


def own(directory_path: str | os.PathLike[str], remove: Callable[[], object]) -> Ownership:
    """Registers a directory for removal when this process exits.

    Args:
        directory_path: The path of the directory.
        remove: Function that removes the directory. Returns False if it removed nothing.
    """
    ownership = Ownership(Path(directory_path), remove)
    _owned.append(ownership)
    _install_handlers()
    return ownership


def temporary_directory() -> Path:
    """Creates a temporary directory with mode 0700, whose name identifies this process."""
    me = current()
    owner = f"{os.geteuid()}-{me.pid_namespace:x}-{me.pid}-{me.start_time}-"
    return make_temporary(PREFIX + owner)


def left_behind() -> Iterator[Path]:
    """Yields the paths of this user's temporary directories whose creator is proved to be dead."""
    uid = os.geteuid()
    pattern = re.compile(rf"{PREFIX}{uid}-([0-9a-f]+)-([0-9]+)-([0-9]+)-\w+")
    folder = tempfile.gettempdir()
    for found in filter(None, map(pattern.fullmatch, sorted(os.listdir(folder)))):
        path = Path(folder, found[0])
        namespace, pid, start_time = found.groups()
        creator = Identity(int(pid), int(start_time), UNKNOWN_BOOT, int(namespace, 16))
        try:
            if not path.is_dir() or path.is_symlink() or path.lstat().st_uid != uid:
                continue
            if not prove_dead(creator, (path / INIT_LOCK).exists):
                continue
        except FileNotFoundError:
            continue  # another process has just removed the directory
        except Exception:
            _log.warning("%s: cannot tell whether its owner is still alive", path, exc_info=True)
            continue
        yield path


def janitor(is_abandoned: Callable[[Path], bool], remove: Callable[[Path], bool]) -> list[Path]:
    """Removes the temporary directories of killed owners, and returns their paths.

    Failures are logged.

    Args:
        is_abandoned: Function that returns True if a directory that is not empty may be removed.
        remove: Function that removes a directory, and returns False if it was not removed.
    """
    removed: list[Path] = []
    try:
        left = list(left_behind())
    except OSError:
        folder = tempfile.gettempdir()
        _log.warning("%s: cannot be searched for abandoned buffers", folder, exc_info=True)
        return removed
    for path in left:
        try:
            if remove_if_empty(path) or (is_abandoned(path) and remove(path)):
                removed.append(path)
        except FileNotFoundError:
            pass  # another process has removed the directory
        except Exception:
            _log.warning("%s: seems to be abandoned, but was not removed", path, exc_info=True)
    return removed


def _remove_all() -> None:
    """Removes all directories that this process owns."""
    for ownership in reversed(_owned.copy()):
        try:
            ownership.remove()
        # a second Ctrl-C must not stop the removal of the other directories
        except BaseException:
            _log.warning("%s: was not removed", ownership.path, exc_info=True)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Removes the owned directories, then performs the default action of the signal."""
    if any(ownership._is_being_removed_here() for ownership in _owned):
        _deferred.append(number)  # the interrupted removal is finished first
        return
    _remove_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _deliver_deferred() -> None:
    if _deferred and threading.current_thread() is threading.main_thread():
        _on_signal(_deferred.pop(), None)


def _install_handlers() -> None:
    """Installs `_on_signal` for the signals that still have their default action."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _on_signal)


def _restore_default_handlers() -> None:
    """Restores the default actions of signals if this is the main thread.

    Python does not allow this in other threads. `_on_signal` then stays installed, and has the same
    effect as the default action once this process owns no directory.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _on_signal:
                signal.signal(number, signal.SIG_DFL)


def _block_signals() -> None:
    """Blocks the handled signals before a fork, because Python clears pending signals in the child.

    A signal that arrives during the fork therefore stays pending until the child has restored the
    default action, which ends the child.
    """
    ours = {number for number in _SIGNALS if signal.getsignal(number) is _on_signal}
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _reset_in_child() -> None:
    """Discards all ownerships in a forked child, because its parent still owns the directories."""
    _owned.clear()
    _deferred.clear()
    _restore_default_handlers()
    _unblock_signals()


atexit.register(_remove_all)
os.register_at_fork(
    before=_block_signals,
    after_in_parent=_unblock_signals,
    after_in_child=_reset_in_child,
)
