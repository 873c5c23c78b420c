"""Reports: results of many runs on one page, the published ones apart, damaged ones by name."""

import copy
import csv
import json
from pathlib import Path

import pytest

from fastattn.lra import published
from fastattn.lra.cli import main
from fastattn.lra.reports import find_results, summary, write_report
from fastattn.lra.results import read_result
from fastattn.lra.tasks import TASKS

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
BASE = json.loads((RESULTS / "nvidia-h200/lra/listops-budget/linear/result.json").read_text())
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
    "words": json.dumps(BASE | {"test": BASE["test"] | {"accuracy": "good"}}),
    "history": json.dumps(BASE | {"fit": BASE["fit"] | {"history": [{"step": 3}]}}),
    "point": json.dumps(
        BASE | {"fit": BASE["fit"] | {"best": {**BASE["fit"]["best"], "step": "x"}}}
    ),
    "roots": json.dumps(BASE | {"test": BASE["test"] | {"by_root_operator": {"[MAX": {}}}}),
    "memory": json.dumps(BASE | {"fit": BASE["fit"] | {"peak_memory_mib": "much"}}),
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
    assert "| MEGA | 63.14 | Ma et al. 2022, arXiv:2209.10655 |" in theirs
    assert "MEGA" not in ours
    assert "| linear |" not in theirs
    assert (tmp_path / "page-listops.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "page.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["run"], row["test"], row["failed"]) == ("runs/a", "0.4", "no")


def test_the_published_figures_are_of_our_tasks_and_complete():
    assert set(published.TASKS) <= set(TASKS)
    for row in published.PUBLISHED:
        assert len(row.accuracies.split()) == len(published.TASKS)
        assert row.source
    pathx = published.published("pathx")
    assert ("Transformer", "fail", "Tay et al. 2021, arXiv:2011.04006") in pathx.rows
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


def test_the_published_page_is_what_the_results_say(tmp_path, capsys):
    out = tmp_path / "results.md"
    assert main(["report", str(RESULTS), "--out", str(out)]) == 0
    assert "runs, written to" in capsys.readouterr().out
    assert out.read_text() == (RESULTS.parent.parent / "docs/results.md").read_text()
    assert not find_results(RESULTS).skipped


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
    assert html.count("<table") == 2
    assert "$x^2$ | `y` &lt;b&gt; [z](nowhere) _w_ {q}`r`" in html
    assert "report-listops.png" in html
