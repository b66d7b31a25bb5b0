"""A learner publishes its weights, and another process's handle loads them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from shmbuffer import (
    Coordinator,
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SchemaMismatchError,
    ShmBufferError,
    TensorDictReplayBuffer,
    Weights,
    attach,
)
from shmbuffer.memory.format.dtypes import DTYPES


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[ReplayBuffer]:
    with TensorDictReplayBuffer(
        storage=LazyMemmapStorage(10, scratch_dir=tmp_path / "buffer", shared_init=True)
    ) as buffer:
        yield buffer


def network() -> nn.Module:
    """Makes a network with a scalar buffer and an empty parameter."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, dtype=torch.float64))
    net.register_parameter("none", nn.Parameter(torch.empty(0, 3)))
    return net


def test_a_network_loads_what_another_one_has_published(buffer: ReplayBuffer) -> None:
    ours, theirs = network(), network()
    with attach(buffer.storage.scratch_dir) as other:
        assert other.newest() is None
        assert buffer.publish(ours.state_dict(), step=1000) == 1
        found = other.newest()
        assert isinstance(found, Weights)
        assert (found.version, found.step) == (1, 1000)
        theirs.load_state_dict(found.state_dict)
        assert other.newest(found.version) is None
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)
        assert found.state_dict[name].dtype == tensor.dtype


def test_tensors_that_are_returned_are_the_callers_own(buffer: ReplayBuffer) -> None:
    buffer.publish({"w": torch.zeros(3), "b": torch.zeros(2)}, 0)
    first, second = buffer.newest(), buffer.newest()
    assert first is not None
    assert second is not None
    first.state_dict["w"].add_(5)
    assert second.state_dict["w"].tolist() == [0, 0, 0]
    assert len(first.state_dict["w"].untyped_storage()) == 12  # its state does not share memory


@pytest.mark.product(few=5)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(buffer: ReplayBuffer, name: str) -> None:
    dtype = getattr(torch, name)
    given = torch.arange(6 * DTYPES[name].itemsize, dtype=torch.uint8)
    if name == "bool":
        given = given % 2
    tensor = given.view(dtype).reshape(2, 3)
    buffer.publish({"w": tensor}, 0)
    found = buffer.newest()
    assert found is not None
    back = found.state_dict["w"]
    assert (back.dtype, back.shape) == (dtype, (2, 3))
    assert torch.equal(back.reshape(-1).view(torch.uint8), given)


def test_what_does_not_lie_in_a_row_is_published_as_it_is_meant(buffer: ReplayBuffer) -> None:
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    complex_one = torch.complex(torch.ones(2), torch.ones(2)).conj()
    buffer.publish({"t": whole.T, "c": complex_one, "n": 3}, 0)
    found = buffer.newest()
    assert found is not None
    assert torch.equal(found.state_dict["t"], whole.detach().T)
    assert torch.equal(found.state_dict["c"], complex_one.resolve_conj())
    assert found.state_dict["n"] == 3
    assert not found.state_dict["t"].requires_grad


@pytest.mark.parametrize("kind", [dict, TensorDict])
def test_nested_tensors_come_back_nested(buffer: ReplayBuffer, kind: type) -> None:
    inner = {"w": torch.ones(2), "b": torch.zeros(1)}
    buffer.publish(kind({"actor": kind(inner), "log_std": torch.tensor(0.5)}), 0)
    found = buffer.newest()
    assert found is not None
    assert list(found.state_dict) == ["actor", "log_std"]
    assert found.state_dict["log_std"] == 0.5
    assert found.state_dict["actor"]["w"].tolist() == [1, 1]


def test_weights_without_an_element_come_back(buffer: ReplayBuffer) -> None:
    given = {"a": torch.empty(0, 3, dtype=torch.int64), "b": torch.empty(0, dtype=torch.bfloat16)}
    buffer.publish(given, 0)
    found = buffer.newest()
    assert found is not None
    for name, tensor in given.items():
        back = found.state_dict[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)


def test_weights_are_there_before_the_first_item_and_after_a_restart(tmp_path: Path) -> None:
    with Coordinator(tmp_path / "buffer", capacity=10) as coordinator:
        coordinator.buffer.publish({"w": torch.ones(1)}, 7)
    with attach(tmp_path / "buffer") as again:
        again.add(TensorDict({"obs": torch.zeros(2)}))
        found = again.newest()
        assert found is not None
        assert (found.version, found.step) == (1, 7)
        assert again.publish({"w": torch.zeros(1)}, 3) == 2


def test_another_network_is_refused_by_the_first_tensor_that_differs(buffer: ReplayBuffer) -> None:
    buffer.publish(nn.Linear(4, 2).state_dict(), 0)
    with pytest.raises(SchemaMismatchError, match=r"leaf 'weight' is float32\[2, 4\], .*\[2, 5\]"):
        buffer.publish(nn.Linear(5, 2).state_dict(), 1)


@pytest.mark.parametrize("value", ["text", None, [1.0], torch.empty(2, device="meta")])
def test_what_cannot_be_stored_is_refused_by_name(buffer: ReplayBuffer, value: object) -> None:
    with pytest.raises(TypeError, match=r"'net\.extra' is a .*, which cannot be stored"):
        buffer.publish({"net": {"extra": value}}, 0)
    assert buffer.newest() is None


@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, LazyMemmapStorage])
def test_without_a_directory_the_error_says_how_to_get_one(storage: type) -> None:
    with ReplayBuffer(storage=storage(10)) as buffer:
        for call in (lambda: buffer.publish({"w": torch.ones(1)}, 0), buffer.newest):
            with pytest.raises(ShmBufferError, match="or a Coordinator"):
                call()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_of_a_gpu_are_copied_from_it(buffer: ReplayBuffer) -> None:
    net = network().to("cuda")
    buffer.publish(net.state_dict(), 0)
    found = buffer.newest()
    assert found is not None
    for name, tensor in net.state_dict().items():
        assert found.state_dict[name].device.type == "cpu"
        assert torch.equal(found.state_dict[name], tensor.cpu())
