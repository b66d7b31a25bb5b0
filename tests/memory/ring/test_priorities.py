"""The priority tree, compared with a plain cumulative sum."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmbuffer._native import _core
from shmbuffer.memory import Engine, Ring, Settings
from shmbuffer.memory.format import priorities
from tests.kit.rings import ring_of
from tests.memory import power_oracle, tree_oracle
from tests.memory.rows import (
    Floats,
    Maker,
    Parent,
    child,
    contents,
    draw,
    mutex_held,
    place,
    require_sound,
    sample,
    schema,
    until_it_sleeps,
    write,
)
from tests.selection import seeds


def slots_file(ring: Ring) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(ring.seat.mapped.slots, np.uint8)


def leaves_of(engine: Engine) -> Floats:
    """Returns the expected masses: (raw + eps) ** alpha of committed items, else 0."""
    ring = ring_of(engine)
    mass = np.zeros(ring.elements)
    items, raw = ring.live.committed(), ring.tree.priorities()
    mass[items] = power_oracle.masses_of(raw[items], ring.tree.alpha, ring.tree.eps)
    return mass


def require_tree(engine: Engine) -> None:
    """Checks leaves, sums and minima against tree_oracle.py, bit for bit."""
    ring = ring_of(engine)
    mass = leaves_of(engine)
    assert ring.tree.mass().tobytes() == mass.tobytes()
    assert tree_oracle.differences(ring.live) == 0
    assert math.isclose(ring.tree.p_sum, math.fsum(mass), rel_tol=1e-12, abs_tol=0)
    positive = mass[mass > 0]
    assert ring.tree.p_min == (positive.min() if len(positive) else 0)
    assert ring.tree.p_sum == ring.live.levels[-1][0][0]
    require_sound(engine)


def chi_square(index: np.ndarray[tuple[int], np.dtype[np.int64]], mass: Floats) -> float:
    """Returns the distance between drawn frequencies and masses, in standard deviations."""
    items = np.flatnonzero(mass)
    frequencies = np.bincount(index, minlength=len(mass))
    assert frequencies.sum() == frequencies[items].sum(), "drawn without mass"
    expected = len(index) * mass[items] / mass.sum()
    assert expected.min() > 5
    freedom = max(len(items) - 1, 1)
    statistic = ((frequencies[items] - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / math.sqrt(2 * freedom))


# The sums.


SIZES = [*range(1, 41), 255, 256, 257, 1000, 4097]


@pytest.mark.product(few=12)
@pytest.mark.parametrize("capacity", SIZES)
def test_every_node_is_the_sum_of_its_children(capacity: int) -> None:
    with Engine.anonymous(Settings(capacity=capacity, alpha=0.7, eps=1e-3)) as engine:
        ring = define(engine, capacity)
        rng = np.random.default_rng(capacity)
        for _ in range(4):
            count = int(rng.integers(1, capacity + 3))
            write(ring, range(count), rng.random(count))
            require_tree(engine)
            index = rng.integers(capacity, size=count)
            ring.update(index, rng.random(count) * 10.0 ** rng.integers(-6, 6))
            require_tree(engine)


def define(engine: Engine, capacity: int, lanes: tuple[int, ...] = ()) -> Ring:
    return engine.define(schema(capacity, lanes))


@pytest.mark.parametrize("seed", seeds(3, 8))
def test_any_sequence_of_calls_leaves_the_tree_as_its_leaves_say(make: Maker, seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = [1, 16, 17, 33, 100, 300, 1000, 5000][seed]
    lanes = [(), (), (3,), (), (2, 2), (), (), (17,)][seed]
    engine = make(capacity, lanes, alpha=float(rng.random()), eps=1e-8)
    ring = ring_of(engine)
    for step in range(40):
        count = int(rng.integers(1, min(capacity, 40) + 1))
        raw = rng.random(count * ring.width) * (rng.random(count * ring.width) < 0.8)
        match step % 8:
            case 0 | 1:
                write(ring, range(count * ring.width), raw)
            case 2:
                write(ring, range(count * ring.width))
            case 3:
                place(ring, rng.permutation(capacity)[:count], range(count * ring.width), raw)
            case 4:
                where = rng.permutation(capacity)[:count]
                place(ring, where, range(count * ring.width), in_place=True)
            case 5:
                ring.claims.claim(count)
                ring.claims.abort()
            case 6:
                ring.tree.set_alpha(float(rng.random() * 2))
            case 7:
                index = rng.integers(ring.elements, size=len(raw))
                ring.update(index, raw)
        if step % 5 == 0 or capacity < 50:
            require_tree(engine)
    require_tree(engine)
    ring.empty()
    require_tree(engine)
    assert (ring.tree.p_sum, ring.tree.p_min) == (0.0, 0.0)


def test_the_same_leaves_give_the_same_bits_on_every_path(make: Maker) -> None:
    """The order of summation is the same for batches, single writes, updates and recomputation."""
    raw = np.random.default_rng(3).random(300) * 10.0 ** np.random.default_rng(4).integers(
        -8, 8, 300
    )
    sums = set()

    def build(fill: Callable[[Ring], object]) -> None:
        ring = ring_of(make(300, alpha=0.6, eps=1e-8))
        fill(ring)
        assert ring.tree.priorities().tobytes() == raw.tobytes()
        data = slots_file(ring)
        sums.add(data[_core.sections(300, 1)["mass"] :].tobytes())

    def one_by_one(ring: Ring) -> None:
        for number in range(300):
            write(ring, [number], raw[number : number + 1])

    def updated(ring: Ring) -> None:
        write(ring, range(300), np.ones(300))
        order = np.random.default_rng(5).permutation(300)
        for part in np.array_split(order, 7):
            ring.update(part, raw[part])

    def recomputed(ring: Ring) -> None:
        write(ring, range(300), raw)
        ring.tree.set_alpha(0.1)
        ring.tree.set_alpha(0.6)

    def rebuilt(ring: Ring) -> None:
        write(ring, range(300), raw)
        slots_file(ring)[_core.sections(300, 1)["mass"] :] = 7
        ring.seat.native.rebuild()

    def split(ring: Ring) -> None:
        ring.claims.claim(300)
        ring.claims.commit(raw)

    build(lambda ring: write(ring, range(300), raw))
    build(one_by_one)
    build(lambda ring: place(ring, range(300), range(300), raw))
    build(updated)
    build(recomputed)
    build(rebuilt)
    build(split)
    assert len(sums) == 1


@pytest.mark.product(few=1)
@given(
    st.lists(
        st.floats(0, 1e290) | st.sampled_from([0.0, 5e-324, 1e-308, 1e-30, 1.0, 1e30, 1e290]),
        min_size=1,
        max_size=70,
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_every_drawn_item_has_mass_whatever_the_priorities(raw: list[float], alpha: float) -> None:
    """Priorities may differ by any factor, and rounding may move the end of a node."""
    with Engine.anonymous(Settings(capacity=len(raw), alpha=alpha, eps=0.0)) as engine:
        ring = define(engine, len(raw))
        write(ring, range(len(raw)), np.array(raw))
        require_tree(engine)
        index, _, weights = draw(ring, 300, beta=1.0, prioritized=True)
        if ring.tree.p_sum > 0:
            assert (ring.tree.mass()[index] > 0).all()
        assert ((weights >= 0) & (weights <= 1)).all()


def test_a_draw_that_rounding_sends_behind_the_last_mass_takes_the_nearest(make: Maker) -> None:
    """The sum is made larger than rounding could make it."""
    ring = ring_of(make(40, alpha=1.0, eps=0.0))
    write(ring, range(40), (np.arange(40) % 16 < 9).astype(np.float64))
    sections = _core.sections(40, 1)
    (leaf_parents, _), (root, _) = ring.live.levels
    leaf_parents[:3] *= 1.5
    root[0] *= 1.5
    index = draw(ring, 5000, prioritized=True)[0]
    assert (ring.tree.mass()[index] > 0).all()
    assert {8, 24} <= set(index)
    slots_file(ring)[sections["mass"] :][:] = 0
    root[0] = 1.0  # no mass below it
    assert set(draw(ring, 100, prioritized=True)[0]) <= set(range(40))


# Draws.


@pytest.mark.product(few=6)
@pytest.mark.parametrize("capacity", [1, 2, 15, 16, 17, 40, 256, 257, 1000])
@pytest.mark.parametrize("lanes", [(), (3,)])
def test_items_are_drawn_in_proportion_to_their_mass(capacity: int, lanes: tuple[int, ...]) -> None:
    with Engine.anonymous(Settings(capacity=capacity, alpha=0.8, eps=0.1)) as engine:
        ring = define(engine, capacity, lanes)
        rng = np.random.default_rng(capacity)
        raw = rng.random(ring.elements) * (rng.random(ring.elements) < 0.7)
        write(ring, range(ring.elements), raw)
        drawn = sample(ring, 200_000, key=11, prioritized=True)
        assert drawn.index.tolist() == drawn.numbers.tolist()
        assert abs(chi_square(drawn.index, ring.tree.mass())) < 5


def test_an_item_without_mass_is_not_drawn(make: Maker) -> None:
    ring = ring_of(make(50, alpha=1.0, eps=0.0))
    raw = np.zeros(50)
    raw[[0, 17, 49]] = [1.0, 2.0, 3.0]
    write(ring, range(50), raw)
    index = draw(ring, 60_000, prioritized=True)[0]
    assert abs(chi_square(index, raw)) < 5


@pytest.mark.product(few=4)
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_masses_that_are_all_zero_are_drawn_uniformly(make: Maker, alpha: float) -> None:
    ring = ring_of(make(10, alpha=alpha, eps=0.0))
    write(ring, range(5), np.zeros(5))
    assert ring.tree.p_sum == 0.0
    index, _, weights = draw(ring, 50_000, beta=0.7, prioritized=True)
    assert abs(chi_square(index, np.array([1.0] * 5 + [0.0] * 5))) < 5
    assert (weights == 1.0).all()


def test_alpha_zero_draws_everything_alike(make: Maker) -> None:
    ring = ring_of(make(10, alpha=0.0, eps=0.0))
    write(ring, range(10), np.arange(10.0))
    assert ring.tree.mass().tolist()[:10] == [1.0] * 10
    assert abs(chi_square(draw(ring, 50_000, prioritized=True)[0], np.ones(10))) < 5


def test_a_large_batch_is_drawn_like_a_small_one(make: Maker) -> None:
    """The mutex is held for 512 draws at a time."""
    ring = ring_of(make(100, alpha=1.0, eps=0.0))
    write(ring, range(100), np.arange(100.0))
    once = draw(ring, 100_000, key=9, prioritized=True)[0]
    assert abs(chi_square(once, np.arange(100.0))) < 5
    assert draw(ring, 511, key=9, prioritized=True)[0].tolist() == once[:511].tolist()


# Weights.


@pytest.mark.product(few=4)
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_are_those_of_the_paper_over_the_largest(make: Maker, beta: float) -> None:
    engine = make(100, alpha=0.6, eps=1e-6)
    ring = ring_of(engine)
    raw = np.random.default_rng(1).random(100) * 5
    raw[7] = 0.0
    write(ring, range(100), raw)
    mass = leaves_of(engine)
    assert ring.tree.p_min == mass[7] > 0
    drawn = sample(ring, 3000, beta=beta, prioritized=True)
    expected = (mass[drawn.index] / mass.min()) ** -beta
    np.testing.assert_allclose(drawn.weights, expected, rtol=1e-6)
    assert drawn.weights.dtype == np.float32
    assert drawn.weights.max() <= 1.0
    probability = mass / mass.sum()
    of_the_paper = (100 * probability) ** -beta
    np.testing.assert_allclose(
        drawn.weights, of_the_paper[drawn.index] / of_the_paper.max(), rtol=1e-6
    )


@pytest.mark.product("decades beta", few=12)
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.4, 0.5, 0.99, 1.0, 2.5, 30.0, 1e300])
@pytest.mark.parametrize("decades", [0.01, 1, 6, 200])
def test_a_weight_is_the_nearest_float32_to_the_power(
    make: Maker, beta: float, decades: float
) -> None:
    engine = make(1500, alpha=1.0, eps=0.0)
    ring = ring_of(engine)
    rng = np.random.default_rng(1)
    write(ring, range(1500), 10 ** (decades * (rng.random(1500) - 0.5)))
    # otherwise one item is always drawn
    ring.update(np.arange(700), np.full(700, ring.tree.mass().max()))
    index, _, weights = draw(ring, 3000, beta=beta, prioritized=True)
    with np.errstate(under="ignore"):
        exact = (ring.tree.mass()[index] / ring.tree.p_min) ** -beta
        nearest = exact.astype(np.float32)
    step = np.maximum(np.spacing(nearest), np.finfo(np.float32).smallest_subnormal)
    assert (np.abs(weights - exact) <= 0.501 * step).all()
    assert (weights[ring.tree.mass()[index] == ring.tree.p_min] == 1.0).all()


def test_weights_look_at_the_smallest_mass_that_can_be_drawn(make: Maker) -> None:
    ring = ring_of(make(4, alpha=1.0, eps=0.0))
    write(ring, range(4), np.array([0.0, 2.0, 4.0, 8.0]))
    index, _, weights = draw(ring, 100, beta=1.0, prioritized=True)
    assert dict(zip(index.tolist(), weights.tolist(), strict=True)) == {1: 1.0, 2: 0.5, 3: 0.25}


def test_a_uniform_draw_has_weight_one(make: Maker) -> None:
    ring = ring_of(make(4, alpha=1.0, eps=0.0))
    write(ring, range(4), np.arange(4.0))
    assert (draw(ring, 100, beta=1.0)[2] == 1.0).all()


# Valid priorities.


BAD = [math.nan, math.inf, -math.inf, -1.0, -1e-300, -5e-324, 1e301, 1.7e308]


@pytest.mark.product("call bad", few=10)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", ["write", "place", "update", "commit"])
def test_a_batch_with_a_bad_priority_is_refused_as_a_whole(
    engine: Engine, ring: Ring, call: str, bad: float
) -> None:
    write(ring, range(6), np.arange(1.0, 7.0))
    before = (
        ring.live.words.tolist(),
        ring.tree.priorities().tobytes(),
        slots_file(ring).tobytes(),
    )
    given = np.array([2.0, 9.0, bad, 3.0])
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: write(ring, range(4), given),
        "place": lambda: place(ring, range(4), range(4), given),
        "update": lambda: ring.update(np.arange(4), given),
        "commit": lambda: [ring.claims.claim(4), ring.claims.commit(given)],  # type: ignore[func-returns-value]
    }
    message = (
        (
            rf"priority {np.float64(bad)} at position 2 is not a number from 0 to 1e\+299 "
            r"\(also after \*\* alpha\); nothing was changed"
        )
        .replace("+308", r"\+308")
        .replace("e+301", r"e\+301")
    )
    with pytest.raises(ValueError, match=message) as caught:
        calls[call]()
    assert str(engine.where) in str(caught.value)
    if call != "commit":  # which has claimed slots before
        after = (
            ring.live.words.tolist(),
            ring.tree.priorities().tobytes(),
            slots_file(ring).tobytes(),
        )
        assert after == before
    assert ring.tree.max_priority == 6.0
    require_tree(engine)


def test_a_priority_may_be_as_large_as_a_full_buffer_of_it_is_finite(make: Maker) -> None:
    engine = make(8, alpha=1.0, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(8), np.full(8, 1.2e299))
    assert math.isfinite(ring.tree.p_sum)
    require_tree(engine)
    assert set(draw(ring, 200, prioritized=True)[0]) == set(range(8))
    with pytest.raises(ValueError, match=r"priority 1\.3e\+299 at position 0 is not a number"):
        ring.update(np.array([0]), np.array([1.3e299]))


def test_a_priority_may_be_too_large_only_after_alpha(make: Maker) -> None:
    ring = ring_of(make(8, alpha=3.0, eps=0.0))
    write(ring, range(8))
    with pytest.raises(ValueError, match=r"priority 1e\+150 at position 1 .* after \*\* alpha"):
        ring.update(np.array([0, 1]), np.array([1e90, 1e150]))
    assert ring.tree.priorities()[0] == 1.0


def test_zero_is_a_priority(engine: Engine, ring: Ring) -> None:
    write(ring, range(4), np.array([0.0, -0.0, 1.0, 0.0]))
    assert ring.tree.max_priority == 1.0
    assert set(draw(ring, 100, prioritized=True)[0]) == {2}
    require_tree(engine)


# The default.


def test_the_default_is_the_largest_that_was_ever_given(engine: Engine, ring: Ring) -> None:
    write(ring, [0])
    before_any = ring.tree.max_priority
    assert before_any is None
    assert ring.tree.priorities()[0] == 1.0
    write(ring, [1], np.array([0.25]))
    assert ring.tree.max_priority == 0.25
    assert ring.tree.default_priority == 1.0, "the first item had it"
    write(ring, [2])
    ring.update(np.array([0, 1]), np.array([3.0, 2.0]))
    write(ring, [3])
    ring.update(np.array([0]), np.array([0.5]))
    write(ring, [4])
    assert ring.tree.priorities()[:5].tolist() == [0.5, 2.0, 1.0, 3.0, 3.0]
    assert ring.tree.max_priority == ring.tree.default_priority == 3.0
    require_tree(engine)


def test_the_largest_is_forgotten_with_the_items(engine: Engine, ring: Ring) -> None:
    write(ring, [0], np.array([9.0]))
    ring.empty()
    assert ring.tree.max_priority is None
    write(ring, [1])
    assert ring.tree.priorities()[0] == 1.0
    require_tree(engine)


def test_the_largest_is_that_of_all_handles(make: Maker) -> None:
    engine = make(alpha=1.0)
    ring, other = ring_of(engine), ring_of(make.second(engine))
    write(other, [0], np.array([9.0]))
    write(ring, [1])
    assert ring.tree.priorities()[1] == 9.0


def test_a_stale_update_does_not_raise_the_default(ring: Ring) -> None:
    write(ring, [0])
    assert ring.update(np.array([0]), np.array([9.0]), np.array([8])) == (0, 1)
    assert ring.tree.max_priority is None


# Updates.


def test_an_element_that_is_named_twice_keeps_the_last(engine: Engine, ring: Ring) -> None:
    write(ring, range(8))
    index = np.array([3, 5, 3, 5, 3])
    assert ring.update(index, np.array([1.0, 2.0, 3.0, 4.0, 5.0])) == (5, 0)
    assert ring.tree.priorities()[[3, 5]].tolist() == [5.0, 4.0]
    require_tree(engine)


def test_a_stale_ticket_does_not_change_a_priority(engine: Engine, ring: Ring) -> None:
    """An update reaches the item that it names, or no item (G6)."""
    write(ring, range(8), np.arange(1.0, 9.0))
    drawn = sample(ring, 8, prioritized=False)
    write(ring, range(100, 104))
    old = drawn.tickets < 4
    before = ring.tree.priorities()
    applied, stale = ring.update(drawn.index, np.full(8, 50.0), drawn.tickets)
    assert [applied, stale] == [int((~old).sum()), int(old.sum())]
    changed = ring.tree.priorities() != before
    assert set(np.flatnonzero(changed)) == set(drawn.index[~old])
    require_tree(engine)


def test_an_update_without_tickets_goes_to_the_current_items(engine: Engine, ring: Ring) -> None:
    write(ring, range(3))
    ring.claims.claim_slots(np.array([1]), in_place=True)
    assert ring.update(np.arange(8), np.full(8, 2.0)) == (2, 6)
    ring.claims.abort()
    assert ring.update(np.array([1]), np.array([5.0])) == (0, 1), "an aborted slot has none"
    assert ring.tree.priorities()[[0, 2]].tolist() == [2.0, 2.0]
    require_tree(engine)


def test_an_update_does_not_survive_its_item(ring: Ring) -> None:
    write(ring, range(8), np.full(8, 7.0))
    ring.update(np.arange(8), np.full(8, 0.5))
    write(ring, range(8))
    assert ring.tree.priorities().tolist()[:8] == [7.0] * 8


def test_every_lane_has_a_priority_and_one_ticket(make: Maker) -> None:
    engine = make(4, (3,), alpha=1.0, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(12), np.arange(1.0, 13.0))
    assert ring.update(np.array([4, 5]), np.array([0.0, 20.0]), np.array([1, 1])) == (2, 0)
    assert ring.update(np.array([4, 5]), np.array([9.0, 9.0]), np.array([4, 5])) == (0, 2)
    assert ring.tree.priorities()[3:6].tolist() == [4.0, 0.0, 20.0]
    require_tree(engine)


def test_as_many_priorities_as_indices_are_needed(ring: Ring) -> None:
    write(ring, range(8))
    with pytest.raises(ValueError, match="update: 2 indices and 3 priorities"):
        ring.update(np.arange(2), np.ones(3))
    with pytest.raises(
        ValueError,
        match="update: 2 indices and 2 priorities, 1 generations were given; pass the same",
    ):
        ring.update(np.arange(2), np.ones(2), np.ones(1, np.int64))


def test_a_priority_may_come_in_any_number_type(ring: Ring) -> None:
    write(ring, range(8))
    index: Any = np.arange(8, dtype=np.int32)[::2]
    given: Any = np.arange(8, dtype=np.float32)[::2]
    ring.update(index, given)
    assert ring.tree.priorities()[:8:2].tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.product(few=8)
@pytest.mark.parametrize(
    ("count", "capacity"),
    [(1, 2000), (127, 2000), (128, 2000), (129, 2000), (3000, 2000), (3000, 70_000)],
)
def test_an_update_of_any_length_is_whole(make: Maker, count: int, capacity: int) -> None:
    engine = make(capacity, alpha=0.7, eps=1e-8)
    ring = ring_of(engine)
    first = write(ring, range(capacity))
    rng = np.random.default_rng(count)
    index, given = rng.integers(capacity, size=count), rng.random(count)
    tickets = first + index - (rng.random(count) < 0.3)
    expected = ring.tree.priorities()
    fresh = tickets == first + index
    for at in np.flatnonzero(fresh):
        expected[index[at]] = given[at]
    assert ring.update(index, given, tickets) == (fresh.sum(), count - fresh.sum())
    assert ring.tree.priorities().tolist() == expected.tolist()
    require_tree(engine)


def test_an_update_whose_last_priority_is_bad_changes_nothing(make: Maker) -> None:
    engine = make(2000, alpha=0.7, eps=1e-8)
    ring = ring_of(engine)
    write(ring, range(2000), np.ones(2000))
    with pytest.raises(ValueError, match="position 1999"):
        ring.update(np.arange(2000), np.append(np.full(1999, 3.0), math.nan))
    with pytest.raises(IndexError, match="position 1999"):
        ring.update(np.append(np.arange(1999), 2000), np.full(2000, 3.0))
    assert ring.tree.priorities().tolist() == [1.0] * 2000
    require_tree(engine)


def test_the_reason_of_a_refusal_belongs_to_its_thread(ring: Ring) -> None:
    write(ring, range(8))
    positions = []

    def refused_at(position: int, count: int) -> int:
        index, given = np.arange(count), np.ones(count)
        given[position] = -1
        ring.seat.native.update(index.ctypes.data, 0, given.ctypes.data, count, 10**9)
        return int(ring.seat.native.bad_at)

    assert refused_at(1, 2) == 1
    thread = threading.Thread(target=lambda: positions.append(refused_at(7, 8)))
    thread.start()
    thread.join()
    assert positions == [7]
    assert ring.seat.native.bad_at == 1, (
        "or the message would look for a priority that is not there"
    )


# Alpha, and switching it on.


def test_another_alpha_is_exact(engine: Engine, ring: Ring) -> None:
    write(ring, range(8), np.arange(1.0, 9.0) / 7)
    before = slots_file(ring).tobytes()
    for alpha, eps in ((0.9, 0.01), (0.0, 0.0), (2.5, 3.0)):
        ring.tree.set_alpha(alpha, eps)
        assert (ring.tree.alpha, ring.tree.eps) == (alpha, eps)
        require_tree(engine)
    ring.tree.set_alpha(0.5, 0.0)
    assert slots_file(ring).tobytes() == before, "there and back again: the same bits"
    ring.tree.set_alpha(0.6)
    assert ring.tree.eps == 0.0


def test_another_alpha_reaches_a_batch_that_was_claimed_before(make: Maker) -> None:
    engine = make(alpha=0.5, eps=0.0)
    ring, other = ring_of(engine), ring_of(make.second(engine))
    write(ring, range(8), np.full(8, 4.0))
    ring.claims.claim_slots(np.array([2, 3]), in_place=True)
    other.tree.set_alpha(2.0)
    ring.claims.commit()
    assert ring.tree.mass()[:4].tolist() == [16.0] * 4
    ring.claims.claim(1)
    other.tree.set_alpha(1.0)
    ring.claims.commit(np.array([3.0]))
    require_tree(engine)


@pytest.mark.product(few=3)
@pytest.mark.parametrize("call", ["commit", "update", "write"])
def test_another_alpha_reaches_a_call_that_waits_for_the_mutex(make: Maker, call: str) -> None:
    """The call has computed its masses already, because powers are too slow under the mutex."""
    engine = make(alpha=0.5, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(8), np.full(8, 4.0))

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        ring.claims.claim_slots(np.array([2]), in_place=True) if call == "commit" else None
        parent.pause()
        parent.tell_him()
        if call == "commit":
            ring.claims.commit()
        elif call == "update":
            ring.update(np.array([2]), np.array([4.0]))
        else:
            place(ring, [2], [2], np.array([4.0]))

    with child(work) as waiter:
        waiter.reached()
        with mutex_held(engine) as holder:
            waiter.go()
            waiter.reached()
            until_it_sleeps(waiter)
            engine.seat.control.runtime["alpha"] = 2.0  # as set_alpha does it under the mutex
            engine.seat.control.runtime["alpha_version"] += np.uint64(1)
            holder.go()
            assert holder.end() == 0
        assert waiter.end() == 0
    assert ring.tree.mass()[2] == 16.0


@pytest.mark.product(few=2)
@pytest.mark.parametrize("change", [(2.0, None), (None, 3.0)], ids=["alpha", "eps"])
def test_a_change_of_alpha_keeps_the_eps_of_another_process_and_the_reverse(
    make: Maker, change: tuple[float | None, float | None]
) -> None:
    """The kept value is read after the mutex is acquired, not before."""
    engine = make(8, alpha=1.0, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(8), np.ones(8))

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at("count.added")  # it has found the mutex locked
        ring.tree.set_alpha(*change)

    with mutex_held(engine) as holder, child(work) as waiter:
        waiter.reached()
        engine.seat.control.runtime["alpha"] = 3.0  # as set_alpha does it under the mutex
        engine.seat.control.runtime["eps"] = 1.0
        holder.go()
        assert holder.end() == 0
        waiter.go()
        assert waiter.end() == 0
    alpha, eps = (3.0 if change[0] is None else 2.0), (1.0 if change[1] is None else 3.0)
    assert (ring.tree.alpha, ring.tree.eps) == (alpha, eps)
    assert ring.tree.mass().tolist() == [(1 + eps) ** alpha] * 8


@pytest.mark.product(few=2)
@pytest.mark.parametrize(("alpha", "applied"), [(2.0, 1200), (90.0, 128)])
def test_another_alpha_between_the_pieces_of_an_update_reaches_the_rest(
    make: Maker, alpha: float, applied: int
) -> None:
    """A long update releases the mutex between pieces.

    A value that is not finite by then is refused.
    """
    engine = make(1200, alpha=0.5, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(1200), np.ones(1200))
    given = np.repeat([1.0, 5e4], [128, 1072])

    def work(parent: Parent) -> None:
        engine.seat.rejoin()
        parent.pause_at("update.unlocked")
        found = ring.update(np.arange(1200), given)
        assert found == (applied, 1200 - applied)

    with child(work) as updater:
        updater.reached()
        ring.tree.set_alpha(alpha, 0.0)
        updater.go()
        assert updater.end() == 0
    assert np.flatnonzero(ring.tree.priorities() == given).size == applied
    require_tree(engine)


@pytest.mark.product(few=6)
@pytest.mark.parametrize(
    ("alpha", "eps"),
    [(-0.1, 0.0), (math.nan, 0.0), (math.inf, 0.0), (1.0, -1e-9), (1.0, math.nan), (1.0, math.inf)],
)
def test_an_invalid_alpha_or_eps_is_refused(make: Maker, alpha: float, eps: float) -> None:
    engine = make(alpha=0.5, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(8))
    before = slots_file(ring).tobytes()
    with pytest.raises(ValueError, match=r"set_alpha\(.*\): alpha and eps must be numbers of at"):
        ring.tree.set_alpha(alpha, eps)
    assert (ring.tree.alpha, ring.tree.eps, slots_file(ring).tobytes()) == (0.5, 0.0, before)
    unbound = ring_of(make())
    with pytest.raises(ValueError, match=r"bind_priorities\(.*\): alpha and eps must be num"):
        unbound.tree.bind(alpha, eps)
    assert not unbound.tree.prioritized
    with pytest.raises(ValueError, match=r"alpha is .* and eps is"):
        Settings(capacity=8, alpha=alpha, eps=eps)


def test_an_alpha_that_makes_the_sum_infinite_is_refused(make: Maker) -> None:
    engine = make(alpha=0.5, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(8), np.array([1e200, 1, 2, 3, 4, 5, 6, 7]))
    with pytest.raises(ValueError, match=r"set_alpha\(2\.0, None\): .* finite; nothing was chang"):
        ring.tree.set_alpha(2.0)
    assert ring.tree.alpha == 0.5
    require_tree(engine)
    assert set(draw(ring, 50, prioritized=True)[0]) == {0}


def test_settings_whose_default_priority_has_no_finite_mass_are_refused() -> None:
    with pytest.raises(ValueError, match="alpha"):
        Settings(capacity=8, alpha=2000.0, eps=1.0)


def test_priorities_may_be_switched_on_late(make: Maker) -> None:
    engine = make()
    ring = ring_of(engine)
    write(ring, range(4))
    write(ring, [4, 5], np.array([3.0, 0.5]))
    assert engine.stats()["prioritized"] == 0
    assert (ring.tree.p_sum, ring.tree.p_min) == (0.0, 0.0)
    assert set(draw(ring, 400, prioritized=True)[0]) == set(range(6)), "until then, uniformly"
    ring.tree.bind(0.5, 0.25)
    assert ring.tree.prioritized
    assert (ring.tree.alpha, ring.tree.eps) == (0.5, 0.25)
    assert ring.tree.priorities()[:6].tolist() == [3.0, 3.0, 3.0, 3.0, 3.0, 0.5]
    require_tree(engine)
    ring.tree.bind(0.5, 0.25)  # a second sampler


def test_binding_with_other_numbers_is_an_error(make: Maker) -> None:
    engine = make(alpha=0.5, eps=0.25)
    ring = ring_of(engine)
    write(ring, range(4))
    for alpha, eps in ((0.6, 0.25), (0.5, 0.0)):
        with pytest.raises(
            ValueError,
            match=r"the priorities of this buffer use alpha=0\.5 and eps=0\.25; use the same "
            "values, or change them with set_alpha",
        ):
            ring.tree.bind(alpha, eps)
    assert (ring.tree.alpha, ring.tree.eps) == (0.5, 0.25)
    require_tree(engine)


def test_the_room_behind_the_last_leaf_is_cleared_when_leaves_are_recomputed(
    make: Maker,
) -> None:
    """The padding is summed too, and a draw that fell into it would be outside the buffer."""
    engine = make(20, alpha=1.0, eps=0.0)
    ring = ring_of(engine)
    write(ring, range(20))
    ring.live.masses[20:] = 5.0
    for sums, least in ring.live.levels:
        sums[2:], least[2:] = 7.0, 7.0
    ring.tree.set_alpha(0.5)
    assert ring.tree.p_sum == 20.0
    assert set(draw(ring, 2000, prioritized=True)[0]) == set(range(20))
    require_tree(engine)


def test_a_slot_claimed_while_priorities_are_switched_on_gets_one(make: Maker) -> None:
    engine = make()
    ring, other = ring_of(engine), ring_of(make.second(engine))
    write(ring, range(4))
    ring.claims.claim(2)
    other.tree.bind(1.0, 0.0)
    require_tree(engine)
    ring.claims.commit()
    assert ring.tree.mass()[:6].tolist() == [1.0] * 6
    require_tree(engine)


def test_without_priorities_nothing_is_summed(make: Maker) -> None:
    ring = ring_of(make())
    write(ring, range(20))
    assert not ring.tree.mass().any()
    assert np.isnan(ring.tree.priorities()).all()
    assert len(contents(ring)) == 8


# Agreement with NumPy.


def test_the_numpy_tree_is_what_the_c_core_keeps() -> None:
    rng = np.random.default_rng(0)
    children = rng.random(64) * (rng.random(64) < 0.5)
    sums, least = tree_oracle.sums_of(children), tree_oracle.least_of(children)
    for node in range(4):
        part = children[16 * node : 16 * node + 16]
        assert math.isclose(sums[node], math.fsum(part), rel_tol=1e-14)
        assert least[node] == part[part > 0].min()
    assert tree_oracle.least_of(np.zeros(16)).tolist() == [0.0]
    assert priorities.mass_of(np.array([3.0]), 0.5, 1.0).tolist() == [2.0]


def test_a_node_that_is_wrong_in_its_last_bit_is_counted(engine: Engine, ring: Ring) -> None:
    write(ring, range(8), np.arange(1.0, 9.0))
    sections = _core.sections(8, 1)
    data = slots_file(ring)
    assert tree_oracle.differences(ring.live) == 0
    for section in ("sum1", "min1"):
        data[sections[section]] ^= 1
        assert tree_oracle.differences(ring.live) == 1
        assert engine.check().problems == [
            "priority tree: 1 nodes are not the sum of their children"
        ]
        data[sections[section]] ^= 1
    data[sections["mass"]] ^= 1
    assert tree_oracle.differences(ring.live) >= 1
    assert "priority tree: 1 leaves are not the mass of their priority" in engine.check().problems
