"""Makes a film of the recording as one SVG, animated by CSS alone, so that it plays as an image.

A screen consists of cells: words in one style at a row and a column. A cell is drawn once, with the
shots that show it. The cells of the same shots are a group with keyframes. If animations are
disabled or not supported, the shot of the kill is shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from rich.color import blend_rgb
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from tests.recording.frames import Shot, trimmed

_COLUMN, _ROW, _FONT, _EDGE = 8.4, 18, 14, 12
_TOLD = 9  # number of the demo's last lines
_FORMAT = """\
<svg viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg">
<title>{title}</title>
<style>
text {{ font: {font}px "DejaVu Sans Mono", Menlo, Consolas, monospace }}
.f {{ visibility: hidden; animation: {seconds:g}s step-end infinite }}
.still {{ visibility: visible }}
{styles}
{keyframes}
@media (prefers-reduced-motion: reduce) {{ .f {{ animation: none !important }} }}
</style>
<rect fill="#292929" width="100%" height="100%" rx="8"/>
{cells}
</svg>
"""


@dataclass(frozen=True)
class _Cell:
    """Words in one style, with their position."""

    row: int
    column: int
    words: str
    style: tuple[str, bool]


def svg(shots: Sequence[Shot], *, width: int, title: str, still: int) -> str:
    """Draws the shots one after the other in an endless loop.

    Args:
        shots: the frames to show, with their durations.
        width: width in columns.
        title: description of the picture for readers who cannot see it.
        still: index of the shot that is shown without animation.
    """
    screens = [list(_cells(_lines(shot, width))) for shot in shots]
    styles = {style: f"s{at}" for at, style in enumerate(_in_order(screens))}
    seconds = sum(shot.seconds for shot in shots)
    starts = [sum(shot.seconds for shot in shots[:at]) / seconds for at in range(len(shots) + 1)]
    keyframes, drawn = [], []
    for (first, end), cells in sorted(_shown(screens).items()):
        group = "".join(_drawn(cell, styles) for cell in cells)
        if (first, end) != (0, len(shots)):
            name = f"k{first}-{end}"
            keyframes.append(_keyframes(name, starts[first], starts[end]))
            stays = " still" if first <= still < end else ""
            group = f'<g class="f{stays}" style="animation-name:{name}">{group}</g>'
        drawn.append(group)
    rows = 1 + max(cell.row for screen in screens for cell in screen)
    return _FORMAT.format(
        width=width * _COLUMN + 2 * _EDGE,
        height=rows * _ROW + 2 * _EDGE,
        title=escape(title),
        font=_FONT,
        seconds=seconds,
        styles="\n".join(_rule(name, *style) for style, name in styles.items()),
        keyframes="\n".join(keyframes),
        cells="\n".join(drawn),
    )


def _lines(shot: Shot, width: int) -> list[str]:
    """Returns the lines of both panes, at the same position in every shot."""
    told = shot.frame.told[-_TOLD:]
    return [
        f"\x1b[1;33m{shot.title}\x1b[0m",
        "\x1b[2m$ shmbuffer demo --scratch-dir run\x1b[0m",
        *told,
        *[""] * (_TOLD - len(told)),
        "\x1b[2m" + "─" * width + "\x1b[0m",
        "\x1b[2m$ shmbuffer top run/replay\x1b[0m",
        *trimmed(shot.frame.top),
    ]


def _cells(lines: Sequence[str]) -> Iterator[_Cell]:
    console = Console(force_terminal=True, color_system="truecolor", legacy_windows=False)
    for row, line in enumerate(lines):
        column = 0
        for part in Text.from_ansi(line).render(console):
            style = _look(part.style or Style.null())
            for words in re.finditer(r"\S+(?: \S+)*", part.text):
                yield _Cell(row, column + words.start(), words[0], style)
            column += len(part.text)


def _look(style: Style) -> tuple[str, bool]:
    """Returns the colour of a style, as rich draws it, and whether the style is bold."""
    color = SVG_EXPORT_THEME.foreground_color
    if style.color is not None and not style.color.is_default:
        color = style.color.get_truecolor(SVG_EXPORT_THEME)
    if style.dim:
        color = blend_rgb(color, SVG_EXPORT_THEME.background_color, 0.4)
    return color.hex, bool(style.bold)


def _in_order(screens: Sequence[Sequence[_Cell]]) -> list[tuple[str, bool]]:
    return sorted({cell.style for screen in screens for cell in screen})


def _shown(screens: Sequence[Sequence[_Cell]]) -> dict[tuple[int, int], list[_Cell]]:
    """Groups cells by the shots that show them: the first shot, and the one after the last."""
    found: dict[tuple[int, int], list[_Cell]] = {}
    since: dict[_Cell, int] = {}
    for at, screen in enumerate([*screens, []]):
        now = set(screen)
        for cell in [cell for cell in since if cell not in now]:
            found.setdefault((since.pop(cell), at), []).append(cell)
        for cell in screen:
            since.setdefault(cell, at)
    return found


def _drawn(cell: _Cell, styles: dict[tuple[str, bool], str]) -> str:
    x, y = _EDGE + cell.column * _COLUMN, _EDGE + (cell.row + 0.75) * _ROW
    length = f' textLength="{len(cell.words) * _COLUMN:g}"' if len(cell.words) > 1 else ""
    name = styles[cell.style]
    return f'<text class="{name}" x="{x:g}" y="{y:g}"{length}>{escape(cell.words)}</text>'


def _rule(name: str, color: str, bold: bool) -> str:
    return f".{name} {{ fill: {color}{'; font-weight: bold' if bold else ''} }}"


def _keyframes(name: str, start: float, end: float) -> str:
    shown = f"{100 * start:.4g}%{{visibility:visible}}"
    before = "0%{visibility:hidden}" if start > 0 else ""
    after = f"{100 * end:.4g}%,to{{visibility:hidden}}" if end < 1 else "to{visibility:visible}"
    return f"@keyframes {name}{{{before}{shown}{after}}}"
