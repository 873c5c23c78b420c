"""Pictures of results, as PNG; matplotlib draws them without a display or a global state."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastattn.lra.tables import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, float]]
_STYLES = ("-", "--", ":", "-.")
_HATCHES = ("", "///", "...", "xxx")
CHARACTERS, LINE = 14, 0.2  # of small letters: characters an inch, and inches a line
NAME = 44  # characters of a line of a name beside a row


def draw_curves(path: Path, runs: Mapping[str, History], floors: Mapping[str, float]) -> None:
    """Losses and accuracy of runs against steps, and the accuracy against seconds of training.

    Args:
        path: The PNG to write.
        runs: By label, entries with "step" and "seconds", and "train_loss", "val_loss",
            "val_accuracy" if known.
        floors: Accuracies to mark, as shares.
    """
    figure, (train, validation, by_step, by_time) = _figure(13, panels=4, columns=2)
    for i, (label, history) in enumerate(runs.items()):
        for axes, x, name, unit in (
            (train, "step", "train_loss", 1),
            (validation, "step", "val_loss", 1),
            (by_step, "step", "val_accuracy", 100),
            (by_time, "seconds", "val_accuracy", 100),
        ):
            points = {entry[x]: unit * entry[name] for entry in history if name in entry}
            axes.plot(
                list(points),
                list(points.values()),
                label=label,
                marker=".",
                markersize=3,
                **_style(i),
            )
    train.set(xlabel="step", ylabel="training cross-entropy, nats")
    validation.set(xlabel="step", ylabel="validation cross-entropy, nats")
    by_step.set(xlabel="step", ylabel="validation accuracy, %")
    by_time.set(xlabel="seconds of training", ylabel="validation accuracy, %")
    for axes in (by_step, by_time):
        _mark_floors(axes, floors)
    _save(figure, train, path)


def draw_lines(
    path: Path,
    lines: Mapping[str, Mapping[float, float]],
    *,
    x: str,
    y: str,
    powers: bool = False,
    ticks: Sequence[float] | None = None,
    floors: Mapping[str, float] | None = None,
    failed: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Lines of y over x.

    Args:
        path: The PNG to write.
        lines: Values at places, by label.
        x, y: What the axes are, with units.
        powers: Whether both axes are logarithmic, x of base 2.
        ticks: The places to label.
        floors: Accuracies to mark, as shares; y is then in percent.
        failed: By label, the places where memory ran out: a cross at the upper edge.
    """
    draw_panels(path, {y: lines}, x=x, powers=powers, ticks=ticks, floors=floors, failed=failed)


def draw_panels(
    path: Path,
    panels: Mapping[str, Mapping[str, Mapping[float, float]]],
    *,
    x: str,
    powers: bool = False,
    ticks: Sequence[float] | None = None,
    floors: Mapping[str, float] | None = None,
    failed: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Lines of several things over the same x, side by side.

    Args:
        path: The PNG to write.
        panels: Lines as of :func:`draw_lines`, by what y is, with its unit.
        x, powers, ticks, floors, failed: As there, of all panels.
    """
    figure, shown = _figure(7 * len(panels), panels=len(panels))
    failed = failed or {}
    labels = list(dict.fromkeys(label for lines in (*panels.values(), failed) for label in lines))
    for axes, (y, lines) in zip(shown, panels.items(), strict=True):
        for i, label in enumerate(labels):
            points = lines.get(label, {})
            if points:
                axes.plot(list(points), list(points.values()), label=label, marker="o", **_style(i))
            _mark_failed(axes, label, failed.get(label, ()), _style(i)["color"])
        if powers:
            from matplotlib.ticker import LogLocator

            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a decade is often all of it
            axes.yaxis.set_major_formatter("{x:g}")
        if ticks is not None:
            axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks], rotation=30)
            axes.minorticks_off()
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        _mark_floors(axes, floors or {})
    _save(figure, shown[0], path)


def draw_bars(
    path: Path,
    groups: Sequence[str],
    bars: Mapping[str, Sequence[float | None]],
    *,
    y: str,
    marks: Mapping[str, Sequence[float | None]] | None = None,
) -> None:
    """Bars side by side, a group for each name.

    Args:
        path: The PNG to write.
        groups: Names on the x axis.
        bars: A value a group, by label; None leaves it out.
        y: What it is, with its unit.
        marks: By the same labels, a dash over each bar: its floor.
    """
    figure, (axes,) = _figure(max(7, 0.3 * len(groups) * len(bars)), panels=1)
    width = 0.8 / max(1, len(bars))
    for i, (label, values) in enumerate(bars.items()):
        places = [g - 0.4 + width * (i + 0.5) for g in range(len(groups))]
        heights = [float("nan") if value is None else value for value in values]
        filling = {"color": _style(i)["color"], "hatch": _HATCHES[i // 10 % len(_HATCHES)]}
        axes.bar(places, heights, width, label=label, edgecolor="white", linewidth=0, **filling)
        for place, mark in zip(places, (marks or {}).get(label, ()), strict=False):
            if mark is not None:
                axes.hlines(mark, place - width / 2, place + width / 2, color="black")
    if marks:
        axes.hlines([], 0, 0, color="black", label="floor")
    axes.set_xticks(range(len(groups)), groups)
    axes.set(ylabel=y)
    _save(figure, axes, path)


def draw_rows(
    path: Path, names: Sequence[str], panels: Mapping[str, Sequence[float | None]]
) -> None:
    """Horizontal bars with their values, a row for each name; several things side by side.

    Args:
        path: The PNG to write.
        names: Of the rows, from above.
        panels: A value a row, by what it is, with its unit; None leaves the bar out.
    """
    figure, places = _rows(names, panels=len(panels), width=3.5)
    for i, (axes, (x, values)) in enumerate(zip(places, panels.items(), strict=True)):
        bars = axes.barh(range(len(names)), [value or 0 for value in values], color=f"C{i}")
        axes.bar_label(bars, [shown(value) for value in values], padding=3, fontsize="small")
        axes.margins(x=0.25)  # for the values
        axes.set(xlabel=x)
    _save(figure, places[0], path)


def draw_intervals(
    path: Path,
    intervals: Mapping[str, tuple[int, int]],
    marks: Mapping[str, tuple[int, int]],
    *,
    x: str,
) -> None:
    """How far something goes to the left and to the right of a place, a row for each name.

    Args:
        path: The PNG to write.
        intervals: By name, both distances.
        marks: By the same names, likewise: a black line on the bar, as measured.
        x: What they are, with the unit; the axis is logarithmic on both sides.
    """
    figure, (axes,) = _rows(list(intervals), panels=1, width=7)
    axes.set_xscale("symlog", linthresh=1)
    rows = range(len(intervals))
    starts = [-left for left, _ in intervals.values()]
    told = [f"{left} + {right}" for left, right in intervals.values()]
    bars = axes.barh(rows, list(map(sum, intervals.values())), left=starts, label="by the layers")
    axes.bar_label(bars, told, padding=3, fontsize="small")
    measured = [marks[name] for name in intervals]
    starts, ends = [-left for left, _ in measured], [right for _, right in measured]
    axes.hlines(rows, starts, ends, color="black", label="measured")
    axes.axvline(0, color="white", linewidth=1)
    axes.use_sticky_edges = False
    axes.margins(x=0.2)  # for the values
    farthest = max(map(max, (*intervals.values(), *measured)))
    powers = [10**i for i in range(len(str(farthest)))]
    ticks = [*(-power for power in reversed(powers)), 0, *powers]
    axes.set_xticks(ticks, [str(abs(tick)) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=x)
    _save(figure, axes, path)


def _rows(names: Sequence[str], *, panels: int, width: float) -> tuple[Figure, Sequence[Axes]]:
    """Panels of a width with the same rows, whose names stand on the left, the first above."""
    lines = [textwrap.fill(name, NAME) for name in names]
    longest = max(len(line) for name in lines for line in name.splitlines())
    figure, places = _figure(longest / CHARACTERS + width * panels, panels=panels)
    tallest = max(name.count("\n") + 1 for name in lines)
    figure.set_figheight(1.1 + len(lines) * max(0.3, LINE * tallest))
    for axes in places:
        axes.set_yticks(range(len(lines)), lines if axes is places[0] else [""] * len(lines))
        axes.tick_params(axis="y", length=0, labelsize="small")
        axes.set_ylim(len(lines) - 0.4, -0.6)
        for label in axes.get_yticklabels():
            label.set_parse_math(False)
    return figure, places


def _figure(
    width: float, *, panels: int, columns: int | None = None
) -> tuple[Figure, Sequence[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"pictures need the extra: pip install 'fastattn[lra]' ({error})"
        ) from None
    columns = panels if columns is None else columns
    rows = -(-panels // columns)
    figure = Figure(figsize=(width, 4.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).flatten().tolist()


def _style(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}", "linestyle": _STYLES[i // 10 % len(_STYLES)]}


def _mark_failed(axes: Axes, label: str, places: Sequence[float], color: str) -> None:
    """A cross at the upper edge for each place where memory ran out."""
    if places:
        axes.plot(
            places,
            [0.97] * len(places),
            "x",
            color=color,
            markersize=9,
            transform=axes.get_xaxis_transform(),
            label=f"{label}: out of memory",
        )


def _mark_floors(axes: Axes, floors: Mapping[str, float]) -> None:
    for name, floor in floors.items():
        axes.axhline(100 * floor, color="grey", linestyle=":", linewidth=1)
        axes.annotate(
            f"floor: {name}",
            (0.01, 100 * floor),
            xycoords=("axes fraction", "data"),
            color="grey",
            va="bottom",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    """With the legend of one panel, which is that of all, below them in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        width, height = figure.get_size_inches()
        longest = max(map(len, names)) + 8  # and the line before it
        columns = max(1, min(len(names), int(width * CHARACTERS) // longest))
        figure.set_size_inches(width, height + LINE * -(-len(names) // columns))
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=columns, fontsize="small"
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
