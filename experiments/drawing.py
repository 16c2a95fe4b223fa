"""Learning curves, scores of runs, strips of an episode, and spans, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator


def draw_curves(
    returns: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    window: int,
    xlabel: str = "update",
    chance: float | None = None,
) -> None:
    """Draw the mean return of the last episodes along the way.

    Args:
      returns: (where, return) of each episode in order, by the name of the run.
      path: The file; its folder is made.
      title: Over the picture.
      window: Episodes that a point is the mean of, at most.
      xlabel: What `where` counts.
      chance: Return of a random player, dotted; None draws no line.
    """
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, episodes in returns.items():
        where, gained = np.array(episodes, float).reshape(-1, 2).T
        sums = np.concatenate([[0.0], np.cumsum(gained)])
        ends = np.arange(1, len(sums))
        starts = np.maximum(ends - window, 0)
        means = (sums[ends] - sums[starts]) / (ends - starts)
        full = min(window, len(ends)) - 1  # the mean of a few would be a spike
        axes.plot(where[full:], means[full:], label=name)
    if chance is not None:
        label = f"a random player: {chance:.1f}"
        axes.axhline(chance, linestyle=":", color="gray", label=label)
    axes.set(xlabel=xlabel, ylabel=f"return, mean of {window} episodes", title=title)
    axes.grid(alpha=0.3)
    if len(returns) > 1 or chance is not None:
        axes.legend()
    _save(figure, path)


def draw_scores(
    panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]],
    path: Path,
    *,
    ylabel: str,
    baseline: float,
) -> None:
    """Draw scores of runs over what they differ in, beside each other, on log scales.

    Args:
      panels: By the name of what has a value: by the name of a line, which joins the
        means, scores of all runs at each value. A line alone needs no name.
      path: The file; its folder is made.
      ylabel: What a score is.
      baseline: A score to compare with, dotted.
    """
    figure = Figure(figsize=(4.5 * len(panels), 4), layout="constrained")
    row = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axes, (xlabel, lines) in zip(row, panels.items(), strict=True):
        for color, (name, scores) in enumerate(lines.items()):
            line = {"color": f"C{color}", "label": name}
            axes.plot(*_means(scores), **line)
            for value, found in scores.items():
                axes.scatter([value] * len(found), found, s=12, color=line["color"])
        values = sorted({value for scores in lines.values() for value in scores})
        if len(lines) > 1:
            axes.legend()
        axes.axhline(baseline, linestyle=":", color="gray")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(values, [str(value) for value in values])
        axes.minorticks_off()
        axes.set(xlabel=xlabel)
        axes.grid(alpha=0.3)
    row[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    row[0].yaxis.set_major_formatter("{x:g}")
    row[0].set(ylabel=ylabel)
    _save(figure, path)


def _means(scores: Mapping[int, Sequence[float]]) -> tuple[list[int], list[float]]:
    values = sorted(scores)
    return values, [float(np.mean(scores[value])) for value in values]


def draw_frames(
    frames: Sequence[np.ndarray], path: Path, *, title: str, most: int = 12
) -> None:
    """Draw pictures of an episode beside each other, evenly spaced in time.

    Args:
      frames: Pictures of [height, width] or [height, width, 3], in order.
      path: The file; its folder is made.
      title: Over the picture.
      most: How many to draw; the first and the last are among them.
    """
    chosen = np.unique(np.linspace(0, len(frames) - 1, most).round().astype(int))
    height, width = frames[0].shape[:2]
    figure = Figure(
        figsize=(1.2 * len(chosen), 1.2 * height / width + 0.6), layout="constrained"
    )
    rows = np.atleast_1d(figure.subplots(1, len(chosen)))
    for axes, index in zip(rows, chosen, strict=True):
        axes.imshow(frames[index], cmap="gray")
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(str(index), fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_spans(
    spans: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    seconds: float,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    ylabel: str,
    marks: Sequence[float] = (),
) -> None:
    """Draw curves over time, and below them when each slice computed at the end.

    Args:
      spans: (began, ended) of ops, in seconds, by the name of their slice.
      path: The file; its folder is made.
      title: Over the picture.
      seconds: How many of the last are drawn of the spans.
      curves: (second, value), by the name of a line.
      ylabel: What the values of the curves are.
      marks: Seconds to mark on the curves.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1))
    for name, points in curves.items():
        above.plot(*np.array(points, float).reshape(-1, 2).T, label=name)
    for second in marks:
        above.axvline(second, color="gray", linewidth=0.5, alpha=0.5)
    above.set(xlabel="seconds", ylabel=ylabel, title=title)
    above.grid(alpha=0.3)
    if len(curves) > 1:
        above.legend()
    until = max(ended for found in spans.values() for _, ended in found)
    for row, (color, found) in enumerate(
        zip(("C0", "C1"), spans.values(), strict=True)
    ):
        bars = [(began, ended - began) for began, ended in found]
        below.broken_barh(bars, (row - 0.4, 0.8), facecolor=color, edgecolor="white")
    below.set(xlim=(max(0.0, until - seconds), until), xlabel="seconds")
    below.set_yticks(range(len(spans)), list(spans))
    below.invert_yaxis()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
