"""scripts/lib/prose.py finds the faults in docstrings and comments, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.lib import prose

LONG = "The writer " + "copies a row and " * 8 + "then stops."


@pytest.mark.parametrize(
    ("source", "line", "rule"),
    [
        ('"""What a call takes."""', 1, 'begins with "What"'),
        ('x = 1\n"""The same, one level out."""', 2, 'begins with "The same"'),
        ('class A:\n    def f(self):\n        """See `B.f`."""', 3, 'begins with "See"'),
        ('def f():\n    """It was drawn."""', 2, 'begins with "It"'),
        ("x = 1  # nobody reads it", 1, 'says "nobody"'),
        ("x = 1\n# Whoever comes next\n# sees it.", 2, 'says "Whoever"'),
        (
            '"""Writes rows.\n\nRows move, and not copies.\n"""',
            3,
            'ends with ", and not ..."',
        ),
        (f'"""Writes rows.\n\n{LONG}\n"""', 3, "has 36 words"),
        ('"""Takes rows.\n\nArgs:\n    rows: nobody has them.\n"""', 4, 'says "nobody"'),
        (f"# {LONG[:70]}\n# {LONG[70:]}", 1, "has 36 words"),
    ],
)
def test_a_fault_in_python_is_found_at_its_line(source: str, line: int, rule: str) -> None:
    assert [fault[:2] for fault in prose.python_faults(source)] == [(line, rule)]


@pytest.mark.parametrize(
    "source",
    [
        '"""Returns the rows, not the items. See also `B`."""',
        '"""True if the row is alive, and not torn or empty, as `A` says."""',
        '"""One-step returns."""',
        '"""What does a sample cost?"""',
        'message = "nobody reads it"',
        f'"""Writes.\n\nExample::\n\n    {LONG}\n\nReads.\n"""',
        f'"""Writes.\n\nExample:\n    >>> f()\n    {LONG}\n"""',
        f'"""Writes.\n\n    key    what is under it, {LONG}\n    other  nothing\n"""',
        '"""Writes.\n\n' + "".join(f"* row {i} of the ring\n" for i in range(20)) + '"""',
        '"""Writes.\n\nArgs:\n' + "".join(f"    a{i}: rows of it\n" for i in range(9)) + '"""',
        "x = 1  # type: ignore[whoever]",
    ],
)
def test_plain_prose_code_tables_and_lists_are_no_faults(source: str) -> None:
    assert prose.python_faults(source) == []


def test_faults_in_comments_of_c_are_found_and_strings_are_not_read() -> None:
    comments = "int a; // nobody\n/* The lock\n * is free. Somebody\n * waits. */\n"
    source = comments + 'char *b = "/* nobody */";\n'
    assert [fault[:2] for fault in prose.c_faults(source)] == [
        (1, 'says "nobody"'),
        (2, 'says "Somebody"'),
    ]


def test_a_fault_is_printed_unless_it_is_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = tmp_path / "shmbuffer" / "room"
    room.mkdir(parents=True)
    (room / "a.py").write_text('"""What it is."""\n')
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "EXCEPTIONS", {})
    assert prose.main([]) == 1
    assert 'shmbuffer/room/a.py:1: begins with "What": What it is.' in capsys.readouterr().out
    assert prose.main([str(room)]) == 1
    monkeypatch.setattr(prose, "EXCEPTIONS", {("shmbuffer/room/a.py", "What it is"): "a reason"})
    assert prose.main([]) == 0
    (room / "a.py").write_text('"""Rows of a ring."""\n')
    capsys.readouterr()
    assert prose.main([]) == 1
    assert "remove it from EXCEPTIONS" in capsys.readouterr().out
