"""A wrong page is reported with the line of the mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

TRUE = """\
```python title="said.py"
if __name__ == "__main__":
    print("said in a file")
```
```console
$ word=said
$ python said.py
said ... file
$ echo $word &
said
$ false || echo $word \\
>   twice
said twice
```
```python
import said  # as a script beside it could

number = 6
print(number + 1)
```
Text between them.
```text
7
```
```python
assert number == 6, "blocks share their names"
```
```bash
test -f said.py
test -d .
```
"""


def run(text: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a page as the server's forks do, in its own process and without the imports."""
    (tmp_path / "page.md").write_text(text)
    (tmp_path / "empty").mkdir()
    program = "import sys; from tests.docs.page import *; run(sys.argv[1], Path(sys.argv[2]))"
    return subprocess.run(
        [sys.executable, "-c", program, tmp_path / "page.md", tmp_path],
        cwd=tmp_path / "empty",
        env={"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_page_that_is_true_runs(tmp_path: Path) -> None:
    done = run(TRUE, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("true", "untrue", "line"),
    [
        ("$ word=said", "$ no-such-command", 6),
        ("said ... file", "written in a file", 7),
        ("said twice", "said once", 11),
        ("$ false || echo", "$ true || echo", 11),
        ("number + 1", "number + missing", 19),
        ("7", "8", 16),
        ("assert number == 6", "assert number == 7", 26),
        ("test -f said.py", "test -f written.py", 29),
    ],
)
def test_one_that_is_not_says_where(tmp_path: Path, true: str, untrue: str, line: int) -> None:
    assert TRUE.count(true) == 1
    done = run(TRUE.replace(true, untrue), tmp_path)
    assert done.returncode != 0
    assert re.search(rf'page.md(:|", line ){line}\b', done.stderr), done.stderr
