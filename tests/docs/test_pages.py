"""The files and tests that pages name exist, and the first screen has what a reader needs."""

from __future__ import annotations

import ast
import doctest
import functools
import itertools
import os
import re
from pathlib import Path, PurePosixPath
from typing import TypeGuard

import pytest

import shmbuffer.torchrl
from shmbuffer._native import _core
from tests.docs.blocks import ROOT, blocks_of, pages

LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)\s#\"]+)(?:#[^)\s]*)?(?: \"[^\"]*\")?[)\"]")
ANCHOR = re.compile(r"\]\(([^)\s#]*)#([^)]+)\)")


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md"])
def test_every_file_that_is_linked_is_there(page: str) -> None:
    folder = PurePosixPath(page).parent
    missing = [
        target
        for target in LINK.findall((ROOT / page).read_text())
        if not re.match(r"\w+:", target) and not (ROOT / os.path.normpath(folder / target)).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md"])
def test_every_heading_that_is_linked_is_there(page: str) -> None:
    missing = [
        (target, anchor)
        for target, anchor in ANCHOR.findall((ROOT / page).read_text())
        if not re.match(r"\w+:", target)
        if anchor not in _anchors((ROOT / page).parent / target if target else ROOT / page)
    ]
    assert missing == []


def _anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_first_example_is_short() -> None:
    assert len(blocks_of("README.md")[1].code.splitlines()) <= 15


def test_the_first_screen_has_the_install_line_an_example_and_the_two_commands() -> None:
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    for needed in ("pip install", "```python", "scripts/demo", "scripts/test"):
        assert needed in screen


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_runs_twice(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example = next(block for block in blocks_of(page) if block.language == "python")
    for _ in range(2):
        exec(compile(example.code, page, "exec"), {"__name__": "__main__"})


def test_a_recipe_has_at_most_30_lines() -> None:
    recipes = [block for block in blocks_of("docs/recipes.md") if block.language == "python"]
    assert len(recipes) == 4
    for recipe in recipes:
        assert sum(1 for line in recipe.code.splitlines() if line.strip()) <= 30


def test_the_recipes_stand_before_the_guides_and_every_guide_names_one() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert navigation.index("recipes.md") < navigation.index("guides/")
    for guide in ROOT.glob("docs/guides/*.md"):
        assert "](../recipes.md#" in guide.read_text(), guide.name


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_public_name_is_on_one_page_of_the_api() -> None:
    shown = [
        name
        for page in sorted((ROOT / "docs/api").glob("*.md"))
        for name in re.findall(r"^::: shmbuffer\.(\w+)$", page.read_text(), re.MULTILINE)
    ]
    assert sorted(shown) == shmbuffer.torchrl.__all__


def test_the_navigation_has_every_page() -> None:
    nav = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    there = [path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")]
    assert sorted(set(nav) - {"readme.md", "benchmarks.md", "changelog.md"}) == sorted(there)
    assert len(nav) == len(set(nav))


GLOSSARY = (ROOT / "docs/glossary.md").read_text()
WIDEST = 76
"""Width in columns of a block that the site shows without cutting it off."""


@pytest.mark.parametrize("page", pages())
def test_code_is_not_wider_than_the_site_shows(page: str) -> None:
    """Blocks without a language are trees, drawings or headers, which may be wider."""
    wide = [
        (block.line + number, line)
        for block in blocks_of(page)
        if block.language
        for number, line in enumerate(f"{block.code}{block.prints or ''}".splitlines())
        if len(line) > WIDEST
    ]
    assert wide == []


def test_examples_of_docstrings_are_not_wider_than_the_site_shows() -> None:
    """Checks any example, because a public class shows those of its inherited methods."""
    wide = [
        (str(path.relative_to(ROOT)), example.source)
        for path in sorted((ROOT / "shmbuffer").rglob("*.py"))
        for node in ast.walk(_parsed(str(path.relative_to(ROOT))))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for example in doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
        if any(len(f">>> {line}") > WIDEST for line in example.source.splitlines())
    ]
    assert wide == []


FAILURES = (ROOT / "docs/failures.md").read_text()
PROOF = re.compile(r"\[test\]\(\.\./(tests/[\w/]+\.py) \"(test_\w+)\"\)")


def test_each_failure_names_a_test_that_is_there() -> None:
    missing = [
        (file, name)
        for file, name in PROOF.findall(FAILURES)
        if name not in {node.name for node in ast.walk(_parsed(file)) if _is_function(node)}
    ]
    assert missing == []


def test_no_row_of_the_failures_is_without_a_test() -> None:
    rows = [line for line in FAILURES.splitlines() if line.startswith("| ")]
    heads = [line for line in rows if line.endswith("| test |")]
    assert len(heads) == FAILURES.count("\n|---")
    assert [line for line in rows if not PROOF.search(line)] == heads


@functools.cache
def _parsed(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def _is_function(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef)


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md"])
def test_a_list_and_a_table_begin_behind_an_empty_line(page: str) -> None:
    """Other renderers accept them without; the site would join them to the paragraph above."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = text.splitlines()
    joined = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"(\||[*-] |\d+\. )", line)
        if before and not re.match(r"(\||\s*[*-] |\s*\d+\. |\s)", before)
    ]
    assert joined == []


def test_the_glossary_names_what_is_in_the_code() -> None:
    sources = "\n".join(
        path.read_text()
        for path in sorted((ROOT / "shmbuffer").rglob("*"))
        if path.suffix in (".py", ".c", ".h")
    )
    rows = re.findall(r"^\| (?!word)([^|-]+) \| .+ \| (.*) \|$", GLOSSARY, re.MULTILINE)
    assert 20 < len(rows) <= 25
    missing = [
        name
        for _, where in rows
        for name in re.findall(r"`([\w.]+)`", where)
        if not all(re.search(rf"\b{part}\b", sources) for part in name.split("."))
    ]
    assert missing == []


MATRIX = (ROOT / "docs/design/crash-matrix.md").read_text()


def test_every_crash_point_is_in_the_crash_matrix() -> None:
    python = "".join(path.read_text() for path in (ROOT / "shmbuffer").rglob("*.py"))
    points = [*_core.crash_points(), *re.findall(r"\breached\(\s*\"([\w.]+)\"", python)]
    rows = re.findall(r"^\| ([^|]*`[^|]+) \|", MATRIX, re.MULTILINE)
    named = {point for row in rows for point in _points_of(row, points)}
    assert sorted(set(points) - named) == []


def _points_of(row: str, points: list[str]) -> list[str]:
    """Returns the points in the first cell of a row: one, all with a prefix, or a range."""
    found: list[str] = []
    for first, last in re.findall(r"`([\w.*]+)`(?: \.\. `([\w.]+)`)?", row):
        prefix = first.partition(".")[0] + "."
        if first.endswith("*") or (last and first not in _core.crash_points()):
            found += [point for point in points if point.startswith(prefix)]
        elif last:
            found += points[points.index(first) : points.index(last) + 1]
        else:
            found.append(first)
    return found


def test_the_changelog_says_what_the_first_version_does() -> None:
    """There was no earlier release, so it lists no fixes and no changes."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["0.1.0"]
    assert not re.search(r"^#+ (?:Fixed|Changed|Unreleased)", text, re.MULTILINE)
    assert len(text.splitlines()) <= 100
