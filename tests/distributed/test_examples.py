"""The example and the demo run over three nodes of a real Ray cluster, one of which dies."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("gymnasium", reason="the examples train on one of its environments")

import ray

from shmbuffer.cli import exits, main
from shmbuffer.examples import double_dqn, nodes
from shmbuffer.examples.loopback import Loopback
from tests.distributed.cluster import on, state_of

pytestmark = pytest.mark.timeout(400)

EXAMPLE = Path(__file__).parents[2] / "examples" / "dqn_ray.py"
SMALL = partial(
    double_dqn.Config, hidden=16, batch_size=32, warmup_steps=100, evaluation_episodes=2
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Loopback]:
    with Loopback(3) as made:
        yield made


@pytest.mark.full  # test_sharded_deaths.py kills nodes of a cluster, too
def test_a_node_is_killed_with_its_workers(cluster: Loopback) -> None:
    """The workers die with the node, before they notice that it is gone."""
    name = cluster.names[-1]
    pid = ray.get(ray.remote(lambda: os.getpid()).options(**on(name)).remote())
    assert state_of(pid) not in "ZX"
    cluster.kill(name)
    assert state_of(pid) in "ZX"
    cluster.start(name)


@pytest.mark.full
@pytest.mark.slow
def test_the_example_goes_on_when_a_node_dies_and_has_its_items_back(
    cluster: Loopback, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("dqn_ray", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    returns = example.run(SMALL(), 5_000, str(tmp_path), cluster)
    assert len(returns) == 10
    assert all(each >= 8 for each in returns)  # no pole falls faster
    said = capsys.readouterr().out.splitlines()
    killed, back = said.index("killing node-3"), said.index("starting node-3 again")
    away = [line for line in said[killed:back] if "node-3 no answer" in line]
    assert away
    before = [items_in(line) for line in said[:killed] if line.startswith("step")]
    after = items_in(said[-1])
    assert after.keys() == {"node-1", "node-2", "node-3"}
    assert after["node-3"] >= max(items.get("node-3", 0) for items in before) > 0


def items_in(line: str) -> dict[str, int]:
    """Returns the number of items on each node that answers, as the example prints it."""
    found = re.findall(r"(node-\d) ([\d,]+)(?:,|$)", line)
    return {node: int(count.replace(",", "")) for node, count in found}


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_loses_a_keeper_and_a_node_and_no_item(
    cluster: Loopback,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = partial(
        nodes.NodesPlan, kill_keeper_at=300, kill_node_at=600, return_after=200, steps=1_200
    )
    monkeypatch.setattr(nodes, "NodesPlan", plan)
    monkeypatch.setattr(double_dqn, "Config", SMALL)
    monkeypatch.setattr(nodes, "Loopback", lambda count: contextlib.nullcontext(cluster))
    directory = tmp_path / "run"
    code = main(["demo", "--nodes", "3", "--json", "--scratch-dir", str(directory)])
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert (code, found["lost"], found["torn"]) == (exits.DONE, 0, 0)
    assert found["finished"]
    keeper, node = found["killed"]
    assert (keeper["what"], keeper["node"]) == ("the keeper", "node-2")
    assert (node["what"], node["node"]) == ("all", "node-3")
    for kill in (keeper, node):
        assert 0 < kill["items"] <= kill["back"]
    assert found["nodes"].keys() == {"node-1", "node-2", "node-3"}
    for one in found["nodes"].values():
        assert 0 < one["acknowledged"] <= one["items"]
        assert one["drawn"] > 0
        assert (one["lost"], one["torn"], one["repeated"]) == (0, 0, 0)
    assert "starting node-3 again" in said.err
    assert main(["inspect", str(directory / "replay"), "--json"]) == exits.DONE
    shards = json.loads(capsys.readouterr().out)["shards"]
    assert {node: shard["counters"]["length"] for node, shard in shards.items()} == {
        node: one["items"] for node, one in found["nodes"].items()
    }


def test_a_node_that_ray_cannot_start_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def add_node(self: Any, **_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.cluster_utils.Cluster.add_node", add_node)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--nodes", "2"]) == exits.REFUSED
    err = capsys.readouterr().err
    assert err.startswith("shmbuffer: Ray could not start node-1 on this machine (The current node")
