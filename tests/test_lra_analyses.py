"""Analyses: pure functions on cases made by hand, and the command on runs of a few steps."""

import csv
import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from fastattn.lra import figures, measure
from fastattn.lra.analyses import ANALYSES, Options, records
from fastattn.lra.analyses import models as model_analyses
from fastattn.lra.analysis import at_floor, mean_and_spread, repeated, step_seconds
from fastattn.lra.cli import main
from fastattn.lra.data import Batch, Split
from fastattn.lra.results import labels, read_result
from fastattn.lra.tables import Table
from fastattn.lra.tasks import TASKS
from fastattn.lra.tasks.listops import evaluate, from_text

COMMITTED = sorted(Path(__file__).parent.parent.glob("benchmarks/results/*/lra/*/*"))
OLDER = [x for x in COMMITTED if '"checkpoint"' not in (x / "result.json").read_text()]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are tiny: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("listops")
    TASKS["listops"].generate(
        out, num_train=60, num_val=5, num_test=9, min_length=5, max_length=30, workers=1
    )
    return out


@pytest.fixture(scope="module")
def fit(data, tmp_path_factory):
    def made(mixer, *options):
        out = tmp_path_factory.mktemp("runs") / "run"
        words = f"fit --task listops --data-dir {data} --max-steps 5 --out {out} --mixer"
        assert main([*words.split(), mixer, *options]) == 0
        return out

    return made


@pytest.fixture(scope="module")
def run(fit):
    out = fit("performer:num_features=16")
    assert main(["test", "--run", str(out)]) == 0
    return out


def edited(run, out, **changes):
    """A run with another result.json."""
    shutil.copytree(run, out)
    result = json.loads((out / "result.json").read_text())
    (out / "result.json").write_text(json.dumps(result | changes))
    return out


def analyze(out, *runs, what=None, options=()):
    words = ["analyze", "--out", str(out), *map(str, options)]
    words += ["--what", what] if what else []
    return main(words + [word for run in runs for word in ("--run", str(run))])


@pytest.fixture
def pictures(monkeypatch):
    """Figures in the order in which they would be saved."""
    drawn = []

    def save(figure, axes, path):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        drawn.append(figure)

    monkeypatch.setattr(figures, "_save", save)
    return drawn


@pytest.fixture
def card(monkeypatch):
    """A GPU of 80 GiB, as far as the analysis of memory asks; the limits that were set on it."""
    limits = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Card(80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limits.append)
    return limits


class Card(NamedTuple):
    total_memory: int


def step_up_to(longest):
    """Steps that take n / 512 ms and n / 2 MiB, and run out of memory beyond ``longest``."""

    def step(result, batch_size, n, steps=5):
        if n > longest:
            raise torch.OutOfMemoryError
        return measure.Step(n / 512, n / 2)

    return step


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# Functions


@pytest.mark.parametrize("operator", ["[MAX", "[MIN", "[MED"])
@pytest.mark.parametrize("copies", [1, 2, 3, 4])
def test_repeated_lists_keep_their_value_at_k_times_the_length(operator, copies):
    split = TASKS["listops"].generate_split(20, seed=3, min_length=4, max_length=50, workers=1)
    longer = repeated(split, operator, copies)
    assert longer.lengths.tolist() == (copies * split.lengths + 2).tolist()
    assert longer.labels.tolist() == split.labels.tolist()
    assert [evaluate(longer.sample(i)) for i in range(20)] == split.labels.tolist()


def test_a_repeated_list_is_what_it_should_be():
    split = Split.of([from_text("[SM 2 9 ]")], [1])
    assert repeated(split, "[MAX", 2).sample(0).tolist() == [
        *from_text("[MAX [SM 2 9 ] [SM 2 9 ] ]")
    ]


def test_a_sum_of_copies_is_refused():
    split = Split.of([from_text("[MAX 2 9 ]")], [9])
    with pytest.raises(ValueError, match=r"one of \[MAX, \[MIN, \[MED, got '\[SM'"):
        repeated(split, "[SM", 2)
    with pytest.raises(ValueError, match="copies must be at least 1, got 0"):
        repeated(split, "[MAX", 0)


def test_a_failure_is_within_two_standard_errors_of_the_floor():
    # 10,000 samples at a half: a standard error is half a point
    assert at_floor(0.51, 0.5, 10_000)
    assert not at_floor(0.5101, 0.5, 10_000)
    assert at_floor(0.3, 0.5, 10_000)
    with pytest.raises(ValueError, match="samples must be at least 1"):
        at_floor(0.5, 0.5, 0)


def test_the_spread_is_the_sample_standard_deviation():
    assert mean_and_spread([1.0, 3.0]) == (2.0, math.sqrt(2))
    assert mean_and_spread([5.0]) == (5.0, None)
    with pytest.raises(ValueError, match="at least one number"):
        mean_and_spread([])


def test_a_step_is_timed_by_the_median_stretch_of_its_phase():
    ends = [(10, 100.0), (20, 101.0), (30, 102.0), (40, 110.0), (50, 114.0), (55, 116.0)]
    history = [{"step": step, "seconds": seconds} for step, seconds in ends]
    assert step_seconds(history) == 0.4  # of .1 .1 .8 .4 .4, without the first stretch
    assert step_seconds(history, begin=40) == 0.4
    assert step_seconds(history[:1]) is None  # which says how long the start took
    assert step_seconds([]) is None
    assert step_seconds(history, begin=55) is None


def test_tables_hold_anything_in_a_cell():
    table = Table(("name", "x, %", "n"), [("a|b`\n[c](d) _e_ f_g", 1.23456, 3), ("$", None, 4)])
    lines = table.markdown().splitlines()
    assert lines[1] == "| --- | --: | --: |"
    assert lines[2] == r"| a\|b\` \[c\](d) \_e\_ f_g | 1.23 | 3 |"
    assert lines[3] == r"| \$ | – | 4 |"
    assert list(csv.reader(table.csv().splitlines()[3:])) == [["$", "", "4"]]
    assert "1.23456" in table.csv()
    with pytest.raises(ValueError, match="rows must have 2 values"):
        Table(("a", "b"), [(1,)])


def test_empty_columns_go_unless_they_are_kept():
    table = Table(("a", "b", "c"), [(None, 1, None)]).without_empty_columns("c")
    assert table.columns == ["b", "c"]


def test_powers_of_two_end_at_the_last_that_fits():
    assert measure.powers_of_two(512, 512) == [512]
    assert measure.powers_of_two(512, 5000) == [512, 1024, 2048, 4096]
    with pytest.raises(ValueError, match="max_length must be at least 512, got 511"):
        measure.powers_of_two(512, 511)


def test_running_out_of_memory_is_a_result():
    def step(n):
        if n == 2:
            raise torch.OutOfMemoryError("too much")
        if n == 4:
            raise ValueError("made for 3 tokens")
        if n == 8:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
        return measure.Step(1.0, 2.0)

    found = measure.by_length(step, [1, 2, 4, 8, 16])
    assert list(found.values()) == [
        measure.Step(1.0, 2.0),
        "out of memory",
        "made for 3 tokens",
        "out of memory",
        measure.Step(1.0, 2.0),
    ]


def test_an_error_of_the_gpu_is_no_lack_of_memory():
    def step(n):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure.by_length(step, [1])


def test_labels_say_what_differs():
    assert len(set(labels([read_result(path) for path in COMMITTED]))) == len(COMMITTED)
    found = set(labels([read_result(path) for path in OLDER]))
    assert {"softmax", "linear", "bigbird:num_random_blocks=4"} <= found
    budget = [path for path in COMMITTED if path.parts[-2] == "listops-budget"]
    found = set(labels([read_result(path) for path in budget]))
    assert {"linear, NVIDIA H200, compiled", "performer"} <= found


# The command


def test_everything_that_applies_is_written(run, tmp_path, capsys):
    assert analyze(tmp_path, run, options=("--steps", 2)) == 0
    printed = capsys.readouterr().out
    assert "reach: does not apply: the reach of the mixer has no limit" in printed
    names = {"roots", "multiplication", "speed", "curves", "features"}
    names |= {"memory"} if torch.cuda.is_available() else set()
    if not torch.cuda.is_available():
        assert "memory: does not apply: memory is not measured on a CPU" in printed
    assert {path.stem for path in tmp_path.glob("*.md")} == names
    assert {path.stem for path in tmp_path.glob("*.csv")} == names
    assert {path.stem for path in tmp_path.glob("*.png")} == names
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    for path in tmp_path.glob("*.md"):
        text = path.read_text()
        assert "protocol default, data: generated, seed 0" in text
        assert str(tmp_path.parent) not in text
    (speed,) = rows(tmp_path / "speed.csv")
    weights = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    buffers = [name for name in weights if name.endswith("projection")]
    parameters = sum(x.numel() for name, x in weights.items() if name not in buffers)
    assert int(speed["parameters"]) == parameters
    assert int(speed["bytes"]) == 4 * parameters
    assert float(speed["measured epoch, s"]) == pytest.approx(
        60 / 1000 * float(speed["measured step, ms"])  # 60 samples, one a step
    )
    (feature,) = rows(tmp_path / "features.csv")
    assert (feature["features"], feature["variant"], feature["of"]) == ("16", "positive", "test")
    points = rows(tmp_path / "curves.csv")
    assert [float(point["step"]) for point in points] == [5]


def test_a_curriculum_is_compared_at_the_time_of_the_shorter_run(run, tmp_path, capsys):
    content = json.loads((run / "result.json").read_text())
    fit, recipe = content["fit"], content["recipe"]
    phase, short = recipe["phases"][-1], {"lengths": [5, 10], "num_samples": 8}
    first = recipe | {"phases": [phase | short, phase], "name": "short-first"}
    plain = recipe | {"phases": [phase], "name": "plain"}
    histories = {
        "on": (first, "linear", [(10, 0.2), (20, 0.4), (40, 0.9)]),
        "off": (plain, "linear", [(15, 0.1), (30, 0.3)]),
        "alone": (first, "softmax", [(10, 0.2)]),
        "late": (first, "performer", [(50, 0.7)]),  # no validation by then
        "soon": (plain, "performer", [(20, 0.2)]),
    }
    for name, (chosen, mixer, found) in histories.items():
        entry = fit["history"][0]
        history = [
            entry | {"step": 5 * i, "seconds": float(seconds), "val_accuracy": accuracy}
            for i, (seconds, accuracy) in enumerate(found, 1)
        ]
        changed = {"fit": fit | {"history": history}, "recipe": chosen, "mixer": mixer}
        edited(run, tmp_path / name, **changed)
    runs = [tmp_path / name for name in histories]
    assert analyze(tmp_path / "out", *runs, what="curriculum") == 0
    assert "no run without a curriculum is like it otherwise (softmax)" in capsys.readouterr().out
    one, late = rows(tmp_path / "out/curriculum.csv")
    assert (one["on"], one["off"], float(one["time, s"])) == ("short-first", "plain", 30)
    told = "validation in that time, on, %", "off, %", "of the whole run, on, %", "off, whole, %"
    assert [float(one[name]) for name in told] == [40, 30, 90, 30]
    assert [late[name] for name in told] == ["", "20.0", "70.0", "20.0"]
    assert (tmp_path / "out/curriculum.png").read_bytes().startswith(b"\x89PNG")
    assert analyze(tmp_path / "none", tmp_path / "off", what="curriculum") == 2
    assert "no run begins with documents of some lengths" in capsys.readouterr().err


def test_recorded_and_recomputed_accuracies_of_operators_agree(run, data, tmp_path):
    assert analyze(tmp_path / "a", run, what="roots") == 0
    assert analyze(tmp_path / "b", run, what="roots", options=("--data-dir", data)) == 0
    recorded, recomputed = (rows(tmp_path / name / "roots.csv") for name in "ab")
    assert recorded == recomputed
    test = json.loads((run / "result.json").read_text())["test"]
    whole = recorded[-1]
    assert (whole["root"], float(whole["accuracy, %"])) == ("all", 100 * test["accuracy"])
    assert float(whole["floor, %"]) == 100 * test["floors"]["root_operator"]


def test_no_copies_are_the_test_set_itself(run, tmp_path):
    assert analyze(tmp_path, run, what="multiplication") == 0
    found = rows(tmp_path / "multiplication.csv")
    test = json.loads((run / "result.json").read_text())["test"]
    assert found[0]["operator"] == "none"
    assert float(found[0]["accuracy, %"]) == 100 * test["accuracy"]
    split = TASKS["listops"].load(json.loads((run / "result.json").read_text())["data"]["folder"])
    longest = int(split["test"].lengths.max())
    assert [(row["operator"], int(row["longest"])) for row in found[1:]] == [
        (operator, k * longest + 2) for operator in ("[MAX", "[MIN", "[MED") for k in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("mixer", "options", "why"),
    [
        ("linformer", (), "was made for seq_len ="),
        ("gmlp", (), "the module is made for"),
        ("linear", ("--positions", "learned"), "learned positions end at"),
    ],
)
def test_a_model_with_a_longest_length_says_so(fit, tmp_path, mixer, options, why):
    run = fit(mixer, *options)
    assert analyze(tmp_path, run, what="multiplication") == 0
    found = rows(tmp_path / "multiplication.csv")
    assert found[0]["accuracy, %"]
    assert found[4]["copies"] == "4"
    assert found[4]["accuracy, %"] == ""
    assert why in found[4]["why not"]


@pytest.mark.parametrize(
    ("mixer", "pool", "limits"),
    [
        ("conv:kernel=5", "mean", (4, 4)),
        ("conv:kernel=7", "cls", (6, 6)),
        ("tcn:kind=causal,blocks=3", "last", None),
        ("tcn:kind=circular,blocks=3", "mean", None),
    ],
)
def test_a_gradient_shows_the_whole_reach_and_no_more(run, tmp_path, mixer, pool, limits):
    recipe = json.loads((run / "result.json").read_text())["recipe"] | {"pool": pool}
    other = edited(run, tmp_path / "run", mixer=mixer, positions="none", recipe=recipe)
    assert analyze(tmp_path / "out", other, what="reach") == 0
    (row,) = rows(tmp_path / "out/reach.csv")
    assert (tmp_path / "out/reach.png").read_bytes().startswith(b"\x89PNG")
    assert "](reach.png)" in (tmp_path / "out/reach.md").read_text()
    for side in ("before", "after"):
        assert row[side] == row[f"measured {side}"]
    assert row["tokens"] == row["measured tokens"]
    if limits is not None:
        assert (int(row["before"]), int(row["after"])) == limits


def test_pixels_as_numbers_have_a_reach_too(run, tmp_path):
    mixer = "tcn:kind=symmetric,blocks=2,embedding=false"
    other = edited(run, tmp_path / "run", mixer=mixer, positions="none")
    seen = measure.measured_reach(read_result(other))
    assert seen == list(range(seen[0], seen[-1] + 1))
    assert seen[-1] == -seen[0] > 0


def test_memory_is_a_table_of_lengths(run, tmp_path, monkeypatch, card):
    monkeypatch.setattr(measure, "step_at_length", step_up_to(1024))
    found = model_analyses.memory({"run": read_result(run)}, Options(max_length=2048))
    assert "memory limit, GiB" not in found.table.columns
    assert [tuple(row[1:]) for row in found.table.rows] == [
        (512, 1, 256.0, 1.0, None, "a card"),
        (1024, 1, 512.0, 2.0, None, "a card"),
        (2048, 1, None, None, "out of memory", "a card"),
    ]
    assert card == []
    found.draw(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 0


def test_memory_and_time_are_two_panels(run, tmp_path, monkeypatch, card):
    drawn = {}
    monkeypatch.setattr(measure, "step_at_length", step_up_to(1024))
    monkeypatch.setattr(
        model_analyses, "draw_panels", lambda path, panels, **how: drawn.update(panels, **how)
    )
    model_analyses.memory({"run": read_result(run)}, Options(max_length=2048)).draw(tmp_path)
    assert drawn["peak memory of a training step, MiB"] == {"run": {512: 256.0, 1024: 512.0}}
    assert drawn["training step, ms"] == {"run": {512: 1.0, 1024: 2.0}}
    assert drawn["failed"] == {"run": [2048]}


def test_memory_is_measured_at_the_lengths_that_are_named(run, tmp_path, monkeypatch, card):
    monkeypatch.setattr(measure, "step_at_length", step_up_to(9999))
    options = ("--lengths", "1024,512,10000")
    assert analyze(tmp_path, run, what="memory", options=options) == 0
    found = rows(tmp_path / "memory.csv")
    assert [int(row["tokens"]) for row in found] == [512, 1024, 10000]
    assert [row["why not"] for row in found] == ["", "", "out of memory"]


def test_lengths_that_are_none_are_refused(run, tmp_path, capsys):
    assert analyze(tmp_path, run, what="memory", options=("--lengths", "512,0")) == 2
    assert "lengths must be numbers of at least 1, got [512, 0]" in capsys.readouterr().err
    for lengths in ("512,many", "512,"):
        with pytest.raises(SystemExit, match="2"):
            analyze(tmp_path, run, what="memory", options=("--lengths", lengths))
        assert "must be numbers with commas between them" in capsys.readouterr().err


def test_a_limit_of_memory_holds_while_it_is_measured_and_stands_on_the_page(
    run, tmp_path, monkeypatch, card
):
    seen = []

    def step(*arguments):
        seen.append(list(card))
        return step_up_to(512)(*arguments)

    monkeypatch.setattr(measure, "step_at_length", step)
    options = ("--lengths", "512,1024", "--memory-limit", 16)
    assert analyze(tmp_path, run, what="memory", options=options) == 0
    assert seen == [[0.2], [0.2]]
    assert card == [0.2, 1.0]
    assert "memory runs out at a limit of 16 GiB" in (tmp_path / "memory.md").read_text()
    assert {row["memory limit, GiB"] for row in rows(tmp_path / "memory.csv")} == {"16.0"}


def test_a_limit_of_memory_that_cannot_be_is_refused(run, tmp_path, monkeypatch, capsys, card):
    def message(limit):
        options = ("--memory-limit", limit)
        assert analyze(tmp_path, run, what="memory", options=options) == 2
        return capsys.readouterr().err

    assert "memory_limit must be at most the GPU's 80.0 GiB, got 81" in message(81)
    assert "memory_limit must be positive, got 0.0" in message(0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "it needs a GPU, and so does a limit of it" in message(16)
    assert card == []


@pytest.mark.parametrize("lines", [{"small": {512: 1.0, 1024: 2.0}}, {}])
def test_what_ran_out_of_memory_at_every_length_is_drawn(tmp_path, pictures, lines):
    failed = {"small": [2048.0], "large": [512.0, 1024.0, 2048.0]}
    figures.draw_lines(
        tmp_path, lines, x="n", y="MiB", powers=True, ticks=(512, 1024, 2048), failed=failed
    )
    (axes,) = pictures[0].axes
    crosses = {
        line.get_label(): list(line.get_xdata())
        for line in axes.get_lines()
        if line.get_marker() == "x"
    }
    assert crosses == {f"{label}: out of memory": places for label, places in failed.items()}
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(legend) == sorted([*lines, *crosses])
    figures.draw_lines(tmp_path / "n.png", lines, x="n", y="MiB", powers=True, failed=failed)


def test_an_axis_of_less_than_a_decade_has_numbers(tmp_path, pictures):
    lines = {"small": {512: 9.0, 1024: 37.0}}
    figures.draw_lines(tmp_path, lines, x="n", y="ms", powers=True, ticks=(512, 1024))
    (axes,) = pictures[0].axes
    low, high = axes.get_ylim()
    marks = [x for x in axes.get_yticks() if low <= x <= high]
    assert axes.yaxis.get_major_formatter().format_ticks(marks) == ["10", "20"]


@pytest.mark.gpu
def test_memory_and_speed_are_measured_on_a_gpu(run, tmp_path):
    assert analyze(tmp_path, run, what="memory,speed", options=("--max-length", 1024)) == 0
    small, large = rows(tmp_path / "memory.csv")
    assert 0 < float(small["peak memory, MiB"]) < float(large["peak memory, MiB"])
    (speed,) = rows(tmp_path / "speed.csv")
    assert float(speed["measured peak, MiB"]) > 0


@pytest.mark.parametrize("count", [1, 20])
def test_a_row_has_its_name_and_value_whatever_their_number(tmp_path, pictures, count):
    names = [f"mixer {i}, $\\frac$, begun with {i * 'long ' * 3}" for i in range(count)]
    values = [None, *(float(i) for i in range(1, count))]
    figures.draw_rows(tmp_path, names, {"step, ms": values, "parameters": [5] * count})
    reaches = {name: (i, 10**i) for i, name in enumerate(names[:5])}
    figures.draw_intervals(tmp_path, reaches, reaches, x="tokens")
    steps, sizes = pictures[0].axes
    (tokens,) = pictures[1].axes
    shown = [text.get_text() for text in steps.texts]
    assert shown == ["–", *(f"{i}.00" for i in range(1, count))]
    assert [bar.get_width() for bar in sizes.patches] == [5] * count
    assert [text.get_text() for text in tokens.texts] == [
        f"{before} + {after}" for before, after in reaches.values()
    ]
    for figure in pictures:
        figure.draw_without_rendering()  # a name is no formula
        axes = figure.axes[0]
        found = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
        assert found == [name.strip() for name in names[: len(found)]]
        edges = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert all(above.y0 >= below.y1 for above, below in itertools.pairwise(edges))


def test_bars_of_twenty_runs_differ(tmp_path, pictures):
    figures.draw_bars(tmp_path, ["a"], {str(i): [1.0] for i in range(20)}, y="%")
    looks = {(bar.get_facecolor(), bar.get_hatch()) for bar in pictures[0].axes[0].patches}
    assert len(looks) == 20


def test_a_name_in_a_legend_is_no_formula(tmp_path):
    figures.draw_bars(tmp_path / "a.png", ["a"], {"runs/$\\frac$": [1.0]}, y="%")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def whole(run, out, **changes):
    """The run as one that has made all its steps."""
    result = json.loads((run / "result.json").read_text())
    return edited(run, out, fit=result["fit"] | {"finished": True}, **changes)


def test_speed_has_the_accuracy_and_time_that_are_recorded(run, tmp_path):
    finished = whole(run, tmp_path / "run")
    assert analyze(tmp_path / "out", finished, what="speed", options=("--steps", 1)) == 0
    (row,) = rows(tmp_path / "out/speed.csv")
    result = json.loads((run / "result.json").read_text())
    assert float(row["test accuracy, %"]) == 100 * result["test"]["accuracy"]
    assert float(row["training, s"]) == result["fit"]["seconds"]
    assert int(row["stopped at step"]) == 5
    text = (tmp_path / "out/speed.md").read_text()
    assert "the measured step is not that of the run" not in text
    assert "finished run's" not in text


def test_speed_has_no_end_of_a_run_that_was_cut_or_is_unfinished(run, tmp_path):
    recipe = json.loads((run / "result.json").read_text())["recipe"] | {"stop_at": None}
    paths = {
        "whole": whole(run, tmp_path / "whole"),
        "cut": run,
        "killed": edited(run, tmp_path / "killed", recipe=recipe),
    }
    runs = {name: read_result(path) for name, path in paths.items()}
    found = model_analyses.speed(runs, Options(steps=1))
    columns = [found.table.columns.index(name) for name in ("training, s", "stopped at step")]
    ends = {row[0]: [row[i] for i in columns] for row in found.table.rows}
    assert ends == {
        "whole": [runs["whole"].seconds, 5],
        "cut": [None, None],
        "killed": [None, None],
    }
    told = "its time of training and last step are no finished run's"
    assert found.notes.lines() == [f"cut at step 5: {told} (cut)", f"unfinished: {told} (killed)"]


def test_bars_of_speed_are_the_step_as_measured_or_else_as_recorded(run, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        model_analyses, "draw_rows", lambda path, names, bars: drawn.update(names=names, **bars)
    )
    monkeypatch.setattr(model_analyses, "_here", lambda: "here")
    found = model_analyses.speed({"run": read_result(run)}, Options(steps=1))
    found.draw(tmp_path)
    row = dict(zip(found.table.columns, found.table.rows[0], strict=True))
    assert drawn == {
        "names": ["run"],
        "measured step, ms\nbatch 1, here": [row["measured step, ms"]],
        "parameters": [row["parameters"]],
    }
    drawn.clear()
    committed = {path.name: read_result(path) for path in COMMITTED[:3]}
    found = model_analyses.speed(committed, Options(steps=1))
    found.draw(tmp_path)
    assert list(drawn) == ["names", "recorded step, ms\nbatch 64, different devices", "parameters"]
    assert all(drawn["recorded step, ms\nbatch 64, different devices"])


def test_speed_says_where_it_times_another_step_than_the_run_had(run, tmp_path):
    result = json.loads((run / "result.json").read_text())
    recipe = result["recipe"]
    denoise = {"share": 0.3, "random": 0.3, "predict": "tokens", "weight": 1.0, "alone": False}
    finished = result["fit"] | {"finished": True}
    changed = {
        "which also denoises": {"recipe": recipe | {"denoise": denoise}},
        "which only denoises": {"recipe": recipe | {"denoise": denoise | {"alone": True}}},
        "which has a penalty": {"recipe": recipe | {"penalty": 0.1, "pool": "attention:hops=2"}},
        "which is compiled": {"compiled": True},
        "which takes a batch in 2 shares": {"recipe": recipe | {"accumulate": 2}},
        "which is on 4 devices": {"fit": finished | {"devices": 4}},
    }
    runs = {
        why: read_result(edited(run, tmp_path / why, **{"fit": finished} | x))
        for why, x in changed.items()
    }
    found = model_analyses.speed(runs, Options(steps=1))
    assert found.notes.lines() == [
        f"the measured step is not that of the run, {why} ({why})" for why in changed
    ]


def test_features_of_a_line_are_of_runs_that_differ_in_their_number_and_seed_alone(
    run, tmp_path, monkeypatch
):
    result = json.loads((run / "result.json").read_text())
    begin = {"run": "/runs/a", "mixer": "softmax", "step": 5, "begin": None}
    begin["fingerprints"] = result["data"]["fingerprints"]

    def made(name, mixer, accuracy, *, seed=0, **changes):
        test = result["test"] | {"accuracy": accuracy}
        changes = {"mixer": mixer, "test": test, "seed": seed} | changes
        return read_result(edited(run, tmp_path / name, **changes))

    small, large = "performer:num_features=16", "performer:num_features=32,variant=positive"
    results = [
        made("a", small, 0.2),
        made("b", small, 0.4, seed=1),
        made("c", large, 0.5),
        made("d", small, 0.6, begin=begin),
        made("e", small, 0.7, task="text"),
        made("f", "linear:feature_map=exp", 0.8),
        made("g", "linear", 0.9),
        made("h", "performer:num_features=16 bigbird", 0.25),
        made("i", "softmax", 0.1),
        made("j", "performer:num_features=8 performer:num_features=16", 0.1),
    ]
    drawn = {}
    monkeypatch.setattr(records, "draw_lines", lambda path, lines, **how: drawn.update(lines))
    found = records.features(dict(zip(labels(results), results, strict=True)), Options())
    found.draw(tmp_path)
    head = result["recipe"]["width"] // result["recipe"]["heads"]
    positive, scratch = "positive, orthogonal, test", "from scratch"
    assert drawn == {
        f"{positive}, listops, {scratch}": {16: pytest.approx(30), 32: pytest.approx(50)},
        f"{positive}, listops, begun with softmax": {16: pytest.approx(60)},
        f"{positive}, text, {scratch}": {16: pytest.approx(70)},
        f"linear, exp, test, listops, {scratch}": {head: pytest.approx(80)},
        f"linear, elu, test, listops, {scratch}": {head: pytest.approx(90)},
        f"{positive}, performer bigbird, listops, {scratch}": {16: pytest.approx(25)},
    }
    assert len(found.table.rows) == 8
    assert sorted(found.notes.said) == [
        "the features differ from block to block",
        "the mixer has no performer, and is not linear attention alone",
    ]


def test_of_a_batch_the_shortest_step_counts_and_the_first_does_not(run, monkeypatch):
    seconds = [0, 0, 1, 6, 3, 4, 2, 5]  # two batches: not counted, then three passes
    clock = itertools.accumulate(x for step in seconds for x in (0, step))
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    result = read_result(run)
    encoder = measure.model_of(result, max_length=32)
    batch = Batch(torch.ones(1, 32, dtype=torch.long), torch.tensor([32]), torch.tensor([0]))
    step = measure.time_steps(encoder, [batch, batch], bf16=False)
    assert step.milliseconds == 2500  # of 1 and 4
    with pytest.raises(ValueError, match="batches must be at least one"):
        measure.time_steps(encoder, [], bf16=False)


def test_a_step_is_made_for_its_length(run, tmp_path):
    # learned positions, Linformer and gMLP have a longest length, but here it is that of the step
    recipe = json.loads((run / "result.json").read_text())["recipe"]
    for mixer, positions in (("linformer", "sinusoidal"), ("gmlp", "none"), ("linear", "learned")):
        changed = {"mixer": mixer, "recipe": recipe | {"positions": positions}}
        other = read_result(edited(run, tmp_path / mixer, **changed))
        step = measure.step_at_length(other, 2, 50, steps=1)
        assert step.milliseconds > 0
        assert (step.peak_mib is None) == (not torch.cuda.is_available())
    fixed = edited(run, tmp_path / "fixed", mixer="linformer:seq_len=40")
    with pytest.raises(ValueError, match="40"):
        measure.step_at_length(read_result(fixed), 2, 50, steps=1)


def test_committed_results_of_older_versions_are_analysed(tmp_path, capsys):
    assert len(OLDER) >= 5
    assert analyze(tmp_path, *OLDER) == 0
    printed = capsys.readouterr().out
    assert "multiplication: does not apply: no checkpoints/best.ckpt" in printed
    found = rows(tmp_path / "roots.csv")
    assert len(found) == 5 * len(OLDER)
    assert {row["root"] for row in found} == {"[MIN", "[MAX", "[MED", "[SM", "all"}
    speeds = {row["run"]: float(row["recorded step, ms"]) for row in rows(tmp_path / "speed.csv")}
    assert speeds["linear"] == pytest.approx(49.7, abs=0.1)
    assert len(rows(tmp_path / "curves.csv")) == 20 * len(OLDER)


def test_a_run_of_another_task_is_left_out_by_name(run, tmp_path, capsys):
    other = edited(run, tmp_path / "run", task="text", mixer="linear")
    assert analyze(tmp_path / "out", run, other, what="roots") == 0
    printed = capsys.readouterr().out
    assert "roots: it is an analysis of listops, and the run is of text (linear)" in printed
    assert {row["run"] for row in rows(tmp_path / "out/roots.csv")} == {"performer:num_features=16"}


def test_bad_input_is_one_sentence(run, tmp_path, capsys):
    def message(*arguments, **options):
        assert analyze(tmp_path / "out", *arguments, **options) == 2
        return capsys.readouterr().err

    assert "what must be of roots, multiplication" in message(run, what="roots,depth")
    assert "is not a run: it has no result.json" in message(tmp_path)
    assert "no analysis applies" in message(run, what="reach")
    assert "steps must be at least 1, got 0" in message(run, options=("--steps", 0))
    assert "max_length must be at least 512" in message(run, options=("--max-length", 64))
    newer = json.loads((run / "result.json").read_text())["recipe"] | {"tomorrow": 1}
    newer = edited(run, tmp_path / "newer", recipe=newer)
    assert "its recipe is none of this version" in message(newer, what="speed")
    untrained = edited(run, tmp_path / "untrained")
    (untrained / "checkpoints/best.ckpt").write_bytes(b"nonsense")
    assert "best.ckpt is damaged" in message(untrained, what="multiplication")
    assert not (tmp_path / "out").exists()


def test_every_analysis_says_what_it_is():
    for analysis in ANALYSES.values():
        title, blank, text = analysis.__doc__.split("\n", 2)
        assert title
        assert not blank
        assert text.strip()


def test_predictions_are_in_the_order_of_the_split(run):
    result = read_result(run)
    split = measure.data_of(result)["test"]
    encoder = measure.trained(result)
    one, many = (measure.predict(encoder, split, size, bf16=False) for size in (1, 7))
    assert np.array_equal(one, many)
