"""``plot`` draws the history and state of a live, dead or empty buffer, and its problems."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmbuffer import Coordinator
from shmbuffer.cli import main, plot
from shmbuffer.extras import command
from shmbuffer.memory import Engine, Settings
from shmbuffer.memory.directory.files import Files
from shmbuffer.memory.format import layout
from shmbuffer.memory.system.region import Directory
from shmbuffer.memory.upkeep import history
from shmbuffer.memory.upkeep.history import EventKind
from shmbuffer.memory.upkeep.item_stats import ItemWriter
from shmbuffer.watch import findings
from shmbuffer.watch.buffer_state import BufferState, read_state
from shmbuffer.watch.findings import Finding
from shmbuffer.watch.plot.timeline import Timeline
from tests.cli.contents import contents
from tests.crash import harness
from tests.kit.programs import Program
from tests.kit.rings import ring_of
from tests.service import items
from tests.watch.histories import client, event, history_of, item_stats, look, steady

pytest.importorskip("matplotlib")

PATIENCE_S = 30.0
PANELS = {
    *("rates", "items", "ratio", "clients", "age", "losses", "priorities"),
    *("distribution", "ages", "collectors"),
}
RATES = {
    "inserts": 100.0,
    "batches_sampled": 4.0,
    "items_sampled": 800.0,
    "age_sum": 300_000.0,
    "updates_applied": 95.0,
    "updates_stale": 5.0,
}

RECORDER = """
import sys, time
from pathlib import Path
from shmbuffer.memory import Engine
from shmbuffer import Coordinator
from tests.service import items
with Coordinator(sys.argv[1], capacity=64):
    engine = Engine.open(sys.argv[1], None, role="collector")
    print("ready", flush=True)
    number = 0
    while True:
        items.write(engine, range(number, number + 4))
        number += 4
        time.sleep(0.01)
"""


def records(path: Path) -> int:
    with Directory.open(path) as directory:
        try:
            return len(history.read(directory).fine)
        except FileNotFoundError:
            return 0


def wait_for_records(path: Path, count: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while records(path) < count:
        assert time.monotonic() < end, "nothing was recorded"
        time.sleep(0.05)


def drawn(one: BufferState, found: list[Finding] | None = None) -> Any:
    from shmbuffer.watch.plot import report

    figure = report.draw(one, findings.find_problems(one) if found is None else found)
    assert {axes.get_label() for axes in figure.axes} == PANELS
    return figure


def panel(figure: Any, name: str) -> Any:
    return next(axes for axes in figure.axes if axes.get_label() == name)


def lines(axes: Any) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    """Returns the data of the labelled lines of a panel."""
    return {
        line.get_label(): np.asarray(line.get_ydata(), np.float64)
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def words(axes: Any) -> str:
    return " ".join(text.get_text() for text in axes.texts).replace("\n", " ")


def headline(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.texts)


def require_apart(figure: Any) -> None:
    """Checks that no two texts of the header, titles, legends and labels overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = {text.get_text(): text.get_window_extent(renderer) for text in figure.texts}
    for axes in figure.axes:
        name = axes.get_label()
        found = {"title": axes.title, "below": axes.xaxis.label, "legend": axes.get_legend()}
        found["left"], found["text"] = axes._left_title, next(iter(axes.texts), None)
        boxes |= {
            f"{name} {what}": one.get_window_extent(renderer)
            for what, one in found.items()
            if one is not None and (what == "legend" or one.get_text())
        }
        for side, labels in (("x", axes.get_xticklabels()), ("y", axes.get_yticklabels())):
            shown = [label for label in labels if label.get_text() and label.get_visible()]
            low, high = sorted(axes.get_xlim() if side == "x" else axes.get_ylim())
            at = [label.get_position()[0 if side == "x" else 1] for label in shown]
            boxes |= {
                f"{name} {side} {label.get_text()}": label.get_window_extent(renderer)
                for label, place in zip(shown, at, strict=True)
                if low <= place <= high
            }
    width, height = canvas.get_width_height()
    names = list(boxes)
    for number, one in enumerate(names):
        box = boxes[one]
        assert box.x0 >= 0, f"{one} leaves the picture"
        assert box.x1 <= width, f"{one} leaves the picture"
        assert box.y0 >= -1, f"{one} leaves the picture"
        assert box.y1 <= height, f"{one} leaves the picture"
        for other in names[number + 1 :]:
            assert not _overlap(box, boxes[other]), f"{one!r} lies on {other!r}"


def _overlap(one: Any, other: Any) -> bool:
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(wide > -3 and high > 1)  # side by side, texts need a gap


@pytest.fixture
def run() -> BufferState:
    """Makes two minutes of two collectors, one of which died twice, around a recovery."""
    happened = [
        event(EventKind.JOINED, 0, incarnation=1, pid=10, role="coordinator"),
        event(EventKind.JOINED, 1, incarnation=2, pid=11, name="collect-0"),
        event(EventKind.JOINED, 1, incarnation=3, pid=12, name="collect-1"),
        event(
            EventKind.DIED, 40, incarnation=3, pid=12, name="collect-1", exitcode=-9, restarted=True
        ),
        event(EventKind.JOINED, 41, incarnation=4, pid=13, name="collect-1"),
        event(EventKind.DIED, 50, incarnation=4, pid=13, name="collect-1", exitcode=-9),
        event(EventKind.RECOVERED, 91, by=5, epoch=1, role="coordinator"),
        event(EventKind.JOINED, 91, by=5, incarnation=5, pid=20, role="coordinator"),
        event(EventKind.JOINED, 92, by=5, incarnation=6, pid=21, name="collect-0"),
    ]
    recorded = [*steady(60, by=1, **RATES), *steady(30, by=5, begin=90, **RATES)]
    for row in recorded:
        row.update(length=min(1000, 100 * row["t"]), p_sum=800.0, max_priority=4.0)
    timeline = Timeline(history_of(recorded, happened=happened))
    writers = [ItemWriter(6, 21, "collector", True), ItemWriter(2, None, "", False)]
    writers += [ItemWriter(2**38 + n, None, "", False) for n in (3, 4)]
    priorities = np.random.default_rng(1).lognormal(size=1000)
    held = item_stats(
        priorities, [2] * 250 + [6] * 700 + [2**38 + 3] * 40 + [2**38 + 4] * 10, writers
    )
    clients = [
        client(incarnation=5, role="coordinator", pid=20),
        client(incarnation=6, pid=21),
    ]
    return look(timeline, items=held, clients=clients, epoch=1)


def test_rates_are_drawn_with_what_happened(run: BufferState) -> None:
    figure = drawn(run)
    rates = lines(panel(figure, "rates"))
    assert np.nanmedian(rates["written"]) == pytest.approx(100)
    assert np.nanmedian(rates["sampled"]) == pytest.approx(800)
    assert len(rates["died (2)"]) == 2
    assert len(rates["recovered (1)"]) == 1
    for name in ("rates", "items", "ratio", "age", "losses", "priorities", "clients"):
        spans = [patch for patch in panel(figure, name).patches if patch.get_alpha() == 0.25]
        assert len(spans) == 1, name  # no process recorded for 30 s


def test_the_panels_over_time_say_what_the_counters_say(run: BufferState) -> None:
    figure = drawn(run)
    (_, ratio), *_ = [(0, line.get_ydata()) for line in panel(figure, "ratio").get_lines()]
    assert np.nanmedian(ratio) == pytest.approx(8)
    assert panel(figure, "ratio").get_title(loc="left") == "samples per insert: 8"
    ages = lines(panel(figure, "age"))
    assert np.nanmedian(ages["mean, when sampled"]) == pytest.approx(375)
    assert np.nanmax(ages["uniform sampling"]) == 500
    late = lines(panel(figure, "losses"))["late updates"]
    assert np.nanmedian(late) == pytest.approx(5)
    means = lines(panel(figure, "priorities"))
    assert np.nanmin(means["mean mass"]) == pytest.approx(0.8)
    assert np.nanmax(means["largest ever"]) == 4
    assert panel(figure, "items").get_title(loc="left") == "items: 100 % of 1,000"


def test_the_ratio_a_rate_limiter_wants_is_drawn_next_to_the_measured_one() -> None:
    limited = steady(20, samples_per_insert=0.0, **RATES)
    for row in limited[8:]:
        row["samples_per_insert"] = 7.5
    axes = panel(drawn(look(Timeline(history_of(limited)))), "ratio")
    found = lines(axes)
    assert np.nanmedian(found["sampled"]) == pytest.approx(8)
    assert np.isnan(found["configured"][:8]).all()
    assert (found["configured"][8:] == 7.5).all()


def test_each_client_is_a_bar_with_a_cross_for_its_death(run: BufferState) -> None:
    axes = panel(drawn(run), "clients")
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["collect-0", "collect-1", "coordinator"]
    crosses = [line for line in axes.get_lines() if line.get_marker() == "X"]
    assert sorted(float(line.get_ydata()[0]) for line in crosses) == [1, 1, 2]
    bars = [line for line in axes.get_lines() if line.get_marker() != "X"]
    assert len(bars) == 6


def test_the_items_are_drawn_by_priority_age_and_collector(run: BufferState) -> None:
    figure = drawn(run)
    for name in ("distribution", "ages"):
        shares = [patch.get_height() for patch in panel(figure, name).patches[:40]]
        assert sum(shares) == pytest.approx(100, abs=0.2)
    collectors = panel(figure, "collectors")
    assert [label.get_text() for label in collectors.get_yticklabels()] == [
        *("collect-0 (21)", "collect-0 (11)", "loaded"),
    ]
    assert [patch.get_width() for patch in collectors.patches] == pytest.approx([70, 25, 5])


def test_the_headline_is_the_verdict(run: BufferState) -> None:
    assert "Looks healthy" in headline(drawn(run))
    found = [Finding(str(n), f"thing {n} is wrong") for n in range(8)]
    said = headline(drawn(run, found))
    assert "8 possible problems" in said
    assert "thing 5 is wrong" in said
    assert "and 2 more, see --json" in said
    assert "thing 6" not in said


@pytest.mark.full
def test_no_text_lies_on_another(run: BufferState, full: bool) -> None:
    found = [Finding(str(n), f"thing {n} is wrong, and that is quite a sentence") for n in range(9)]
    require_apart(drawn(run, found))
    require_apart(drawn(look()))
    many = [client(incarnation=n, pid=n) for n in range(2, 40)]
    joined = [event(EventKind.JOINED, n, incarnation=n, pid=10**7 + n) for n in range(2, 40)]
    for count in (3000, 20_000, 999_999) if full else (999_999,):
        require_apart(drawn(look(items=item_stats(np.ones(count)))))
    crowd = Timeline(history_of(steady(60, inserts=1e7, items_sampled=1e9), happened=joined))
    held = item_stats(np.logspace(-12, 9, 38), list(range(2, 40)))
    require_apart(drawn(look(crowd, clients=many, items=held, elements=10**9, length=10**9)))


def test_of_many_clients_some_are_named_and_all_are_counted(run: BufferState) -> None:
    held = item_stats(np.ones(40), list(range(2, 42)))
    joined = [event(EventKind.JOINED, n, incarnation=n, pid=n) for n in range(2, 42)]
    axes = panel(
        drawn(look(Timeline(history_of(steady(60), happened=joined)), items=held)), "collectors"
    )
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert (len(labels), labels[-1]) == (12, "29 others")
    assert sum(patch.get_width() for patch in axes.patches) == pytest.approx(100)


def test_without_a_history_the_panels_say_so() -> None:
    figure = drawn(look(items=item_stats(np.ones(10))))
    for name in ("rates", "items", "ratio", "clients", "age", "losses", "priorities"):
        assert words(panel(figure, name)) == "no history: none was recorded"
    assert not words(panel(figure, "ages"))


def test_without_items_or_priorities_the_panels_say_so() -> None:
    figure = drawn(look(prioritized=0, items=item_stats([], [2, 2])))
    assert words(panel(figure, "distribution")) == "this buffer has no priorities"
    figure = drawn(look(Timeline(history_of(steady(3))), write_count=0, prioritized=0, length=0))
    assert words(panel(figure, "distribution")) == "nothing was written"
    assert words(panel(figure, "ages")) == "the buffer is empty"
    assert words(panel(figure, "ratio")) == "nothing was written"
    assert words(panel(figure, "age")) == "nothing was sampled"
    assert "Nothing has been written yet" in headline(figure)
    figure = drawn(look(items=item_stats(np.zeros(4))))
    assert words(panel(figure, "distribution")) == "every priority is 0"


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Makes a buffer that is in use; the tests only read it or a copy."""
    path = tmp_path_factory.mktemp("plot") / "run $x$" / "living"
    with (
        Coordinator(path, capacity=64),
        Engine.open(path, None, role="collector") as engine,
        Engine.open(path, None, role="learner") as learner,
    ):
        items.write(engine, range(40))
        wait_for_records(path, 2)
        index, tickets = np.empty(16, np.int64), np.empty(16, np.int64)
        numbers = [np.empty(16, np.int64), np.empty(16, np.int64)]
        ring = ring_of(learner)
        out = [one.ctypes.data for one in numbers]
        ring.sample(16, 1, out, index.ctypes.data, tickets.ctypes.data, prioritized=True)
        ring.update(index, np.full(16, 2.0), tickets)
        items.write(engine, range(40, 50))
        wait_for_records(path, records(path) + 2)
        yield path


@pytest.mark.product(few=1)
@pytest.mark.parametrize(
    ("suffix", "begins"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_living_buffer_is_drawn(
    living: Path, tmp_path: Path, suffix: str, begins: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / f"report.{suffix}"
    before = contents(living).keys()
    with Directory.open(living) as directory, Files(directory).lock(5.0):
        assert main(["plot", str(living), "-o", str(picture)]) == 0  # plot takes no lock
    said = capsys.readouterr().out  # on a busy machine the coordinator may be late as well
    assert said.endswith(f"\npicture: {picture}\n")
    assert picture.read_bytes().startswith(begins)
    assert contents(living).keys() == before
    one = read_state(str(living), None)
    assert one.timeline is not None
    assert one.total("inserts") == 10 or one.total("inserts") == 50
    assert one.total("items_sampled") == 16
    assert {seen.role for seen in one.timeline.known.values()} == {
        *("coordinator", "collector", "learner"),
    }


@pytest.mark.full
def test_a_dead_run_is_drawn_up_to_its_death_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, picture = tmp_path / "dead", tmp_path / "report.png"
    with Program.python(RECORDER, path) as program:
        program.line()
        wait_for_records(path, 4)
        program.kill()
    before = contents(path)
    assert main(["plot", str(path), "-o", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert contents(path) == before
    assert not found["healthy"]
    assert found["findings"][0]["name"] == "all_clients_dead"
    assert f"collector {program.pid}" in found["findings"][0]["says"]
    assert found["history"]["grown"]["inserts"] > 0
    assert found["picture"] == str(picture)
    assert picture.stat().st_size > 10_000
    crosses = [
        line
        for line in panel(drawn(read_state(str(path), None)), "clients").get_lines()
        if line.get_marker() == "X"
    ]
    assert len(crosses) == 2


def test_a_copy_that_was_recovered_shows_what_was_recorded_before(
    living: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(living, copy)
    Engine.open(copy, None).close()
    assert main(["plot", str(copy), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["history"]["grown"]["items_sampled"] == 16


def test_a_directory_without_a_history_is_drawn(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(closed), "-o", str(tmp_path / "report.png")]) == 0
    assert "no history: none was recorded" in capsys.readouterr().out
    (closed / layout.HISTORY).write_bytes(b"something else")
    assert main(["plot", str(closed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "not a history of shmbuffer" in found["absent"]
    assert found["picture"] is None


@pytest.mark.full
def test_an_empty_buffer_records_and_a_uniform_one_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Engine.open(tmp_path / "empty", Settings(capacity=8)):
        assert main(["plot", str(tmp_path / "empty"), "-o", str(tmp_path / "a.png")]) == 0
        assert "nothing has been written yet" in capsys.readouterr().out
    with Engine.open(tmp_path / "records", harness.settings("records")) as engine:
        harness.write(engine.define(harness.schema("records")), range(5))
        assert main(["plot", str(tmp_path / "records"), "-o", str(tmp_path / "b.png")]) == 0
    with Engine.open(tmp_path / "uniform", Settings(capacity=8)) as engine:
        items.write(engine, [1])
        assert main(["plot", str(tmp_path / "uniform"), "-o", str(tmp_path / "c.png")]) == 0


def test_where_no_buffer_is_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(tmp_path / "none"), "-o", str(tmp_path / "a.png")]) == 3
    assert "none" in capsys.readouterr().err
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib_it_says_what_to_install(
    closed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", str(closed), "-o", "a.png"]) == 4
    assert capsys.readouterr().err == (
        "shmbuffer: --json prints the findings without a picture; the picture needs matplotlib, "
        f"which is not installed: {command('plot')}\n"
    )
    assert main(["plot", str(closed), "--json"]) == 0


def test_a_picture_replaces_a_link_and_other_users_may_not_write_to_it(
    closed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    picture, other = folder / "a.png", folder / "other"
    other.write_text("mine")
    picture.symlink_to(other)
    before = os.umask(0)
    try:
        assert main(["plot", str(closed), "-o", str(picture)]) == 0
    finally:
        os.umask(before)
    assert other.read_text() == "mine"
    assert stat.S_ISREG(picture.lstat().st_mode)
    assert not picture.lstat().st_mode & stat.S_IWOTH
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(folder)) == ["a.png", "other"]


def test_a_picture_that_cannot_be_written_is_an_error(
    closed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plot", str(closed), "-o", str(tmp_path / "none" / "a.png")]) == 4
    assert "a.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["-o", "a.jpg"], ["--last", "10"], ["--last", "0s"], ["--last", "x"]]
)
def test_a_senseless_argument_is_wrong_usage(
    closed: Path, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plot", str(closed), *argv])
    assert ended.value.code == 2
    assert argv[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("7d", 604800)]
)
def test_a_span_has_a_unit(text: str, seconds: float) -> None:
    assert plot._span(text) == seconds


def test_it_loads_no_torch(
    closed: Path, tmp_path: Path, loads_no_torch: Callable[..., None]
) -> None:
    loads_no_torch("plot", closed, "-o", tmp_path / "report.png")
