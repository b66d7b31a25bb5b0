"""Reading logs: outcomes, logs that were cut, and what copies leave of the past."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.torture import items
from tests.torture.history import EVENT, NEVER, NO_OUTCOME, History, Kind, Log
from tests.torture.lineage import lineage

WRITER, LATER = items.who_of(1, 1), items.who_of(1, 2)


def test_the_outcome_of_a_call_is_that_of_its_own_process(tmp_path: Path) -> None:
    for who in (WRITER, LATER):
        with Log(tmp_path, 1, who) as log:
            log.invoked(0, 2)
            if who == LATER:
                log.written(0, 2, 77)
    with Log(tmp_path, 0, 0) as log:
        log.died(WRITER)
    first, second = History.read(tmp_path).batches
    assert (int(first["key"]) >> 32, first["ticket"]) == (WRITER, NO_OUTCOME)
    assert first["ended"] != NEVER
    assert (int(second["key"]) >> 32, second["ticket"]) == (LATER, 77)


def test_a_log_that_is_cut_is_not_read(tmp_path: Path) -> None:
    with Log(tmp_path, 1, WRITER) as log:
        log.invoked(0, 1)
    path = tmp_path / "1.calls"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AssertionError, match="the log itself is torn"):
        History.read(tmp_path)


def test_a_process_that_dies_opening_its_logs_has_reported_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.open, list[int]()

    def dies(path: Path, flags: int, mode: int) -> int:
        if len(opened) == 2:
            raise KeyboardInterrupt
        opened.append(real(path, flags, mode))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", dies)
        with pytest.raises(KeyboardInterrupt):
            Log(tmp_path, 0, 1)
    for descriptor in opened:
        os.close(descriptor)
    assert len(History.read(tmp_path).batches) == 0


def test_only_copies_on_the_line_to_the_present_count() -> None:
    batches, marks = np.zeros(5, History.BATCH), np.zeros(4, EVENT)
    # The batches began before and after the first copy, and before, during and after the second.
    batches["began"] = [10, 30, 50, 60, 80]
    batches["ended"] = [11, 31, 51, 64, 81]
    batches["ticket"] = [0, 1, 1, 2, 3]
    marks["kind"] = [Kind.COPIED, Kind.RESTORED, Kind.COPIED, Kind.RESTORED]
    marks["first"] = [1, 1, 2, 2]
    marks["began"], marks["ended"] = [20, 40, 62, 90], [21, 41, 63, 91]
    found = lineage(batches, marks)
    assert found.kept.tolist() == [True, False, True, False, False]
    assert found.perhaps.tolist() == [False, False, False, True, False]
    assert found.undone.tolist() == [False, True, False, False, True]
    assert (found.since, found.ours.any()) == (90, False)
    marks["a"][2] = 1  # ticket 0 was needed again while the second copy was made
    assert lineage(batches, marks).perhaps.tolist() == [True, False, False, True, False]
