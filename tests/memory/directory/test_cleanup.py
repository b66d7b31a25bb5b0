"""Which process may remove a directory, and when."""

from __future__ import annotations

import errno
import gc
import logging
import os
import pickle
import re
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmbuffer.memory.clients.locks import INIT_LOCK
from shmbuffer.memory.directory import cleanup
from shmbuffer.memory.directory.cleanup import Ownership, janitor, own, temporary_directory
from shmbuffer.memory.system.identity import current
from tests.kit.programs import Program, in_fork, needs_root

# A program that owns a temporary directory with a file in it and prints its path.
OWNER = """
import os, shutil, signal, sys, threading
from shmbuffer.memory.directory import cleanup

path = cleanup.temporary_directory()
(path / "obs.memmap").write_text("data")

def remove():
    shutil.rmtree(path)

ownership = cleanup.own(path, remove)
print(path, flush=True)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder for temporary directories that no other test uses."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return path


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """Sets the default signal handlers, and checks that the test leaves no owned directory."""
    before = {number: signal.getsignal(number) for number in cleanup._SIGNALS}
    gc.collect()  # releases directories that earlier tests own
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    left = [ownership.path for ownership in cleanup._owned]
    cleanup._owned.clear()
    for number, handler in before.items():
        signal.signal(number, handler)
    assert left == []


def started(process: Program) -> Path:
    """Returns the directory of a program that runs OWNER."""
    path = Path(process.line())
    assert (path / "obs.memmap").read_text() == "data"
    return path


# The end of a process.


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), ("ownership.remove()", 0)],
)
def test_an_owner_that_ends_removes_its_directory(ending: str, status: int) -> None:
    with Program.python(OWNER + ending) as process:
        path = Path(process.line())
        found, _, errors = process.end()
        assert found == status, errors
        assert ("ValueError" in errors) == (status == 1)
        assert not path.exists()


@pytest.mark.full
def test_a_directory_that_was_released_stays() -> None:
    with Program.python(OWNER + "assert ownership.release()") as process:
        path = Path(process.line())
        assert process.end()[0] == 0
        assert path.exists()


@pytest.mark.full
def test_several_directories_are_removed_the_last_one_first() -> None:
    source = """
    import sys
    from shmbuffer.memory.directory.cleanup import own
    for name in "abc":
        own(name, lambda name=name: print(name, flush=True))
    own("d", lambda: 1 / 0)
    sys.exit(4)
    """
    with Program.python(source) as process:
        status, output, errors = process.end()
        assert output.split() == ["c", "b", "a"]
        assert status == 4
        assert "d: was not removed" in errors
        assert "ZeroDivisionError" in errors


# Signals.


def test_sigterm_removes_and_then_ends_the_process_as_it_always_did() -> None:
    with Program.python(OWNER + "input()") as process:
        path = started(process)
        process.terminate()
        assert process.end()[0] == -signal.SIGTERM
        assert not path.exists()


def test_sigint_is_a_keyboard_interrupt_as_before() -> None:
    with Program.python(OWNER + "input()") as process:
        path = started(process)
        process.send_signal(signal.SIGINT)
        status, _, errors = process.end()
        assert status == -signal.SIGINT
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert not path.exists()


@pytest.mark.full
def test_a_keyboard_interrupt_that_the_program_survives_removes_nothing() -> None:
    """A user who interrupts a notebook cell still needs the buffer in the next cell."""
    source = (
        OWNER
        + """
import time
try:
    print("ready", flush=True)
    while True:  # a read that has just not begun would be interrupted by nothing
        time.sleep(0.01)
except KeyboardInterrupt:
    print("interrupted", flush=True)
input()
"""
    )
    with Program.python(source) as process:
        path = started(process)
        assert process.line() == "ready"
        process.send_signal(signal.SIGINT)
        assert process.line() == "interrupted"
        assert (path / "obs.memmap").exists()
        process.tell()
        assert process.end()[0] == 0
        assert not path.exists()


@pytest.mark.full
def test_where_sigint_ends_the_process_at_once_it_removes_first() -> None:
    source = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)" + OWNER + "input()"
    with Program.python(source) as process:
        path = started(process)
        process.send_signal(signal.SIGINT)
        assert process.end()[0] == -signal.SIGINT
        assert not path.exists()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_program_has_the_buffer_and_decides(when: str) -> None:
    """The handler may save a checkpoint first, and may or may not end the process."""
    handler = """
import signal, sys, time
def handle(number, frame):
    assert (path / "obs.memmap").exists()
    print("handled", number, flush=True)
    if input() == "end":
        sys.exit(5)
signal.signal(signal.SIGTERM, handle)
"""
    source = handler + OWNER if when == "before" else OWNER + handler
    # The program does not use pause(), which would miss a signal that arrives just before.
    waiting = "print('ready', flush=True)\nwhile True: time.sleep(0.01)"
    with Program.python(source + waiting) as process:
        path = started(process)
        assert process.line() == "ready"
        for answer in ("go on", "end"):
            process.terminate()
            assert process.line() == "handled 15"
            assert (path / "obs.memmap").exists()
            process.tell(answer)
        assert process.end()[0] == 5
        assert not path.exists()


@pytest.mark.full
def test_a_handler_that_hands_on_to_ours_gets_the_default_action() -> None:
    source = (
        OWNER
        + """
def handle(number, frame):
    print("first", flush=True)
    previous(number, frame)
previous = signal.signal(signal.SIGTERM, handle)
print("ready", flush=True)
input()
"""
    )
    with Program.python(source) as process:
        path = started(process)
        assert process.line() == "ready"
        process.terminate()
        assert process.line() == "first"
        assert process.end()[0] == -signal.SIGTERM
        assert not path.exists()


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + OWNER + "input()"
    with Program.python(source) as process:
        path = started(process)
        process.terminate()
        process.tell()
        assert process.end()[0] == 0
        assert not path.exists()


@pytest.mark.full
def test_a_removal_that_fails_does_not_keep_the_signal_from_ending_the_process() -> None:
    source = OWNER + "cleanup.own('other', lambda: 1 / 0)\nprint('ready', flush=True)\ninput()"
    with Program.python(source) as process:
        path = started(process)
        assert process.line() == "ready"
        process.terminate()
        status, _, errors = process.end()
        assert status == -signal.SIGTERM
        assert "other: was not removed" in errors
        assert not path.exists()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("who", ["remove()", "sys.exit()"])
def test_a_signal_in_the_middle_of_a_removal_waits_for_its_end(who: str) -> None:
    source = (
        OWNER
        + f"""
def remove():
    print("begun", flush=True)
    input()
    shutil.rmtree(path)
    print("finished", flush=True)
ownership.release()
ownership = cleanup.own(path, remove)
cleanup.own("other", lambda: print("other", flush=True))
if "{who}" == "remove()":
    ownership.remove()
    print("not reached", flush=True)
"""
    )
    with Program.python(source) as process:
        path = started(process)
        said = [process.line()]
        if said == ["other"]:  # at exit the last handler runs first
            said.append(process.line())
        assert said[-1] == "begun"
        process.terminate()
        process.terminate()
        process.tell()
        status, output, errors = process.end()
        said += output.split("\n")
        assert status == -signal.SIGTERM, errors
        assert sorted(filter(None, said)) == ["begun", "finished", "other"]
        assert not path.exists()


@pytest.mark.full
def test_an_impatient_user_does_not_keep_others_from_being_removed() -> None:
    source = """
    from shmbuffer.memory.directory.cleanup import own
    own("first", lambda: print("first", flush=True))
    def hang():
        print("hangs", flush=True)
        input()
    own("second", hang)
    """
    with Program.python(source) as process:
        assert process.line() == "hangs"
        process.send_signal(signal.SIGINT)
        status, output, errors = process.end()
        assert output.split() == ["first"]
        assert "second: was not removed" in errors
        assert status == 0


@pytest.mark.full
def test_a_signal_waits_for_a_removal_in_another_thread() -> None:
    source = (
        OWNER
        + """
def remove():
    print("begun", flush=True)
    os.read(0, 1)
    shutil.rmtree(path)
    print("finished", flush=True)
ownership.release()
ownership = cleanup.own(path, remove)
thread = threading.Thread(target=ownership.remove)
thread.start()
thread.join()
print("not reached", flush=True)
"""
    )
    with Program.python(source) as process:
        path = started(process)
        assert process.line() == "begun"
        process.terminate()
        process.tell()
        status, output, errors = process.end()
        assert status == -signal.SIGTERM, errors
        assert "finished" in output
        assert not path.exists()


def test_handlers_stand_only_while_something_is_owned() -> None:
    first = own("first", lambda: None)
    assert signal.getsignal(signal.SIGTERM) is cleanup._on_signal
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    second = own("second", lambda: None)
    assert first.release()
    assert signal.getsignal(signal.SIGTERM) is cleanup._on_signal
    assert second.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_came_later_is_left_alone() -> None:
    def handle(number: int, frame: object) -> None:
        """Handles the signal in the program."""

    ownership = own("first", lambda: None)
    signal.signal(signal.SIGTERM, handle)
    assert ownership.release()
    assert signal.getsignal(signal.SIGTERM) is handle


def test_a_handler_of_ours_that_was_put_back_later_acts_like_the_default() -> None:
    def later() -> None:
        ownership = own("first", lambda: None)
        ours = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ownership.release()
        signal.signal(signal.SIGTERM, ours)
        os.kill(os.getpid(), signal.SIGTERM)

    assert in_fork(later) == -signal.SIGTERM


def test_outside_the_main_thread_no_handler_is_touched() -> None:
    def work() -> None:
        ownership = own("first", lambda: None)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        own("second", lambda: None)
        assert ownership.release()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    third = own("third", lambda: None)
    assert signal.getsignal(signal.SIGTERM) is cleanup._on_signal
    for ownership in cleanup._owned.copy():
        thread = threading.Thread(target=ownership.release)
        thread.start()
        thread.join()
    assert not third.release()
    # until the main thread runs again
    assert signal.getsignal(signal.SIGTERM) is cleanup._on_signal
    assert own("fourth", lambda: None).release()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# Children.


@pytest.mark.product(few=2)
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("cleanup._on_signal(signal.SIGTERM, None)", -signal.SIGTERM),
        ("cleanup._remove_all(); os._exit(7)", 7),
        ("os._exit(ownership.remove() or ownership.release() or 7)", 7),
        # As after a fork in C, which runs no hook: only the pid differs.
        ("cleanup._owned.append(ownership); sys.exit(7)", 7),
    ],
)
def test_a_forked_child_removes_nothing(ending: str, status: int) -> None:
    source = (
        OWNER
        + f"""
pid = os.fork()
if pid == 0:
    {ending}
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
input()
"""
    )
    with Program.python(source) as process:
        path = started(process)
        assert process.line() == str(status)
        assert (path / "obs.memmap").exists()
        process.terminate()
        assert process.end()[0] == -signal.SIGTERM
        assert not path.exists()


@pytest.mark.product(few=1)
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_multiprocessing_removes_nothing(
    method: str, fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the path of the forkserver's socket must be short
    monkeypatch.setenv("TMPDIR", str(fast_path))
    source = (
        OWNER
        + f"""
import multiprocessing, time
if __name__ == "__main__":
    context = multiprocessing.get_context("{method}")
    child = context.Process(target=print, args=("child",))
    child.start()
    child.join()
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    print(child.exitcode, flush=True)
    input()
"""
    )
    with Program.python(source) as process:
        path = started(process)
        assert process.line() == "child"
        assert process.line() == str(-signal.SIGTERM)
        assert (path / "obs.memmap").exists()
        process.tell()
        assert process.end()[0] == 0
        assert not path.exists()


@pytest.mark.full
def test_a_signal_that_comes_while_a_child_is_being_forked_is_not_lost() -> None:
    """In a child, Python forgets signals that arrived before the child could run a handler."""
    ownership = own("first", lambda: pytest.fail("removed"))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    for _ in range(30):
        pid = os.fork()
        if pid == 0:
            signal.pause()
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert ownership.release()
    assert in_fork(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM


def test_a_child_has_the_handlers_of_a_process_that_owns_nothing() -> None:
    ownership = own("first", lambda: None)

    def look() -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert own("second", lambda: None).remove()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    assert in_fork(look) == 0
    assert ownership.release()


def test_an_ownership_does_not_travel() -> None:
    ownership = own("first", lambda: None)
    with pytest.raises(
        TypeError, match=rf"first: the ownership .* cannot be pickled, .* process {os.getpid()}"
    ):
        pickle.dumps(ownership)
    assert ownership.release()


# An ownership.


def test_a_directory_is_removed_once() -> None:
    calls: list[int] = []
    ownership = own("first", lambda: calls.append(1))
    assert ownership.path == Path("first")
    assert ownership.owner == current()
    assert ownership.remove()
    assert not ownership.remove()
    assert not ownership.release()
    assert calls == [1]


def test_a_released_directory_is_not_removed() -> None:
    ownership = own("first", lambda: pytest.fail("removed"))
    assert ownership.release()
    assert not ownership.release()
    assert not ownership.remove()


def test_a_removal_that_failed_is_tried_again() -> None:
    answers: list[Callable[[], object]] = [lambda: None, lambda: 1 / 0]
    ownership = own("first", lambda: answers.pop()())
    with pytest.raises(ZeroDivisionError):
        ownership.remove()
    assert cleanup._owned == [ownership]
    assert ownership.remove()


def test_a_removal_may_come_back_to_its_ownership() -> None:
    answers: list[bool] = []

    def remove() -> None:
        answers.extend((ownership.remove(), ownership.release()))

    ownership = own("first", remove)
    assert ownership.remove()
    assert answers == [False, False]


def test_only_one_of_two_threads_removes() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def remove() -> None:
        inside.set()
        assert go_on.wait(30)

    ownership = own("first", remove)
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.append(ownership.remove())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(30)
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False, False, True]


def test_a_removal_that_hangs_in_another_thread_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cleanup, "PATIENCE_S", 0.01)
    inside, go_on = threading.Event(), threading.Event()

    def remove() -> None:
        inside.set()
        assert go_on.wait(30)

    ownership = own("first", remove)
    thread = threading.Thread(target=ownership.remove)
    thread.start()
    assert inside.wait(30)
    assert not ownership.remove()
    go_on.set()
    thread.join()
    assert not ownership.remove()


# Temporary and abandoned directories.


def test_a_temporary_directory_is_private_and_says_who_made_it(temporary: Path) -> None:
    me = current()
    umask = os.umask(0o777)
    try:
        path = temporary_directory()
    finally:
        os.umask(umask)
    assert path.parent == temporary
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert re.fullmatch(
        f"shmbuffer-{os.geteuid()}-{me.pid_namespace:x}-{me.pid}-{me.start_time}-[a-z0-9_]+",
        path.name,
    )


def always(path: Path) -> bool:
    return True


def never_asked(path: Path) -> bool:
    pytest.fail(f"{path}: asked")  # not an Exception, so that the janitor does not log it


def remove_tree(path: Path) -> bool:
    shutil.rmtree(path)
    return True


def abandoned(*, full: bool = True, ending: str = "os.kill(os.getpid(), signal.SIGKILL)") -> Path:
    """Makes the directory of an owner that was killed."""
    with Program.python(
        OWNER + ("" if full else "(path / 'obs.memmap').unlink()\n") + ending
    ) as process:
        path = Path(process.line())
        assert process.end()[0] == -signal.SIGKILL
    assert path.exists()
    return path


def test_the_directory_of_a_killed_owner_is_removed_at_the_next_start() -> None:
    path = abandoned()
    asked: list[Path] = []
    assert janitor(lambda found: not asked.append(found), remove_tree) == [path]
    assert asked == [path]
    assert not path.exists()
    assert janitor(never_asked, never_asked) == []


@pytest.mark.full
def test_where_directories_cannot_be_listed_nothing_is_removed_and_nobody_is_kept_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On some systems, users cannot list /tmp."""
    path = abandoned()

    def refused(folder: str) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), folder)

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refused)
        assert janitor(never_asked, never_asked) == []
    assert "cannot be searched for abandoned buffers" in caplog.text
    assert path.exists()


@pytest.mark.full
def test_a_directory_that_is_not_abandoned_is_left() -> None:
    path = abandoned()
    assert janitor(lambda path: False, never_asked) == []
    assert janitor(always, lambda path: False) == []
    assert path.exists()


def test_the_directory_of_a_living_owner_is_never_looked_at() -> None:
    """An empty directory is not examined either, because its owner may be creating it."""
    with Program.python(
        OWNER + "cleanup.temporary_directory()\nprint('ready', flush=True)\ninput()"
    ) as it:
        path = started(it)
        assert it.line() == "ready"
        mine = temporary_directory()
        os.kill(it.pid, signal.SIGSTOP)
        os.waitpid(it.pid, os.WUNTRACED)
        assert janitor(never_asked, never_asked) == []
        assert path.exists()
        assert mine.exists()


@pytest.mark.full
def test_an_empty_directory_of_a_killed_owner_is_removed_without_a_question() -> None:
    path = abandoned(full=False)
    assert janitor(never_asked, never_asked) == [path]
    assert not path.exists()


@pytest.mark.full
def test_a_zombie_is_judged_by_its_locks() -> None:
    with Program.python(OWNER + "os.kill(os.getpid(), signal.SIGKILL)") as process:
        path = started(process)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert janitor(never_asked, never_asked) == []
        (path / INIT_LOCK).parent.mkdir()
        (path / INIT_LOCK).touch()
        assert janitor(always, remove_tree) == [path]


@pytest.mark.parametrize("namespace", ["1", "0"])
def test_a_directory_made_in_another_container_is_judged_by_its_locks(
    temporary: Path, namespace: str
) -> None:
    path = temporary / f"shmbuffer-{os.geteuid()}-{namespace}-1-1-abcdefgh"
    path.mkdir(0o700)
    assert janitor(never_asked, never_asked) == []  # the directory may just be in the making
    (path / INIT_LOCK).parent.mkdir()
    (path / INIT_LOCK).touch()
    assert janitor(lambda path: False, never_asked) == []
    assert janitor(always, remove_tree) == [path]


@pytest.mark.full
def test_directories_with_other_names_or_owners_are_never_examined(
    temporary: Path, tmp_path: Path
) -> None:
    name = abandoned().name
    (temporary / name).rename(tmp_path / "moved")
    (temporary / name).symlink_to(tmp_path / "moved")
    (temporary / f"{name}x").write_text("a file")
    (temporary / "shmbuffer-notes").mkdir()
    (temporary / f"shmbuffer-{os.geteuid()}-results").mkdir()
    (temporary / f"shmbuffer-{os.geteuid()}-0-1-1-x.bak").mkdir()
    (temporary / name.replace(f"-{os.geteuid()}-", f"-{os.geteuid() + 1}-")).mkdir()
    (temporary / f"my-{name}").mkdir()
    before = sorted(os.listdir(temporary))
    assert janitor(never_asked, never_asked) == []
    assert sorted(os.listdir(temporary)) == before
    assert (tmp_path / "moved" / "obs.memmap").exists()


@pytest.mark.full
@needs_root
def test_the_directory_of_another_user_is_never_looked_at() -> None:
    path = abandoned()
    os.chown(path, 65534, 65534)
    assert janitor(never_asked, never_asked) == []
    assert path.exists()


@pytest.mark.full
def test_another_janitor_may_be_faster(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        abandoned()
    calls: list[Path] = []

    def vanishes(path: Path) -> bool:
        calls.append(path)
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    assert janitor(vanishes, never_asked) == []
    for _ in range(2):
        abandoned()
    assert janitor(always, vanishes) == []
    assert len(calls) == 4
    assert caplog.records == []


@pytest.mark.full
def test_a_directory_that_cannot_be_removed_is_logged_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = sorted(abandoned() for _ in range(2))

    def remove(path: Path) -> bool:
        if path == first:
            raise PermissionError("not today")
        return remove_tree(path)

    with caplog.at_level(logging.WARNING):
        assert janitor(always, remove) == [second]
    (record,) = caplog.records
    assert f"{first}: seems to be abandoned, but was not removed" in record.getMessage()
    assert first.exists()


def test_an_ownership_is_made_by_own_only_in_this_process() -> None:
    """A copy that a child makes by hand owns nothing."""
    ownership = Ownership(Path("first"), lambda: pytest.fail("removed"))
    assert in_fork(lambda: pytest.fail("removed") if ownership.remove() else None) == 0
