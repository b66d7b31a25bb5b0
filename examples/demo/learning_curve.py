"""Plots the mean return of a run over its steps, with the kills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shmbuffer.saves.publication import publish_file

WIDTH, HEIGHT = 64, 12  # size of the plot in the terminal, in characters


@dataclass(frozen=True)
class Curve:
    """Data of the plot."""

    title: str
    points: Sequence[tuple[int, float]]  # steps and mean returns, in the order of the steps
    marks: Sequence[tuple[int, str]]  # steps and labels of the kills
    goal: float  # return to reach, drawn as a line


def save(curve: Curve, path: Path) -> Path | None:
    """Saves a PNG. Returns its absolute path, or None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(curve.goal, color="tab:green", linestyle=":", label=f"goal: {curve.goal:g}")
    axes.plot(*_columns(curve.points), marker="o", label="mean return of 20 greedy episodes")
    for number, (step, name) in enumerate(curve.marks):
        label = "killed with SIGKILL" if not number else None
        axes.axvline(step, color="tab:red", linestyle="--", label=label)
        # Labels are above the axes, and close labels are on different lines.
        axes.annotate(
            f"{name} killed",
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4 + 14 * (number % 2)),
            textcoords="offset points",
            color="tab:red",
            ha="center",
            va="bottom",
        )
    axes.set_title(curve.title, pad=40)
    axes.set(xlabel="steps of all environments", ylabel="mean return")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    with publish_file(path) as beside:
        figure.savefig(beside, format="png", dpi=120)
    return path.absolute()


def draw(curve: Curve) -> str:
    """Returns the plot as text: ``*`` is a return, ``|`` a kill, and ``-`` the goal."""
    steps, returns = _columns(curve.points)
    last = max([*steps, *(step for step, _ in curve.marks), 1])
    top = max([*returns, curve.goal, 1.0])

    def column(step: int) -> int:
        return round(step / last * (WIDTH - 1))

    def row(mean_return: float) -> int:
        return round((1 - mean_return / top) * (HEIGHT - 1))

    grid = [[" "] * WIDTH for _ in range(HEIGHT)]
    grid[row(curve.goal)] = ["-"] * WIDTH
    for step, _ in curve.marks:
        for line in grid:
            line[column(step)] = "|"
    for step, mean_return in curve.points:
        grid[row(mean_return)][column(step)] = "*"
    lines = [
        f"{top * (1 - k / (HEIGHT - 1)):6.0f} {''.join(cells)}" for k, cells in enumerate(grid)
    ]
    axis = f"{'':6} {'0':<{WIDTH - 12}}{f'{last:,} steps':>12}"
    kills = [f"{'':6} | at {step:,}: {name} killed" for step, name in curve.marks]
    return "\n".join([curve.title, *lines, axis, *kills])


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [mean_return for _, mean_return in points]
