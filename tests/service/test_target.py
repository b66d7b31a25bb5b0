"""Targets by name: the process imports only the module of the target, and torch only if needed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from shmbuffer import Coordinator
from shmbuffer.service.process import Named, names_of
from tests.service import targets
from tests.service.conftest import Reports
from tests.service.test_main_module import ends

TARGETS = "tests.service.targets"

#: Checks what a collector finds in its process.
COLLECTING = """
import sys

def collect(scratch_dir, index, word):
    from shmbuffer.memory import Engine

    with Engine.open(scratch_dir, None, role="collector") as engine:
        roles = sorted(client.role for client in engine.clients())
        heavy = sorted({"torch", "tensordict"} & sys.modules.keys())
        main = hasattr(sys.modules["__main__"], "MADE_BY_THE_PROGRAM")
        print("collects", index, word, heavy, main, roles, flush=True)

class Holder:
    collect = staticmethod(collect)
    number = 3
"""

PROGRAM = """
import torch, sys

MADE_BY_THE_PROGRAM = True
print("the program is imported", flush=True)

from shmbuffer import Coordinator

class Mine:
    pass

for number, target in enumerate({targets!r}):
    with Coordinator(f"buffer-{{number}}", capacity=8) as coordinator:
        try:
            coordinator.spawn(target, {n}{args})
            coordinator.join()
            print("joined", [death.exitcode for death in coordinator.deaths])
        except Exception as error:
            print(type(error).__name__, error)
"""


def program(
    folder: Path, *targets: str, n: int = 1, args: str = "", **modules: str
) -> tuple[list[str], str]:
    """Runs a program that spawns targets by name in turn; returns all output and its stderr."""
    for name, text in {"collecting": COLLECTING, **modules}.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "train.py").write_text(PROGRAM.format(targets=targets, n=n, args=args))
    code, out, err = ends(folder, "train.py")
    assert code == 0, err
    return out.splitlines(), err


def test_it_gets_the_directory_its_index_and_the_arguments(
    scratch_dir: Path, reports: Reports
) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        spawned = coordinator.spawn(f"{TARGETS}:say_what_you_got", 2, reports.out, "word")
        assert coordinator.join(30)
        assert [one.exitcode for one in spawned] == [0, 0]
        assert [one.name for one in spawned] == ["say_what_you_got-0", "say_what_you_got-1"]
        pids = [one.pid for one in spawned]
        assert reports.take(2) == [(scratch_dir, i, "word", pids[i]) for i in (0, 1)]


def test_its_process_has_neither_torch_nor_the_program(tmp_path: Path) -> None:
    """The program needs no guard, because the spawned process does not import it."""
    targets = ("collecting:collect", "collecting:Holder.collect")
    # torch is replaced by an empty module, because only the import counts and torch takes seconds.
    said, err = program(tmp_path, *targets, n=2, args=", 'hello'", torch="")
    assert said[0] == "the program is imported"
    assert len(said) == 7
    for *collected, last in (said[1:4], said[4:]):
        assert last == "joined []"
        for index, line in enumerate(sorted(collected)):
            assert line.startswith(f"collects {index} hello [] False ['collector', ")
    assert err == ""


@pytest.mark.full
def test_a_module_that_imports_torch_is_named_once(tmp_path: Path) -> None:
    heavy = "import torch\ndef collect(scratch_dir, index): pass\n"
    said, err = program(tmp_path, "heavy:collect", n=2, heavy=heavy)
    assert said[-1] == "joined []"
    [line] = err.splitlines()
    assert "heavy:collect was given by name, but the module heavy imported torch" in line
    assert "collect with shmbuffer.numpy, which does not need torch" in line


@pytest.mark.full
def test_arguments_that_import_torch_are_named(tmp_path: Path) -> None:
    said, err = program(tmp_path, "collecting:collect", args=", torch.zeros(())")
    assert said[-1] == "joined []"
    assert "its arguments imported torch" in err


REFUSED = {
    "collect": (
        "ValueError",
        "the name of a target must be 'package.module:function', got 'collect'",
    ),
    "collecting:": ("ValueError", "must be 'package.module:function', got 'collecting:'"),
    "a b:c": ("ValueError", "must be 'package.module:function', got 'a b:c'"),
    "__main__:f": ("ValueError", "does not import __main__. Nothing was started. Move f to a"),
    "nowhere:f": ("ModuleNotFoundError", "module of nowhere:f was not found: there is no nowhere"),
    "no.where:f": ("ModuleNotFoundError", "of no.where:f was not found: No module named 'no'"),
    "collecting:gather": ("AttributeError", "collecting.py has no gather. Nothing was started"),
    "json:loader": ("AttributeError", "json:loader: the module json has no loader; check"),
    "sys:path": ("TypeError", "sys:path is of type list, which is not callable"),
}


@pytest.mark.full
def test_a_wrong_name_is_an_error_of_the_caller(tmp_path: Path) -> None:
    """A program tries all wrong names: a refused name starts no process and leaves none to join."""
    (_, *said), err = program(tmp_path, *REFUSED)
    for line, (kind, says) in zip(said, REFUSED.values(), strict=True):
        assert line.startswith(f"{kind} ")
        assert says in line
    assert err == ""


@pytest.mark.full
def test_an_argument_of_the_program_is_an_error_of_the_caller(tmp_path: Path) -> None:
    said, _ = program(tmp_path, "collecting:collect", args=", Mine()")
    assert said[1].startswith("RuntimeError ")
    assert "Mine is defined in __main__, which a process whose target is given by name" in said[1]


ONLY_IMPORTED = {
    "broken:collect": "ZeroDivisionError",
    "late:Late.collect": "has no Late.collect; check the name",
    "collecting:Holder.number": "is of type int, which is not callable; pass the name",
    "makes:collect": "creates a Coordinator when it is imported",
}


@pytest.mark.full
def test_what_only_the_import_shows_is_said_by_the_child(tmp_path: Path) -> None:
    makes = (
        "from shmbuffer import Coordinator\n"
        "coordinator = Coordinator('another', capacity=1)\ndef collect(*_): pass\n"
    )
    broken, late = "1 / 0\n# collect\n", "class Late: pass\n# collect\n"
    (_, *said), err = program(tmp_path, *ONLY_IMPORTED, broken=broken, late=late, makes=makes)
    assert said == ["joined [1]"] * len(ONLY_IMPORTED)
    at = [err.index(says) for says in ONLY_IMPORTED.values()]
    assert at == sorted(at)  # each by its own child, in this order


@pytest.mark.full
def test_a_program_that_names_itself_needs_a_guard(tmp_path: Path) -> None:
    said, _ = program(tmp_path, "train:collect")
    assert said[1].startswith("RuntimeError ")
    assert "spawns processes without checking __name__" in said[1]


def test_what_cannot_be_pickled_is_the_callers_error(scratch_dir: Path) -> None:
    with (
        Coordinator(scratch_dir, capacity=8) as coordinator,
        pytest.raises(TypeError, match=rf"the target {TARGETS}:stay and its arguments cannot be"),
    ):
        coordinator.spawn(f"{TARGETS}:stay", 1, threading.Lock())


def test_a_name_and_its_function_are_the_same_collectors() -> None:
    """Coordinators of either kind can find the other's orphans."""
    assert names_of(Named(f"{TARGETS}:stay")) == names_of(targets.stay)


def test_one_that_dies_is_started_again(scratch_dir: Path, reports: Reports) -> None:
    with Coordinator(scratch_dir, capacity=8) as coordinator:
        (one,) = coordinator.spawn(f"{TARGETS}:stay", 1, reports.out, restart=True)
        assert reports.next()[:2] == ("attached", 0)
        one.kill()
        word, index, pid = reports.next()
        assert (word, index) == ("attached", 0)
        assert pid == one.pid
        assert one.restarts == 1
