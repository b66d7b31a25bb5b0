"""Quotas of all shards are computed correctly if messages are lost or late, or shards die."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shmbuffer import RateLimiter, RateLimitError
from shmbuffer.distributed.shards.flow.bank import (
    GONE_S,
    LAPSE_S,
    Bank,
    BankState,
    Report,
    latest,
)
from shmbuffer.memory.flow.sides import ALONE_S
from tests.selection import seeds

CAPACITY = 10_000


@dataclass
class Shard:
    """A ring and its keeper, as far as the bank sees them."""

    name: str
    room: int = 0
    used: int = 0
    pending: int = 0
    drawn: int = 0
    wanted: int = 0
    answers: bool = True
    state: BankState | None = None
    late: list[int] = field(default_factory=list)  # orders whose answer was lost

    @property
    def left(self) -> int:
        return self.room - self.used - self.pending

    def report(self) -> Report:
        return Report(
            *(max(self.room, self.used + self.pending), self.used, self.drawn, self.pending),
            length=min(self.used, CAPACITY),
            capacity=CAPACITY,
            wanted=self.wanted,
            has_writers=True,
        )


@dataclass
class Draws:
    """A learner with its own clock."""

    key: tuple[int, int] = (-1, -1)
    granted: int = 0
    spent: int = 0
    ends: float = 0.0


class World:
    """Shards, learners and a bank, with messages that may be lost."""

    def __init__(self, limiter: RateLimiter, shards: int, learners: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.limiter, self.now = limiter, 100.0
        self.shards = {f"s{at}": Shard(f"s{at}") for at in range(shards)}
        self.learners = {f"l{at}": Draws() for at in range(learners)}
        self.orders: dict[str, int] = {}
        self.number = 1
        self.bank = Bank.new(1, None, self.now)
        self.bank.set(limiter, {k: one.report() for k, one in self.shards.items()}, self.now)
        self.round()

    def round(self, lost: float = 0.0) -> None:
        """Runs a round of `FlowControl` in which each keeper's answer may be lost."""
        state = self.bank.state
        self.bank.ask(self.now)
        reports = {}
        for name, one in self.shards.items():
            if one.answers:
                one.state = state
                if name in self.orders:
                    one.room = self.orders[name]
                if self.random.random() >= lost:
                    reports[name] = one.report()
        self.bank.confirm(state)
        self.bank.hear(reports, self.now)
        self.orders = self.bank.plan(reports, self.now)
        for name in reports:
            self.shards[name].state = self.bank.state
        self.bank.confirm(self.bank.state)

    def start_again(self) -> None:
        """Replaces the bank with a new one, which knows what the keepers report."""
        self.number += 1
        self.orders = {}
        found = latest(one.state for one in self.shards.values() if one.answers)
        self.bank = Bank.new(self.number, found, self.now)

    def write(self, name: str, count: int) -> bool:
        one = self.shards[name]
        fits = count <= one.left
        one.wanted = 0 if fits else count
        one.pending += count if fits else 0
        return fits

    def commit(self, name: str) -> None:
        one = self.shards[name]
        one.used, one.pending = one.used + one.pending, 0

    def sample(self, learner: str, count: int) -> bool:
        one = self.learners[learner]
        if one.spent + count > one.granted or self.now >= one.ends:
            asked = self.now
            known = (one.granted, one.spent) if one.key == self.bank.key else (0, 0)
            granted = self.bank.grant(learner, *known, count, self.now)
            if one.key != self.bank.key:
                one.key, one.spent = self.bank.key, 0
            one.granted, one.ends = granted, asked + LAPSE_S
        living = [shard for shard in self.shards.values() if shard.answers]
        if one.spent + count > one.granted or not living:
            return False
        one.spent += count
        self.random.choice(living).drawn += count
        return True

    @property
    def ahead(self) -> tuple[float, float]:
        """Returns the true lead of the inserts, with all open claims and without them."""
        state, ratio = self.bank.state, self.limiter.samples_per_insert or 0.0
        began = sum(one.used for one in state.began.values())
        inserts = sum(one.used for one in self.shards.values()) - began - state.free
        pending = sum(one.pending for one in self.shards.values())
        drawn = sum(one.drawn for one in self.shards.values()) - state.passed
        return (inserts + pending) * ratio - drawn, inserts * ratio - drawn

    def require_in_step(self) -> None:
        most, least = self.ahead
        assert most <= self.limiter.tolerance + 1e-6
        assert least >= -self.limiter.tolerance - 1e-6


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_the_ratio_is_kept_whatever_is_lost_late_or_dead(seed: int) -> None:
    choice = random.Random(seed)
    ratio = choice.choice([0.25, 1.0, 4.0])
    limiter = RateLimiter(
        ratio,
        min_size=choice.choice([1, 50]),
        error_buffer=400,
        when_no_peer=choice.choice(["wait", "pass"]),
    )
    world = World(limiter, choice.randint(1, 4), choice.randint(1, 3), seed)
    written = drawn = 0
    for _ in range(600):
        world.now += choice.choice([0.001, 0.02, 0.02, 0.3, 1.5])
        match choice.randrange(12):
            case 0 | 1 | 2 | 3:
                name = choice.choice(list(world.shards))
                written += world.write(name, choice.choice([1, 7, 40]))
            case 4 | 5:
                world.commit(choice.choice(list(world.shards)))
            case 6 | 7 | 8:
                drawn += world.sample(choice.choice(list(world.learners)), choice.choice([8, 64]))
            case 9:  # a learner dies and another one comes
                gone = choice.choice(list(world.learners))
                del world.learners[gone]
                world.learners[f"{gone}'"] = Draws()
            case 10:  # a node is away for a while: its writers continue or die
                one = choice.choice(list(world.shards.values()))
                one.answers = not one.answers
                if choice.random() < 0.5:
                    one.pending = 0
            case 11:
                if choice.random() < 0.2 and any(one.answers for one in world.shards.values()):
                    world.start_again()
        world.round(lost=choice.choice([0.0, 0.0, 0.3]))
        world.require_in_step()
    assert written > 20
    assert drawn > 5


def until_both_wait(world: World, write: int, draw: int) -> tuple[int, int]:
    """Lets all sides continue while they may; returns how many writes and samples were made."""
    made = [0, 0]
    idle = 0
    while idle < 20 and sum(made) < 400:
        world.now += 0.01
        world.round()
        before = sum(made)
        for name in world.shards:
            if world.write(name, write):
                world.commit(name)
                made[0] += 1
        for name in world.learners:
            made[1] += world.sample(name, draw)
        idle = idle + 1 if sum(made) == before else 0
    return made[0], made[1]


@pytest.mark.product(few=8)
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("learners", [1, 2, 3])
@pytest.mark.parametrize(("ratio", "write", "draw"), [(1, 1, 1), (4, 10, 32), (0.5, 64, 8)])
def test_nobody_waits_for_ever_with_room_for_a_write_and_a_sample(
    shards: int, learners: int, ratio: float, write: int, draw: int
) -> None:
    """Each living shard has a writer, and all quotas are requested."""
    buffer = max(1.0, ratio, write * ratio + draw)
    world = World(RateLimiter(ratio, error_buffer=buffer, when_no_peer="wait"), shards, learners)
    assert sum(until_both_wait(world, write, draw)) >= 400
    world.require_in_step()


@pytest.mark.parametrize("dead", [1, 2])
def test_the_quotas_of_dead_shards_leave_room_for_the_others(dead: int) -> None:
    limiter = RateLimiter(2, error_buffer=8 * (5 * 2 + 16), when_no_peer="wait")
    world = World(limiter, 3, 2)
    until_both_wait(world, 5, 16)
    for name in list(world.shards)[:dead]:
        world.shards[name].answers = False
    living = {k: one for k, one in world.shards.items() if one.answers}
    away = {k: one for k, one in world.shards.items() if not one.answers}
    world.shards = living
    assert sum(until_both_wait(world, 5, 16)) >= 400
    world.shards = living | away
    world.require_in_step()


def test_a_shard_that_nobody_writes_to_gives_its_quota_back_to_who_waits() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 4, 0)
    for _ in range(3):
        world.round()
    assert all(one.left > 0 for one in world.shards.values()), "each has a piece"
    assert not world.write("s0", 90)
    for _ in range(4):
        world.round()
    assert world.write("s0", 90), "without a single sample"
    assert not world.write("s1", 20)


def test_what_a_dead_shard_had_been_granted_counts_until_it_is_read() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 2, 1)
    world.round()
    granted = world.shards["s1"].room
    assert granted == 25
    world.shards["s1"].answers = False
    world.write("s0", 77)
    for _ in range(5):
        world.round()
    assert not world.write("s0", 77), "25 of 101 may have been written"
    world.shards["s1"].answers = True
    for _ in range(5):
        world.round()
    assert world.write("s0", 77)


def test_what_a_dead_learner_had_been_granted_is_read_from_the_shards() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 1, 2)
    assert world.sample("l0", 10)
    assert world.bank.samples > 10, "it was granted more than it drew"
    for _ in range(10):
        while world.sample("l1", 10):
            pass
        world.now += 0.02
        world.round()
    assert world.shards["s0"].drawn < 90
    world.now += GONE_S + 0.1
    world.round()
    while world.sample("l1", 10):
        world.round()
    assert world.shards["s0"].drawn == 90, "and 9 more would be too few"


def test_the_next_bank_grants_nothing_to_learners_before_old_quotas_have_lapsed() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 2, 1)
    assert world.sample("l0", 10)
    world.start_again()
    world.round()
    assert world.sample("l0", 10), "by its old quota"
    world.learners["l1"] = Draws()
    assert not world.sample("l1", 10)
    world.now += GONE_S
    world.round()
    world.round()
    assert world.sample("l1", 10)


def test_the_next_bank_knows_what_was_granted_to_a_shard_that_is_away() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 2, 1)
    world.round()
    world.shards["s1"].answers = False
    world.start_again()
    world.write("s0", 77)
    for _ in range(5):
        world.round()
    assert not world.write("s0", 77)
    assert not world.write("s0", 76)
    for _ in range(5):
        world.round()
    assert world.write("s0", 76)


def test_the_first_items_are_free() -> None:
    world = World(RateLimiter(2, min_size=30, error_buffer=10, when_no_peer="wait"), 2, 1)
    assert not world.write("s0", 36)
    for _ in range(5):
        world.round()
    assert not world.write("s0", 36)
    assert not world.write("s0", 35)
    for _ in range(5):
        world.round()
    assert world.write("s0", 35)
    assert not world.write("s1", 1)


def test_writes_go_on_while_fewer_than_min_size_items_are_left() -> None:
    """A shard with most of the items has died."""
    world = World(RateLimiter(1, min_size=50, error_buffer=20, when_no_peer="wait"), 2, 1)
    for _ in range(3):
        world.write("s0", 55)
        world.round()
    world.commit("s0")
    world.shards["s0"].answers = False
    assert not world.write("s1", 15)
    for _ in range(3):
        world.round()
    assert world.write("s1", 15)


def test_a_shard_that_was_emptied_begins_the_ratio_again() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 2, 1)
    world.round()
    assert world.write("s0", 20)
    world.commit("s0")
    world.round()
    before = world.bank.state.setting
    one = world.shards["s0"]
    one.used = one.room = 0
    world.orders = {}
    world.round()
    assert world.bank.state.setting == before + 1
    assert (world.bank.inserted, world.bank.drawn) == (0, 0)


def test_a_side_that_nobody_is_on_is_passed_uncounted_or_waited_for() -> None:
    for policy in ("pass", "wait"):
        world = World(RateLimiter(1, error_buffer=20, when_no_peer=policy), 1, 0)
        for _ in range(100):
            if world.write("s0", 5):
                world.commit("s0")
            world.now += ALONE_S / 4
            world.round()
        passed = world.shards["s0"].used > 100
        assert passed == (policy == "pass")
        world.learners["l0"] = Draws()
        world.sample("l0", 1)
        world.round()
        world.require_in_step()


def test_a_sample_that_could_never_be_made_is_refused() -> None:
    world = World(RateLimiter(1, error_buffer=20, when_no_peer="wait"), 1, 1)
    with pytest.raises(RateLimitError, match=r"must be at least 20\.5 to sample 41 items"):
        world.sample("l0", 41)
    assert not world.sample("l0", 40), "once there are inserts"


def test_an_order_whose_answer_is_lost_counts_as_obeyed() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 2, 1)
    world.round()
    assert not world.write("s0", 70)
    world.round()
    world.round(lost=1.0)
    assert world.write("s0", 70), "the order has arrived"
    world.shards["s0"].answers = False
    world.write("s1", 60)
    for _ in range(5):
        world.round()
    assert not world.write("s1", 60)


def test_no_learner_is_lent_what_the_next_bank_would_not_know_of() -> None:
    world = World(RateLimiter(1, error_buffer=1_000, when_no_peer="wait"), 2, 3)
    for _ in range(100):
        for name in world.learners:
            world.sample(name, 10)
        found = latest(one.state for one in world.shards.values())
        assert found is not None
        assert sum(one.granted for one in world.learners.values()) <= found.samples
        assert world.bank.samples <= found.samples


def test_idle_quotas_are_half_of_the_error_buffer_at_most_whoever_joins() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 1, 1)
    for at in range(1, 5):
        world.round()
        world.shards[f"s{at}"] = Shard(f"s{at}")
    for _ in range(3):
        world.round()
    assert sum(one.left for one in world.shards.values()) == 50


def test_a_bank_without_shards_waits_for_the_first() -> None:
    world = World(RateLimiter(1, error_buffer=100, when_no_peer="wait"), 0, 1)
    world.round()
    world.shards["s0"] = Shard("s0")
    world.round()
    world.round()
    assert world.write("s0", 50)
