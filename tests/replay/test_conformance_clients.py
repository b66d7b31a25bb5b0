"""Every kind of client of one buffer supports the same calls and sees the others' changes.

A client is the coordinator's buffer, a handle from `attach`, a handle that was pickled, or a client
of arrays. All of them accept a dict of arrays as a batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbuffer
from shmbuffer import BufferClosedError, Coordinator, SchemaMismatchError

pytestmark = pytest.mark.product(few=4)

CAPACITY = 12
STORAGES: dict[str, dict[str, Any]] = {
    "rows": {},
    "records": {"storage": "LazyStackStorage", "max_bytes": 2**20},
    "compressed records": {"storage": "CompressedListStorage", "max_bytes": 2**20},
}
ALPHAS = {"uniform": None, "prioritized": 0.7}
CLIENTS: dict[str, Callable[[Coordinator], Any]] = {
    "the coordinator's": lambda coordinator: coordinator.buffer,
    "attached": lambda coordinator: shmbuffer.attach(coordinator.scratch_dir),
    "pickled": lambda coordinator: pickle.loads(pickle.dumps(coordinator.buffer)),
    "arrays": lambda coordinator: shmbuffer.numpy.attach(coordinator.scratch_dir),
}

each_client = pytest.mark.parametrize("client", CLIENTS, indirect=True)
each_other = pytest.mark.parametrize("other", CLIENTS, indirect=True)
only_prioritized = pytest.mark.parametrize("sampler", ["prioritized"])


@pytest.fixture(params=STORAGES)
def storage(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=ALPHAS)
def sampler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def coordinator(tmp_path: Path, storage: str, sampler: str) -> Iterator[Coordinator]:
    options = {"alpha": ALPHAS[sampler], **STORAGES[storage]}
    with Coordinator(tmp_path / "buffer", capacity=CAPACITY, **options) as coordinator:
        coordinator.buffer.extend(steps(0, 3))
        yield coordinator


@pytest.fixture
def client(request: pytest.FixtureRequest, coordinator: Coordinator) -> Iterator[Any]:
    client = CLIENTS[request.param](coordinator)
    yield client
    if client is not coordinator.buffer:
        client.close()


other = client


def steps(start: int, stop: int, **entries: Any) -> dict[str, Any]:
    """Makes steps as arrays in which every other entry follows from ``id``."""
    number = np.arange(start, stop)
    return {"id": number, "next": {"obs": number[:, None] * np.array([1.0, 10.0])}, **entries}


def column(sample: Any, *key: str) -> list[Any]:
    """Returns an entry of all items of a sample; the records of an array client are a list."""
    if not isinstance(sample, list):
        for name in key:
            sample = sample[name]
        return list(sample.tolist())
    for name in key:
        sample = [item[name] for item in sample]
    return [np.asarray(value).tolist() for value in sample]


def base(client: Any) -> int:
    """Returns the ticket of item 0; later items were written in the order of their ids."""
    sample = client.sample(1)
    return int(column(sample, "index_generation")[0] - column(sample, "id")[0])


def drawn(client: Any, batches: int = 20) -> set[int]:
    """Returns the ids drawn in some batches, after checking the other entries against them."""
    found: set[int] = set()
    for _ in range(batches):
        sample = client.sample(8)
        ids = column(sample, "id")
        assert column(sample, "next", "obs") == [[one, 10.0 * one] for one in ids]
        tickets = column(sample, "index_generation")
        assert {ticket - one for ticket, one in zip(tickets, ids, strict=True)} == {base(client)}
        assert [ticket % CAPACITY for ticket in tickets] == column(sample, "index")
        found.update(ids)
    return found


@each_client
@each_other
def test_every_client_draws_whole_items_that_any_client_wrote(client: Any, other: Any) -> None:
    inserts = other.stats()["inserts"]
    assert client.extend(steps(3, 9)).tolist() == [3, 4, 5, 6, 7, 8]
    assert len(other) == len(client) == 9
    assert drawn(other) == set(range(9))
    for number in range(9, 15):
        step = {"id": number, "next": {"obs": np.array([1.0, 10.0]) * number}}
        assert client.add(step) == number % CAPACITY
    assert len(other) == len(client) == CAPACITY
    assert drawn(other, 40) == drawn(client, 40) == set(range(3, 15))
    assert other.stats()["inserts"] == inserts + 12


@pytest.mark.parametrize("storage", ["rows"])  # the clients have no common form of records
@each_client
def test_a_batch_of_another_form_is_refused_and_changes_nothing(client: Any) -> None:
    for wrong in (np.zeros((2, 3)), np.zeros((2, 2), np.int8)):
        with pytest.raises(SchemaMismatchError, match="obs"):
            client.extend({"id": np.arange(2), "next": {"obs": wrong}})
    with pytest.raises(SchemaMismatchError, match="obs"):
        client.extend({"id": np.arange(2)})
    assert len(client) == 3
    assert drawn(client) == {0, 1, 2}


@only_prioritized
@each_client
@each_other
def test_priorities_that_one_client_gives_decide_what_another_draws(
    client: Any, other: Any
) -> None:
    client.extend(steps(3, 6, td_error=np.array([0.0, 5.0, 0.0])))
    assert client.update_priority(np.arange(3), np.zeros(3)) == (3, 0)
    assert drawn(other) == {4}
    (weight,) = set(column(other.sample(8), "_weight"))
    assert 0 < weight < 1


@only_prioritized
@each_client
@each_other
def test_a_priority_of_an_item_that_was_written_over_is_dropped_and_counted(
    client: Any, other: Any
) -> None:
    stale = other.stats()["updates_stale"]
    sample = client.sample(40)
    index, tickets = (np.array(column(sample, key)) for key in ("index", "index_generation"))
    other.extend(steps(3, 14))  # overwrites the items 0 and 1
    gone = int((index < 2).sum())
    assert 0 < gone < 40
    assert client.update_priority(index, np.zeros(40), generation=tickets) == (40 - gone, gone)
    assert other.stats()["updates_stale"] == stale + gone
    assert drawn(other, 40) == set(range(3, 14))


@only_prioritized
@each_client
@pytest.mark.parametrize("given", [False, True], ids=["index", "index and generation"])
def test_an_index_of_minus_one_is_left_out(client: Any, given: bool) -> None:
    """An index of -1 stands for an item that a writer did not keep."""
    index, priority = np.array([-1, 2, -1, 0]), np.array([9.0, 5.0, 9.0, 0.0])
    tickets = base(client) + np.array([0, 2, 0, 0]) if given else None
    assert client.update_priority(index, priority, generation=tickets) == (2, 0)
    assert client.update_priority(-1, 9.0) == (0, 0)
    assert client.update_priority(np.array([1]), np.zeros(1)) == (1, 0)
    with pytest.raises(IndexError, match="index -2 at position 0 is out of range"):
        client.update_priority(np.array([-2, 0, -1]), np.full(3, 9.0))
    assert drawn(client) == {2}


@only_prioritized
@pytest.mark.parametrize("client", [*CLIENTS][1:], indirect=True)
def test_a_closed_handle_says_so_and_the_others_go_on(
    client: Any, coordinator: Coordinator
) -> None:
    client.close()
    client.close()
    for call in (
        lambda: client.extend(steps(3, 5)),
        lambda: client.add({"id": 3, "next": {"obs": np.zeros(2)}}),
        lambda: client.sample(1),
        lambda: client.update_priority(np.arange(1), np.ones(1)),
        lambda: len(client),
        lambda: client.stats(),
    ):
        with pytest.raises(BufferClosedError, match="this handle was closed; attach again"):
            call()
    coordinator.buffer.extend(steps(3, 5))
    assert drawn(coordinator.buffer) == set(range(5))
