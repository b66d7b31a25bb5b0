"""Lets the site read our docstrings, which are written for people who read the source.

* "Example:" is a section of code, as "Examples:" is for griffe.
* Names that share one description, ``alpha, beta: see X``, get it each.
* "Cost:" begins a paragraph, and no box.
* A public name in back-quotes leads to its place.
"""

import re
from typing import Any

import griffe

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
        homes = pkg["_HOMES"].value
        public = set(re.findall(r"'(\w+)'", str(homes)))
        self._go_through(pkg, public)

    def _go_through(self, thing: griffe.Object, public: set[str]) -> None:
        if thing.docstring is not None:
            thing.docstring.value = readable(thing.docstring.value, public - {thing.name})
        for member in thing.members.values():
            if not member.is_alias:
                self._go_through(member, public)


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
