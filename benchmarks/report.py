"""Turn the JSON of `make bench` into docs/benchmarks.md and its plots.

python benchmarks/report.py            # every file under benchmarks/results/*/
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OURS, SOFTMAX = "fastattn", "sdpa"
HEAD = """# Benchmarks

Made by `make bench` and `python benchmarks/report.py` from the JSON under `benchmarks/results/`.
Time: median of `triton.testing.do_bench`, as called from Python; in brackets the replay of a CUDA
graph. Memory: peak above inputs and upstream gradient. Of a training step, optimiser included: time
from one synchronisation to the next, and all memory. Error: relative, against float64, the largest
of output and gradients ("-": another function, or too long to compute). ×: time over ours; of whole
models over stock's, of training steps over softmax attention's, so that less than 1 is faster.
TFLOP/s: of the products that count, without what a backward pass repeats, by the graph's time.
"""


def load(paths: list[Path]) -> dict[str, list[dict]]:
    """Measurements by device; of one measured twice, the later file's stands."""
    found: dict[str, dict[str, dict]] = defaultdict(dict)
    for path in sorted(paths):
        content = json.loads(path.read_text())
        if "benchmarks" not in content:
            raise ValueError(f"{path} is not pytest-benchmark's JSON: it has no benchmarks")
        machine = content["machine_info"]
        for entry in content["benchmarks"]:
            info = entry["extra_info"] | {"machine": machine, "date": content["datetime"][:10]}
            found[machine["device"]][entry["fullname"]] = info
    return {device: list(entries.values()) for device, entries in found.items()}


def milliseconds(x: float | None) -> str:
    return "-" if x is None else f"{x:.3f}" if x < 1 else f"{x:.2f}"


def said(x: object) -> str:
    return f"({', '.join(map(str, x))})" if isinstance(x, list) else str(x)


def table(entries: list[dict], x: str = "n") -> str:
    """One op and pass: a row per length, or what else x says, and rival."""
    rated = any(e.get("tflops") for e in entries)
    rows = [f"| {x} | | ms | × | peak MiB | error | ms at 3 TB/s |" + " TFLOP/s |" * rated]
    rows.append("| --- " * (7 + rated) + "|")
    ats = sorted([e[x] for e in entries])
    for at in [at for i, at in enumerate(ats) if at not in ats[:i]]:
        here = [e for e in entries if e[x] == at]
        base = here[0].get("base", OURS)
        ours = next((e["ms"] for e in here if e["rival"] == base), None)
        for e in sorted(here, key=lambda e: (e["rival"] != base, e["ms"])):
            graph = f" ({milliseconds(e['graph_ms'])})" if e["graph_ms"] is not None else ""
            ratio = e.get("ratio", None if ours is None else e["ms"] / ours)
            ratio = "-" if ratio is None else f"{ratio:.{1 if base == OURS else 2}f}"
            peak = "-" if e["peak_mib"] is None else f"{e['peak_mib']:.1f}"
            wrong = "-" if e["error"] is None else f"{e['error']:.1e}"
            floor = milliseconds(e.get("floor_ms"))
            rate = f"{e['tflops']:.0f}" if e.get("tflops") else "-"
            rows.append(
                f"| {said(at)} | {e['rival']} | {milliseconds(e['ms'])}{graph} | {ratio} | "
                f"{peak} | {wrong} | {floor} |" + f" {rate} |" * rated
            )
    return "\n".join(rows)


def crossover(entries: list[dict]) -> str:
    """From which length on softmax attention is slower than ours, in one sentence; or stock, of
    what takes its place, in one each; or nothing."""
    base = entries[0].get("base")
    if base is None:
        return faster(entries, OURS, SOFTMAX, "", f"softmax attention ({SOFTMAX})")
    rivals = dict.fromkeys(e["rival"] for e in entries if e["rival"] != base)
    return "".join(faster(entries, rival, base, f"{rival}: ", base) for rival in rivals)


def faster(entries: list[dict], mine: str, other: str, begin: str, called: str) -> str:
    """The sentence of two rivals; and where graphs begin at another length, that."""
    first, ratios = beginning(entries, mine, other, "ms")
    if not ratios:
        return ""
    last = max(ratios)
    if first is None:
        said = f"{begin}no faster than {called} up to n = {last}"
    else:
        said = f"{begin}from n = {first} on faster than {called}"
        said += f", {ratios[last]:.1f} times at n = {last}"
    as_graph, timed = beginning(entries, mine, other, "graph_ms")
    if timed and as_graph != first:
        said += "; as graphs " + ("at no length" if as_graph is None else f"from n = {as_graph} on")
    return (said if begin else said[0].upper() + said[1:]) + ".\n"


def beginning(
    entries: list[dict], mine: str, other: str, key: str
) -> tuple[int | None, dict[int, float]]:
    """The length from which on mine stays faster, and at each length by how much."""
    of = {who: {e["n"]: e[key] for e in entries if e["rival"] == who} for who in (mine, other)}
    lengths = sorted(n for n in of[mine].keys() & of[other].keys() if of[mine][n] and of[other][n])
    ratios = {n: of[other][n] / of[mine][n] for n in lengths}
    if key == "ms":
        in_turn = {e["n"]: 1 / e["ratio"] for e in entries if e["rival"] == mine and "ratio" in e}
        ratios |= {n: in_turn[n] for n in lengths if n in in_turn}
    slower = max((n for n in lengths if ratios[n] < 1), default=0)
    return next((n for n in lengths if n > slower), None), ratios


def plot(entries: list[dict], path: Path, x: str = "n") -> None:
    """Time, memory and error, of which there is something: against n, or what else x says, one line
    a rival; at one n, one bar a rival."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {"ms": "ms", "peak_mib": "peak MiB", "error": "relative error"}
    labels = {k: v for k, v in labels.items() if any(e[k] is not None for e in entries)}
    size = (13 / 3 * len(labels), 3.6)
    figure, panels = plt.subplots(1, len(labels), figsize=size, layout="constrained", squeeze=False)
    for axes, (key, label) in zip(panels[0], labels.items(), strict=True):
        given = [e for e in entries if e[key] is not None]
        (bars if one_length(entries, x) else lines)(axes, given, key, label, x)
    if not one_length(entries, x):
        panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def one_length(entries: list[dict], x: str) -> bool:
    return len({said(e[x]) for e in entries}) == 1


def lines(axes, entries: list[dict], key: str, label: str, x: str) -> None:
    for rival in dict.fromkeys(e["rival"] for e in entries):
        points = sorted((e[x], e[key]) for e in entries if e["rival"] == rival)
        width = 2.5 if rival == OURS else 1.2
        axes.plot(*zip(*points, strict=True), marker="o", ms=3, lw=width, label=rival)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel=x, ylabel=label)


def bars(axes, entries: list[dict], key: str, label: str, x: str) -> None:
    entries = sorted(entries, key=lambda e: -e["ms"])
    drawn = axes.barh([e["rival"] for e in entries], [e[key] for e in entries])
    numbers = [f"{e[key]:.3g}" if e[key] < 100 else f"{e[key]:.0f}" for e in entries]
    axes.bar_label(drawn, numbers, padding=2, fontsize=8)
    axes.set(xlabel=f"{label}, {x} = {said(entries[0][x])}", xscale="log")
    axes.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", labelsize=8)
    axes.margins(x=0.15)


def page(found: dict[str, list[dict]], pictures: Path) -> str:
    """The whole page; plots go to ``pictures``."""
    parts = [HEAD]
    for device, entries in sorted(found.items()):
        parts.append(f"## {device}\n")
        names = ("fastattn", "torch", "triton", "flash-linear-attention")
        versions = entries[-1]["machine"]
        with_rival = [e["machine"] for e in entries if e["machine"].get(names[-1])]
        versions = (
            with_rival[-1] | {k: v for k, v in versions.items() if v} if with_rival else versions
        )
        with_versions = [f"{name} {versions.get(name)}" for name in names if versions.get(name)]
        pinned = ", pinned to one core" if versions.get("cores") == 1 else ""
        about = f"{', '.join(with_versions)}, seed {versions.get('seed')}, {entries[-1]['date']}"
        parts.append(f"{about}{pinned}.\n")
        groups = defaultdict(list)
        for e in entries:
            groups[e["op"], e["pass"], e.get("sweep", "n")].append(e)
        for (op, direction, x), group in sorted(groups.items()):
            e = group[0]
            length = 2 if e["shape"][2] == e.get("n") else 1
            shape = ", ".join(
                "n" if i == length and x == "n" else str(s) for i, s in enumerate(e["shape"])
            )
            shape = "" if x == "shape" else f", ({shape})"
            features = f", m = {e['m']}" if x == "n" and "m" in e else ""
            parts.append(f"### {op} against {x}, {direction}{shape}{features}, {e['dtype']}\n")
            against = "" if x == "n" else f" against {x}"
            name = f"{device} {op}{against} {direction}".lower().replace(",", "")
            name = name.replace(" ", "-").replace("+", "-")
            if x != "shape":  # which has no order
                pictures.mkdir(parents=True, exist_ok=True)
                plot(group, pictures / f"{name}.png", x)
                parts.append(f"![time, memory and error against {x}](benchmarks/{name}.png)\n")
            in_turn = [e for e in group if "ratio" in e]
            if in_turn:
                lengths = ", ".join(map(str, sorted({e["n"] for e in in_turn})))
                pairs = " or ".join(map(str, sorted({len(e["ms_rounds"]) for e in in_turn})))
                parts.append(
                    f"× at n = {lengths}: the median of {pairs} ratios, each of two measurements, "
                    f"one after the other, of {in_turn[0]['base']} and of this.\n"
                )
            compared = x == "n" and not one_length(group, x)
            parts += [crossover(group) if compared else "", table(group, x) + "\n"]
    return "\n".join(parts)


def main() -> int:
    paths = list(RESULTS.glob("*/*.json"))
    if not paths:
        print(f"no results under {RESULTS}: run `make bench` first", file=sys.stderr)
        return 2
    docs = ROOT / "docs"
    (docs / "benchmarks.md").write_text(page(load(paths), docs / "benchmarks"))
    print(f"{docs / 'benchmarks.md'} written from {len(paths)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
