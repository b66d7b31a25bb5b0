"""Every code block of README.md and docs/ runs and prints the output shown below it."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmbuffer.distributed.runtime import PATIENT
from tests.docs import warm
from tests.docs.blocks import RUNS, Block, blocks_of, pages
from tests.kit.programs import environment

BLOCKS = {page: blocks_of(page) for page in pages()}
RUNNING = [page for page, blocks in BLOCKS.items() if any(b.language in RUNS for b in blocks)]

# Code that is not run, with the reason.
NOT_RUN = {
    (
        "docs/guides/a-whole-program.md",
        "tests/examples kills it, resumes it, and measures what it has learned",
    ),
    ("docs/first-hour.md", "installs what is tested here"),
    ("docs/first-hour.md", "builds for minutes"),
    ("docs/first-hour.md", "installs into an environment of its own"),
    (
        "docs/guides/stable-baselines3.md",
        "RL Zoo is installed by scripts/compat only, whose tests run these commands",
    ),
    ("docs/programs.md", "tests/compat/marl.py has these lines"),
    ("docs/torchrl.md", "needs TorchRL, and scripts/compat runs it"),
}

# Pages that need a package which some test environments lack.
NEEDS = {
    "docs/guides/cleanrl.md": "gymnasium",
    "docs/guides/from-sb3-and-reverb.md": "gymnasium",
    "docs/guides/offline-to-online.md": "pyarrow",
    "docs/guides/stable-baselines3.md": "stable_baselines3",
    "docs/guides/vector-environments.md": "gymnasium",
    "docs/guides/several-machines.md": "ray",
    "docs/monitoring.md": "matplotlib",
    "docs/recipes.md": "stable_baselines3",
}

# Pages that run for seconds and repeat what other tests run.
IN_FULL = (
    "docs/first-hour.md",
    "docs/guides/after-a-crash.md",
    "docs/guides/cleanrl.md",
    "docs/guides/collectors-and-learner.md",
    "docs/guides/from-sb3-and-reverb.md",
    "docs/guides/how-many-collectors.md",
    "docs/guides/stable-baselines3.md",
    "docs/guides/several-learners.md",
    "docs/guides/several-machines.md",
    "docs/monitoring.md",
    "docs/recipes.md",
)

# Otherwise Ray reports usage, leaves a token in the user's home, and starts workers late.
RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_TOKEN": secrets.token_hex(16), **PATIENT}

# Otherwise each model leaves a temporary directory.
SB3 = {"SB3_LOGDIR": "logs"}

Run = Callable[[str, bool], str]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Runs a process that has imported torch and runs pages with the commands of this tree."""
    commands = tmp_path_factory.mktemp("commands")
    for name, arguments in (
        ("python", f'-SE "{warm.__file__}" "$PAGE"'),
        ("shmbuffer", "-m shmbuffer"),
    ):
        (commands / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (commands / name).chmod(0o755)
    path = f"{commands}:/usr/bin:/bin"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.docs.page"],
        env=environment(PATH=path, COLUMNS="120", LC_ALL="C.UTF-8", **RAY, **SB3),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as serving:
        yield serving


@pytest.fixture
def run(server: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Runs a page in its own directory and returns the output of its Python blocks."""
    directory = tmp_path / "directory"
    directory.mkdir()

    def run_page(page: str, again: bool) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        request = {"page": page, "directory": str(directory), "again": again}
        print(json.dumps(request), file=server.stdin, flush=True)
        status = server.stdout.readline()
        printed = (tmp_path / "page.log").read_text()
        shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)  # the logs of Ray
        assert status == "0\n", printed
        return printed

    return run_page


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.full if page in IN_FULL else ()) for page in RUNNING],
)
def test_the_blocks_of_a_page_run_in_their_order_and_once_more(run: Run, page: str) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason="the page uses it")
    printed = run(page, False)
    if page == "README.md":
        assert printed.startswith("1000 PriorityUpdate(applied=256, stale=0)\n")
    run(page, True)


def test_a_program_that_spawns_asks_for_its_name() -> None:
    """A reader saves the block in a file that the spawned processes import."""
    unguarded = [
        (page, block.line)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if block.language == "python" and ".spawn(" in block.code and "__name__" not in block.code
    ]
    assert unguarded == []


def test_a_block_that_does_not_run_has_one_of_few_reasons() -> None:
    marked = {
        (page, block.not_run)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if block.not_run is not None
    }
    assert marked <= NOT_RUN


def test_a_block_that_looks_like_a_program_has_its_language() -> None:
    """A block without a language would not run, and the mistake would go unnoticed."""
    unnamed = [
        (page, block.line)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if not block.language and _looks_like_python(block)
    ]
    assert unnamed == []


def test_a_file_that_a_page_shows_is_run_by_it() -> None:
    forgotten = [
        (page, block.title)
        for page, blocks in BLOCKS.items()
        for block in blocks
        if block.title is not None
        and not any(
            block.title in later.code for later in blocks if later.language in ("console", "bash")
        )
    ]
    assert forgotten == []


def _looks_like_python(block: Block) -> bool:
    return block.code.startswith(("import ", "from ", "with ", "rb = ", "@"))
