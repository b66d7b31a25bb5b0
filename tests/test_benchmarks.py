"""The benchmarks run at a small size, and the form of their results is checked."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")  # needed for the plots

import itertools

from benchmarks import __main__ as benchmarks
from benchmarks import (
    contention,
    crowd,
    film,
    frames,
    lives,
    once,
    peer,
    plots,
    prefetch,
    report,
    scaling,
    table,
    watched,
    whole,
)
from benchmarks.__main__ import BENCHMARKS, ON_REQUEST, SCALE, main, plan
from benchmarks.bound import EPS, Bound
from benchmarks.comparison import Setting
from benchmarks.held import Held
from benchmarks.items import KINDS, priorities
from benchmarks.library import ALPHA, ARRAYS, BETA, INDEX, LAZY_STACK, TENSORDICT, Operation
from benchmarks.measure import Load, Timed
from benchmarks.peer import PEERS, Peer, PeerError, why_not

ROOT = Path(__file__).parents[1]

# The calls of cpprb, in a process without torch: this tests the connection to a peer. The calls of
# torchrl are tested in tests/compat.
STAND_IN = """
import numpy as np

class ReplayBuffer:
    def __init__(self, size, env_dict, **options):
        self.size = size
        self.fields = {
            name: np.zeros((size, *np.atleast_1d(field["shape"])), field["dtype"])
            for name, field in env_dict.items()
        }

    def add(self, priorities=None, **batch):
        assert set(batch) == set(self.fields)
        for name, field in self.fields.items():
            rows = np.reshape(batch[name], (-1, *field.shape[1:]))
            field[: len(rows)] = rows[: self.size]

    def sample(self, count, beta=None):
        index = np.random.randint(self.size, size=count)
        return {**{name: field[index] for name, field in self.fields.items()}, "indexes": index}

    def update_priorities(self, index, priorities):
        assert len(index) == len(priorities)

    def save_transitions(self, path):
        np.savez(path, **self.fields)

    def load_transitions(self, path):
        self.fields = dict(np.load(path))

PrioritizedReplayBuffer = MPPrioritizedReplayBuffer = ReplayBuffer
"""
# Contention, frames and the benchmarks on Ray have tests of their own. Contention needs no process
# that imports torch.
MEASURED = [name for name in BENCHMARKS if name not in ("contention", "frames", "sharded")]
#: The operations for the tables, without `--full`.
FEW = ["add", "sample", "recover"]
BOUNDED = {"extend", "sample", "cycle", "capacity", "latency"}
BESIDE = {"add", "extend", "sample", "cycle", "writers", "attach", "capacity", "latency"}

# Operations on items of any size; there are 16 such items.
AT_MOST = {"extend(16)", "sample(16), all entries read"}
RECORDS = {
    "frames": {*AT_MOST, "times smaller", "add(1)", "sample(16), as it comes"},
    "frames, beside zstd alone": AT_MOST,
    "channels last, beside zstd alone": AT_MOST,
    "sequences": {"add(1)", "extend(16)"}
    | {f"sample(16), {form}" for form in ("as it comes", "entries as lists", "padded", "nested")},
}


HINDSIGHT = [
    ("uniform", "TensorDict"),
    ("hindsight", "quiet"),
    ("hindsight", "after add(1)"),
]


LABELLED = "by staleness", "in groups", "in windows as they come"
MIXED = [
    ("uniform", "TensorDict"),
    ("mixed", "data set in memory"),
    ("mixed", "data set in files"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, full: bool) -> tuple[str, dict[str, Any], Path]:
    """Runs the benchmarks beside a peer; returns their output and results."""
    scratch = tmp_path_factory.mktemp("benchmarks")
    buffers, out = scratch / "buffers", scratch / "out"
    (scratch / "cpprb.py").write_text(STAND_IN)
    buffers.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(scratch))
        patch.setattr(benchmarks.signal, "signal", lambda *_: None)
        patch.setattr(benchmarks, "interpreter", lambda name: scratch / name)
        patch.setattr(benchmarks, "why_not", lambda name: f"{name} is not here")
        # The fewest writers that show contention.
        patch.setattr(benchmarks.writers, "WRITERS", (0, 2))
        patch.setattr(benchmarks.capacity, "STEPS", (10, 100))
        patch.setattr(benchmarks.whole, "STEPS", (60, 100))
        patch.setattr(benchmarks.crowd, "WRITERS", (1, 3))
        patch.setattr(benchmarks.crowd, "SLOTS", (100,))
        patch.setattr(benchmarks.lives, "COLLECTORS", 3)
        patch.setattr(benchmarks.lives, "HANDLES", 7)
        with pytest.MonkeyPatch.context() as printing:
            said: list[str] = []
            printing.setattr("builtins.print", lambda *what, **_: said.extend(map(str, what)))
            arguments = ["--toy", "--items", "S", "--dir", buffers, "--out", out]
            beside = ["--beside", "cpprb,flashbax", "--cpprb", sys.executable]
            assert main([*map(str, arguments), *beside, *(MEASURED if full else FEW)]) == 0
    assert not list(buffers.iterdir())
    return "\n".join(said), json.loads((out / "found.json").read_text()), out


def check_spread(spread: dict[str, Any]) -> None:
    assert 0 <= spread["min"] <= spread["median"] <= spread["max"]


def test_every_benchmark_answers_its_question(
    run: tuple[str, dict[str, Any], Path], full: bool
) -> None:
    printed, found, _ = run
    assert [part["name"] for part in found["benchmarks"]] == (MEASURED if full else FEW)
    for part in found["benchmarks"]:
        assert part["question"].endswith("?")
        assert f"{part['name']}: {part['question']}" in printed
        check_spread(part["others_cpus"])
        for result in part["results"]:
            assert result["operation"] in printed
            assert result["unit"] in ("s", "1/s", "x", "share")
            assert len(result["rounds"]) == found["rounds"]
            assert all(figure >= 0 for figure in result["rounds"])
            check_spread(result)


@pytest.mark.full
def test_every_operation_is_there(run: tuple[str, dict[str, Any], Path]) -> None:
    ours = {
        part["name"]: {
            (result["operation"], result["form"])
            for result in part["results"]
            if result["library"] == "shmbuffer"
        }
        for part in run[1]["benchmarks"]
    }
    assert ours["add"] == {("add(1)", "arrays"), ("add(1)", "TensorDict")}
    assert {operation for operation, _ in ours["writers"]} == {
        "no writer: cycles(256)",
        "no writer: p99 of cycle(256)",
        "2 x extend(32): items",
        "2 x extend(32): cycles(256)",
        "2 x extend(32): p99 of cycle(256)",
    }
    assert {operation for operation, _ in ours["windows"]} == {
        *("32 windows of 13", "416 single items", "sample(256)"),
        *("sample(256), 3 steps", "sample(256), 10 steps"),
    }
    assert {operation for operation, _ in ours["large"]} == {
        *("sample(256), uniform", "sample(256), prioritized", "update(256)", "extend(32)")
    }
    assert {form for _, form in ours["attach"]} >= {"beside others", "nobody there"}
    assert {form for _, form in ours["recover"]} == {"recover()", "attach()"}
    assert {form for _, form in ours["save"]} == {"in place", "elsewhere"}
    assert ("sample(256), prioritized, of 1,000", "TensorDict") in ours["capacity"]
    hindsight = {(f"sample(256), {how}", form) for how, form in HINDSIGHT}
    assert ours["hindsight"] == hindsight
    loops = {
        f"{what}: sample, {work} ms of work" for what in prefetch.COUNTS for work in (0, 2, 20)
    }
    steps = {f"{what}: step, {work} ms of work" for what in prefetch.COUNTS for work in (2, 20)}
    assert ours["prefetch"] == {(operation, "prefetch=3") for operation in loops | steps}
    assert ours["mixed"] == {(f"sample(256), {how}", form) for how, form in MIXED}
    assert ours["slices"] == {
        (f"extend(32), sample(256) in slices, of {capacity:,}", form)
        for capacity in (512, 1000, 10_000)
        for form in ("uniform", "prioritized", "fragmented")
    }
    assert ours["passes"] == {
        (f"sample(256) without replacement, of {capacity:,}", form)
        for capacity in (512, 1000, 10_000)
        for form in ("after extend(32)", "first of a pass")
    }
    assert ours["asynchronous"] == {
        (f"extend(32), sample(256) {form}", form) for form in LABELLED
    } | {(f"sample(256) {form}, beside a writer", form) for form in ("uniform", *LABELLED)}
    assert {("cycle(256): p50", "index"), ("cycle(256): max", "index")} <= ours["latency"]
    for form in ("private", "shared"):
        assert {operation for operation, who in ours["records"] if who == form} == {
            f"{what}: {operation}"
            for what, operations in RECORDS.items()
            for operation in operations
        }
    assert ours["crowd"] == {
        (f"{writers} writers, 1,000 slots", form)
        for writers in (1, 3)
        for form in (crowd.ITEMS_A_SECOND, crowd.LEAST)
    }
    rows = {row for row, _ in ours["lives"]}
    assert {"cycle(256): p99.9", lives.LONGEST_WRITE, lives.LEAST} < rows
    assert ours["whole"] == {
        (f"{row}, of {capacity:,}", filled)
        for row in whole.ROWS
        for capacity in (600, 1000)
        for filled in whole.SHARES
    }


@pytest.mark.full
def test_a_ratio_compares_with_a_peer_that_was_measured(
    run: tuple[str, dict[str, Any], Path],
) -> None:
    printed, found, _ = run
    assert found["peers"]["cpprb"] == "measured"
    assert set(found["versions"]) == {"shmbuffer", "bound", "cpprb"}
    assert "x cpprb [" in printed
    assert "x zstandard [" in printed
    for part in found["benchmarks"]:
        for result in part["results"]:
            alone = result["operation"].startswith("reserve")  # other clients do not hold it
            if result["library"] == "shmbuffer" and part["name"] in BESIDE and not alone:
                compared = [ratio["to"] for ratio in result["ratios"]]
                assert compared == ["cpprb", *(["bound"] if part["name"] in BOUNDED else [])]
                for ratio in result["ratios"]:
                    check_spread(ratio)


def test_the_table_has_a_line_for_every_row_that_was_measured(
    run: tuple[str, dict[str, Any], Path],
) -> None:
    _, found, out = run
    titles = [line.title for line in table.lines(found)]
    assert "S: sample(256), prioritized, TensorDict" in titles
    assert "S: recover 1,000 items, attach()" in titles
    written = (out / "table.md").read_text()
    assert written == table.document(found) + "\n"
    for one in table.tables(found).values():
        assert {len(row) for row in one} == {len(one[0])}
    overview = [row[0] for row in table.tables(found)[table.OVERVIEW]]
    assert [row for row in titles if row not in overview] == []
    assert {len(row) for row in table.tables(found)[table.OVERVIEW]} == {4}


def test_a_target_is_a_ratio_to_the_bound() -> None:
    """The ratio does not depend on the machine, because both sides run in the same rounds."""

    def of(ours: list[float]) -> list[str]:
        part = {
            "name": "cycle",
            "items": "S",
            "capacity": 1000,
            "results": [
                {**result(library, "index", rounds), "operation": "update(256)"}
                for library, rounds in (("shmbuffer", ours), ("bound", [1.0, 1.0, 1.0]))
            ],
        }
        bounds = table.tables({"benchmarks": [part]})["The bound, and the targets"]
        return bounds[1]

    title = "S: update(256), index"
    assert of([1.5, 1.5, 1.5]) == [title, "1 s", "1.5x", "≤ 2x"]
    assert of([3.0, 3.0, 3.0]) == [title, "1 s", "3x", "≤ 2x, missed"]


@pytest.mark.full
def test_the_plots_are_drawn(run: tuple[str, dict[str, Any], Path]) -> None:
    _, found, out = run
    for name in ("speed", "ratios", "capacity", "writers", "latency", "whole", "large"):
        for theme in plots.THEMES:
            assert "<svg" in (out / f"{name}-{theme}.svg").read_text()
    assert plots.draw({**found, "benchmarks": []}, out) == []


RECORDED = Path(__file__).parents[1] / "docs/recordings/benchmarks.json"


def test_the_pictures_of_the_pages_are_drawn_from_the_recorded_figures(tmp_path: Path) -> None:
    drawn = plots.draw(json.loads(RECORDED.read_text()), tmp_path)
    images = RECORDED.parents[1] / "images"
    shown = [*images.glob("bench-*.svg"), *images.glob("speed-*.svg")]
    assert {path.name for path in drawn} == {path.name.removeprefix("bench-") for path in shown}
    for path in drawn:
        kept = next(one for one in shown if one.name.removeprefix("bench-") == path.name)
        assert set(LETTERS.findall(kept.read_text())) == set(LETTERS.findall(path.read_text()))
        assert "10^" not in path.read_text()  # ticks are plain numbers


LETTERS = re.compile(r">([^<>]*[\w][^<>]*)</text>")


def test_the_chart_of_the_front_page_shows_the_ratios_of_the_table() -> None:
    images = RECORDED.parents[1] / "images"
    overview = {
        cells[1].strip(): cells[3:5]
        for line in table.README.read_text().partition("<details")[0].splitlines()
        if len(cells := line.split("|")) == 6
    }
    wanted = {
        ratio
        for title in (
            "S: add(1), arrays",
            "S: extend(32), prioritized, TensorDict",
            "S: sample(256), prioritized, TensorDict",
            "S: cycle(256), TensorDict",
            "S: 4 x extend(32): items, processes",
        )
        for cell in overview[title]
        for ratio in re.findall(r"\(([\d.]+x)\)", cell)
    }
    assert len(wanted) == 10
    for theme in plots.THEMES:
        drawn = (images / f"speed-{theme}.svg").read_text()
        assert wanted <= set(re.findall(r"[\d.]+x", " ".join(LETTERS.findall(drawn))))


def test_stored_results_are_shown_again_without_measuring(
    run: tuple[str, dict[str, Any], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, found, out = run
    monkeypatch.setattr(plots, "draw", lambda *_: [])  # one run is enough
    assert main(["--found", str(out / "found.json"), "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert table.markdown(found) in printed
    assert json.loads((tmp_path / "found.json").read_text()) == found


def test_the_table_is_written_between_its_markers(
    run: tuple[str, dict[str, Any], Path], tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    for _ in range(2):
        table.write(run[1], readme)
        text = readme.read_text()
        assert text.startswith(f"before\n{table.BEGIN}\n\nBuffers are full: ")
        assert text.endswith(f"</details>\n\n{table.END}\nafter\n")
        assert "old" not in text
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="has no '<!-- table of operations -->'"):
        table.write(run[1], readme)
    assert table.BEGIN in table.README.read_text()


def result(library: str, form: str, rounds: list[float], unit: str = "s") -> dict[str, Any]:
    middle = float(np.median(rounds))
    return {
        "operation": "o",
        "library": library,
        "form": form,
        "unit": unit,
        "rounds": rounds,
        "median": middle,
        "min": min(rounds),
        "max": max(rounds),
    }


def test_a_peer_is_compared_in_the_same_form_or_in_its_best() -> None:
    ours = result("shmbuffer", TENSORDICT, [1.0, 2.0])
    results = [
        ours,
        result("torchrl", INDEX, [3.0, 3.0]),
        result("torchrl", TENSORDICT, [5.0, 6.0]),
        result("cpprb", ARRAYS, [9.0, 9.0]),
        result("cpprb", INDEX, [8.0, 8.0]),
        result("cpprb", "other", [10.0, 10.0]),
    ]
    peers = report.peers_of(ours, results)
    assert {name: (one["form"], one["rounds"]) for name, one in peers.items()} == {
        "torchrl": (TENSORDICT, [5.0, 6.0]),
        "cpprb": (INDEX, [8.0, 8.0]),
    }
    assert report.ratio(ours, peers["cpprb"]) == {"to": "cpprb", "median": 6, "min": 4, "max": 8}
    assert [ratio["to"] for ratio in report.ratios_of(ours, results)] == ["torchrl", "cpprb"]
    rates = [result("shmbuffer", ARRAYS, [6.0], "1/s"), result("torchrl", ARRAYS, [2.0], "1/s")]
    assert report.ratio(*rates)["median"] == 3


def test_calls_timed_one_by_one_take_turns_with_their_inputs() -> None:
    seen: list[int] = []
    timed = Timed(seen.append, [(0,), (1,), (2,)], 1e-6)
    first = len(seen)
    assert len(timed.each(7)) == 7
    assert all((b - a) % 3 == 1 for a, b in zip(seen[first:], seen[first + 1 :], strict=False))


def test_the_locked_sections_of_the_core_are_noted_in_their_order(tmp_path: Path) -> None:
    program = """
import ctypes, sys, time
from pathlib import Path
import numpy as np
from tests.crash.deeds import prepare, writes

holds = ctypes.CDLL(None)
notes = np.zeros(8, np.int64)
with prepare(Path(sys.argv[1])) as engine:
    holds.holds_begin(notes.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(len(notes)))
    began = time.monotonic_ns()
    writes(engine)  # claims, then commits
    took = time.monotonic_ns() - began
    count = holds.holds_end()
    assert count == 2, count
    assert (notes[:2] > 0).all(), notes
    assert notes.sum() <= took, (notes, took)
    assert (notes[2:] == 0).all(), notes
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "buffer")],
        check=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(contention.compile_holds(tmp_path))},
    )


def test_sections_are_those_of_each_call() -> None:
    class Recorder(Held):
        def __init__(self) -> None:
            self._capacity = 1

        def call(self, operation: Operation) -> Any:
            return (lambda at: None), [(0,), (1,)]

        def _begin(self) -> None:
            pass

        def _end(self) -> Any:
            return np.arange(1, 7)

    found = Recorder().sections(Operation("extend", 32), 3)
    assert found["held"] == [[1, 3, 5], [2, 4, 6]]
    assert len(found["outside"]) == 3
    with pytest.raises(RuntimeError, match="6 locked sections in 4 calls of"):
        Recorder().sections(Operation("extend", 32), 4)


@pytest.mark.full
def test_contention_says_what_is_measured_and_what_is_modelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Measured:
        def ask(self, do: str, **asked: Any) -> dict[str, Any]:
            if do == "sections":
                sections = 1 if asked["operation"]["call"] in ("sample", "update") else 2
                return {"held": [[1000, 3000]] * sections, "outside": [8000, 8000]}
            return {"held": [5, 5], "items": 7.0, "cycles": 2.0}

    monkeypatch.setattr(contention, "_MODELLED_S", 0.01)
    setting = Setting([], KINDS["S"], 1000, 1, 2, 1, 1e-4, 0.02, 2, tmp_path)
    found = {
        (series.operation, series.form): series
        for series in contention._contender(setting, Measured()).series  # type: ignore[arg-type]
    }
    for operation, sections in {"extend(32)": 2, "sample(256)": 1, "cycle(256)": 2}.items():
        for at in range(1, sections + 1):
            assert (f"{operation}, section {at} of {sections}: held", "max") in found
    assert ("learner beside 4 x extend(32): held", "p99") in found
    for row in found:
        if row[1] in ("items", "cycles", "the mutex is held"):
            assert row[0].startswith(("measured, ", "modelled, "))
    figures = contention._round(setting, Measured())  # type: ignore[arg-type]
    alone = figures["modelled, 16 processors, learner beside 1 x extend(32)", "items"]
    assert 0.5 < alone / (32 / 12e-6) <= 1.01
    full = figures["modelled, 16 processors, learner beside 64 x extend(32)", "the mutex is held"]
    assert full == pytest.approx(1, rel=0.01)
    # Each writer steps its environment between its writes.
    slow = figures["modelled, 64 processors, learner beside 63 x extend(32), 10 us a step", "items"]
    assert 0.9 < slow / (63 * 32 / (32 * 10e-6 + 12e-6)) <= 1.01


def test_a_model_gives_what_can_be_computed() -> None:
    steps = np.array([[3e-6, 1e-6]])
    alone = scaling.simulate([scaling.Role(1, steps)], 1, 0.01)
    assert alone.calls[0] == pytest.approx(250_000, rel=0.01)
    assert alone.busy == pytest.approx(0.25, rel=0.01)
    # Four writers saturate the mutex; more processors change nothing.
    full = scaling.simulate([scaling.Role(64, steps)], 64, 0.01)
    assert full.calls[0] == pytest.approx(1_000_000, rel=0.01)
    assert full.busy == pytest.approx(1, rel=0.01)
    # One processor does the same work for many processes, and divides it evenly.
    shared = scaling.simulate([scaling.Role(1, steps), scaling.Role(3, steps)], 1, 0.3)
    assert sum(shared.calls) == pytest.approx(250_000, rel=0.01)
    assert shared.calls[0] == pytest.approx(62_500, rel=0.2)


def test_the_default_plan_asks_for_the_items_of_the_table() -> None:
    planned = plan([], None)
    assert {(row.benchmark, row.items) for row in table.ROWS} <= set(planned)
    assert not {name for name, _ in planned} & set(ON_REQUEST)
    assert plan(["add"], "L") == [("add", "L")]
    assert [name for name, _ in plan(["scale", "add"], "S")] == [*SCALE, "add"]


def test_missing_measurements_are_named(run: tuple[str, dict[str, Any], Path]) -> None:
    assert "\n  sb3: not asked for\n" in run[0]
    assert "\n  flashbax: flashbax is not here\n" in run[0]
    assert run[1]["peers"]["flashbax"] == "flashbax is not here"


def test_a_peer_that_did_not_install_is_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_ROOT", tmp_path)
    assert why_not("sb3") == "not installed: scripts/peers sb3 makes its environment"
    (tmp_path / ".venv-peers").mkdir()
    (tmp_path / ".venv-peers" / "sb3.failed").write_text("ERROR: no wheel\n")
    assert why_not("sb3") == "not installed: ERROR: no wheel"


def test_a_peer_that_is_not_there_is_an_error_in_its_own_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cpprb: ModuleNotFoundError: No module"):
        Peer("cpprb", sys.executable, tmp_path / "log")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["extent"], "no benchmark extent; there are add, extend, sample"),
        (["--beside", "torchrll"], "no peer torchrll; there are torchrl, cpprb"),
        (["--rounds", "0"], "--rounds is at least 1, not 0"),
    ],
)
def test_an_argument_that_makes_no_sense_is_an_error_that_says_what_would(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


def test_every_peer_has_an_environment_and_a_module() -> None:
    for name in PEERS:
        assert (ROOT / "benchmarks" / "peers" / f"{name}.py").is_file()
        pins = (
            ROOT / "constraints-compat.txt"
            if name == "torchrl"
            else ROOT / "benchmarks" / "environments" / f"{name}.txt"
        )
        for line in pins.read_text().splitlines():
            assert line.startswith("#") or "==" in line
    assert f"peers=({' '.join(PEERS)})" in (ROOT / "scripts" / "peers").read_text()


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_s_interpreter_needs_no_shmbuffer(name: str) -> None:
    ahead, seen, imported = [f"benchmarks.peers.{name}"], set(), set()
    while ahead:
        module = ahead.pop()
        if module in seen or not module.startswith(("benchmarks.", "tests.")):
            imported.add(module.partition(".")[0])
            continue
        seen.add(module)
        source = (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()
        tree = ast.parse(source)
        # Only callers of a function need its imports.
        for node in tree.body if name not in ("torchrl", "ray") else ast.walk(tree):
            if isinstance(node, ast.Import):
                ahead += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                ahead.append(str(node.module))
    assert {"benchmarks.library", "benchmarks.local", "benchmarks.served"} < seen
    assert "shmbuffer" not in imported
    if name not in ("torchrl", "ray"):
        assert not {"tensordict", "torchrl"} & imported


def test_sampling_into_a_batch_of_the_caller_is_measured_where_there_is_such_a_call() -> None:
    from benchmarks.torchlike import _sampling_into

    class Buffer:
        def sample(self, count: int, out: object = None) -> object:
            return ("new", count) if out is None else out

    class Without:
        def sample(self, count: int) -> object:
            return count

    call, inputs = _sampling_into(Buffer(), 3) or (None, [])
    assert call is not None
    assert call(*inputs[0]) == ("new", 3)
    assert _sampling_into(Without(), 3) is None


@pytest.mark.full
def test_the_cost_of_a_live_view_is_measured_in_pairs() -> None:
    found = watched.measure(items=1000, pairs=2, seconds=0.05)
    assert found["alone"] > 0
    assert found["watched"] > 0
    assert len(found["pairs"]) == 2
    assert found["lost_percent"] == pytest.approx(sum(found["pairs"]) / 2)


@pytest.mark.full
@pytest.mark.slow
def test_what_observations_that_are_stored_once_take_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    once.main(["--toy", "--torchrl", "/nowhere"])
    lines = capsys.readouterr().out.splitlines()
    *kinds, frames = [json.loads(line[line.index("{") :]) for line in lines]
    assert len(kinds) == len(once.KINDS)
    assert frames["memory"] < 0.2
    for found in kinds:
        assert 0.5 < found["memory"] <= 0.55
        assert found["own_rows"] == "32 of 100", "the newest of each stream, all of the same step"


@pytest.mark.full
def test_the_bound_draws_weighs_and_stores_what_the_package_does(tmp_path: Path) -> None:
    kind, count = KINDS["S"], 1000
    bound = Bound(tmp_path)
    assert bound.open(str(tmp_path), "S", count, True)
    written, raw = kind.batches(count, ARRAYS)[0], priorities(count, 1)[0].astype(np.float64)
    mass = (raw + EPS) ** ALPHA
    drawn = Operation("sample", 256, ARRAYS)
    assert bound.prepare(drawn, 1e-6)
    seen = np.zeros(count)
    for _ in range(200):
        bound.round(drawn, 1)
        batch = bound.batch(256)
        index = batch["index"]
        for name, leaf in written.items():
            assert (batch[name] == leaf[index]).all()
        np.testing.assert_allclose(batch["weight"], (mass[index] / mass.min()) ** -BETA, rtol=1e-6)
        seen += np.bincount(index, minlength=count)
    expected = mass / mass.sum() * seen.sum()
    assert ((seen - expected) ** 2 / expected).sum() < count + 5 * np.sqrt(2 * count)
    bound.close()


def test_after_an_update_the_bound_draws_by_the_new_priorities(tmp_path: Path) -> None:
    bound = Bound(tmp_path)
    assert bound.open(str(tmp_path), "S", 1000, True)
    update, cycle = Operation("update", 256, INDEX), Operation("cycle", 256, INDEX)
    assert bound.prepare(update, 1e-6)
    assert bound.prepare(cycle, 1e-6)
    assert bound.round(update, 3)
    assert len(bound.calls(cycle, 5)) == 5
    after = (bound.tree(0) + EPS) ** ALPHA  # the raw priorities
    np.testing.assert_allclose(bound.tree(1), after, rtol=1e-14)
    assert bound.tree(2)[0] == pytest.approx(after.sum())
    assert not bound.prepare(Operation("extend", 32, TENSORDICT), 1e-6), "it has no TensorDicts"
    bound.close()
    assert bound.open(str(tmp_path), "M", 100, False)
    assert not bound.prepare(update, 1e-6), "nothing is drawn by priority there"
    assert not bound.open(str(tmp_path), "S", 100, False, LAZY_STACK)
    bound.close()


@pytest.mark.full
def test_the_law_of_a_row_is_how_it_grows_over_its_last_two_capacities(
    run: tuple[str, dict[str, Any], Path],
) -> None:
    _, found, out = run
    part = next(part for part in found["benchmarks"] if part["name"] == "whole")
    table = (out / "whole.md").read_text()
    assert table == whole.markdown(part) + "\n"
    assert len(table.splitlines()) == 2 + len(whole.ROWS) * len(whole.SHARES)
    assert table.startswith("| | | 600 | 1,000 | law |")
    assert whole.law({100: 7.0, 1000: 2.0, 10_000: 20.0}) == pytest.approx(1)
    assert whole.law({100: 7.0, 1000: 2.0, 10_000: 2.0}) == pytest.approx(0)


def test_stacks_of_frames_are_measured_beside_a_ring_in_numpy(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"rounds": 2, "blocks": 1, "block_s": 1e-4, "contest_s": 0.02}
    setting = Setting(
        [], KINDS["S"], 300, records=0, calls=0, directory=tmp_path, load=Load(), **sizes
    )
    found = {(one.operation, one.library, one.form): one for one in frames.run(setting)}
    who = [("shmbuffer", "TensorDict"), ("shmbuffer", "TensorDict, out=")]
    who.append(("numpy ring", "as it comes"))
    assert found.keys() == {
        *((f"{count} stacks of 4", *one) for count in (32, 256) for one in who),
        ("frames a step", "shmbuffer", "TensorDict"),
    }
    assert all(len(one.rounds) == 2 for one in found.values())
    assert not list(tmp_path.iterdir())


def test_the_ring_in_numpy_gives_the_stacks_of_the_definition() -> None:
    ring, at, wanted = film.FrameRing(600), 0, []
    for one in film.episodes(600):
        ring.extend(one, at)
        at += len(one) - 1
        stacks = film.stacked(one)
        wanted += itertools.pairwise(stacks)
    for stack, after in zip(*ring.sample(50), strict=True):
        step = next(at for at, frame in enumerate(ring.frames) if np.array_equal(frame, stack[-1]))
        assert np.array_equal(stack, wanted[step][0])
        assert np.array_equal(after, wanted[step][1])
