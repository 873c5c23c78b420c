"""Pictures of results, as PNG; matplotlib draws them without a display or a global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

History = Sequence[Mapping[str, float]]
_STYLES = ("-", "--", ":", "-.")


def draw_curves(path: Path, runs: Mapping[str, History], floors: Mapping[str, float]) -> None:
    """Losses and accuracy of runs against steps.

    Args:
        path: The PNG to write.
        runs: By label, entries with "step", and "train_loss", "val_loss", "val_accuracy" if known.
        floors: Accuracies to mark, as shares.
    """
    figure, (left, middle, right) = _figure(15, panels=3)
    for i, (label, history) in enumerate(runs.items()):
        for axes, name, unit in (
            (left, "train_loss", 1),
            (middle, "val_loss", 1),
            (right, "val_accuracy", 100),
        ):
            points = {entry["step"]: unit * entry[name] for entry in history if name in entry}
            axes.plot(
                list(points),
                list(points.values()),
                label=label,
                marker=".",
                markersize=3,
                **_style(i),
            )
    left.set(xlabel="step", ylabel="training cross-entropy, nats")
    middle.set(xlabel="step", ylabel="validation cross-entropy, nats")
    right.set(xlabel="step", ylabel="validation accuracy, %")
    _mark_floors(right, floors)
    _save(figure, left, path)


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
    figure, (axes,) = _figure(7, panels=1)
    for i, (label, points) in enumerate(lines.items()):
        axes.plot(list(points), list(points.values()), label=label, marker="o", **_style(i))
        places = (failed or {}).get(label, ())
        if places:
            axes.plot(
                places,
                [0.97] * len(places),
                "x",
                color=_style(i)["color"],
                markersize=9,
                transform=axes.get_xaxis_transform(),
                label=f"{label}: out of memory",
            )
    if powers:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    if ticks is not None:
        axes.set_xticks(list(ticks), [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    _mark_floors(axes, floors or {})
    _save(figure, axes, path)


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
        axes.bar(places, heights, width, label=label, color=_style(i)["color"])
        for place, mark in zip(places, (marks or {}).get(label, ()), strict=False):
            if mark is not None:
                axes.hlines(mark, place - width / 2, place + width / 2, color="black")
    if marks:
        axes.hlines([], 0, 0, color="black", label="floor")
    axes.set_xticks(range(len(groups)), groups)
    axes.set(ylabel=y)
    _save(figure, axes, path)


def _figure(width: float, *, panels: int) -> tuple[Figure, Sequence[Axes]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"pictures need the extra: pip install 'fastattn[lra]' ({error})"
        ) from None
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    return figure, figure.subplots(1, panels, squeeze=False)[0].tolist()


def _style(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}", "linestyle": _STYLES[i // 10 % len(_STYLES)]}


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
    """With the legend of one panel, which is that of all, beside them."""
    handles, names = axes.get_legend_handles_labels()
    if names:
        figure.legend(handles, names, loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
