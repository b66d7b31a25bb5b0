from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shmbuffer import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from shmbuffer.distributed.far_handle import Handle
from shmbuffer.distributed.nearby import Address, LocalHandle, Unreachable, approach
from shmbuffer.distributed.owner import GROUP_OF, Owner
from shmbuffer.memory.format import layout
from tests.distributed.parts import (
    Oldest,
    OwnSample,
    Picky,
    Scaled,
    Tied,
    Told,
    doubled,
    items,
)
from tests.kit.rings import engine_of, ring_of

Make = Callable[..., TensorDictReplayBuffer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes buffers in ``tmp_path / "buffer"`` with eight items."""
    made: list[ReplayBuffer] = []

    def buffer(cls: type[ReplayBuffer] = TensorDictReplayBuffer, **options: Any) -> Any:
        storage = LazyMemmapStorage(20, scratch_dir=tmp_path / "buffer", shared_init=True)
        one = cls(storage=storage, batch_size=4, **options)
        made.append(one)
        one.extend(items(0, 8))
        return one

    yield buffer
    while made:  # pytest keeps the fixture longer than the maps may stay
        made.pop().close()


@pytest.fixture
def near() -> Iterator[Callable[[Address], LocalHandle]]:
    """Returns `approach` and closes its handles at the end."""
    opened: list[LocalHandle] = []

    def approached(offer: Address) -> LocalHandle:
        opened.append(approach(offer))
        return opened[-1]

    yield approached
    while opened:
        opened.pop().close()


def offer_of(buffer: ReplayBuffer) -> Address:
    return Address.of(buffer, pickle.dumps)


def why_apart(offer: Address) -> str:
    with pytest.raises(Unreachable) as caught:
        approach(offer)
    return str(caught.value)


# -- the same machine, the same files --------------------------------------------------------------


def test_a_local_handle_maps_the_owners_memory(make: Make, near: Any) -> None:
    owners = make()
    theirs = near(offer_of(owners)).buffer
    assert theirs[:]["a"].tolist() == list(range(8))
    theirs.extend(items(8, 2))
    assert owners[:]["a"].tolist() == list(range(10))
    owners.extend(items(10, 1))
    assert len(theirs) == theirs.write_count == 11
    assert theirs[10]["obs"].tolist() == [10.0, -10.0]


def test_priorities_nearby_are_those_of_the_owner(make: Make, near: Any) -> None:
    owners = make(TensorDictPrioritizedReplayBuffer, alpha=1.0, beta=1.0, eps=0.0)
    theirs = near(offer_of(owners)).buffer
    theirs.update_priority(torch.arange(8), torch.tensor([0.0] * 7 + [3.0]))
    sample = owners.sample()
    assert sample["index"].tolist() == [7] * 4
    owners.update_priority(torch.tensor([7, 2]), torch.tensor([0.0, 5.0]))
    assert theirs.sample()["index"].tolist() == [2] * 4


def test_class_arguments_and_transforms_of_the_owner_come_along(make: Make, near: Any) -> None:
    options = {"alpha": 0.7, "beta": 0.3, "priority_key": "prio"}
    owners = make(TensorDictPrioritizedReplayBuffer, transform=[Scaled(), doubled], **options)
    theirs = near(offer_of(owners)).buffer
    assert type(theirs) is TensorDictPrioritizedReplayBuffer
    assert (theirs.batch_size, theirs.priority_key) == (4, "prio")
    assert (theirs.sampler.alpha, theirs.sampler.beta) == (0.7, 0.3)
    theirs.extend(items(8, 1))
    assert owners.storage[8]["obs"].tolist() == pytest.approx([0.8, -0.8])  # through Scaled.inv
    assert theirs[8]["obs"].tolist() == pytest.approx([8.0, -8.0])
    sample = theirs.sample()
    assert torch.equal(sample["twice"], sample["a"] * 2)


def test_nothing_is_lost_when_the_owner_closes(make: Make, near: Any) -> None:
    owners = make()
    theirs = near(offer_of(owners)).buffer
    owners.close()
    assert theirs[:]["a"].tolist() == list(range(8))


def test_closing_leaves_the_registry(make: Make, near: Any) -> None:
    owners = make()
    registry = engine_of(owners).seat.registry
    one = near(offer_of(owners))
    assert len(registry.alive()) == 2
    one.close()
    assert len(registry.alive()) == 1


def test_a_local_handle_that_nobody_holds_leaves_by_itself(make: Make) -> None:
    owners = make()
    one: LocalHandle | None = approach(offer_of(owners))
    assert len(engine_of(owners).seat.registry.alive()) == 2
    del one
    assert len(engine_of(owners).seat.registry.alive()) == 1


# -- elsewhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("boot_id", [os.urandom(16), bytes(16)], ids=["a later boot", "none"])
def test_another_kernel_is_another_machine(make: Make, boot_id: bytes) -> None:
    offer = replace(offer_of(make()), boot_id=boot_id)
    assert why_apart(offer) == "its owner is on another machine"


def test_a_kernel_that_does_not_say_who_it_is_is_another_machine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shmbuffer.memory.system import identity

    offer = replace(offer_of(make()), boot_id=identity.UNKNOWN_BOOT)
    monkeypatch.setattr(identity, "_PROC", Path("/nonexistent"))
    assert identity.boot_id() == identity.UNKNOWN_BOOT
    assert why_apart(offer) == "its owner is on another machine"


def test_a_directory_that_cannot_be_seen_here_is_elsewhere(make: Make, tmp_path: Path) -> None:
    offer = offer_of(make())
    (tmp_path / "buffer").rename(tmp_path / "away")
    assert why_apart(offer) == (f"its directory {tmp_path}/buffer is not visible to this process")


def test_an_empty_directory_of_that_name_is_elsewhere(make: Make, tmp_path: Path) -> None:
    offer = offer_of(make())
    (tmp_path / "buffer").rename(tmp_path / "away")
    (tmp_path / "buffer").mkdir(0o700)
    assert why_apart(offer) == f"this process sees no buffer in {tmp_path}/buffer"


def test_another_buffer_under_the_same_path_is_elsewhere(make: Make, tmp_path: Path) -> None:
    offer = offer_of(make())
    (tmp_path / "buffer").rename(tmp_path / "away")
    make()
    assert why_apart(offer) == (
        f"{tmp_path}/buffer contains a different buffer here than for the owner"
    )


def test_a_copy_under_the_same_path_is_elsewhere(make: Make, tmp_path: Path) -> None:
    offer = offer_of(make())
    (tmp_path / "buffer").rename(tmp_path / "away")
    shutil.copytree(tmp_path / "away", tmp_path / "buffer")  # the same uuid
    assert why_apart(offer) == (
        f"{tmp_path}/buffer contains a different buffer here than for the owner"
    )


def test_a_directory_that_may_not_be_opened_is_elsewhere(make: Make, tmp_path: Path) -> None:
    offer = offer_of(make())
    (tmp_path / "buffer").chmod(0o777)  # refused, because any user could have written there
    assert why_apart(offer).startswith(
        f"this process cannot open {tmp_path}/buffer (UnsafePathError: "
    )


PROGRAM = """
import pickle, sys
sys.path.insert(0, sys.argv[2])
from known_there import transform
from shmbuffer import LazyMemmapStorage, TensorDictReplayBuffer
from shmbuffer.distributed.nearby import Address
storage = LazyMemmapStorage(20, scratch_dir=sys.argv[1], shared_init=True)
with TensorDictReplayBuffer(storage=storage, transform=transform) as buffer:
    sys.stdout.buffer.write(pickle.dumps(Address.of(buffer, pickle.dumps)))
"""


@pytest.mark.full
def test_a_transform_that_is_not_known_here_keeps_the_buffer_apart(tmp_path: Path) -> None:
    (tmp_path / "known_there.py").write_text("def transform(data):\n    return data\n")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "buffer"), str(tmp_path)]
    offer = pickle.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert why_apart(offer) == (
        f"this process cannot open {tmp_path}/buffer "
        "(ModuleNotFoundError: No module named 'known_there')"
    )


# -- what stays with the owner ---------------------------------------------------------------------


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_memory_without_a_name_cannot_be_reached(storage: Any) -> None:
    with TensorDictReplayBuffer(storage=storage(10)) as buffer:
        buffer.extend(items(0, 3))
        assert why_apart(offer_of(buffer)) == (
            f"its {storage.__name__} is in the private memory of its owner"
        )


def test_a_directory_that_the_first_write_makes_is_offered_after_it(
    tmp_path: Path, near: Any
) -> None:
    with TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "b")) as owner:
        offer = offer_of(owner)
        assert offer.later
        assert why_apart(offer) == "its directory is created by the first write"
        owner.extend(items(0, 3))
        assert near(offer_of(owner)).buffer[:]["a"].tolist() == [0, 1, 2]


def test_a_part_that_cannot_be_pickled_stays_with_the_owner(make: Make) -> None:
    assert why_apart(offer_of(make(transform=Tied()))) == (
        "its configuration cannot be pickled (TypeError: cannot pickle '_thread.lock' object)"
    )


def refused(buffer: ReplayBuffer) -> dict[str, str]:
    return offer_of(buffer).refused


def test_a_buffer_of_our_own_parts_is_wholly_near(make: Make) -> None:
    assert refused(make(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5)) == {}
    assert refused(make(sampler=RandomSampler())) == {}


def test_a_pass_is_one_for_all_so_the_owner_draws_it(make: Make, near: Any) -> None:
    owners = make(sampler=SamplerWithoutReplacement())
    assert refused(owners)["sample"] == (
        "SamplerWithoutReplacement keeps track of the items that it has sampled, "
        "and all clients share its pass"
    )
    assert near(offer_of(owners)).direct >= {"read"}


def test_a_generator_draws_where_it_is(make: Make) -> None:
    assert refused(make(generator=torch.Generator())) == {
        "sample": "sampling uses the generator that was passed to the owner"
    }


def test_a_foreign_sampler_draws_in_the_owners_process(make: Make) -> None:
    assert refused(make(sampler=Oldest())) == {
        "sample": "Oldest is not one of shmbuffer's samplers, "
        "and may keep track of the items that it has sampled"
    }


def test_a_sampler_that_is_told_of_writes_keeps_them_in_the_owners_process(make: Make) -> None:
    assert refused(make(sampler=Told()))["write"] == "Told must be notified of every write"


def test_a_foreign_writer_writes_in_the_owners_process(make: Make) -> None:
    assert refused(make(writer=Picky())) == {
        "write": "Picky decides in one process which items are kept"
    }


def test_a_method_that_was_overridden_is_called_where_the_owner_is(make: Make) -> None:
    assert refused(make(OwnSample, alpha=0.7, beta=0.5)) == {
        "sample": "OwnSample overrides sample()"
    }


def test_an_attached_listener_keeps_writes_in_the_owners_process(make: Make) -> None:
    class Ear:
        def mark_update(self, index: Any) -> None: ...

    buffer, ear = make(), Ear()
    buffer.storage.attach(ear)
    assert refused(buffer) == {
        "write": "an object in the owner's process must be notified of every write"
    }
    buffer.storage.detach(ear)
    assert refused(buffer) == {}


def test_weights_go_by_the_owners_directory_or_by_the_owner(make: Make, near: Any) -> None:
    owner = Owner(make(writer=Picky()), pickle.dumps)
    theirs = near(owner.offer())
    assert {GROUP_OF["publish"], GROUP_OF["newest"]} <= theirs.direct
    assert theirs.buffer.publish({"w": torch.ones(2)}, 5) == 1
    found = pickle.loads(pickle.dumps(owner.call("newest", (), {"than": 0})))
    assert (found.version, found.step) == (1, 5)
    assert found.state_dict["w"].tolist() == [1, 1]
    assert owner.call("publish", ({"w": torch.zeros(2)}, 6), {}) == 2
    assert theirs.buffer.newest(1).state_dict["w"].tolist() == [0, 0]


# -- handles ---------------------------------------------------------------------------------------


class Asking(Handle):
    """A handle whose requests are pickled and answered in this process."""

    def __init__(self, owner: Owner, remote_only: str = "") -> None:
        super().__init__(None, remote_only)
        self.owner = owner

    def _ask(self, request: str, *args: Any) -> Any:
        answer = self.owner.answer(*pickle.loads(pickle.dumps((request, args))))
        return pickle.loads(pickle.dumps(answer))


@pytest.fixture
def handle_on() -> Iterator[Callable[..., Any]]:
    """Makes handles that are detached at the end."""
    with contextlib.ExitStack() as held:

        def handle(owner: Owner, remote_only: str = "") -> Any:
            one = Asking(owner, remote_only)
            held.callback(one.detach)
            return one

        yield handle


@pytest.fixture
def private() -> Iterator[Owner]:
    """Makes the owner of a private buffer with items 0 to 9."""
    owner = Owner(TensorDictReplayBuffer(storage=LazyTensorStorage(20), batch_size=4), pickle.dumps)
    owner.buffer.extend(items(0, 10))
    with contextlib.closing(owner.buffer):
        yield owner


@pytest.mark.parametrize("remote_only", ["", "it is far away"])
def test_streams_go_straight_or_by_the_owner(make: Make, handle_on: Any, remote_only: str) -> None:
    buffer = make()
    handle = handle_on(Owner(buffer, pickle.dumps), remote_only)
    assert handle.direct is (not remote_only)
    handle.extend(items(8, 3), streams=np.array([4, 5, 6]))
    handle.add(items(11, 1)[0], streams=7)
    with pytest.raises(ValueError, match="2 streams were given for 3 items"):
        handle.extend(items(12, 3), streams=[1, 2])
    sources = ring_of(buffer).live.sources
    assert layout.stream_of(sources[8:12]).tolist() == [4, 5, 6, 7]
    mine = engine_of(buffer).seat.incarnation
    assert (layout.writer_of(sources[8:12]) == mine).all() == bool(remote_only)


def test_a_transform_that_cannot_travel_is_applied_by_the_owner(make: Make, handle_on: Any) -> None:
    handle = handle_on(Owner(make(transform=Tied()), pickle.dumps))
    assert not handle.direct
    assert handle.paths["sample"].startswith("its configuration cannot be pickled (TypeError")
    assert handle.sample()["pid"].tolist() == [os.getpid()] * 4


def test_handles_follow_the_owners_changes(make: Make, handle_on: Any) -> None:
    owner = Owner(make(transform=Scaled()), pickle.dumps)
    near, far = handle_on(owner), handle_on(owner, "it is far away")
    assert near.direct
    assert near.storage[5]["obs"].tolist() == [0.5, -0.5]  # through Scaled.inv
    assert near[5]["obs"].tolist() == far[5]["obs"].tolist() == [5.0, -5.0]

    assert far.append_transform(doubled) is far
    before = near._near
    for handle in (near, far):
        sample = handle.sample()
        assert torch.equal(sample["twice"], 2 * sample["a"])
    assert len(near.transform) == 2
    assert near._near is not before
    assert near._near.buffer.storage is before.buffer.storage  # attached only once

    # The owner draws without replacement: each item goes to one of the handles.
    assert isinstance(far.set_sampler(SamplerWithoutReplacement()), RandomSampler)
    assert near.paths["read"] == "direct"
    assert near.paths["sample"].startswith("SamplerWithoutReplacement keeps track")
    assert not near.direct
    assert isinstance(near.sampler, SamplerWithoutReplacement)
    first = near.next()["a"].tolist()
    rest = [batch["a"].tolist() for batch in far]
    assert sorted(chain(first, *rest)) == list(range(8))
    for _ in range(2):
        batches = [batch["a"].tolist() for batch in near]
        assert [len(batch) for batch in batches] == [4, 4]
        assert sorted(chain(*batches)) == list(range(8))


def test_a_storage_in_a_directory_brings_the_buffer_nearer(
    private: Owner, handle_on: Any, tmp_path: Path
) -> None:
    handle = handle_on(private)
    assert handle.paths["read"] == "its LazyTensorStorage is in the private memory of its owner"
    path = tmp_path / "buffer"
    handle.set_storage(partial(LazyMemmapStorage, 20, scratch_dir=path, shared_init=True))
    assert handle.direct
    handle.extend(items(0, 5))
    with contextlib.closing(handle.set_storage(partial(LazyTensorStorage, 20))) as former:
        assert not handle.direct
        assert former[:]["a"].tolist() == [0, 1, 2, 3, 4]
    assert len(handle) == 0


def test_a_storage_that_the_first_write_makes_is_direct_from_then_on(
    private: Owner, handle_on: Any, tmp_path: Path
) -> None:
    handle = handle_on(private)
    handle.set_storage(partial(LazyMemmapStorage, 20, scratch_dir=tmp_path / "buffer"))
    assert handle.paths["write"] == "its directory is created by the first write"
    handle.extend(items(0, 3))
    assert handle.direct
    assert handle[:]["a"].tolist() == [0, 1, 2]
    with contextlib.closing(handle.set_storage(partial(LazyTensorStorage, 20))):
        assert not handle.direct


# -- changes ---------------------------------------------------------------------------------------


def test_a_change_of_the_configuration_is_seen_before_the_next_call(make: Make, near: Any) -> None:
    owner = Owner(make(), pickle.dumps)
    theirs = near(owner.offer())
    assert theirs.is_current()
    owner.call("append_transform", (doubled,), {})
    assert not theirs.is_current()
    assert theirs.news() == owner.offer().mark
    again = near(owner.offer())
    assert again.is_current()
    assert "twice" in again.buffer.sample()


def test_moving_data_is_no_change_of_the_configuration(make: Make, near: Any) -> None:
    owner = Owner(make(TensorDictPrioritizedReplayBuffer, alpha=0.7, beta=0.5), pickle.dumps)
    theirs = near(owner.offer())
    owner.call("extend", (items(8, 4),), {})
    owner.call("sample", (), {})
    owner.call("flush", (), {})  # it writes the superblock
    owner.call("empty", (), {})
    assert theirs.is_current()
    assert len(theirs.buffer) == 0


def test_another_storage_is_a_change_for_those_in_the_former_directory(
    make: Make, near: Any, tmp_path: Path
) -> None:
    owner = Owner(make(), pickle.dumps)
    theirs = near(owner.offer())
    owner.call("set_storage", (LazyTensorStorage(5),), {})
    assert not theirs.is_current()
    assert why_apart(owner.offer()) == "its LazyTensorStorage is in the private memory of its owner"


def test_a_part_that_was_exchanged_comes_back_if_it_can_travel(make: Make) -> None:
    owner = Owner(make(), pickle.dumps)
    assert type(given_up(owner, "set_sampler", Oldest())) is RandomSampler
    with contextlib.closing(given_up(owner, "set_storage", LazyTensorStorage(5))) as before:
        assert isinstance(before, LazyMemmapStorage)
        assert before[:]["a"].tolist() == list(range(8))
    owner.buffer.extend(items(0, 2))
    # private memory of this process
    assert given_up(owner, "set_storage", LazyTensorStorage(5)) is None
    assert len(owner.buffer) == 0


def given_up(owner: Owner, name: str, part: Any) -> Any:
    return pickle.loads(owner.call(name, (part,), {}).data)
