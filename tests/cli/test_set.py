"""``set``: its output and its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shmbuffer import RateLimiter
from shmbuffer.cli import main
from shmbuffer.memory import Engine


def test_without_changes_it_says_what_is_set(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", str(closed)]) == 0
    assert capsys.readouterr().out == f"{closed}: no rate limiter is set\n"
    assert main(["set", str(closed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"path": str(closed), "rate_limiter": None}


def test_named_settings_change_and_the_rest_stays(
    closed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["set", str(closed), "samples_per_insert=4", "min_size=3", "when_no_peer=wait"]) == 0
    )
    capsys.readouterr()
    assert main(["set", str(closed), "samples_per_insert=0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rate_limiter"] == {
        "samples_per_insert": 0.5,
        "min_size": 3,
        "error_buffer": 4.0,
        "max_times_sampled": None,
        "when_no_peer": "wait",
        "max_staleness": None,
        "items_per_version": None,
    }
    assert main(["set", str(closed)]) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()[1:]] == [
        ["samples_per_insert", "0.5"],
        ["min_size", "3"],
        ["error_buffer", "4"],
        ["when_no_peer", "wait"],
    ]


@pytest.mark.parametrize("off", ["off", "none", "OFF"])
def test_off_removes_a_setting_of_the_limiter(
    closed: Path, off: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", str(closed), "samples_per_insert=4", "min_size=3"]) == 0
    assert main(["set", str(closed), f"samples_per_insert={off}"]) == 0
    with Engine.open(closed, None) as engine:
        assert engine.limiter == RateLimiter(min_size=3, when_no_peer="pass")
    assert main(["set", str(closed), f"min_size={off}"]) == 0
    with Engine.open(closed, None) as engine:
        assert engine.limiter is None
    capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("samples_per_insert", "'samples_per_insert' is not NAME=VALUE, where NAME is one of"),
        ("ratio=4", "'ratio=4' is not NAME=VALUE, where NAME is one of"),
        ("min_size=1.5", "min_size must be an integer or off, got '1.5'"),
        ("error_buffer=much", "error_buffer must be a number or off, got 'much'"),
    ],
)
def test_a_call_without_a_change_is_bad_usage(
    closed: Path, change: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["set", str(closed), change])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("samples_per_insert=-1", "samples_per_insert must be a number above 0"),
        ("min_size=9", "min_size is 9, but the buffer has room for only 8 items"),
        ("when_no_peer=WAIT", "when_no_peer must be 'pass', 'wait' or 'error', but is 'WAIT'"),
        ("max_times_sampled=1", "this buffer has priorities"),
    ],
)
def test_an_impossible_value_changes_nothing(
    closed: Path, change: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["set", str(closed), change]) != 0
    assert text in capsys.readouterr().err
    with Engine.open(closed, None) as engine:
        assert engine.limiter is None


def test_it_needs_no_torch(closed: Path, loads_no_torch: Callable[..., None]) -> None:
    loads_no_torch("set", closed, "samples_per_insert=4")
