"""Several seeds: each its run, a summary that states what failed, and the others go on."""

import json
import os
import statistics
from dataclasses import replace

import pytest

from fastattn.lra import runs, seeds
from fastattn.lra.cli import main
from fastattn.lra.recipes import SMOKE, Phase
from fastattn.lra.results import failure
from fastattn.lra.tasks import TASKS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("listops")
    TASKS["listops"].generate(
        out, num_train=49, num_val=20, num_test=20, min_length=5, max_length=40, workers=1
    )
    return out


def result(seed, *losses, accuracy=0.5):
    history = [{"step": i, "val_loss": x, "val_accuracy": accuracy} for i, x in enumerate(losses)]
    return {
        "task": "listops",
        "seed": seed,
        "floors": {"majority": 0.1},
        "data": {"samples": {"val": 400}, "protocol": "default", "stand_in": "made up"},
        "fit": {"history": history, "best": history[0]},
    }


@pytest.mark.parametrize(
    ("losses", "accuracy", "why"),
    [
        ([2.3, 2.2], 0.129, "at chance"),  # an error is 0.015
        ([2.3, 2.2], 0.131, None),
        ([1.0, float("nan")], 0.5, "diverged"),
        ([2.3, float("inf")], 0.5, "diverged"),
    ],
)
def test_a_seed_fails_by_its_losses_or_its_accuracy(losses, accuracy, why):
    assert failure(result(0, *losses, accuracy=accuracy)) == why


def test_a_test_decides_where_there_was_one():
    test = {"accuracy": 0.2, "samples": 400, "floors": {"majority": 0.18}}
    assert failure(result(0, 1.0) | {"test": test}) == "at chance"


def test_a_run_that_only_denoises_is_not_at_chance():
    one = result(0, 1.0)
    one["fit"] = {"history": [{"val_denoise_loss": 3.0}]}
    assert failure(one) is None
    one["fit"]["history"].append({"val_denoise_loss": float("nan")})
    assert failure(one) == "diverged"


def test_failed_seeds_are_stated_and_the_others_go_on(tmp_path, monkeypatch):
    made = {
        3: result(3, 1.0, accuracy=0.8),
        1: result(1, 2.3, accuracy=0.1),
        10: result(10, float("nan"), accuracy=0.2),
        4: result(4, 1.5, accuracy=0.6),
    }

    def fake(task, data, recipe, mixer, run, resume):
        assert not resume
        run.mkdir(parents=True)
        (run / "result.json").write_text(json.dumps(made[recipe.seed]))

    monkeypatch.setattr(seeds, "fit", fake)
    summary = seeds.fit_seeds("listops", tmp_path, SMOKE, "linear", tmp_path / "a", [3, 1, 10, 4])
    assert json.loads((tmp_path / "a/summary.json").read_text()) == summary
    assert summary["data"] == {"protocol": "default", "stand_in": "made up"}
    assert summary["seeds"] == 4
    assert summary["failed"] == {"1": "at chance", "10": "diverged"}
    assert [row["seed"] for row in summary["runs"]] == [1, 3, 4, 10]
    accuracy = summary["val_accuracy"]
    assert accuracy["mean"] == pytest.approx(0.7)
    assert accuracy["spread"] == pytest.approx(statistics.stdev([0.6, 0.8]))
    assert accuracy["range"] == [0.6, 0.8]
    assert accuracy["mean_with_failed"] == pytest.approx((0.8 + 0.1 + 0.2 + 0.6) / 4)
    with pytest.raises(ValueError, match="is not empty"):
        seeds.fit_seeds("listops", tmp_path, SMOKE, "linear", tmp_path / "a", [0])


def test_one_seed_has_no_spread_and_none_that_learnt_no_mean(tmp_path, monkeypatch):
    def fake(task, data, recipe, mixer, run, resume):
        run.mkdir(parents=True)
        loss = 1.0 if recipe.seed else float("nan")
        (run / "result.json").write_text(json.dumps(result(recipe.seed, loss)))

    monkeypatch.setattr(seeds, "fit", fake)
    one = seeds.fit_seeds("listops", tmp_path, SMOKE, "linear", tmp_path / "a", [1])
    assert (one["val_accuracy"]["mean"], one["val_accuracy"]["spread"]) == (0.5, None)
    none = seeds.fit_seeds("listops", tmp_path, SMOKE, "linear", tmp_path / "b", [0])
    assert none["val_accuracy"]["mean"] is None


@pytest.mark.parametrize("wrong", [[], [1, 2, 1]])
def test_seeds_are_given_once_each(tmp_path, wrong):
    with pytest.raises(ValueError, match="at least one, each once"):
        seeds.fit_seeds("listops", tmp_path, SMOKE, "linear", tmp_path / "a", wrong)


def test_the_command_trains_tests_and_goes_on_with_seeds(data, tmp_path, capsys):
    out = tmp_path / "run"
    words = f"fit --task listops --data-dir {data} --mixer conv --workers 0 --max-steps 2"
    words = [*words.split(), "--out", str(out)]
    assert main([*words, "--seeds", "0,7"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    results = [json.loads((out / f"seed-{seed}/result.json").read_text()) for seed in (0, 7)]
    assert [x["recipe"]["seed"] for x in results] == [0, 7]
    assert (
        results[0]["fit"]["history"][0]["val_loss"] != results[1]["fit"]["history"][0]["val_loss"]
    )
    assert [row["val_accuracy"] for row in summary["runs"]] == [
        x["fit"]["best"]["val_accuracy"] for x in results
    ]
    for _ in range(2):
        said = capsys.readouterr().out
        assert "of 2 seeds did not fail" in said
        assert "generated, not the public files: seed 0" in said
        assert main(["test", "--run", str(out)]) == 0
    assert "test_accuracy" in json.loads((out / "summary.json").read_text())
    assert main([*words, "--seeds", "0,7,8", "--resume"]) == 0
    assert json.loads((out / "summary.json").read_text())["seeds"] == 3
    assert main([*words, "--seeds", "1", "--seed", "1"]) == 2
    assert "takes the place of --seed" in capsys.readouterr().err
    assert main(["test", "--run", str(out), "--require-above-floors", "1"]) == 2
    assert "are for one of them" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [False, True])
def test_a_seed_killed_before_its_first_result_is_begun_again(data, tmp_path, monkeypatch, resume):
    class Killed(BaseException):
        pass

    def killed(*paths):
        raise Killed

    def fitted(**options):
        given = ("listops", data, SMOKE.at_most(2), "linear", tmp_path / "run", [0])
        return seeds.fit_seeds(*given, workers=0, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            fitted()
    files = [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert files == ["result.json.part"]
    assert fitted(resume=resume)["seeds"] == 1
    with pytest.raises(ValueError, match="is not empty"):
        fitted()


def test_a_run_that_diverges_ends_and_says_so(data, tmp_path):
    phases = (Phase(steps=40, batch_size=2, lr=1e30),)
    recipe = replace(SMOKE, phases=phases, warmup=0, clip=None)
    with pytest.warns(UserWarning, match="diverged: at step 5 the loss is no number"):
        result = runs.fit("listops", data, recipe, "linear", tmp_path / "a", workers=0)
    assert result["fit"]["steps"] == 5
    assert result["fit"]["finished"]
    assert failure(result) == "diverged"
