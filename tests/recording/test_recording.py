"""`top` beside the demo shows the kill, the restart and the recovery as they happen."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import unescape

import pytest

pytest.importorskip("rich", reason="what is recorded is drawn with it")

from tests.recording import animation, terminal
from tests.recording.__main__ import write
from tests.recording.frames import Frame, Story, plain

DOCS = Path(__file__).parents[2] / "docs"
TOP_OF_FILM = "$ shmbuffer top run/replay"

DEMO = """the run is in run
\x1b[1mstep 5,000: killed a collector with SIGKILL (pid 11)\x1b[0m
  a table of many
  lines
step 15,000: killed all with SIGKILL (pid 1, 2, 12, 13)
"""
VIEW = """run/replay           READY: {alive} alive
items         █░ 10.0%
rates                   now
items written/s       {rate}
items sampled/s       {rate}
clients  pid  state
{clients}

events
{events}
"""
ALIVE = {1: "running", 2: "running", 11: "running", 12: "running"}


def frame(
    clients: dict[int, str], *events: str, rate: str = "1,000", at_s: float = 0.0, demo: str = DEMO
) -> Frame:
    rows = "\n".join(f"collector {pid} {state}" for pid, state in clients.items())
    told = "\n".join(f"12:00:00  {event}" for event in events)
    view = VIEW.format(alive=0, rate=rate, clients=rows, events=told)
    return Frame(at_s, demo, f"\x1b[31m{view}\x1b[0m")


STORY = [
    frame(ALIVE, "joined  collector 11", at_s=1.0),
    frame(ALIVE | {11: "dead, reaped"}, "died    collector 11", at_s=2.0),
    frame(ALIVE | {11: "dead, reaped", 13: "running"}, "joined  collector 13", at_s=3.0),
    frame({1: "dead", 2: "running", 12: "dead", 13: "dead"}, "died    c 1, c 12, c 13", at_s=4.0),
    frame(
        dict.fromkeys((1, 2, 12, 13), "dead, reaped"),
        "died    c 1, c 12, c 13",
        "recovered  no client alive, 15,000 items kept, in 2.0 ms",
        rate="0",
        at_s=5.0,
    ),
    frame({21: "running", 22: "running"}, "joined  collector 21", at_s=6.0),
]


def test_the_story_is_found_in_its_order() -> None:
    story = Story(STORY)
    assert story.killed == [{11}, {1, 2, 12, 13}]
    assert story.missing == []
    assert [scene.frame.at_s for scene in story.scenes] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_the_first_scene_is_the_last_look_at_the_training_before_the_kill() -> None:
    empty = frame(ALIVE, "joined  collector 11", rate="0", at_s=0.0)
    early = frame(ALIVE, "joined  collector 11", rate="1", at_s=0.5)
    story = Story([empty, early, *STORY])
    assert story.missing == []
    assert story.scenes[0].frame.at_s == 1.0
    assert story.shots()[0].frame.at_s == 1.0


@pytest.mark.parametrize("left_out", [0, 1, 2, 4, 5])
def test_a_scene_without_a_frame_is_reported_as_missing(left_out: int) -> None:
    story = Story([one for at, one in enumerate(STORY) if at != left_out])
    assert len(story.missing) == 1, story.missing


def test_one_look_may_see_the_kill_of_all_and_the_recovery() -> None:
    story = Story([one for at, one in enumerate(STORY) if at != 3])
    assert story.missing == []
    assert [scene.frame.at_s for scene in story.scenes] == [1.0, 2.0, 3.0, 5.0, 5.0, 6.0]


def test_a_frame_that_is_half_drawn_shows_nothing() -> None:
    half = [Frame(one.at_s, one.demo, one.top.partition("events")[0]) for one in STORY]
    assert len(Story(half).missing) == 6


def test_tables_of_the_demo_are_left_out_of_what_it_tells() -> None:
    assert STORY[0].told == [
        "the run is in run",
        "\x1b[1mstep 5,000: killed a collector with SIGKILL (pid 11)\x1b[0m",
        "  ...",
        "step 15,000: killed all with SIGKILL (pid 1, 2, 12, 13)",
    ]


def test_pictures_need_nothing_from_elsewhere(tmp_path: Path) -> None:
    write(Story(STORY), tmp_path)
    still = (tmp_path / "images" / "top.svg").read_text()
    assert "SIGKILL" not in still
    assert "run/replay" in unescape(still).replace("\xa0", " ").replace("&#160;", " ")
    pictures = sorted((tmp_path / "images").glob("top-*.svg"))
    assert len(pictures) == 6
    for picture in pictures:
        drawn = picture.read_text()
        assert len(drawn) < 60_000
        assert set(re.findall(r"https?://[^\"\s]+", drawn)) == {"http://www.w3.org/2000/svg"}
        assert "SIGKILL" in drawn
    text = (tmp_path / "recordings" / "top.txt").read_text()
    assert "\n== 2.0 s: a collector was killed\n" in text
    assert "\x1b" not in text


def test_the_film_shows_each_frame_for_its_time_and_nothing_of_another() -> None:
    shots = Story(STORY).shots()
    assert [shot.frame.at_s for shot in shots] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    drawn = animation.svg(shots, width=80, title="a & b", still=1)
    ElementTree.fromstring(drawn)
    whole = sum(shot.seconds for shot in shots)
    since = 0.0
    for shot in shots:
        said = seen(drawn, 100 * (since + shot.seconds / 2) / whole)
        wanted = words(shot.title, *shot.frame.told, *shot.frame.plain[1].splitlines())
        assert said == wanted | words("$ shmbuffer demo --scratch-dir run", "─" * 80, TOP_OF_FILM)
        since += shot.seconds


def test_the_film_stays_at_the_kill_where_nothing_moves() -> None:
    shots = Story(STORY).shots()
    drawn = animation.svg(shots, width=80, title="a film", still=1)
    groups = re.findall(r'<g class="f still"[^>]*>(.*?)</g>', drawn)
    still = {unescape(text) for group in groups for text in re.findall(r">([^<>]+)</text>", group)}
    assert shots[1].title in still
    assert not {shot.title for at, shot in enumerate(shots) if at != 1} & still


def test_the_film_of_the_readme_is_small_and_needs_nothing_from_elsewhere() -> None:
    picture = DOCS / "images" / "demo.svg"
    assert picture.stat().st_size < 300_000
    drawn = picture.read_text()
    ElementTree.fromstring(drawn)
    assert set(re.findall(r"https?://[^\"\s]+", drawn)) == {"http://www.w3.org/2000/svg"}
    for title in ("a collector was killed", "the directory was recovered"):
        assert f">{title}</text>" in drawn
    readme = (DOCS.parent / "README.md").read_text().splitlines(True)
    assert "(docs/images/demo.svg)" in "".join(readme[:20])


def test_the_film_of_the_readme_begins_with_training() -> None:
    """Pages and prints show the first picture before the animation begins."""
    first = " ".join(seen((DOCS / "images" / "demo.svg").read_text(), 0.0))
    assert "two collectors write, a learner samples" in first
    assert re.search(r"READY: 4 alive", first)


def seen(drawn: str, percent: float) -> set[str]:
    """Returns the words of a film that are visible at this percentage of its length."""
    shown = re.sub(r"<g .*?</g>", "", drawn.partition("</style>")[2])
    for name, group in re.findall(r'animation-name:([\w-]+)">(.*?)</g>', drawn):
        frames = re.search(rf"@keyframes {name}{{(.*)}}$", drawn, re.M)
        assert frames is not None
        steps = {
            (100.0 if at == "to" else float(at.rstrip("%"))): what
            for names, what in re.findall(r"([^{}]+){visibility:(\w+)}", frames[1])
            for at in names.split(",")
        }
        if steps[max(at for at in steps if at <= percent)] == "visible":
            shown += group
    return {unescape(text) for text in re.findall(r">([^<>]+)</text>", shown)}


def words(*lines: str) -> set[str]:
    """Returns the groups of adjacent words in these lines."""
    return {found for line in lines for found in re.findall(r"\S+(?: \S+)*", plain(line))}


@pytest.mark.full  # tests/examples covers the same kills, and tests/cli/test_top.py the screens
@pytest.mark.slow
@pytest.mark.longest
@pytest.mark.timeout(600)
def test_top_shows_the_kill_the_restart_and_the_recovery_of_the_demo(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium", reason="the demo trains on one of its environments")
    if not terminal.is_installed():
        pytest.skip("tmux is not installed (Debian, Ubuntu: apt install tmux)")
    from tests.recording import recorder

    frames = list(recorder.frames(tmp_path, seed=0, max_minutes=8))
    assert "the demo ended with 0" in frames[-1].plain[0]
    story = Story(frames)
    one, everybody = story.killed
    assert (len(one), len(everybody)) == (1, 4)
    assert story.missing == []
    before, killed, restarted, all_killed, recovered, after = (s.frame for s in story.scenes)
    assert one < before.alive
    assert one <= killed.dead
    assert len(killed.alive) == 3
    assert not one & restarted.alive
    assert len(restarted.alive - before.alive) == 1  # the collector that replaced the killed one
    assert everybody >= restarted.alive
    assert everybody & all_killed.dead
    assert everybody <= recovered.dead
    assert not recovered.alive
    assert any(
        kind == "recovered" and re.search(r"no client alive, [\d,]{5,} items kept", text)
        for kind, text in recovered.events
    )
    assert after.alive
    assert not after.alive & everybody
