"""A client's view of the shards with a fake Ray: which shards are asked, lost and found."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import numpy as np
import pytest

ray = pytest.importorskip("ray")


from shmbuffer.distributed.message import pack  # noqa: E402
from shmbuffer.distributed.shards import member as member_module  # noqa: E402
from shmbuffer.distributed.shards import members as members_module  # noqa: E402
from shmbuffer.distributed.shards.member import Sent, Update  # noqa: E402
from shmbuffer.distributed.shards.members import Members  # noqa: E402
from shmbuffer.memory import Totals  # noqa: E402

DIED = ray.exceptions.ActorUnavailableError


class Wire:
    """Replaces the module ``ray``; answers arrive when the test releases them."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.come: dict[str, Any] = {}
        self.waits = 0

    def wait(self, refs: list[str], **options: Any) -> tuple[list[str], list[str]]:
        self.waits += options["timeout"] > 0
        return [ref for ref in refs if ref in self.come], [
            ref for ref in refs if ref not in self.come
        ]

    def get(self, ref: str, timeout: float | None = None) -> Any:
        answer = self.come[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Method:
    """A method of an actor; the reference to an answer is its name and the number of the call."""

    def __init__(self, name: str) -> None:
        self.name, self.calls = name, 0

    def remote(self, *args: Any) -> str:
        self.calls += 1
        return f"{self.name}{self.calls}"


class Answer:
    """The method of a keeper that calls a method of its owner."""

    def __init__(self, keeper: str) -> None:
        self.methods = {name: Method(f"{keeper}.{name}") for name in ("news", "step")}

    def remote(self, request: bytes) -> str:
        name, args = pickle.loads(request)
        return self.methods[name].remote(*args)


class Actor:
    """A keeper or the shard map."""

    def __init__(self, name: str) -> None:
        self._actor_id = name
        self.keepers, self.answer = Method(f"{name}.keepers"), Answer(name)


def news(length: int, identity: int = 7) -> Any:
    return pack((True, (identity, Totals(float(length), 1.0, 1.0, length), 100)))


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setattr(member_module, "PROBE_S", 0.0)
    monkeypatch.setattr(members_module, "PROBE_S", 0.0)
    return Wire()


@pytest.fixture
def members(wire: Wire) -> Members:
    """Makes the members for the nodes b and c, which have 10 items each."""
    wire.come["map.keepers1"] = {"b": Actor("b"), "c": Actor("c")}, []
    made = Members(wire, lambda: Actor("map"), "here", "a", 5.0, 1)
    wire.come |= {"b.news1": news(10), "c.news1": news(10)}
    made.refresh(all_of_them=True)
    assert [one.totals.length for one in made] == [10, 10]
    return made


def test_an_answer_after_its_deadline_is_dropped_and_nobody_waits_for_another(
    members: Members, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    _, c = members
    sent = [Sent("first", c.life), Sent("second", c.life)]
    assert not list(members.answers([(c, sent[0])]))
    assert not c.lives
    assert c.totals.length == 0
    assert "here: the shard of node c does not answer (no answer within 5 s); its 10" in caplog.text
    wire.come |= dict.fromkeys(("first", "second"), pack((True, "late")))
    waits = wire.waits
    assert not list(members.answers((c, one) for one in sent))
    assert wire.waits == waits
    c.learn(Totals(1.0, 1.0, 1.0, 1), 7)
    assert not list(members.answers((c, one) for one in sent)), "it is another life"
    assert [message for *_, message in members.answers([(c, Sent("first", c.life))])]


def test_a_message_that_failed_in_a_former_life_does_not_end_this_one(
    members: Members, wire: Wire
) -> None:
    _, c = members
    before = Sent("before", c.life)
    wire.come["before"] = DIED("gone", None)
    assert not list(members.answers([(c, before)]))
    c.learn(Totals(1.0, 1.0, 1.0, 1), 7)
    assert not list(members.answers([(c, before)]))
    assert c.lives


def test_a_shard_that_was_lost_is_asked_without_waiting_and_counts_again_when_it_answers(
    members: Members, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    b, c = members
    c.lose("test")
    waits = wire.waits
    members.refresh()
    members.refresh()
    assert members.living() == [b]
    assert members.missing() == "no answer from the shards of c"
    wire.come["c.news2"] = DIED("still starting", None)
    members.refresh()
    assert members.living() == [b]
    members.refresh()
    wire.come["c.news3"] = news(12)
    members.refresh()
    assert members.living() == [b, c]
    assert c.totals.length == 12
    assert wire.waits == waits
    assert "the shard of node c answers again" in caplog.text


def test_a_keeper_that_cannot_open_its_directory_is_missing_and_the_log_says_why(
    members: Members, wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    b, _c = members
    broken = pack((False, OSError("the disk is away"), ""))
    wire.come |= {"b.news2": news(10), "c.news2": broken}
    members.refresh(all_of_them=True)
    assert members.living() == [b]
    assert caplog.text.count("OSError: the disk is away") == 1
    for again in range(3, 6):
        wire.come[f"c.news{again}"] = broken
        members.refresh()
        members.refresh()
    assert members.living() == [b]
    assert caplog.text.count("OSError: the disk is away") == 1


def test_priorities_that_wait_for_a_message_to_a_dead_shard_are_lost(members: Members) -> None:
    _, c = members
    update = Update(7, np.arange(3), np.ones(3), None)
    c.update(update)
    assert update.found is None
    c.lose("test")
    assert update.found == (0, 0, 3)


def test_a_node_that_is_back_has_its_keeper_asked_before_anybody_counts_on_it(
    members: Members, wire: Wire
) -> None:
    b, c = members
    before = Sent("before", c.life)
    new = Actor("c-again")
    members.refresh()
    wire.come["map.keepers2"] = {"b": b.keeper, "c": new, "d": Actor("d")}, ["e"]
    members.refresh()
    assert c.keeper is new
    assert members.living() == [b]
    assert members.missing() == "no answer from the shards of c, d, e"
    assert not list(members.answers([(c, before)]))
    members.refresh()
    wire.come["c-again.news1"] = news(10)
    members.refresh()
    assert members.living() == [b, c]
    assert members.by_identity() == {7: c}


def test_a_map_that_has_died_is_found_by_its_name_and_asked_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = iter([Actor("old"), Actor("new")])
    wire.come = {"old.keepers1": DIED("gone", None), "new.keepers1": ({"b": Actor("b")}, [])}
    assert [one.node for one in Members(wire, lambda: next(maps), "here", "a", 5.0, 1)] == ["b"]
    monkeypatch.setattr(members_module, "START_S", 0.0)
    with pytest.raises(RuntimeError, match="here: the shard map does not answer"):
        Members(wire, lambda: Actor("old"), "here", "a", 5.0, 1)
