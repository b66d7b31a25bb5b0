"""Runs one case in its own process: prepares a scenario, injects a fault, and checks the outcome.

The process is forked from one that has loaded all modules, and reports its findings by a pipe.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import json
import logging
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shmbuffer import ShmBufferError
from tests.crash.harness import ended, fork
from tests.faults.audit import held
from tests.faults.injector import Call, Fault, Injector
from tests.faults.scenario import Scenario

#: A process that takes this long hangs. Normally none takes a second.
HANGS_S = 60


@dataclass
class Outcome:
    """The report of a process that met a fault.

    Attributes:
        raised: the class of the error, or None if no error was raised.
        calls: the calls until the end of the scenario's action, if there was no fault.
        failed: how many of them failed.
        done: whether the action is complete although no error was raised.
        problems: descriptions of violated rules.
    """

    raised: str | None = None
    message: str = ""
    calls: list[Call] = field(default_factory=list)
    failed: int = 0
    done: bool = False
    problems: list[str] = field(default_factory=list)


def run(
    make: Callable[[Path, str], Scenario], kind: str, fault: Fault | None, *, stays: bool
) -> Outcome:
    """Runs a scenario with one fault, or with none."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="shmbuffer-faulted-", dir=base))
    told, tell = os.pipe()
    try:
        scenario = make(folder, kind)
        pid = fork(lambda: _attach_ring(scenario, fault, tell, stays=stays))
        os.close(tell)
        with os.fdopen(told, "rb") as file:
            said = file.read()
        status = ended(pid)
        if not said:
            how = "hangs" if status == -signal.SIGALRM else f"ended with {status}"
            return Outcome(problems=[f"the process {how}; see its standard error"])
        found = json.loads(said)
        outcome = Outcome(**{**found, "calls": [Call(**call) for call in found["calls"]]})
        if status:
            outcome.problems.append(f"the process ended with {status}; see its standard error")
        elif (scenario.until_its_end or not stays) and not outcome.problems:
            _look_afterwards(scenario, outcome)
        return outcome
    finally:
        shutil.rmtree(folder)


def _look_afterwards(scenario: Scenario, outcome: Outcome) -> None:
    status = ended(fork(lambda: _watched_by_a_clock(scenario.look_afterwards)))
    if status:
        outcome.problems.append(f"a fresh process finds it broken ({status}); see standard error")


def _watched_by_a_clock(body: Callable[[], None]) -> None:
    """Runs ``body``, and ends the process with a traceback if it hangs."""
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(HANGS_S)
    body()
    signal.alarm(0)


def _attach_ring(scenario: Scenario, fault: Fault | None, tell: int, *, stays: bool) -> None:
    logging.disable(logging.CRITICAL)  # files that the janitor could not remove
    injector = Injector()
    outcome = Outcome()
    prefixes = (str(scenario.folder), "/memfd:shmbuffer")
    injector.watch(*prefixes, "/proc/")
    faulthandler.register(signal.SIGALRM, chain=True)
    scenario.prepare()
    signal.alarm(HANGS_S)
    before = held(*prefixes)
    _act(scenario, fault, injector, outcome)
    gc.collect()
    held_now = (held(*prefixes) - before).elements()
    leaked = [what for what in held_now if not is_of_a_handle(what, scenario)]
    if outcome.raised is not None and leaked:
        outcome.problems.append(f"after {outcome.raised} are left: {leaked}")
    if fault is not None and outcome.failed == 0:
        outcome.problems.append(f"{fault} was not met")
    outcome.done = outcome.raised is None and scenario.is_done()
    if stays:
        try:
            if outcome.raised is not None:
                scenario.again()
            scenario.stop()
            vars(scenario).clear()  # views keep their memory mapped
            gc.collect()
            left = held(*prefixes)
            assert set(left) == {"threads"}, f"in the end are left: {sorted(left.elements())}"
        except BaseException:
            outcome.problems.append("when the fault is gone:\n" + traceback.format_exc())
    signal.alarm(0)
    with os.fdopen(tell, "w") as file:
        json.dump(asdict(outcome), file)
    if not stays:
        os._exit(0)


def _act(scenario: Scenario, fault: Fault | None, injector: Injector, outcome: Outcome) -> None:
    try:
        with injector.armed(fault):
            scenario.act()
    except BaseException as error:
        outcome.raised, outcome.message = type(error).__name__, str(error)
        if fault is None:
            outcome.problems.append("without a fault:\n" + traceback.format_exc())
        elif (wrong := what_is_wrong_with(error, scenario.folder)) is not None:
            outcome.problems.append(f"{wrong}\n" + traceback.format_exc())
    outcome.failed = injector.failed
    if fault is None:
        outcome.calls = injector.calls


def is_of_a_handle(what: str, scenario: Scenario) -> bool:
    """True if a handle that is still open may hold this; at the end nothing may be held."""
    return what.startswith("map") or (scenario.holds is not None and scenario.holds in what)


def what_is_wrong_with(error: BaseException, folder: Path) -> str | None:
    """Returns a problem unless the error is from the library, MemoryError, or names a path."""
    if isinstance(error, ShmBufferError):
        return None if error.message else "an error that says nothing"
    if isinstance(error, MemoryError):
        return None
    if not isinstance(error, OSError) or error.errno not in errno.errorcode:
        return f"{type(error).__name__} is not for the caller"
    said = f"{error} {error.filename} {error.filename2}"
    if not any(part in said for part in (str(folder), "/proc/", "anonymous memory")):
        return f"it does not say where: {error}"
    return None
