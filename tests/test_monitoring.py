"""Every metric that the dashboard and its page name is served."""

from __future__ import annotations

import itertools
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmbuffer import Coordinator
from shmbuffer.watch.metrics import COUNTERS, GAUGES

pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[1]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs" / "grafana.json").read_text())
PAGE = (ROOT / "docs" / "monitoring.md").read_text()
METRIC = re.compile(r"\bshmbuffer_\w+")
SAMPLE = re.compile(r"(?P<name>\w+)\{(?P<labels>.*)\} ")


def expressions() -> Iterator[tuple[str, str]]:
    """Yields title and expression of every query on the dashboard."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Returns the labels of each metric that a coordinator serves."""
    path = tmp_path_factory.mktemp("monitoring") / "buffer"
    with Coordinator(path, capacity=8, metrics_port=0) as coordinator:
        url = f"http://127.0.0.1:{coordinator.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
    found = [SAMPLE.match(line) for line in text.splitlines()]
    return {one["name"]: set(re.findall(r'(\w+)="', one["labels"])) for one in found if one}


def test_the_served_metrics_are_those_of_the_tables(served: dict[str, set[str]]) -> None:
    named = {f"shmbuffer_{name}_total" for name in COUNTERS}
    assert named | {f"shmbuffer_{name}" for name in GAUGES} <= served.keys()


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_every_metric_on_the_dashboard_is_served(
    title: str, expression: str, served: dict[str, set[str]]
) -> None:
    names = METRIC.findall(expression)
    assert names, title
    assert set(names) <= served.keys()


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_a_rate_is_of_what_only_grows_and_nothing_else_is(title: str, expression: str) -> None:
    rated = re.findall(r"(?:rate|increase)\((shmbuffer_\w+)\{[^}]*\}\[[\w$]+\]\)", expression)
    assert set(rated) == {name for name in METRIC.findall(expression) if name.endswith("_total")}


def test_labels_are_those_that_are_served(served: dict[str, set[str]]) -> None:
    text = json.dumps(DASHBOARD)
    asked = set(re.findall(r"\{(\w+)=~", text)) | set(re.findall(r"\{\{(\w+)\}\}", text))
    assert asked == {"directory"}
    assert all(asked <= labels for labels in served.values())


def test_every_choice_that_a_panel_refers_to_is_there() -> None:
    choices = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used - {"__rate_interval"} == choices == {"datasource", "directory"}


def test_no_panel_lies_on_another_and_each_has_a_number_of_its_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )


def test_the_page_names_metrics_that_are_served(served: dict[str, set[str]]) -> None:
    names = {name for name in METRIC.findall(PAGE) if name != "shmbuffer_"}
    assert names
    assert names <= served.keys()


def test_the_page_names_numbers_that_stats_has(tmp_path: Path) -> None:
    table = PAGE.split("## The numbers")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    with Coordinator(tmp_path / "buffer", capacity=8) as coordinator:
        stats = coordinator.stats().keys()
        of_buffer = coordinator.buffer.stats().keys()
    for row in rows:
        named = set(re.findall(r"`(\w+)`", row))
        assert named <= (stats if "(coordinator)" in row else stats & of_buffer), row
