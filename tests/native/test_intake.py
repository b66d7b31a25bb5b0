"""The intake of the C core: without a class of tensors, and with parts that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import schema, settings
from tests.native.test_binding import SPOILT


class Tensors:
    """A class that offers the functions of dlpack.h would be one; this one does not."""


def test_an_intake_without_a_class_of_tensors_says_the_slots_in_bytes() -> None:
    numpy = pytest.importorskip("numpy")
    with Engine.anonymous(settings("rows")) as engine:
        ring = engine.define(schema("rows"))
        leaves = ring.schema.leaves
        none = type(None)
        intake = _core.Intake(
            ring=ring.seat.native,
            tree=tuple((str(at), None) for at in range(len(leaves))),
            forms=tuple(
                (leaf.shape, numpy.zeros((2, 3), leaf.dtype), None, None) for leaf in leaves
            ),
            tensors=none,
            box=none,
            inside="",
            reals=(numpy.dtype("float32"), numpy.dtype("float64")),
            priority=None,
            timeout_ns=0,
        )
        batch = {
            str(at): numpy.zeros((3, *leaf.shape), leaf.dtype) for at, leaf in enumerate(leaves)
        }
        for first in (0, 3):
            slots = intake.extend(batch, None)
            assert type(slots) is bytearray
            assert numpy.frombuffer(slots, "<i8").tolist() == list(range(first, first + 3))
        assert intake.add({key: rows[0, ...] for key, rows in batch.items()}, None) == 6
        for data in (None, [], {"0": None}, {**batch, "0": [0] * 3}):
            assert intake.extend(data, None) is None


def test_the_parts_of_an_intake_may_be_wrong_each() -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    with Engine.anonymous(settings("rows")) as engine:
        ring = engine.define(schema("rows"))
        native = ring.seat.native
        leaves = ring.schema.leaves
        form = ((), numpy.zeros((2, 3)), numpy.float64(), torch.zeros(()))
        right: dict[str, Any] = {
            "ring": native,
            "tree": tuple((str(at), None) for at in range(len(leaves))),
            "forms": (form,) * len(leaves),
            "tensors": torch.Tensor,
            "box": dict,
            "inside": "nothing",
            "reals": (1, 2),
            "priority": None,
            "timeout_ns": 0,
        }
        assert _core.Intake(**right).extend([], None) is None
        wrong: list[tuple[str, Any]] = [
            *((name, SPOILT) for name in right if name not in ("priority", "reals")),
            ("tree", (("a", None),) * (len(leaves) + 1)),
            ("tree", (("a", SPOILT),)),
            ("tree", ("a",)),
            ("forms", (form,) * (len(leaves) - 1)),
            ("forms", (((1,) * 33, None, None, None),) * len(leaves)),
            ("forms", (((SPOILT,), None, None, None),) * len(leaves)),
            ("forms", ((form[0],),) * len(leaves)),
            ("tensors", Tensors),
            ("priority", len(leaves)),
            ("priority", -2),
            ("priority", 1 << 80),
            ("reals", (1,)),
        ]
        for name, value in wrong:
            with pytest.raises((TypeError, ValueError, OverflowError)):
                _core.Intake(**{**right, name: value})
        intake = _core.Intake(**right)
        for arguments in ((), ([],), ([], None, 0)):
            with pytest.raises(TypeError):
                intake.add(*arguments)
            with pytest.raises(TypeError):
                intake.extend(*arguments)
