"""The caller's settings of torch, such as a default device, dtype or mode, have no effect.

Each test uses a buffer inside a mode and then outside it. Objects that are made inside and kept
have to work outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shmbuffer import RandomSampler
from tests.replay.conformance import CASES, Maker, assert_are_steps, numbers, steps

pytestmark = pytest.mark.product("mode maker")

Mode = Callable[[], AbstractContextManager[Any]]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def no_grad_and_float64() -> Iterator[None]:
    with torch.no_grad(), default_dtype(torch.float64):
        yield


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Mode] = {
    "device": lambda: torch.device("meta"),
    "default device": default_device,
    "inference": torch.inference_mode,
    "no_grad and float64": no_grad_and_float64,
}

every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda name: name.replace(" ", "-"))
every_case = pytest.mark.parametrize("maker", CASES, indirect=True, ids=str)


def use(rb: Any, maker: Maker, data: Any, path: Path) -> list[Any]:
    """Writes, reads, samples, updates and saves; returns what was read."""
    rb.extend(data)
    rb.add(data[0])
    found = [rb.sample(4), rb.sample(6), rb[:], rb[2:5]]
    batch = rb.sample(4)
    if "prioritized" in maker.case.sampler:
        rb.update_priority(batch["index"], torch.full_like(batch["rank"], 0.5))
    rb.dumps(path)
    rb.state_dict()
    rb.loads(path)
    return [*found, rb.sample(4)]


@every_mode
@every_case
def test_a_buffer_works_inside_a_mode_of_the_caller_and_then_outside(
    mode: str, maker: Maker, tmp_path: Path
) -> None:
    first, second, third = steps(0, 12), steps(12, 24), steps(24, 36)
    with MODES[mode]():
        rb = maker.buffer(24, batch_size=None)
        inside = use(rb, maker, first, tmp_path / "inside")
    outside = use(rb, maker, second, tmp_path / "outside")
    with MODES[mode]():
        again = use(rb, maker, third, tmp_path / "again")
    for data in (*inside, *outside, *again):
        assert data["obs"].device.type == "cpu"
        assert data["obs"].dtype is torch.float32
        assert_are_steps(data, slices=True)
    for data in (inside[0], outside[0], again[0]):
        assert data["index"].dtype is torch.int64
        for name in ("_weight", "priority_weight"):
            if name in data:
                assert data[name].dtype is torch.float32


@every_mode
@every_case
def test_a_buffer_that_was_first_used_outside_works_inside(
    mode: str, maker: Maker, tmp_path: Path
) -> None:
    rb = maker.buffer(24, batch_size=None)
    first, second = steps(0, 12), steps(12, 24)
    use(rb, maker, first, tmp_path / "outside")
    with MODES[mode]():
        found = use(rb, maker, second, tmp_path / "inside")
    for data in found:
        assert data["obs"].device.type == "cpu"
        assert_are_steps(data, slices=True)


@every_mode
@pytest.mark.parametrize(
    "maker", [case for case in CASES if case.sampler == "random"], indirect=True, ids=str
)
def test_prefetched_and_seeded_batches_are_the_same_in_every_mode(mode: str, maker: Maker) -> None:
    data, drawn = steps(0, 12), []
    for inside in (True, False):
        rb = maker.buffer(
            12,
            prefetch=2,
            sampler=RandomSampler(),
            name=f"buffer-{inside}",
            generator=torch.Generator().manual_seed(3),
        )
        with ExitStack() as held:
            if inside:
                held.enter_context(MODES[mode]())
            rb.extend(data)
            drawn.append([numbers(rb.sample()) for _ in range(5)])
    assert drawn[0] == drawn[1]
