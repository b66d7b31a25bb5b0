"""Runs inputs again that once reached new branches of the C core, or ended it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.damage.fuzzing import CORPUS, built, missing, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.mark.full
def test_no_input_of_the_corpus_leaves_its_memory(tmp_path: Path) -> None:
    program = built(tmp_path, "-O0")
    known = len(CORPUS.read_text().splitlines())
    for work, more in ((("replay", CORPUS), 0), (("fuzz", CORPUS, 1, 2000), 2000)):
        _, inputs, edges = run(program, *work)
        assert inputs == known + more
        assert edges > 1000  # edges are identified by their addresses, which differ between runs
