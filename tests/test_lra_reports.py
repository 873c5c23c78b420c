"""Reports: results of many runs on one page, the published ones apart, damaged ones by name."""

import copy
import csv
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fastattn.lra import figures, published
from fastattn.lra.cli import main
from fastattn.lra.recipes import RECIPES
from fastattn.lra.reports import every_run, find_results, summary, write_report
from fastattn.lra.results import labels, read_result, with_origins
from fastattn.lra.tasks import TASKS

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
DOCS = Path(__file__).parent.parent / "docs"
BASE = json.loads(
    (RESULTS / "nvidia-h100-80gb-hbm3/lra/listops-budget/linear/result.json").read_text()
)
GENERATED = {"generated": True, "generator": {"seed": 3, "ease": None}, "stand_in": None}


def write(path, *, seed=0, test=None, protocol=None, origin=None, **changes):
    """A result.json; without ``test`` as an unfinished run leaves it."""
    result = copy.deepcopy(BASE) | changes
    result["recipe"]["seed"] = result["seed"] = seed
    if test is None:
        del result["fit"], result["test"]
    else:
        result["test"]["accuracy"] = test
    for part in (result["data"], result.get("test", {})):
        part |= origin or GENERATED
        part |= {"protocol": protocol} if protocol else {}
    path.mkdir(parents=True)
    (path / "result.json").write_text(json.dumps(result))
    return read_result(path)


def table(results):
    found = summary(results)
    return [dict(zip(found.columns, row, strict=True)) for row in found.rows]


def test_seeds_of_a_configuration_are_one_row(tmp_path):
    results = [write(tmp_path / str(i), seed=i, test=0.4 + i / 100) for i in (0, 1, 2)]
    (row,) = table(results)
    assert row["seeds"] == "0, 1, 2"
    assert row["failed seeds"] == "0 of 3"
    assert row["test accuracy, %"] == "41.00 ± 1.00"
    assert row["data"] == "generated, seed 3"
    assert row["protocol"] == "default"
    assert row["state"] == "3 finished"
    assert row["floors, %"] == "majority 16.90, root_operator 34.95"


def test_a_seed_at_chance_and_one_without_a_result_have_failed(tmp_path):
    results = [
        write(tmp_path / "good", seed=0, test=0.6),
        write(tmp_path / "chance", seed=1, test=0.18),  # the majority is .169, an error .008
        write(tmp_path / "killed", seed=2),
    ]
    (row,) = table(results)
    assert row["failed seeds"] == "2 of 3 (1, 2)"
    assert row["test accuracy, %"] == "39.00 ± 29.70 (2 of 3)"
    assert row["state"] == "2 finished, 1 unfinished"


def test_a_run_that_diverged_has_failed(tmp_path):
    history = [*BASE["fit"]["history"], BASE["fit"]["best"] | {"val_loss": float("nan")}]
    result = write(tmp_path / "a", test=0.6, fit=BASE["fit"] | {"history": history})
    assert result.failure == "diverged"
    assert result.state == f"diverged at step {BASE['fit']['best']['step']}"
    assert not result.finished
    write_report(tmp_path, tmp_path / "page.md")


def test_a_run_that_classifies_nothing_has_not_failed(tmp_path):
    # as one that only denoises, to begin others with
    entry = {"step": 5, "seconds": 1.0, "train_denoise_loss": 2.0, "val_denoise_loss": 2.0}
    fit = BASE["fit"] | {"history": [entry], "best": entry}
    content = {k: x for k, x in BASE.items() if k != "test"} | {"fit": fit}
    (tmp_path / "result.json").write_text(json.dumps(content))
    write_report(tmp_path, tmp_path / "page.md")
    (row,) = table([read_result(tmp_path)])
    assert row["failed seeds"] == "0 of 1"
    assert row["state"] == "1 finished, classifies nothing"
    assert (
        main(["analyze", "--run", str(tmp_path), "--out", str(tmp_path), "--what", "curves"]) == 2
    )


def test_what_differs_in_anything_but_the_seed_is_a_row_of_its_own(tmp_path):
    recipe = copy.deepcopy(BASE["recipe"])
    linear = [phase | {"decay": "linear"} for phase in recipe["phases"]]
    results = [
        write(tmp_path / "a", test=0.4),
        write(tmp_path / "b", test=0.4, mixer="performer"),
        write(tmp_path / "c", test=0.4, protocol="s4"),
        write(tmp_path / "d", test=0.4, device="another"),
        write(tmp_path / "e", test=0.4, recipe=recipe | {"dropout": 0.1}),
        write(tmp_path / "f", test=0.4, origin=GENERATED | {"stand_in": "of mails"}),
        write(tmp_path / "g", test=0.4, origin=GENERATED | {"generated": False}),
        write(tmp_path / "h", test=0.4, recipe=recipe | {"stop_at": 5}),
        write(tmp_path / "i", test=0.4, recipe=recipe | {"phases": linear}),
    ]
    found = table(results)
    assert len(found) == len(results)
    assert found[4]["recipe"] == "listops-budget (dropout=0.1)"
    assert found[8]["recipe"] == "listops-budget (decay=linear/linear)"
    assert [row["data"] for row in found[4:7]] == [
        "generated, seed 3",
        "stand-in, not LRA",
        "the public files",
    ]


OTHER = {"train": "1234567890", "val": "2345678901", "test": "3456789012"}


def beginning(mixer, fingerprints=None, before=None, step=5):
    """What result.json says of the run whose weights a run has begun with."""
    fingerprints = fingerprints or BASE["data"]["fingerprints"]
    return {
        "run": f"/runs/{mixer}-{step}",
        "mixer": mixer,
        "step": step,
        "fingerprints": fingerprints,
        "begin": before,
    }


def test_what_a_run_began_with_makes_a_row_of_its_own(tmp_path):
    headless = {"moved": [], "new": ["head.0.weight"], "dropped": []}
    easy = beginning("softmax", OTHER)
    results = [
        write(tmp_path / "scratch", test=0.4),
        write(tmp_path / "softmax", test=0.5, begin=beginning("softmax")),
        write(tmp_path / "headless", test=0.5, begin=beginning("softmax"), transfer=headless),
        write(tmp_path / "easy", test=0.5, begin=easy),
        write(tmp_path / "chain", test=0.5, begin=beginning("softmax", before=easy)),
        write(tmp_path / "linear", test=0.5, begin=beginning("linear")),
    ]
    found = table(results)
    told = [
        None,
        "softmax",
        "softmax (new head)",
        "softmax (data 12345678)",
        "softmax after softmax (data 12345678)",
        "linear",
    ]
    assert [row["begun with"] for row in found] == told
    whole = every_run(results, tmp_path)
    assert [row[whole.columns.index("begun_with")] for row in whole.rows] == told
    assert labels(results)[0] == "linear, from scratch"
    assert labels(results)[3] == "linear, begun with softmax (data 12345678)"


def test_seeds_that_began_with_seeds_of_another_run_are_one_row(tmp_path):
    results = [
        write(tmp_path / str(i), seed=i, test=0.4, begin=beginning("softmax", OTHER, step=10 * i))
        for i in range(2)
    ]
    (row,) = table(results)
    assert row["seeds"] == "0, 1"


def test_what_a_run_began_with_has_the_name_of_its_data_where_another_run_tells(tmp_path):
    easy = copy.deepcopy(BASE)
    easy["data"] |= {"generated": True, "generator": {"seed": 0, "difficulty": "easy"}}
    easy["data"]["fingerprints"], easy["test"]["fingerprint"] = OTHER, OTHER["test"]
    (tmp_path / "easy").mkdir()
    (tmp_path / "easy/result.json").write_text(json.dumps(easy))
    write(tmp_path / "begun", test=0.5, begin=beginning("softmax", OTHER))
    begun, source = find_results(tmp_path).results
    assert begun.begun == "softmax (generated, seed 0, difficulty easy)"
    assert source.begun is None


def test_a_compiled_run_is_a_row_of_its_own(tmp_path):
    results = [
        write(tmp_path / "old", test=0.4),  # without the field
        write(tmp_path / "new", test=0.4, compiled=False),
        write(tmp_path / "compiled", test=0.6, compiled=True),
    ]
    found = table(results)
    assert [(row["seeds"], row["compiled"]) for row in found] == [("0, 0", None), ("0", "yes")]
    assert labels(results)[2] == "linear, compiled"
    assert "compiled" not in table(results[:2])[0]


def test_a_test_of_the_last_checkpoint_is_a_row_of_its_own_and_says_so(tmp_path):
    last = write(tmp_path / "last", test=0.4)
    last.content["test"]["checkpoint"] = "last"
    (tmp_path / "last/result.json").write_text(json.dumps(last.content))
    results = [write(tmp_path / "best", test=0.5), read_result(tmp_path / "last")]
    assert [row["test accuracy, %"] for row in table(results)] == [50.0, 40.0]
    write_report(tmp_path, tmp_path / "page.md")
    assert "the test is of the last checkpoint" in (tmp_path / "page.md").read_text()


def test_the_reach_of_a_convolution_stands_beside_its_result(tmp_path):
    results = [
        write(tmp_path / "conv", test=0.4, mixer="conv", reach=[4, 6]),
        write(tmp_path / "linear", test=0.4, reach=None),
        write(tmp_path / "old", test=0.4, mixer="performer"),
    ]
    assert [row["reach"] for row in table(results)] == ["4 + 6", None, None]
    assert "reach" not in table(results[1:])[0]
    whole = every_run(results, tmp_path)
    assert [row[-2:] for row in whole.rows] == [(4, 6), (None, None), (None, None)]


def test_a_run_that_stopped_early_says_when(tmp_path):
    fit = BASE["fit"] | {"stopped_early": True, "steps": 1500, "finished": True}
    results = [
        write(tmp_path / "early", test=0.4, fit=fit),
        write(tmp_path / "whole", test=0.4, fit=BASE["fit"] | {"stopped_early": False}, seed=1),
    ]
    (row,) = table(results)
    assert row["state"] == "1 stopped early at step 1500, 1 finished"


def fitted(**changes):
    return BASE["fit"] | changes


def test_steps_and_the_best_checkpoint_of_each_seed_stand_in_the_order_of_the_seeds(tmp_path):
    ours = {i: str(i) * 64 for i in range(3)}
    results = [
        write(tmp_path / "b", seed=1, test=0.4, fit=fitted(steps=900, checkpoint=ours[1])),
        write(tmp_path / "a", seed=0, test=0.4, fit=fitted(steps=10, checkpoint=ours[0])),
        write(tmp_path / "c", seed=2),
    ]
    (row,) = table(results)
    assert row["steps"] == "10, 900, –"
    assert row["checkpoint"] == f"{ours[0][:12]}, {ours[1][:12]}, –"
    assert [table(results[i : i + 1])[0]["steps"] for i in range(3)] == [900, 10, None]
    old = table([write(tmp_path / "old", test=0.4)])[0]
    assert (old["steps"], old["checkpoint"]) == (10000, None)
    write_report(tmp_path, tmp_path / "page.md")
    with open(tmp_path / "page.csv", newline="") as file:
        rows = {row["run"]: (row["steps"], row["checkpoint"]) for row in csv.DictReader(file)}
    assert rows == {
        "a": ("10", ours[0][:12]),
        "b": ("900", ours[1][:12]),
        "c": ("", ""),
        "old": ("10000", ""),
    }


@pytest.mark.parametrize(
    ("hashes", "checkpoint", "state"),
    [
        (("a" * 64, "a" * 64), "best", "1 finished"),
        (("a" * 64, "b" * 64), "best", "1 finished (tested: another checkpoint)"),
        (("a" * 64, None), "best", "1 finished"),
        ((None, "b" * 64), None, "1 finished"),
        (("a" * 64, "b" * 64), "last", "1 finished (tested: last checkpoint)"),
    ],
)
def test_a_test_of_another_checkpoint_than_the_best_says_so(tmp_path, hashes, checkpoint, state):
    content = write(tmp_path / "a", test=0.4, fit=fitted(checkpoint=hashes[0])).content
    told = {"sha256": hashes[1], "checkpoint": checkpoint}
    content["test"] |= {key: value for key, value in told.items() if value}
    (tmp_path / "a/result.json").write_text(json.dumps(content))
    (row,) = table([read_result(tmp_path / "a")])
    assert row["state"] == state


def test_an_origin_is_told_by_the_fingerprints_of_another_run(tmp_path):
    unknown = copy.deepcopy(BASE) | {"mixer": "performer"}
    other_train = copy.deepcopy(unknown)
    other_train["data"]["fingerprints"]["train"] = "another"
    other_test = copy.deepcopy(unknown)
    other_test["test"]["fingerprint"] = "another"
    for name, content in (("a", unknown), ("b", other_train), ("c", other_test)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(content))
    write(tmp_path / "known", test=0.4)
    origins = [run.origin for run in find_results(tmp_path).results]
    assert origins == [
        "generated, seed 3, by its fingerprint",
        "not recorded",
        "not recorded",
        "generated, seed 3",
    ]
    write_report(tmp_path, tmp_path / "page.md")
    assert "generated, seed 3, by its fingerprint" in (tmp_path / "page.md").read_text()
    # two runs that say different things of the same data tell nothing
    another = write(tmp_path / "contrary", test=0.4, origin=GENERATED | {"generator": {"seed": 4}})
    runs = [another, *(read_result(tmp_path / name) for name in ("a", "known"))]
    assert with_origins(runs)[1].origin == "not recorded"


def test_curves_are_drawn_against_steps_and_against_seconds(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "_save", lambda figure, axes, path: drawn.append(figure))
    for name, slow in (("a", 1), ("b", 3)):
        history = [
            {"step": step, "seconds": slow * seconds, "train_loss": 1.0, "val_loss": 2.0}
            | {"val_accuracy": accuracy}
            for step, seconds, accuracy in ((10, 1.5, 0.2), (20, 3.0, 0.4))
        ]
        fit = BASE["fit"] | {"history": history}
        write(tmp_path / name, test=0.4, fit=fit, mixer={"a": "linear", "b": "softmax"}[name])
    write_report(tmp_path, tmp_path / "page.md")
    (figure,) = drawn
    *_, by_step, by_time = figure.axes
    assert (by_step.get_xlabel(), by_time.get_xlabel()) == ("step", "seconds of training")

    def points(axes):
        lines = {line.get_label(): line for line in axes.get_lines()}
        return {
            name: (list(line.get_xdata()), list(line.get_ydata()))
            for name, line in lines.items()
            if not name.startswith("_")
        }

    accuracy = [20.0, 40.0]
    assert points(by_step) == dict.fromkeys(("linear", "softmax"), ([10, 20], accuracy))
    assert points(by_time) == {
        "linear": ([1.5, 3.0], accuracy),
        "softmax": ([4.5, 9.0], accuracy),
    }


def test_an_older_result_says_that_its_origin_is_not_recorded():
    (row,) = table([read_result(RESULTS / "nvidia-h200/lra/listops-mini/bigbird")])
    assert (row["data"], row["protocol"]) == ("not recorded", "default")
    assert row["recipe"] == "listops-mini"
    assert row["test accuracy, %"] == 37.5


DAMAGED = {
    "half": '{"task": "listops", "mix',
    "empty": "",
    "list": "[1, 2]",
    "other": '{"score": 3}',
    "no-task": json.dumps(BASE | {"task": "sudoku"}),
    "no-mixer": json.dumps(BASE | {"mixer": "flash"}),
    "no-floors": json.dumps(BASE | {"test": BASE["test"] | {"floors": {}}}),
    "no-data": json.dumps(BASE | {"data": {}}),
    "sets": json.dumps(BASE | {"data": BASE["data"] | {"fingerprints": ["a", "b"]}}),
    "prints": json.dumps(
        BASE | {"data": BASE["data"] | {"fingerprints": {"train": [], "test": 1}}}
    ),
    "begin": json.dumps(BASE | {"begin": {"run": "a"}}),
    "reach": json.dumps(BASE | {"reach": 3}),
    "words": json.dumps(BASE | {"test": BASE["test"] | {"accuracy": "good"}}),
    "history": json.dumps(BASE | {"fit": BASE["fit"] | {"history": [{"step": 3}]}}),
    "point": json.dumps(
        BASE | {"fit": BASE["fit"] | {"best": {**BASE["fit"]["best"], "step": "x"}}}
    ),
    "roots": json.dumps(BASE | {"test": BASE["test"] | {"by_root_operator": {"[MAX": {}}}}),
    "memory": json.dumps(BASE | {"fit": BASE["fit"] | {"peak_memory_mib": "much"}}),
    "steps": json.dumps(BASE | {"fit": BASE["fit"] | {"steps": "many"}}),
    "hash": json.dumps(BASE | {"fit": BASE["fit"] | {"checkpoint": 3}}),
    "nobody": json.dumps(BASE | {"test": BASE["test"] | {"samples": 0}}),
    "phases": json.dumps(BASE | {"recipe": {"name": "smoke", "phases": [{}]}}),
    "binary": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_result_is_named_and_skipped(tmp_path, capsys, name):
    write(tmp_path / "good", test=0.4)
    bad = tmp_path / "deep/er" / name
    bad.mkdir(parents=True)
    content = DAMAGED[name]
    (bad / "result.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert f"skipped: {bad / 'result.json'}: damaged, or not of fastattn-lra" in printed.err
    assert "1 runs, written to" in printed.out
    text = (tmp_path / "report.md").read_text()
    assert "## Skipped" in text
    assert f"deep/er/{name}/result.json" in text
    assert str(tmp_path) not in text


def test_ours_and_the_published_are_two_tables(tmp_path):
    write(tmp_path / "runs/a", test=0.4)
    write_report(tmp_path, tmp_path / "page.md")
    ours, theirs = (tmp_path / "page.md").read_text().split("### Published figures of listops")
    assert "| linear |" in ours
    assert "generated, seed 3" in ours
    told = "public files; 2002 tokens | 90,000 steps, batch 64, one A100"
    assert f"| MEGA | 63.14 | {told} | Ma et al. 2022, arXiv:2209.10655 |" in theirs
    assert "MEGA" not in ours
    accuracies, speeds = theirs.split("## Published speed and memory")
    assert "| Performer | 5.7 | 1.06 | Tay et al. 2021, arXiv:2011.04006 |" in speeds
    assert "| Reformer | 0.8 | – | Tay et al. 2021, arXiv:2011.04006 |" in speeds
    assert "Reformer" not in accuracies
    assert "| linear |" not in theirs
    assert (tmp_path / "page-listops.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "page.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["test"], row["failed"]) == ("runs/a", "0.4", "no")


def test_the_published_figures_are_of_our_tasks_and_complete():
    assert set(published.TASKS) <= set(TASKS)
    for row in published.PUBLISHED:
        assert len(row.accuracies.split()) == len(published.TASKS)
        assert row.setup.source
        assert {*row.setup.data, *row.setup.training} <= set(published.TASKS)
    pathx = published.published("pathx")
    made = "public files; hard set", "200 epochs, batch 64", "Tay et al. 2021, arXiv:2011.04006"
    assert ("Transformer", "fail", *made) in pathx.rows
    assert all(row[0] != "Nyströmformer" for row in pathx.rows)
    with pytest.raises(ValueError, match="task must be one of"):
        published.published("sudoku")


def test_warnings_stand_on_the_page(tmp_path):
    fit = BASE["fit"] | {"warnings": ["stuck at chance"]}
    for seed in (0, 1):
        write(tmp_path / str(seed), seed=seed, test=0.4, fit=fit)
    write_report(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "- stuck at chance (linear, seed 0; linear, seed 1)" in text


def test_a_warning_has_the_name_of_its_run_alone(tmp_path):
    fit = BASE["fit"] | {"warnings": ["stuck at chance"]}
    write(tmp_path / "runs/a", test=0.2, fit=fit)
    write(tmp_path / "runs/b", test=0.4, recipe=BASE["recipe"] | {"dropout": 0.1})
    write_report(tmp_path / "runs", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "- stuck at chance (linear, listops-budget)\n" in text


def test_devices_of_several_sittings_are_told_from_several_at_once(tmp_path):
    shown = [
        write(tmp_path / f"{n}{at}", test=0.4, device=at, fit=BASE["fit"] | {"devices": n}).device
        for n in (1, 2)
        for at in ("A", "A, then B")
    ]
    assert shown == ["A", "A, then B", "2 × A", "2 × (A, then B)"]


def test_a_run_that_was_at_chance_and_is_not_has_no_advice_on_the_page(tmp_path):
    at = "chance: at step 9 of 90 the training loss is 0.6932 nats, that of guessing from "
    for test, seed, guess in (
        (0.4, 0, "nothing (1.0)"),
        (0.17, 1, "nothing (2.0)"),
        (0.4, 2, "a root (1.0)"),
    ):
        warning = f"stuck at {at}{guess}. Take a lower learning rate"
        write(tmp_path / str(seed), test=test, seed=seed, fit=BASE["fit"] | {"warnings": [warning]})
    write_report(tmp_path, tmp_path / "page.md")
    lines = [x for x in (tmp_path / "page.md").read_text().splitlines() if "step 9 of" in x]
    assert sorted(x.split(" (linear")[0] for x in lines) == [
        f"- at {at.replace('chance', 'chance for a time')}nothing (1.0); later it was not",
        f"- stuck at {at}a root (1.0). Take a lower learning rate",
        f"- stuck at {at}nothing (2.0). Take a lower learning rate",
    ]


def test_a_recipe_of_an_older_definition_says_what_is_another_today(tmp_path):
    phases = [phase | {"steps": 100} for phase in BASE["recipe"]["phases"]]
    fewer = write(tmp_path / "a", test=0.4, recipe=BASE["recipe"] | {"phases": phases})
    assert fewer.recipe == "listops-budget (steps=100/100)"
    layer = read_result(RESULTS / "nvidia-h200/lra/pathfinder-budget/long_conv-layer")
    assert {"norm", "embedding"} & layer.content["recipe"].keys() == set()
    assert layer.recipe == "pathfinder-budget (embedding=table, norm=layer)"
    # a recipe in epochs has as many steps as the data makes of it
    epochs = asdict(RECIPES["text-transformer"].on(1000, 100))
    other = write(tmp_path / "b", test=0.4, task="text", recipe=epochs)
    assert other.recipe == "text-transformer"


def test_the_published_page_is_what_the_results_say(tmp_path, capsys):
    out = tmp_path / "results.md"
    assert main(["report", str(RESULTS), "--out", str(out)]) == 0
    assert "runs, written to" in capsys.readouterr().out
    for name in ("results.md", "results.csv"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), name
    assert not find_results(RESULTS).skipped


def test_the_published_analyses_are_what_the_results_say(tmp_path):
    runs = sorted(f"{path}/" for path in RESULTS.glob("*/lra/listops*/*"))  # as a shell does
    words = [word for run in runs for word in ("--run", run)]
    assert main(["analyze", *words, "--out", str(tmp_path), "--what", "roots,curriculum"]) == 0
    for name in ("roots.md", "roots.csv", "curriculum.md", "curriculum.csv"):
        assert (tmp_path / name).read_text() == (DOCS / "results" / name).read_text(), name


def test_a_page_without_results_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no result.json of a run under" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    write(tmp_path / "a", test=0.4)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "must be a file that ends in .md" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_sphinx_builds_the_pages_without_a_warning(tmp_path):
    pytest.importorskip("myst_parser")
    from sphinx.cmd.build import main as sphinx

    source = tmp_path / "source"
    runs = tmp_path / "runs"
    write(runs / "a", test=0.4)
    write(runs / "b", test=0.4, seed=1, device="$x^2$ | `y` <b> [z](nowhere) _w_ {q}`r`")
    (runs / "c").mkdir()
    (runs / "c/result.json").write_text("{")
    write_report(runs, source / "report.md")
    what = "roots,speed,curves"
    words = ["analyze", "--what", what, "--out", str(source), "--run", str(runs / "a")]
    assert main([*words, "--run", str(runs / "b")]) == 0
    pages = "\n".join(["report", *what.split(",")])
    (source / "index.md").write_text(f"# Index\n\n```{{toctree}}\n{pages}\n```\n")
    (source / "conf.py").write_text(
        'extensions = ["myst_parser"]\n'
        'myst_enable_extensions = ["dollarmath", "colon_fence"]\n'
        'html_theme = "basic"\n'
    )
    assert (
        sphinx(["-q", "-W", "--keep-going", "-b", "html", str(source), str(tmp_path / "out")]) == 0
    )
    html = (tmp_path / "out/report.html").read_text()
    assert html.count("<table") == 3
    assert "$x^2$ | `y` &lt;b&gt; [z](nowhere) _w_ {q}`r`" in html
    assert "report-listops.png" in html
