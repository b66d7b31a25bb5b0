"""Streams and weights are exchanged with the other kind of client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmbuffer.memory.format.layout import stream_of
from tests.kit.rings import ring_of
from tests.numpy.conftest import Directory


def streams_in(buffer: object) -> list[int]:
    """Returns the stream of every item, in storage order."""
    ring = ring_of(buffer)
    return stream_of(ring.live.sources[ring.live.committed()]).tolist()


@pytest.mark.parametrize("first", [True, False], ids=["first write", "later"])
def test_an_item_has_the_stream_that_is_given_with_it(first: bool, directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays()
    before = [] if first else [0]
    if not first:
        arrays.add({"a": 0.0})
    arrays.extend({"a": np.zeros(3, np.float32)}, streams=[4, 5, 4])
    arrays.extend({"a": [0.0, 0.0]}, streams=np.array([1, 2]))
    arrays.add({"a": 0.0}, streams=7)
    arrays.extend({"a": np.zeros(2, np.float32)}, streams=9)
    assert streams_in(directory.tensors()) == [*before, 4, 5, 4, 1, 2, 7, 9, 9]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_dimension_of_streams_is_taken_apart_step_by_step(
    dim: int, directory: Directory, other: Directory
) -> None:
    steps = {"a": np.arange(6.0).reshape(2, 3), "next": {"b": np.arange(12).reshape(2, 3, 2)}}
    directory.create()
    other.create()
    arrays, tensors = directory.arrays(), other.tensors()
    mine, theirs = arrays.extend(steps, stream_dim=dim), tensors.extend(steps, stream_dim=dim)
    assert np.array_equal(mine, theirs.numpy())
    written = directory.tensors()
    assert streams_in(written) == streams_in(tensors)
    assert torch.equal(written[:]["next", "b"], tensors[:]["next", "b"])


@pytest.mark.parametrize("dim", [0, 1])
def test_lists_with_a_dimension_of_streams_take_the_dtype_of_the_buffer(
    dim: int, directory: Directory
) -> None:
    directory.create()
    arrays = directory.arrays()
    arrays.add({"a": np.float32(0), "b": {"c": np.zeros(2, np.int32)}, "d": np.float64(0)})
    numbers = np.arange(6).reshape(2, 3)
    pairs = np.stack([numbers, numbers + 10], -1)
    given = {"a": (numbers / 2).tolist(), "b": {"c": pairs.tolist()}, "d": numbers.tolist()}
    index = arrays.extend(given, stream_dim=dim)
    assert index.shape == (2, 3)
    assert arrays.dtypes == {
        ("a",): "float32",
        ("b", "c"): "int32",
        ("d",): "float64",
    }
    written = directory.tensors()[torch.from_numpy(index.reshape(-1))]
    assert written["a"].tolist() == (numbers / 2).reshape(-1).tolist()
    assert written["b", "c"].tolist() == pairs.reshape(-1, 2).tolist()
    assert written["d"].tolist() == numbers.reshape(-1).tolist()


def test_streams_that_do_not_fit_are_refused_and_nothing_is_written(directory: Directory) -> None:
    directory.create()
    arrays = directory.arrays()
    with pytest.raises(ValueError, match="3 streams were given for 2 items"):
        arrays.extend({"a": np.zeros(2)}, streams=[0, 1, 2])
    assert arrays.dtypes == {}
    arrays.extend({"a": np.zeros(2)})
    with pytest.raises(ValueError, match="3 streams were given for 2 items"):
        arrays.extend({"a": np.zeros(2)}, streams=[0, 1, 2])
    with pytest.raises(ValueError, match="stream -1 at position 0 is not a number from 0"):
        arrays.add({"a": 0.0}, streams=-1)
    with pytest.raises(TypeError, match="streams and stream_dim cannot be combined"):
        arrays.extend({"a": np.zeros((2, 2))}, streams=1, stream_dim=0)
    with pytest.raises(ValueError, match="begin with the same two dimensions"):
        arrays.extend({"a": np.zeros(2)}, stream_dim=0)
    assert len(arrays) == 2


def test_weights_go_from_one_kind_of_client_to_the_other(directory: Directory) -> None:
    directory.create()
    arrays, tensors = directory.arrays(), directory.tensors()
    assert arrays.newest() is None
    assert tensors.publish(torch.nn.Linear(2, 1).state_dict(), step=3) == 1
    found = arrays.newest()
    assert found is not None
    assert found.step == 3
    assert found.state_dict["weight"].shape == (1, 2)
    assert arrays.newest(than=found.version) is None
    changed = {name: value + 1 for name, value in found.state_dict.items()}
    assert arrays.publish(changed, step=4) == 2
    assert torch.equal(tensors.newest(than=1).state_dict["bias"], torch.from_numpy(changed["bias"]))
