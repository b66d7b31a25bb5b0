"""Who may remove what, and when.

    temporary_directory ──own──▶ Ownership ──▶ removed, by the process that owns it and no other
                                     ├── remove()               asked for
                                     ├── it exits               atexit
                                     ├── SIGTERM, SIGINT        where they end it without atexit
                                     └── it is killed           janitor, when the user starts again

A temporary directory says in its name who made it, so that a stranger can tell a buffer that was
abandoned from one that is just being made and has nothing in it yet:

    shmbuffer-<uid>-<pid namespace, hex>-<pid>-<start time>-<random>

Always true
  1. Pid and start time are compared on every way to a removal. A forked child owns nothing; a
     spawned one never did.
  2. A signal that the program survives removes nothing. A handler of ours stands only where the
     default action stood, which ends the process at once. Where the program has its own, such as
     Python's KeyboardInterrupt, that one decides: if the process ends, atexit removes, and if it
     goes on, as a notebook does, it has its buffer.
  3. The exit status is that of the signal: after the removal it is raised again, by default.
If the owner dies here: a directory of ours may be left, whole or in part. `janitor` finds it.
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
"""How long a removal waits for the same removal in another thread."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)

_owned: list[Ownership] = []
_deferred: list[int] = []  # signals that came while the main thread was in a removal
_thread = threading.local()  # the signal mask that a thread had before it forked


class Ownership:
    """The right and the duty of one process to remove a directory; made by `own`."""

    def __init__(self, path: Path, remove: Callable[[], object]) -> None:
        self.path = path
        self.owner = current()
        self._remove = remove
        self._state: Literal["owned", "removing", "ended"] = "owned"
        self._busy = threading.RLock()  # reentrant: a signal may come in the middle of a removal
        self._remover = 0

    def remove(self) -> bool:
        """Remove the directory; true if this call did. What fails is tried again at exit."""
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
        """Let the directory be, and return whether this call ended the ownership."""
        if not self.is_ours():
            return False
        with self._busy:
            if self._state != "owned":
                return False
            self._end()
            return True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.path}: the ownership of a directory stays in its process, pid {self.owner.pid};"
            " pickle the path"
        )

    def is_ours(self) -> bool:
        """True if it is this process's, and not that of the one that forked it."""
        me = current()
        return (me.pid, me.start_time) == (self.owner.pid, self.owner.start_time)

    def _is_being_removed_here(self) -> bool:
        return self._state == "removing" and self._remover == threading.get_ident()

    def _end(self) -> None:
        self._state = "ended"
        _owned.remove(self)
        if not _owned:
            _put_default_handlers_back()


def own(directory_path: str | os.PathLike[str], remove: Callable[[], object]) -> Ownership:
    """Make this process the one that removes a directory at its end."""
    ownership = Ownership(Path(directory_path), remove)
    _owned.append(ownership)
    _put_handlers_up()
    return ownership


def temporary_directory() -> Path:
    """Make a directory, 0700, where `tempfile` and TMPDIR say, with this process in its name."""
    me = current()
    maker = f"{os.geteuid()}-{me.pid_namespace:x}-{me.pid}-{me.start_time}-"
    return make_temporary(PREFIX + maker)


def left_behind() -> Iterator[Path]:
    """Temporary directories of this user whose maker is dead, by proof or by their locks."""
    uid = os.geteuid()
    pattern = re.compile(rf"{PREFIX}{uid}-([0-9a-f]+)-([0-9]+)-([0-9]+)-\w+")
    folder = tempfile.gettempdir()
    for found in filter(None, map(pattern.fullmatch, sorted(os.listdir(folder)))):
        path = Path(folder, found[0])
        namespace, pid, start_time = found.groups()
        maker = Identity(int(pid), int(start_time), UNKNOWN_BOOT, int(namespace, 16))
        try:
            if not path.is_dir() or path.is_symlink() or path.lstat().st_uid != uid:
                continue
            if not prove_dead(maker, (path / INIT_LOCK).exists):
                continue
        except FileNotFoundError:
            continue  # somebody has just removed it
        except Exception:
            _log.warning("%s: cannot tell if its owner is still alive", path, exc_info=True)
            continue
        yield path


def janitor(is_abandoned: Callable[[Path], bool], remove: Callable[[Path], bool]) -> list[Path]:
    """Removes the temporary directories of killed owners, and returns them; logs what it cannot."""
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
            pass  # another janitor was faster
        except Exception:
            _log.warning("%s: seems to be abandoned, but was not removed", path, exc_info=True)
    return removed


def _remove_all() -> None:
    for ownership in reversed(_owned.copy()):
        try:
            ownership.remove()
        except BaseException:  # also a second Ctrl-C: the others are removed all the same
            _log.warning("%s: was not removed", ownership.path, exc_info=True)


def _on_signal(number: int, frame: FrameType | None) -> None:
    """In place of the default action: remove what is owned, then take the default action."""
    if any(ownership._is_being_removed_here() for ownership in _owned):
        _deferred.append(number)  # that removal is finished first, it lies below us on the stack
        return
    _remove_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _deliver_deferred() -> None:
    if _deferred and threading.current_thread() is threading.main_thread():
        _on_signal(_deferred.pop(), None)


def _put_handlers_up() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _on_signal)


def _put_default_handlers_back() -> None:
    """Elsewhere than in the main thread they stay, and act like the default."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            if signal.getsignal(number) is _on_signal:
                signal.signal(number, signal.SIG_DFL)


def _hold_signals_back() -> None:
    """Before a fork: Python clears, in the child, what came before the child could handle it.

    With the default action such a signal would end the child, so it is kept until that is in place.
    """
    ours = {number for number in _SIGNALS if signal.getsignal(number) is _on_signal}
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ours)


def _let_signals_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _forget() -> None:
    _owned.clear()
    _deferred.clear()
    _put_default_handlers_back()
    _let_signals_through()


atexit.register(_remove_all)
os.register_at_fork(
    before=_hold_signals_back,
    after_in_parent=_let_signals_through,
    after_in_child=_forget,
)
