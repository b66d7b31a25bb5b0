"""Events are derived from the difference of two snapshots and reported in a fixed order."""

from __future__ import annotations

from typing import Any

import pytest

from shmbuffer.watch.events import between

LAST = {
    "items": 15_000,
    "rolled_back": 16,
    "rolled_forward": 0,
    "checksum_failed": 0,
    "words_refused": 0,
    "priorities_repaired": 0,
    "unverified": 0,
    "clients_retired": 4,
    "reason": "no client alive",
    "duration_ms": 2.5,
}


def client(incarnation: int, role: str = "collector", **other: Any) -> dict[str, Any]:
    return {
        "incarnation": incarnation,
        "role": role,
        "pid": 100 + incarnation,
        "alive": True,
        "state": "running",
        **other,
    }


def dead(incarnation: int) -> dict[str, Any]:
    return client(incarnation, alive=False, state="dead")


def look(*clients: dict[str, Any], **other: Any) -> dict[str, Any]:
    counters = {"reaped": other.pop("reaped", 0), "rolled_back": other.pop("rolled_back", 0)}
    return {
        "clients": clients,
        "counters": counters,
        "epoch": 0,
        "state": "READY",
        "recovery": None,
        **other,
    }


BOTH = look(client(1), client(2, "learner"))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (BOTH, BOTH, []),
        (look(), BOTH, [("joined", "collector 101, learner 102")]),
        (BOTH, look(client(1)), [("left", "learner 102")]),
        (look(client(1)), look(dead(1)), [("died", "collector 101")]),
        (look(client(1)), look(reaped=1), [("died", "collector 101")]),
        (look(dead(1)), look(reaped=1), [("reaped", "collector 101")]),
        (
            look(dead(1), client(2)),
            look(reaped=1),
            [("reaped", "collector 101"), ("left", "collector 102")],
        ),
        (
            look(client(1), client(2)),
            look(reaped=1),
            [("left or died", "collector 101, collector 102")],
        ),
        (
            look(client(1)),
            look(reaped=1, rolled_back=1),
            [("died", "collector 101"), ("rolled back", "1 slot claimed by dead clients")],
        ),
        (look(client(1)), look(client(1, state="stopped")), [("stopped", "collector 101")]),
        (look(client(1, state="stopped")), look(client(1)), [("continued", "collector 101")]),
        (look(client(1, state="stopped")), look(dead(1)), [("died", "collector 101")]),
    ],
)
def test_clients_that_join_and_leave_are_events(
    before: dict[str, Any], now: dict[str, Any], told: list[tuple[str, str]]
) -> None:
    assert list(between(before, now).kinds) == told


def test_a_recovery_between_two_looks_says_who_had_died_and_what_was_found() -> None:
    now = look(client(3), epoch=1, reaped=2, rolled_back=16, recovery=LAST)
    change = between(BOTH, now)
    assert list(change.kinds) == [
        ("died", "collector 101, learner 102"),
        ("rolled back", "16 slots claimed by dead clients"),
        (
            "recovered",
            "no client alive, 15,000 items kept, 16 rolled back, 4 clients reaped, in 2.5 ms",
        ),
        ("joined", "collector 103"),
    ]
    assert [(one["pid"], how) for one, how in change.departed] == [(101, "died"), (102, "died")]


def test_a_recovery_that_is_seen_while_it_runs_is_told_twice() -> None:
    begun, over = look(epoch=1, state="RECOVERING"), look(epoch=1, recovery=LAST)
    assert [kind for kind, _ in between(look(), begun).kinds] == ["recovering"]
    assert between(begun, begun).kinds == []
    assert [kind for kind, _ in between(begun, over).kinds] == ["recovered"]


def test_a_recovery_by_a_version_that_keeps_no_record_is_told_without_figures() -> None:
    change = between(look(), look(epoch=1))
    assert list(change.kinds) == [("recovered", "its result was not recorded")]
