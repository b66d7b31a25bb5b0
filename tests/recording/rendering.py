"""Draws frames as SVG, using rich and the text of the terminal."""

from __future__ import annotations

import io

from rich.console import Console
from rich.text import Text

from tests.recording.frames import Frame, trimmed

#: The template of rich without external fonts, so that a page needs no other file.
_FORMAT = """\
<svg viewBox="0 0 {width} HEIGHT" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect fill="#292929" width="100%" height="100%" rx="8" />
<g transform="translate(9, 9)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_LINE_HEIGHT = 24.4  # line height of rich
_PADDING = 18


def svg(frame: Frame, title: str, width: int, name: str) -> str:
    """Draws the title and both panes, one above the other, without empty lines.

    Args:
        frame: the frame to draw.
        title: the title of the picture.
        width: width in columns.
        name: name of the picture; it prefixes its CSS classes, so that pictures can share a page.
    """
    shown = [
        f"\x1b[1;33m{title}\x1b[0m",
        "\x1b[2m$ shmbuffer demo --scratch-dir run\x1b[0m",
        *frame.told,
        "\x1b[2m" + "─" * width + "\x1b[0m",
    ]
    return _drawn([*shown, *_top(frame)], width, name)


def svg_of_top(frame: Frame, width: int, name: str) -> str:
    """Draws the lower pane only."""
    return _drawn(_top(frame), width, name)


def _top(frame: Frame) -> list[str]:
    return ["\x1b[2m$ shmbuffer top run/replay\x1b[0m", *trimmed(frame.top)]


def _drawn(shown: list[str], width: int, name: str) -> str:
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for line in shown:
        console.print(Text.from_ansi(line), no_wrap=True, crop=True)
    height = f"{len(shown) * _LINE_HEIGHT + _PADDING:g}"
    return console.export_svg(
        title="", code_format=_FORMAT.replace("HEIGHT", height), unique_id=f"top-{name}"
    )
