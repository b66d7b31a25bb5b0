"""A program that spawns without an importable main module gets an error that explains it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.programs import environment

SPAWNS = """
import sys
from shmbuffer import Coordinator
from tests.service import targets

def collect(scratch_dir, index):
    pass

coordinator = Coordinator("buffer", capacity=8, on_existing="overwrite")
coordinator.spawn({target}, 2{more})
coordinator.join()
print("joined", coordinator.deaths)
"""
UNGUARDED = SPAWNS.format(target="collect", more="")
SOUND = """
import multiprocessing
from shmbuffer import Coordinator

def collect(scratch_dir, index):
    print("collected", flush=True)

def main():
    with Coordinator("buffer", capacity=8) as coordinator:
        coordinator.spawn(collect)
        coordinator.join()

{start}
"""


def ends(cwd: Path, *command: str, stdin: str = "") -> tuple[int, str, str]:
    """Runs Python in a directory until it ends."""
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
    )
    return done.returncode, done.stdout, done.stderr


def test_without_a_guard_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    code, out, err = ends(tmp_path, "train.py")
    assert (code, out) == (1, "")
    assert err.endswith(
        f"RuntimeError: {tmp_path}/buffer: {tmp_path}/train.py, line 10, spawns processes without "
        "checking __name__, so each spawned process would import that file and spawn processes, "
        "too. Nothing was started. Put the code that runs the program, including the Coordinator "
        "and spawn, under "
        '`if __name__ == "__main__":`\n'
    )
    assert "Process" not in err


def test_a_program_whose_first_spawn_was_refused_runs_once_it_is_corrected(tmp_path: Path) -> None:
    for start, ended in (
        ("main()", 1),
        ('if __name__ == "__main__":\n    main()', 0),
    ):
        (tmp_path / "train.py").write_text(SOUND.format(start=start))
        code, _, err = ends(tmp_path, "train.py")
        assert (code, (tmp_path / "buffer").exists()) == (ended, ended == 0), err


@pytest.mark.full
def test_where_only_the_child_can_know_of_a_missing_guard_it_ends_there(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"if __name__ != 'here': print('begun')\n{UNGUARDED}")
    code, out, err = ends(tmp_path, "train.py")
    # Two children, which neither create a coordinator nor spawn processes.
    assert (code, out.count("begun"), out.count("joined")) == (0, 3, 1), out
    assert err.count("RuntimeError: ") == 2
    for index in range(2):
        assert (
            f"RuntimeError: buffer: the spawned process collect-{index} imports the main module of "
            "the program and the module of its target, and one of them creates a Coordinator when "
            "it is imported. Put the code that runs the program, including the Coordinator and "
            "spawn, under "
            '`if __name__ == "__main__":`\n'
        ) in err
        assert f"collect-{index} " in err


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    "start",
    [
        'if __name__ == "__main__":\n    main()',
        '__name__ == "__main__" and main()',
        'if multiprocessing.current_process().name == "MainProcess":\n    main()',
    ],
)
def test_any_way_to_ask_is_a_guard(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").write_text(SOUND.format(start=start))
    assert ends(tmp_path, "train.py") == (0, "collected\n", "")


@pytest.mark.full
def test_a_module_without_a_guard_may_spawn_what_is_not_in_the_main_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SOUND.format(start=""))
    (tmp_path / "start.py").write_text('import train\nif __name__ == "__main__":\n    train.main()')
    assert ends(tmp_path, "start.py") == (0, "collected\n", "")
    assert ends(tmp_path, "-c", "import train, shutil; shutil.rmtree('buffer'); train.main()") == (
        0,
        "collected\n",
        "",
    )


@pytest.mark.product(few=1)
@pytest.mark.parametrize("command", [(), ("-",)])
def test_a_program_from_standard_input_is_told_to_become_a_file(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    source = SPAWNS.format(target="targets.fail", more="")
    code, out, err = ends(tmp_path, *command, stdin=source)
    assert (code, out) == (1, "")
    assert err.endswith(
        f"RuntimeError: {tmp_path}/buffer: the program was read from <stdin>, but this "
        "file does not exist, so a spawned process cannot import it. Nothing was started. "
        "Write the program to a file, and run that file\n"
    )


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    ("target", "more", "named"),
    [
        ("collect", "", "collect"),
        ("__import__('functools').partial(collect)", "", "collect"),
        ("type('Collect', (), {'run': lambda self, path, index: None})().run", "", "Collect"),
        ("targets.stay", ", collect", "collect"),
    ],
)
def test_a_target_defined_in_a_notebook_is_told_to_move_to_a_module(
    tmp_path: Path, target: str, more: str, named: str
) -> None:
    """Like a notebook kernel and the prompt, -c has a main module without a file."""
    code, out, err = ends(tmp_path, "-c", SPAWNS.format(target=target, more=more))
    assert (code, out) == (1, "")
    assert err.endswith(
        f"RuntimeError: {tmp_path}/buffer: {named} is defined in __main__, which a spawned "
        "process cannot import, because __main__ is a notebook, a prompt, a -c option, or the "
        f"__main__ of a package. Nothing was started. Write {named} to a module (in a notebook: "
        "%%writefile collect.py), and import it from there\n"
    )
