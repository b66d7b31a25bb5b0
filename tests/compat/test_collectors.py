"""TorchRL's collector processes write into our buffers as into TorchRL's own."""

from __future__ import annotations

import pytest

from tests.compat.family import said_by

# TorchRL keeps entries that only the dummy first item had, and fills them with zeros.
INVENTED = {"_reset", "index"}


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    "storage",
    [("LazyTensorStorage",), ("LazyMemmapStorage",), ("LazyMemmapStorage", "shared_init")],
    ids="+".join,
)
def test_collectors_in_processes_write_the_items_that_torchrl_gets(
    kind: str, storage: tuple[str, ...]
) -> None:
    ours = said_by("collect", kind, "shmbuffer", *storage)
    theirs = said_by("collect", kind, "torchrl", "LazyTensorStorage")
    assert ours["sampled"]
    assert ours["len"] == theirs["len"] == 400
    assert {*ours["keys"]} == {*theirs["keys"]} - INVENTED
