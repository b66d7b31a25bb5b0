"""Every public name is available from ``shmbuffer``, and no module is loaded before it is used."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict, is_tensorclass, tensorclass

import shmbuffer
import shmbuffer.errors
import shmbuffer.torchrl


def test_every_name_that_is_promised_is_there() -> None:
    for name in shmbuffer.torchrl.__all__:
        assert getattr(shmbuffer, name) is getattr(shmbuffer.torchrl, name)
    assert sorted(set(shmbuffer.__all__)) == sorted(shmbuffer.__all__)
    assert {"Coordinator", "attach", "recover", "RecoveryReport"} <= set(shmbuffer.__all__)
    assert set(shmbuffer.__all__) <= set(dir(shmbuffer))
    assert set(shmbuffer.__all__) < set(shmbuffer.torchrl.__all__) == set(dir(shmbuffer.torchrl))


def test_every_name_that_a_guide_imports_is_listed() -> None:
    root = Path(__file__).parents[2]
    used: set[str] = set()
    for page in (root / "README.md", root / "docs/first-hour.md", *root.glob("docs/guides/*.md")):
        for names in re.findall(r"from shmbuffer import (\([^)]*\)|[^\n]*)", page.read_text()):
            used.update(re.findall(r"\w+", names))
    assert used <= set(shmbuffer.__all__)


def test_every_error_is_there() -> None:
    tree = ast.parse(Path(shmbuffer.errors.__file__).read_text())
    errors = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert errors <= set(shmbuffer.torchrl.__all__)


def test_every_name_is_listed_once_with_the_module_that_defines_it() -> None:
    assert shmbuffer.__file__ is not None
    lists = [
        ast.parse(Path(shmbuffer.__file__).with_name(stub).read_text())
        for stub in ("guide_names.pyi", "other_names.pyi")
    ]
    found = [
        (alias.name, node.module)
        for node in (node for tree in lists for node in tree.body)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert len(found) == len({name for name, _ in found})
    for name, module in found:
        thing = getattr(shmbuffer, name)
        assert getattr(thing, "__module__", module) in (module, "typing"), name


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchThing"):
        shmbuffer.NoSuchThing  # noqa: B018


def test_the_front_door_and_the_memory_floor_do_not_import_torch() -> None:
    program = (
        "import shmbuffer, shmbuffer.memory, shmbuffer.errors, sys\n"
        "shmbuffer.attach, shmbuffer.Coordinator, shmbuffer.recover, shmbuffer.SpaceError\n"
        "found = {'torch', 'tensordict'} & set(sys.modules)\n"
        "sys.exit(f'{found} were imported' if found else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)


#: The folders with the classes of TorchRL's family.
ROOMS = (
    *("tensors", "storages", "saves", "torchrl", "samplers", "units", "writers"),
    *("buffers", "datasets", "ensembles"),
)


def modules() -> list[str]:
    """Returns the names of all modules in these folders."""
    paths = {room: importlib.import_module(f"shmbuffer.{room}").__path__ for room in ROOMS}
    found = (pkgutil.walk_packages(path, f"shmbuffer.{room}.") for room, path in paths.items())
    return [module.name for modules in found for module in modules]


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_the_docstrings_run(name: str) -> None:
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


# -- what we use of tensordict that it does not promise --------------------------------------------


def test_a_tensordict_keeps_its_entries_in_a_dict() -> None:
    data = TensorDict({"a": torch.zeros(2), "n": {"b": torch.zeros(2)}}, [2])
    assert isinstance(data._tensordict, dict)
    assert list(data._tensordict) == ["a", "n"]
    assert type(data._tensordict["n"]) is TensorDict


def test_a_tensordict_can_be_made_without_checks() -> None:
    tensor = torch.zeros(2, 3)
    data = TensorDict._new_unsafe(
        {"a": tensor}, batch_size=torch.Size([2]), device=torch.device("cpu"), nested=False
    )
    checked = TensorDict({"a": tensor}, [2], device="cpu")
    assert data["a"] is tensor
    assert (data.batch_size, data.device, repr(data)) == (
        checked.batch_size,
        checked.device,
        repr(checked),
    )
    data["b"] = torch.ones(2)
    assert data[0]["b"] == 1
    assert not data.is_locked


def test_a_memory_mapped_tensor_can_be_made_over_memory_that_is_mapped_already() -> None:
    memory = bytearray(24)
    tensor = torch.frombuffer(memory, dtype=torch.float32).view(3, 2)
    mapped = MemoryMappedTensor(tensor)
    assert mapped.data_ptr() == tensor.data_ptr()
    for view in (mapped[0], mapped[1:], mapped[:2][0]):
        assert type(view) is MemoryMappedTensor
    mapped[2].fill_(1.0)
    assert tensor.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_a_tensorclass_keeps_its_entries_in_a_tensordict() -> None:
    @tensorclass
    class Pair:
        x: torch.Tensor
        y: torch.Tensor | None = None

    pair = Pair(x=torch.zeros(2), batch_size=[2])
    assert is_tensorclass(pair)
    assert type(pair._tensordict) is TensorDict
    again = Pair.from_tensordict(TensorDict({"x": torch.ones(2)}, [2]))
    assert again.x.tolist() == [1, 1]
    assert again.y is None
