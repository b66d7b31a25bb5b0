"""Prometheus reads the metrics of a directory from any process that serves them."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from shmbuffer import Coordinator, RateLimiter
from shmbuffer.extras import MissingExtra, command
from shmbuffer.memory import Engine
from shmbuffer.watch.metrics import COUNTERS, GAUGES
from tests.kit.programs import Program
from tests.kit.rings import engine_of
from tests.service import items

parser = pytest.importorskip("prometheus_client.parser")


def numbers(port: int | None) -> dict[str, float]:
    """Returns the values of one request by name; all must have the same label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    samples = [
        one for family in parser.text_string_to_metric_families(text) for one in family.samples
    ]
    assert len({tuple(one.labels.items()) for one in samples}) == 1
    return {one.name.removeprefix("shmbuffer_"): one.value for one in samples}


def test_every_number_is_there_and_right(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=8, metrics_port=0) as coordinator:
        items.write(engine_of(coordinator), range(5))
        items.write(engine_of(coordinator), range(6))
        before = coordinator.stats()
        found = numbers(coordinator.metrics_port)
        assert {*GAUGES, *(f"{name}_total" for name in COUNTERS)} <= found.keys()
        assert (found["size"], found["capacity"], found["inserts_total"]) == (8, 8, 11)
        assert (found["clients_alive"], found["processes"], found["deaths_total"]) == (1, 0, 0)
        stats = coordinator.stats()
        assert found["p_sum"] == stats["p_sum"]
        # The history may have been created in between.
        assert before["bytes"] <= found["bytes"] <= stats["bytes"]


def test_the_metrics_and_stats_tell_the_newest_weights(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=8, metrics_port=0) as coordinator:
        for version in (0, 1, 2):
            if version:
                coordinator.buffer.publish({"w": torch.ones(1)}, step=version * 10)
            found = numbers(coordinator.metrics_port)
            assert found["weights_version"] == version
            assert (found["weights_age_s"] > 0) == (version > 0)
            for stats in (coordinator.stats(), coordinator.buffer.stats()):
                assert stats["weights_version"] == version
                assert stats["weights_age_s"] >= found["weights_age_s"]


def test_the_metrics_show_how_far_each_side_is(tmp_path: Path) -> None:
    limiter = RateLimiter(4, min_size=2, error_buffer=20)
    with Coordinator(
        tmp_path / "buffer", capacity=8, alpha=None, metrics_port=0, rate_limiter=limiter
    ) as coordinator:
        items.write(engine_of(coordinator), range(5))
        found = numbers(coordinator.metrics_port)
        names = ("samples_per_insert", "error_buffer", "min_size", "samples_ahead", "limited")
        assert [found[name] for name in names] == [4, 20, 2, 12, 0]
        coordinator.set_rate(RateLimiter(max_times_sampled=1))
        assert numbers(coordinator.metrics_port)["queued"] == 5


def test_a_request_does_not_disturb_the_rates_of_stats(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=8, metrics_port=0) as coordinator:
        coordinator.stats()
        items.write(engine_of(coordinator), range(4))
        numbers(coordinator.metrics_port)
        assert coordinator.stats()["inserts_per_s"] > 0


def test_counters_go_on_under_the_next_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    with Program.shmbuffer("serve", path, "--capacity", 8, "--metrics-port", 0, "--json") as first:
        port = first.json()["metrics_port"]
        with Engine.open(path, None) as engine:
            items.write(engine, range(5))
            assert numbers(port)["inserts_total"] == 5
            first.kill()
            with Coordinator(path, on_existing="recover", metrics_port=0) as second:
                found = numbers(second.metrics_port)
                assert found["inserts_total"] == 5
                assert found["epoch_total"] == 0  # a client has survived


def test_a_port_in_use_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "one", capacity=8, metrics_port=0) as first:
        with pytest.raises(OSError, match=r"metrics.*in use.*choose another"):
            Coordinator(tmp_path / "two", capacity=8, metrics_port=first.metrics_port)
        assert not (tmp_path / "two").exists()
    with Coordinator(tmp_path / "two", capacity=8, metrics_port=first.metrics_port):
        pass  # the port is free again


def test_without_prometheus_client_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=re.escape(f"not installed: {command('metrics')}")):
        Coordinator(tmp_path / "buffer", capacity=8, metrics_port=0)
    assert not (tmp_path / "buffer").exists()


def test_no_metrics_server_listens_by_default(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=8) as coordinator:
        assert coordinator.metrics_port is None


def test_serve_makes_a_buffer_of_records(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    asked = ("--capacity", 8, "--storage", "LazyStackStorage", "--max-bytes", 1 << 20)
    with Program.shmbuffer("serve", path, *asked, "--json") as program:
        assert program.json()["event"] == "ready"
        with Engine.open(path, None) as engine:
            assert engine.settings.record_bytes == 1 << 20
