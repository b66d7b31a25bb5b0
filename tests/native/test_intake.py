"""The input conversion of the C core, without a tensor class and with wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

import shmbuffer.items.form.arrays  # noqa: F401 - which says what arrays are
from shmbuffer._native import _core
from shmbuffer.memory import Engine
from tests.crash.harness import schema, settings
from tests.native.test_binding import SPOILT


class Tensors:
    """An object without the functions of dlpack.h, which a class of tensors needs."""


def test_a_class_of_tensors_has_the_functions_of_dlpack() -> None:
    for wrong in (Tensors, SPOILT):
        with pytest.raises(TypeError, match="is not a tensor class with"):
            _core.register_tensors(wrong)  # type: ignore[arg-type]


def test_an_intake_without_a_class_of_tensors_says_the_slots_in_bytes() -> None:
    with Engine.anonymous(settings("rows")) as engine:
        ring = engine.define(schema("rows"))
        leaves = ring.schema.leaves
        intake = _core.Intake(
            ring=ring.seat.native,
            tree=tuple((str(at), None) for at in range(len(leaves))),
            forms=tuple(
                (leaf.shape, numpy.zeros((2, 3), leaf.dtype), None, None) for leaf in leaves
            ),
            tensors=False,
            box=type(None),
            inside="",
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
    _core.register_tensors(torch.Tensor)
    with Engine.anonymous(settings("rows")) as engine:
        ring = engine.define(schema("rows"))
        native = ring.seat.native
        leaves = ring.schema.leaves
        form = ((), numpy.zeros((2, 3)), numpy.float64(), torch.zeros(()))
        right: dict[str, Any] = {
            "ring": native,
            "tree": tuple((str(at), None) for at in range(len(leaves))),
            "forms": (form,) * len(leaves),
            "tensors": True,
            "box": dict,
            "inside": "nothing",
            "priority": None,
            "timeout_ns": 0,
        }
        assert _core.Intake(**right).extend([], None) is None
        wrong: list[tuple[str, Any]] = [
            *((name, SPOILT) for name in right if name != "priority"),
            ("tree", (("a", None),) * (len(leaves) + 1)),
            ("tree", (("a", SPOILT),)),
            ("tree", ("a",)),
            ("forms", (form,) * (len(leaves) - 1)),
            ("forms", (((1,) * 33, None, None, None),) * len(leaves)),
            ("forms", (((SPOILT,), None, None, None),) * len(leaves)),
            ("forms", ((form[0],),) * len(leaves)),
            ("priority", len(leaves)),
            ("priority", -2),
            ("priority", 1 << 80),
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


def test_the_keys_of_a_batch_may_be_in_any_order_and_other_objects() -> None:
    with Engine.anonymous(settings("rows")) as engine:
        ring = engine.define(schema("rows"))
        names = [f"leaf {at}" for at in range(len(ring.schema.leaves))]
        intake = _core.Intake(
            ring=ring.seat.native,
            tree=tuple((name, None) for name in names),
            forms=tuple(
                (leaf.shape, numpy.zeros((2, 3), leaf.dtype), None, None)
                for leaf in ring.schema.leaves
            ),
            tensors=False,
            box=type(None),
            inside="",
            priority="urgent",
            timeout_ns=0,
        )
        batch = {
            name: numpy.full((2, *leaf.shape), at, leaf.dtype)
            for at, (name, leaf) in enumerate(zip(names, ring.schema.leaves, strict=True))
        }
        urgent = {"urgent": numpy.array([3.0, 4.0])}
        for first, data in enumerate(
            (
                batch,
                dict(reversed(batch.items())),
                {"".join(name): rows for name, rows in batch.items()},
                {names[0]: batch[names[0]], **urgent, **batch},
            )
        ):
            slots = intake.extend(data, None)
            assert numpy.frombuffer(slots, "<i8").tolist() == [2 * first, 2 * first + 1]
            for at, leaf in enumerate(ring.schema.leaves):
                stored = numpy.frombuffer(ring.leaf(at), leaf.dtype).reshape(-1, *leaf.shape)
                assert (stored[2 * first : 2 * first + 2] == at).all()
        assert ring.live.raw[6:8].tolist() == [3.0, 4.0]
        assert intake.extend({**batch, "another": batch[names[0]]}, None) is None
        assert intake.extend({**dict(list(batch.items())[1:]), "another": 0}, None) is None
