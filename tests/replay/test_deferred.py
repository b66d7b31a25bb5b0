"""A lazy stack whose items are made on first access behaves like any other."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from shmbuffer.tensors.form.deferred import defer_change, deferred
from shmbuffer.tensors.records.tensor_decoder import TensorDecoder
from shmbuffer.tensors.records.tensor_encoder import TensorEncoder
from tests.kit.items import alike
from tests.replay.records.batches import as_read

pytestmark = pytest.mark.product(few=4)


def items(*batch: int) -> list[TensorDict]:
    return [
        TensorDict(
            {"a": torch.ones(*batch, n), "b": torch.full((*batch, 2), n), "t": str(n)}, batch
        )
        for n in (1, 3, 2)
    ]


class Maker:
    """Makes the items and counts how often they were made."""

    def __init__(self, *batch: int) -> None:
        self.batch = batch
        self.calls = 0

    def __call__(self) -> list[Any]:
        self.calls += 1
        return items(*self.batch)


@pytest.fixture
def maker() -> Maker:
    return Maker()


@pytest.fixture
def stack(maker: Maker) -> LazyStackedTensorDict:
    return deferred(maker, 3, torch.Size([]))


def test_nothing_is_made_until_somebody_looks(maker: Maker, stack: LazyStackedTensorDict) -> None:
    assert isinstance(stack, LazyStackedTensorDict)
    assert (stack.batch_size, stack.shape, len(stack)) == (torch.Size([3]), torch.Size([3]), 3)
    assert (stack.stack_dim, stack.batch_dims) == (0, 1)
    assert not hasattr(stack, "something")
    assert maker.calls == 0


def test_the_first_look_makes_an_ordinary_stack_once(
    maker: Maker, stack: LazyStackedTensorDict
) -> None:
    assert stack["b"].shape == torch.Size([3, 2])
    assert type(stack) is LazyStackedTensorDict
    assert stack["t"] == ["1", "3", "2"]
    assert vars(stack).keys() == vars(lazy_stack(items())).keys()
    assert maker.calls == 1


LOOKS: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "keys": lambda stack: sorted(stack.keys()),
    "nested keys": lambda stack: sorted(stack.keys(True, True)),
    "get": lambda stack: stack.get("b"),
    "padded": lambda stack: stack.get("a", as_padded_tensor=True),
    "item": lambda stack: stack[1],
    "slice": lambda stack: stack[1:],
    "mask": lambda stack: stack[torch.tensor([True, False, True])],
    "iterate": list,
    "unbind": lambda stack: list(stack.unbind(0)),
    "tensordicts": lambda stack: stack.tensordicts,
    "clone": lambda stack: stack.clone(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda stack: pickle.loads(pickle.dumps(stack)),
    "to": lambda stack: stack.to("cpu"),
    "device": lambda stack: stack.device,
    "names": lambda stack: stack.names,
    "set": lambda stack: stack.set("c", torch.arange(3)),
    "update": lambda stack: stack.update({"b": torch.zeros(3, 2)}),
    "select": lambda stack: stack.select("b"),
    "exclude": lambda stack: stack.exclude("a"),
    "apply": lambda stack: stack.exclude("t").apply(lambda leaf: leaf * 2),
    "equal": lambda stack: (stack.exclude("t") == stack.exclude("t")).all(),
    "densify": lambda stack: stack.densify(layout=torch.jagged),
    "stack": lambda stack: torch.stack([stack, stack]),
    "cat": lambda stack: torch.cat([stack, stack]),
    "view": lambda stack: stack.view(3, 1),
    "reshape": lambda stack: stack.select("b").reshape(1, 3),
    "unsqueeze": lambda stack: stack.unsqueeze(0),
    "lock": lambda stack: stack.lock_().is_locked,
    "numel": lambda stack: stack.numel(),
    "empty": lambda stack: stack.empty(),
    "append": lambda stack: (stack.append(items()[0]), stack)[1],
    "insert": lambda stack: (stack.insert(0, items()[0]), stack)[1],
    "entry": lambda stack: TensorDict({"entry": stack}, [3]),
    "tree_map": lambda stack: torch.utils._pytree.tree_map(
        lambda leaf: leaf + 1, stack.select("b")
    ),
    "tree_leaves": lambda stack: torch.utils._pytree.tree_leaves(stack.exclude("t")),
    "tree with paths": lambda stack: torch.utils._pytree.tree_flatten_with_path(stack)[0],
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_look_sees_what_an_ordinary_stack_shows(
    look: str, stack: LazyStackedTensorDict
) -> None:
    def seen(stack: Any) -> Any:
        try:
            return LOOKS[look](stack)
        except NotImplementedError as error:  # raised for paths of a stack before tensordict 0.13
            return repr(error)

    assert alike(seen(stack), seen(lazy_stack(items())))


def test_a_pytree_of_it_is_made_again(stack: LazyStackedTensorDict) -> None:
    leaves, spec = torch.utils._pytree.tree_flatten(stack)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert alike(again, lazy_stack(items()))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_it_may_be_stacked_along_any_dim(dim: int) -> None:
    stack = deferred(Maker(4, 5), 3, torch.Size([4, 5]), dim)
    expected = lazy_stack(items(4, 5), dim)
    assert stack.batch_size == expected.batch_size
    assert alike(stack["b"], expected["b"])


def test_an_error_at_the_first_access_is_raised_again_at_the_next() -> None:
    def fail() -> list[Any]:
        raise ValueError("no items today")

    stack = deferred(fail, 3, torch.Size([]))
    for _ in range(2):
        with pytest.raises(ValueError, match="no items today"):
            stack["a"]


def test_threads_that_look_at_once_see_the_same_items() -> None:
    both = threading.Barrier(2)

    def make() -> list[Any]:
        both.wait(timeout=20)
        return items()

    stack = deferred(make, 3, torch.Size([]))
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(stack.tensordicts)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen[0] is seen[1]
    assert type(stack) is LazyStackedTensorDict


@pytest.mark.parametrize(("count", "dim"), [(0, 0), (3, 2), (3, -1)])
def test_items_that_cannot_be_a_stack_are_refused(count: int, dim: int, maker: Maker) -> None:
    with pytest.raises(ValueError, match=f"{count} items .* cannot be stacked along dim {dim}"):
        deferred(maker, count, torch.Size([2]), dim)


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_a_column_of_raw_records_is_read_without_their_items(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    data = TensorDict({"a": torch.randn(4, *shape), "inner": {"b": torch.arange(4)}}, [4])
    decoder = TensorDecoder()
    stack = decoder.stack(as_read(TensorEncoder().encode(data)))
    assert stack is not None
    column = stack["a"]
    assert type(stack) is not LazyStackedTensorDict  # the items do not exist yet
    assert column.is_contiguous()
    assert column.equal(data["a"])
    column.zero_()
    assert stack["a"].equal(data["a"])
    assert stack["inner", "b"].equal(data["inner", "b"])
    assert stack["a"].equal(data["a"])
    assert stack.get("a", as_list=True)[2].equal(data["a"][2])
    with pytest.raises(KeyError, match="missing"):
        stack["missing"]


def test_a_column_of_records_that_differ_is_that_of_their_items() -> None:
    rows = [TensorDict({"a": torch.full((n,), n), "b": torch.tensor(n)}) for n in (1, 3, 2)]
    stack = TensorDecoder().stack(as_read(TensorEncoder().encode(rows)))
    assert stack is not None
    assert stack["b"].tolist() == [1, 3, 2]
    with pytest.raises(RuntimeError):
        stack["a"]
    assert [row.tolist() for row in stack.get("a", as_list=True)] == [[1], [3] * 3, [2] * 2]


def test_an_entry_that_the_items_will_get_replaces_their_column() -> None:
    data = TensorDict({"a": torch.arange(3)}, [3])
    stack = TensorDecoder().stack(as_read(TensorEncoder().encode(data)))
    assert stack is not None

    def amend(items: list[Any]) -> None:
        for number, item in enumerate(items):
            item["a"] = torch.tensor(10 * number)

    assert defer_change(stack, amend, {"a": [0, 10, 20]})
    assert stack["a"].tolist() == [0, 10, 20]
