"""Lets the site read our docstrings, which are written for people who read the source.

* "Example:" is a section of code, as "Examples:" is for griffe.
* Names that share one description, ``alpha, beta: see X``, get it each.
* "Cost:" begins a paragraph, and no box.
* A public name in back-quotes leads to its place.
* The members of a class are those that a page of the documentation names. The others are what the
  parts of a buffer ask of each other.
* A default that is a constant of a module is shown with its value.
"""

import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"^::: shmbuffer\.(\w+)$", re.MULTILINE)
CODE = re.compile(r"^```\w.*?^```$", re.MULTILINE | re.DOTALL)
OTHERS = {"tracks_generations", "detach", "TensorStorage.append", "ListStorage.append"}
"""Members of ours whose names the pages have from other libraries, or from other classes."""
INSIDE = {"directory.md", "records.md", "saves.md"}
"""Pages about the inside, as are those of design/: their names in back-quotes are not for users."""

SHARED = re.compile(
    r"^(?P<indent> {4,})(?P<names>[*\w]+(?:,\s+[*\w]+)+): (?P<said>.*(?:\n(?P=indent) +.*)*)$",
    re.MULTILINE,
)
SECTION = re.compile(r"^(?:Args|Raises|Attributes):\n(?:(?: +.*)?\n)*", re.MULTILINE)
COST = re.compile(r"^Cost: (?P<said>.*(?:\n +\S.*)*)", re.MULTILINE)
QUOTED = re.compile(r"(?<![`\w\[])(`{1,2})(\w+)(?:\(\))?\1(?!`)")


class Readable(griffe.Extension):
    """Changes each docstring before it is parsed."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through everything in the package, once its sources have been read."""
        self._go_through(pkg, public(), named() - OTHERS)

    def _go_through(self, thing: griffe.Object, public: set[str], members: set[str]) -> None:
        if thing.docstring is not None:
            thing.docstring.value = readable(thing.docstring.value, public - {thing.name})
        for name, member in list(thing.members.items()):
            shown = name in members and f"{thing.name}.{name}" not in OTHERS
            if thing.is_class and not name.startswith("_") and not shown:
                thing.del_member(name)
            elif not member.is_alias:
                self._go_through(member, public, members)
        if isinstance(thing, griffe.Function):
            for parameter in thing.parameters:
                parameter.default = _spelled_out(parameter.default, thing.package)


def public() -> set[str]:
    """The public names: each has its place on a page of the API, which a test compares."""
    pages = (page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    return {name for text in pages for name in PLACE.findall(text)}


def named() -> set[str]:
    """Every name that a page for users has in back-quotes, or reaches in an example."""
    names: set[str] = set()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")]
    for page in pages:
        if page.name in INSIDE or page.parent.name == "design":
            continue
        text = page.read_text()
        for code in CODE.findall(text):
            names.update(re.findall(r"\.(\w+)", code))
        for quoted in re.findall(r"`([^`\n]+)`", CODE.sub("", text)):
            names.update(re.findall(r"\w+", quoted))
    return names


def _spelled_out(default: Any, package: griffe.Module) -> Any:
    """A default, with the values of the package's constants in place of their names."""
    if isinstance(default, griffe.ExprName):
        path = default.canonical_path.removeprefix(f"{package.name}.")
        try:
            found = package[path]
            value = found.value if found.is_attribute else None
        except (KeyError, griffe.AliasResolutionError):  # builtins, other packages
            value = None
        return str(default) if value is None else _spelled_out(value, package)
    if isinstance(default, griffe.ExprCall) and default.canonical_name == "Default":
        return _spelled_out(default.arguments[0], package)  # a number that says it was not given
    if isinstance(default, griffe.Expr):
        parts = (_spelled_out(part, package) for part in default.iterate(flat=True))
        return "".join(map(str, parts))
    return default


def readable(docstring: str, public: set[str]) -> str:
    """The docstring as griffe reads it."""
    docstring = re.sub(r"^Example:$", "Examples:", docstring, flags=re.MULTILINE)
    docstring = COST.sub(_paragraph, docstring)
    docstring = SECTION.sub(lambda section: SHARED.sub(_each, section[0]), docstring + "\n")
    return "\n".join(
        line if line.lstrip().startswith((">>>", "...")) else QUOTED.sub(_linked(public), line)
        for line in docstring.rstrip().split("\n")
    )


def _each(found: re.Match[str]) -> str:
    names = re.findall(r"[*\w]+", found["names"])
    return "\n".join(f"{found['indent']}{name}: {found['said']}" for name in names)


def _paragraph(found: re.Match[str]) -> str:
    return "**Cost:** " + re.sub(r"\n +", "\n", found["said"])


def _linked(public: set[str]) -> Any:
    def link(found: re.Match[str]) -> str:
        name = found[2]
        return f"[`{name}`][shmbuffer.{name}]" if name in public else found[0]

    return link
