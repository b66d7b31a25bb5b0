"""The benchmarks run, at a size where their figures mean nothing: only the form is looked at."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.peer import Peer, PeerError

pytestmark = pytest.mark.xdist_group("benchmarks")

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.timeout(120)  # the first test waits for all benchmarks

# This package has the API of torchrl, so it can stand in for it: what is tested is the way there.
# Only dumps are not there yet.
STAND_IN = """
import shmbuffer
from shmbuffer import CompressedListStorage, LazyMemmapStorage, LazyStackStorage
from shmbuffer import ReplayBuffer, TensorDictReplayBuffer

class TensorDictPrioritizedReplayBuffer(shmbuffer.TensorDictPrioritizedReplayBuffer):
    def dumps(self, path):
        pass

    def loads(self, path):
        pass
"""

# What is measured of items of any size; 16 of them are there.
AT_MOST = {"extend(16)", "sample(16), all entries read"}
RECORDS = {
    "frames": {*AT_MOST, "times smaller", "add(1)", "sample(16), as it comes"},
    "frames, zstd in both": {*AT_MOST, "times smaller"},
    "frames, beside zstd alone": AT_MOST,
    "sequences": {"add(1)", "extend(16)"}
    | {f"sample(16), {form}" for form in ("as it comes", "entries as lists", "padded", "nested")},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What all benchmarks printed and wrote, beside a peer; nothing else is left of them."""
    scratch = tmp_path_factory.mktemp("benchmarks")
    package, buffers, output = scratch / "torchrl", scratch / "buffers", scratch / "found.json"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.0'\n")
    (package / "data.py").write_text(STAND_IN)
    buffers.mkdir()
    arguments = ["--toy", "--dir", buffers, "--json", output, "--torchrl", sys.executable]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{scratch}"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    assert not list(buffers.iterdir())
    return ran.stdout, json.loads(output.read_text())


def check_spread(spread: dict[str, Any]) -> None:
    assert 0 <= spread["min"] <= spread["median"] <= spread["max"]


def test_every_benchmark_answers_its_question(run: tuple[str, dict[str, Any]]) -> None:
    printed, found = run
    assert list(found["benchmarks"]) == list(BENCHMARKS)
    for name, benchmark in found["benchmarks"].items():
        assert benchmark["question"].endswith("?")
        assert f"\n{name}: {benchmark['question']}" in printed
        check_spread(benchmark["others_cpus"])
        for result in benchmark["results"]:
            assert result["operation"] in printed
            assert result["unit"] in ("s", "1/s", "x")
            assert len(result["rounds"]) == found["setting"]["rounds"]
            assert all(figure > 0 for figure in result["rounds"])
            assert result["p95"] > 0
            check_spread(result)


def test_every_operation_is_there(run: tuple[str, dict[str, Any]]) -> None:
    found = run[1]["benchmarks"]
    ours = {
        name: {
            (result["operation"], result["form"])
            for result in benchmark["results"]
            if result["library"] == "shmbuffer"
        }
        for name, benchmark in found.items()
    }
    assert ours["add"] == {("add(1)", "arrays"), ("add(1)", "TensorDict")}
    assert ("extend(32), prioritized", "arrays") in ours["extend"]
    assert ("sample(256), uniform", "TensorDict") in ours["sample"]
    assert ("sample(256), prioritized", "TensorDict") in ours["sample"]
    assert ("cycle(256)", "TensorDict") in ours["cycle"]
    assert ("update(256)", "index") in ours["cycle"]
    assert {operation for operation, _ in ours["writers"]} >= {
        "no writer: cycles(256)",
        "1 x extend(32): items",
        "2 x extend(32): cycles(256)",
        "4 x extend(32): p99 of cycle(256)",
    }
    assert {form for _, form in ours["attach"]} >= {"beside others", "nobody there"}
    assert {form for _, form in ours["recover"]} == {"recover()", "attach()"}
    for form in ("private", "shared"):
        assert {operation for operation, who in ours["records"] if who == form} == {
            f"{what}: {operation}"
            for what, operations in RECORDS.items()
            for operation in operations
        }
    assert ("frames: times smaller", "shared, frames once") in ours["records"]


def test_a_ratio_compares_with_a_peer_that_was_measured(run: tuple[str, dict[str, Any]]) -> None:
    printed, found = run
    assert found["peers"] == {"torchrl": "measured"}
    assert set(found["versions"]) == {"shmbuffer", "torchrl"}
    assert "x torchrl [" in printed
    assert "x zstandard [" in printed
    for name, benchmark in found["benchmarks"].items():
        for result in benchmark["results"]:
            if result["library"] == "shmbuffer" and name != "recover":
                alone = "beside zstd alone" in result["operation"]
                assert result["ratio"]["to"] == ("zstandard" if alone else "torchrl")
                check_spread(result["ratio"])
            else:
                assert result["ratio"] is None


def test_what_was_not_measured_is_said_by_name(run: tuple[str, dict[str, Any]]) -> None:
    found = {**run[1], "versions": {"shmbuffer": {}}, "peers": {"torchrl": "not measured, why"}}
    assert "\n  torchrl: not measured, why\n" in report.header(found)


def test_a_peer_that_is_not_there_is_an_error_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="torchrl: ModuleNotFoundError: No module"):
        Peer("torchrl", sys.executable, tmp_path / "log")


def test_a_benchmark_that_is_not_there_is_an_error_that_names_those_that_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["extent"])
    assert "no benchmark extent; there are add, extend, sample" in capsys.readouterr().err


def test_a_peer_s_interpreter_needs_no_shmbuffer() -> None:
    ahead, seen, imported = ["benchmarks.peer_torchrl"], set(), set()
    while ahead:
        module = ahead.pop()
        if module in seen or not module.startswith(("benchmarks.", "tests.")):
            imported.add(module.partition(".")[0])
            continue
        seen.add(module)
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                ahead.append(str(node.module))
    assert {"benchmarks.library", "benchmarks.recordings", "tests.frames"} < seen
    assert "shmbuffer" not in imported
