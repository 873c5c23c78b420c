"""Training: exact resume, honest results, one clear sentence for every bad input."""

import functools
import hashlib
import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastattn.lra import runs, train
from fastattn.lra.checkpoints import read_checkpoint
from fastattn.lra.cli import main
from fastattn.lra.encoder import MIXERS
from fastattn.lra.recipes import LISTOPS_BUDGET, RECIPES, SMOKE, SOURCES, Phase, Recipe
from fastattn.lra.tasks import TASKS


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("listops")
    TASKS["listops"].generate(
        out, num_train=200, num_val=40, num_test=53, min_length=5, max_length=40, workers=1
    )
    return out


def fit(data, out, *options, mixer="linear", recipe="smoke"):
    words = f"fit --task listops --data-dir {data} --recipe {recipe} --out {out} --mixer"
    return main([*words.split(), mixer, *map(str, options)])


def history(run):
    entries = json.loads((run / "result.json").read_text())["fit"]["history"]
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "smoke"
    assert fit(data, out) == 0
    return out


# The files of a run


def test_a_run_records_everything(run, data):
    result = json.loads((run / "result.json").read_text())
    longest = max(x.lengths.max() for x in TASKS["listops"].load(data).values())
    recipe = SMOKE.on(samples=200, longest=int(longest))
    assert result["recipe"] == json.loads(json.dumps(asdict(recipe)))
    assert Recipe.from_dict(result["recipe"]) == recipe
    assert result["vocabulary"] == TASKS["listops"].vocabulary.hash
    assert result["data"]["samples"] == {"train": 200, "val": 40, "test": 53}
    assert len(result["data"]["fingerprints"]["test"]) == 16
    assert result["device"]
    assert result["versions"].keys() == {"python", "fastattn", "torch", "triton", "lightning"}
    assert result["versions"]["torch"] == torch.__version__
    assert result["source"] == "fastattn"
    assert result["unused"] == ["min_delta", "plateau_patience"]
    assert sum(group["numbers"] for group in result["groups"]) == result["parameters"]
    assert [group["decay"] for group in result["groups"]] == [0.05, 0.0]
    assert [group["group"] for group in result["groups"]] == ["matrices", "vectors"]
    assert result["fit"]["peak_process_mib"] > 0
    best = (run / "checkpoints/best.ckpt").read_bytes()
    assert result["fit"]["checkpoint"] == hashlib.sha256(best).hexdigest()
    assert result["fit"]["steps"] == SMOKE.steps
    assert [e["step"] for e in result["fit"]["history"]] == [5, 10, 15, 20]
    assert result["parameters"] == sum(
        p.numel() for p in torch.load(run / "checkpoints/best.ckpt")["state_dict"].values()
    )
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list(run.glob("tensorboard/*/events*"))
    assert "val/accuracy" in (run / "csv/version_0/metrics.csv").read_text()


def test_from_python_paths_may_be_words_and_an_unknown_task_is_named(data, tmp_path):
    where = str(tmp_path / "a")
    one = runs.fit("listops", str(data), SMOKE.at_most(5), "linear", where, workers=0)
    written = json.loads((tmp_path / "a" / "result.json").read_text())
    assert json.loads(json.dumps(one)) == written
    other = {"workers": 0, "begin": where}
    runs.fit("listops", str(data), SMOKE.at_most(5), "linear", str(tmp_path / "b"), **other)
    assert runs.evaluate(where, str(data))["test"]["samples"] == 53
    with pytest.raises(ValueError, match=r"task_name must be one of listops, text.* got 'list'"):
        runs.fit("list", data, SMOKE, "linear", tmp_path / "c")


def test_every_test_sample_counts_once(run, data):
    assert main(["test", "--run", str(run)]) == 0
    test = json.loads((run / "result.json").read_text())["test"]
    split = TASKS["listops"].load(data)["test"]
    assert test["samples"] == 53
    assert sum(x["samples"] for x in test["by_root_operator"].values()) == 53
    assert test["fingerprint"] == split.fingerprint()
    model = train.Classifier(TASKS["listops"], SMOKE.on(200, 40), "linear", {})
    model.load_state_dict(torch.load(run / "checkpoints/best.ckpt")["state_dict"])
    model.eval()
    right = 0
    for i in range(len(split)):
        ids = torch.from_numpy(split.sample(i).astype(np.int64))[None]
        logits = model.encoder(ids, torch.tensor([ids.shape[1]]))
        right += int(logits.argmax() == split.labels[i])
    assert test["accuracy"] == right / 53


@pytest.mark.parametrize("mixer", [*MIXERS, "bigbird linear"])
def test_every_mixer_trains(data, tmp_path, mixer):
    assert fit(data, tmp_path / "run", "--max-steps", 5, mixer=mixer) == 0
    assert json.loads((tmp_path / "run/result.json").read_text())["fit"]["steps"] == 5


# Resuming


def test_a_compiled_run_gives_the_same_losses(data, tmp_path, quick_compile, capsys):
    recipe = replace(SMOKE, dropout=0.0)  # eager and compiled dropout draw other numbers
    for name, compiled in (("a", False), ("b", True)):
        runs.fit("listops", data, recipe, "linear", tmp_path / name, workers=0, compiled=compiled)
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result["compiled"] is compiled
    for a, b in zip(history(tmp_path / "a"), history(tmp_path / "b"), strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert fit(data, tmp_path / "c", "--compile", mixer="gru") == 2
    assert "RecurrentBody is a whole network" in capsys.readouterr().err
    assert fit(data, tmp_path / "c", "--compile", "--denoise", "tokens") == 2
    assert "only denoises" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
    assert fit(data, tmp_path / "b", "--resume") == 2
    assert "was started with compile, not without it" in capsys.readouterr().err


def test_a_resumed_run_gives_the_same_losses_and_weights(run, data, tmp_path):
    out = tmp_path / "run"
    assert fit(data, out, "--max-steps", 10) == 0
    assert fit(data, out, "--resume") == 0
    assert history(out) == history(run)
    one, two = (torch.load(x / "checkpoints/last.ckpt")["state_dict"] for x in (run, out))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_batch_norm_goes_on_with_a_resumed_run_and_a_begun_one(tmp_path):
    pictures = tmp_path / "data"
    TASKS["image"].generate(pictures, num_train=40, num_val=10, num_test=10)

    def pictured(name, *more):
        words = [f"--data-dir={pictures}", f"--out={tmp_path / name}", *map(str, more)]
        options = "--task image --mixer long_conv --workers 0 --norm batch --embedding numbers"
        assert main(["fit", *options.split(), *words]) == 0
        return torch.load(tmp_path / name / "checkpoints/last.ckpt")["state_dict"]

    whole = pictured("whole")
    pictured("run", "--max-steps", 10)
    resumed = pictured("run", "--resume")
    assert history(tmp_path / "run") == history(tmp_path / "whole")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)
    assert whole["encoder.norm.norm.num_batches_tracked"] == SMOKE.steps
    pictured("begun", "--from", tmp_path / "whole", "--max-steps", 1)
    moved = json.loads((tmp_path / "begun/result.json").read_text())["transfer"]["moved"]
    assert "norm.norm.running_mean" in moved
    assert main(["test", "--run", str(tmp_path / "whole")]) == 0
    pictured("denoised", "--denoise", "grey", "--max-steps", 5)
    pictured("tuned", "--from", tmp_path / "denoised", "--max-steps", 1)
    moved = json.loads((tmp_path / "tuned/result.json").read_text())["transfer"]["moved"]
    assert "blocks.0.norm_mixer.norm.running_mean" in moved
    assert "norm.norm.running_mean" not in moved


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--accumulate", "2"], "accumulate and devices must be 1, got 2 and 1"),
        (["--devices", "2"], "accumulate and devices must be 1, got 1 and 2"),
        (["--denoise", "multitask"], "would mix the statistics of whole and of corrupted"),
        ([], "norm batch takes documents of one length, as pictures are: the data has them from"),
    ],
)
def test_batch_norm_that_cannot_be_is_refused_before_anything_is_written(
    options, message, data, tmp_path, capsys
):
    assert fit(data, tmp_path / "run", "--norm", "batch", *options) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_network_without_norms_takes_any_norm(data, tmp_path):
    options = ("--norm", "batch", "--accumulate", 2, "--max-steps", 1)
    assert fit(data, tmp_path / "run", *options, mixer="gru") == 0


def test_a_run_that_has_no_checkpoint_yet_is_begun_again(run, data, tmp_path, capsys):
    def killed(name, *options):
        """As if before the first validation."""
        assert fit(data, tmp_path / name, *options) == 0
        shutil.rmtree(tmp_path / name / "checkpoints")
        path = tmp_path / name / "result.json"
        result = json.loads(path.read_text())
        del result["fit"]
        path.write_text(json.dumps(result))
        return tmp_path / name

    assert fit(data, killed("a"), "--resume") == 0
    assert history(tmp_path / "a") == history(run)
    begun = killed("b", "--from", run)
    assert fit(data, begun, "--resume") == 0  # which knows where it began
    assert fit(data, tmp_path / "c", "--from", run) == 0
    assert history(begun) == history(tmp_path / "c") != history(run)
    assert fit(data, killed("d"), "--resume", mixer="softmax") == 2
    assert "was started with mixer 'linear'" in capsys.readouterr().err
    assert fit(data, killed("e", "--from", run), "--resume", "--from", tmp_path / "a") == 2
    assert "was not begun with" in capsys.readouterr().err
    assert fit(data, tmp_path / "f", "--max-steps", 10) == 0
    shutil.rmtree(tmp_path / "f/checkpoints")  # of a run that got somewhere
    assert fit(data, tmp_path / "f", "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_a_resumed_run_without_its_best_checkpoint_keeps_its_result(run, data, tmp_path):
    assert fit(data, tmp_path / "run", "--max-steps", 10) == 0
    (tmp_path / "run/checkpoints/best.ckpt").unlink()
    assert fit(data, tmp_path / "run", "--resume") == 0
    assert history(tmp_path / "run") == history(run)


def test_the_progress_bar_shows_the_loss_when_it_is_drawn(data, tmp_path, monkeypatch):
    shown = []

    class Watched(runs.ProgressBar):
        def get_metrics(self, trainer, model):
            shown.append(super().get_metrics(trainer, model))
            return shown[-1]

    monkeypatch.setattr(runs, "ProgressBar", Watched)
    assert fit(data, tmp_path / "run") == 0
    losses = [x["train/loss"] for x in shown if "train/loss" in x]
    assert losses
    assert len(losses) < SMOKE.steps
    assert all(0 < float(x) < 10 for x in losses)


def test_directions_are_redrawn_as_the_mixer_says_and_on_resuming(data, tmp_path):
    mixer = "performer:redraw=2,num_features=8"
    assert fit(data, tmp_path / "whole", mixer=mixer) == 0
    assert fit(data, tmp_path / "cut", "--max-steps", 5, mixer=mixer) == 0
    assert fit(data, tmp_path / "cut", "--resume", mixer=mixer) == 0
    assert history(tmp_path / "cut") == history(tmp_path / "whole")
    states = [
        torch.load(tmp_path / name / "checkpoints/last.ckpt")["state_dict"]
        for name in ("whole", "cut")
    ]
    model = train.Classifier(TASKS["listops"], SMOKE.on(200, 40), mixer, {})
    for i, block in enumerate(model.encoder.blocks):
        drawn = [state[f"encoder.blocks.{i}.mixer.projection"] for state in states]
        assert torch.equal(*drawn)
        assert not torch.equal(drawn[0], block.mixer.projection)
        block.mixer.redraw_projection(10)  # after step 20
        assert torch.equal(drawn[0], block.mixer.projection)


@pytest.mark.parametrize("cut", [3, 7, 12])
def test_a_run_cut_between_validations_resumes_on_the_same_grid(run, data, tmp_path, cut):
    out = tmp_path / "run"
    assert fit(data, out, "--max-steps", cut) == 0
    assert not json.loads((out / "result.json").read_text())["fit"]["finished"]
    assert fit(data, out, "--resume", "--max-steps", cut + 1) == 0
    assert fit(data, out, "--resume") == 0
    losses = {e["step"]: e["val_loss"] for e in history(out)}
    assert {e["step"]: e["val_loss"] for e in history(run)}.items() <= losses.items()
    one, two = (torch.load(x / "checkpoints/last.ckpt")["state_dict"] for x in (run, out))
    assert all(torch.equal(one[k], two[k]) for k in one)


def test_a_resumed_run_can_be_cut_where_it_stands_already(data, tmp_path):
    out = tmp_path / "run"
    assert fit(data, out, "--max-steps", 10) == 0
    before = history(out)
    assert fit(data, out, "--resume", "--max-steps", 5) == 0
    assert history(out) == before


def test_a_run_resumed_elsewhere_says_where_it_trained(data, tmp_path, monkeypatch):
    found, out, peaks = [], tmp_path / "run", []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for chip, steps in (("a", 2), ("a", 4), ("b", 4), ("b", 6), ("b", 8), ("a", 9), ("c", 9)):
        monkeypatch.setattr("platform.processor", lambda chip=chip: chip)
        monkeypatch.setattr("platform.python_version", lambda chip=chip: f"of {chip}")
        process = {"a": 5, "b": 7, "c": 9}[chip] * 2**20
        monkeypatch.setattr(runs, "peak_of_process", lambda process=process: process)
        recipe = replace(SMOKE, warmup=0).at_most(steps)
        result = runs.fit("listops", data, recipe, "linear", out, workers=0, resume=bool(found))
        found.append(f"{result['device']}; Python {result['versions']['python']}")
        peaks.append(result["fit"]["peak_process_mib"])
    assert found == [
        *["a; Python of a"] * 3,  # the third has nothing to do
        *["a, then b; Python of b"] * 2,
        *["a, then b; Python of a"] * 2,
    ]
    assert peaks == [5, 5, 5, 7, 7, 7, 7]


def test_a_run_with_phases_off_the_grid_and_patience_resumes(data, tmp_path):
    phases = (Phase(steps=6, batch_size=8, lr=1e-3), Phase(steps=9, batch_size=4, lr=1e-3))
    recipe = replace(SMOKE, phases=phases, patience=50)
    whole = runs.fit("listops", data, recipe, "linear", tmp_path / "whole", workers=0)
    out = tmp_path / "cut"
    for steps in (6, 11):
        runs.fit("listops", data, recipe.at_most(steps), "linear", out, workers=0, resume=steps > 6)
    resumed = runs.fit("listops", data, recipe, "linear", out, workers=0, resume=True)
    assert [e["val_loss"] for e in resumed["fit"]["history"]] == [
        e["val_loss"] for e in whole["fit"]["history"]
    ]


def test_resuming_a_finished_run_changes_nothing(run, data, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    assert main(["test", "--run", str(out)]) == 0
    before = (out / "result.json").read_text()
    assert "test" in json.loads(before)
    assert fit(data, out, "--resume") == 0
    assert (out / "result.json").read_text() == before


def test_a_killed_run_resumes_to_the_same_losses(run, data, tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "fastattn.lra.train", "--task", "listops", "--mixer"]
    command += ["linear", "--data-dir", str(data), "--out", str(out), "--checkpoint-pieces"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "checkpoints/last.ckpt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert json.loads((out / "result.json").read_text())["task"] == "listops"
    assert fit(data, out, "--resume") == 0
    assert history(out) == history(run)


class Killed(BaseException):
    """No handler of an error or of an interrupt takes it."""


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [False, True])
def test_a_run_killed_before_any_file_is_replaced_resumes_to_the_same_losses(
    data, tmp_path, pieces, monkeypatch
):
    phases = (Phase(steps=4, batch_size=2, lr=1e-3),)
    recipe = replace(SMOKE, phases=phases, warmup=0, validate_every=2)
    monkeypatch.setattr(runs, "plot_curve", lambda out: None)
    trained = []  # steps
    note = lambda self, *_: trained.append(self.global_step)  # noqa: E731
    monkeypatch.setattr(train.Classifier, "on_train_batch_end", note)

    def stored(name, which):
        return read_checkpoint(tmp_path / name / f"checkpoints/{which}.ckpt")

    def fitted(name, **options):
        trained.clear()
        given = {"workers": 0, "pieces": pieces, **options}
        runs.fit("listops", data, recipe, "linear", tmp_path / name, **given)
        best = stored(name, "best")["global_step"]
        return history(tmp_path / name), best, stored(name, "last")["state_dict"]

    def killed(name, fatal):
        """The names of what was replaced before the kill, and whether there was one."""
        replaced, replace_file = [], os.replace

        def counted(source, target):
            if tmp_path in Path(target).parents:
                if len(replaced) == fatal:
                    raise Killed
                replaced.append(Path(target).name)
            replace_file(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", counted)
            try:
                fitted(name)
            except Killed:
                return replaced, True
        return replaced, False

    losses, best, weights = fitted("whole")
    for fatal in itertools.count():
        replaced, dead = killed(str(fatal), fatal)
        if not dead:
            break
        done = stored(str(fatal), "last")["global_step"] if "last.ckpt" in replaced else 0
        *resumed, resumed_weights = fitted(str(fatal), resume=True)
        assert resumed == [losses, best], replaced
        assert all(torch.equal(resumed_weights[k], weights[k]) for k in weights), replaced
        assert trained == list(range(done + 1, 5)), replaced
    listed = [name for name in replaced if name.endswith(("json", "ckpt"))]
    assert listed[:3] == ["result.json", "best.ckpt", "last.ckpt"]
    assert listed[-2:] == ["last.ckpt", "result.json"]
    assert (len(replaced) > len(listed)) == pieces


def test_a_directory_with_anything_else_in_it_is_no_killed_run(data, tmp_path, capsys):
    (tmp_path / "result.json.part").touch()
    (tmp_path / "notes.txt").touch()
    assert fit(data, tmp_path) == 2
    assert "is not empty" in capsys.readouterr().err
    assert fit(data, tmp_path, "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_the_module_and_the_command_are_the_same(monkeypatch, capsys):
    def helped(words, start):
        monkeypatch.setattr(sys, "argv", ["-", *words])
        with pytest.raises(SystemExit) as end:
            start()
        assert end.value.code == 0
        return capsys.readouterr().out

    module = functools.partial(runpy.run_module, "fastattn.lra.train", run_name="__main__")
    assert helped(["--help"], module) == helped(["fit", "--help"], main)
    assert helped(["test", "--help"], module) == helped(["test", "--help"], main)


def test_a_run_is_neither_overwritten_nor_resumed_as_another(run, data, tmp_path, capsys):
    def message(*options, **kwargs):
        assert fit(data, run, *options, **kwargs) == 2
        return capsys.readouterr().err

    assert "is not empty" in message()
    assert "another recipe: seed differ" in message("--resume", "--seed", 1)
    assert "started with mixer 'linear', not 'softmax'" in message("--resume", mixer="softmax")
    assert fit(data, tmp_path / "new", "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_workers_change_nothing(run, data, tmp_path):
    assert fit(data, tmp_path / "run", "--workers", 2) == 0
    assert history(tmp_path / "run") == history(run)


def test_a_curriculum_makes_its_own_lists_and_records_them(data, tmp_path):
    short = Phase(steps=6, batch_size=8, lr=1e-3, lengths=(4, 12), num_samples=40)
    recipe = replace(SMOKE, phases=(short, *SMOKE.phases))
    result = runs.fit("listops", data, recipe, "linear", tmp_path / "run", workers=0)
    (name,) = result["fit"]["additional_sets"]
    assert name == "4 to 12 tokens"
    assert result["fit"]["additional_sets"][name]["samples"] == 40
    model = train.Classifier(
        TASKS["listops"], recipe.on(200, 40), "linear", TASKS["listops"].load(data)
    )
    lengths = torch.cat([model._stream(0)[i].lengths for i in range(5)])
    assert 4 <= lengths.min() <= lengths.max() <= 12
    assert max(int(model._stream(1)[i].lengths.max()) for i in range(25)) > 12
    assert [e["step"] for e in result["fit"]["history"]] == [5, 6, 11, 16, 21, 26]


def test_a_run_can_begin_with_the_weights_of_another(run, data, tmp_path, capsys):
    # as an easy set comes before a hard one
    still = replace(SMOKE, phases=(Phase(steps=5, batch_size=2, lr=1e-12),), warmup=0)
    result = runs.fit("listops", data, still, "linear", tmp_path / "a", workers=0, begin=run)
    best = json.loads((run / "result.json").read_text())["fit"]["best"]
    assert result["fit"]["history"][0]["val_loss"] == pytest.approx(best["val_loss"], rel=1e-5)
    assert result["begin"]["run"] == str(run)
    assert result["begin"]["step"] == best["step"]
    assert fit(data, tmp_path / "b", "--from", run, recipe="listops-demo") == 2
    assert "is a run of another model" in capsys.readouterr().err
    assert fit(data, tmp_path / "b", "--from", tmp_path) == 2
    assert "is not a run" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_early_stopping_stops(data, tmp_path):
    recipe = replace(SMOKE, phases=(Phase(steps=100, batch_size=8, lr=1e-9),), patience=2, warmup=0)
    result = runs.fit("listops", data, recipe, "linear", tmp_path / "run", workers=0)
    assert result["fit"]["steps"] == 15
    assert result["fit"]["finished"]
    assert result["fit"]["stopped_early"]


def test_early_stopping_has_a_threshold_and_counts_on_after_resuming(data, tmp_path, monkeypatch):
    phase = Phase(steps=40, batch_size=8, lr=1e-9)
    recipe = replace(SMOKE, phases=(phase,), patience=3, warmup=0)
    log = train.Classifier.log

    def rising(self, name, value, **options):
        log(self, name, 1e-4 * self.global_step if name == "val/accuracy" else value, **options)

    monkeypatch.setattr(train.Classifier, "log", rising)

    def steps(name, recipe, **options):
        result = runs.fit("listops", data, recipe, "linear", tmp_path / name, workers=0, **options)
        return result["fit"]["steps"], result["fit"]["stopped_early"]

    assert steps("any", recipe) == (40, False)
    least = replace(recipe, min_delta=0.01)
    assert steps("most", least) == (20, True)
    assert steps("cut", least.at_most(10)) == (10, False)
    assert steps("cut", least, resume=True) == (20, True)


# The schedule


def test_the_learning_rate_that_is_logged_is_the_one_that_is_configured(run):
    rates = [entry["lr"] for entry in history(run)]
    assert rates == [SMOKE.lr_at(step - 1) for step in (5, 10, 15, 20)]
    assert max(SMOKE.lr_at(step) for step in range(20)) == 1e-3
    logged = (run / "csv/version_0/metrics.csv").read_text().splitlines()
    column = logged[0].split(",").index("lr-AdamW/pg1")
    rates = [float(x) for x in (line.split(",")[column] for line in logged[1:]) if x]
    assert rates
    assert all(any(abs(r - SMOKE.lr_at(s)) < 1e-12 for s in range(20)) for r in rates)


def test_phases_decay_as_they_say():
    recipe = LISTOPS_BUDGET
    first = recipe.phases[0]
    assert recipe.lr_at(0) == first.lr / recipe.warmup
    assert recipe.lr_at(first.steps - 1) == first.lr
    assert recipe.lr_at(first.steps) == recipe.phases[1].lr
    middle = first.steps + recipe.phases[1].steps // 2
    assert recipe.lr_at(middle) == pytest.approx(recipe.phases[1].lr / 2)
    assert recipe.lr_at(recipe.steps - 1) < 1e-9
    plateau = Phase(steps=100, batch_size=1, lr=1.0, decay="plateau")
    assert [plateau.factor(s) for s in (0, 90, 95)] == pytest.approx([1.0, 1.0, 0.5])


def test_a_plateau_halves_the_learning_rate_and_goes_on_with_a_resumed_run(
    data, tmp_path, monkeypatch
):
    phase = Phase(steps=40, batch_size=2, lr=1e-3, decay="plateau")
    recipe = replace(SMOKE, phases=(phase,), plateau_patience=1, warmup=0)
    report = train.Classifier._report
    flat = {"loss": 1.0}
    monkeypatch.setattr(train.Classifier, "_report", lambda *given: report(*given) | flat)

    def rates(name, *cuts):
        for i, steps in enumerate((*cuts, 40)):
            result = runs.fit(
                "listops", data, recipe.at_most(steps), "linear", tmp_path / name,
                workers=0, resume=i > 0,
            )  # fmt: skip
        return [entry["lr"] / phase.lr for entry in result["fit"]["history"]]

    # halved behind the third validation, the fifth and the seventh; only the last is in the cut
    whole = rates("whole")
    assert whole == pytest.approx([1, 1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4, 1 / 4 / 8])
    logged = (tmp_path / "whole/csv/version_0/metrics.csv").read_text().splitlines()
    column = logged[0].split(",").index("lr-AdamW/pg1")
    assert {"0.001", "0.0005", "0.00025"} <= {line.split(",")[column] for line in logged[1:]}
    assert rates("cut", 10, 20) == whole


def test_a_plateau_is_what_torch_takes_for_one_and_ends_with_its_phase(monkeypatch):
    phases = (
        Phase(steps=100, batch_size=8, lr=1.0, decay="plateau"),
        Phase(steps=50, batch_size=8, lr=0.5),
        Phase(steps=50, batch_size=8, lr=0.25, decay="plateau"),
    )
    recipe = replace(SMOKE, phases=phases, plateau_patience=2, warmup=0).on(200, 40)
    model = train.Classifier(TASKS["listops"], recipe, "linear", {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torchs = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=2, threshold=0.0
    )
    at = SimpleNamespace(step=0)
    monkeypatch.setattr(train.Classifier, "global_step", property(lambda self: at.step))
    for loss in (3, 2, 2, 2, 2, 1.9, 2, 2, 1.8, 2, 2, 2, 1.8, 2, 2, 2, 2):
        at.step += 5
        model._watch_plateau(loss)
        torchs.step(loss)
        assert model._lr_at(at.step) == optimizer.param_groups[0]["lr"]
    assert model._lr_at(at.step) <= 0.25
    assert model._lr_at(100) == 0.5
    at.step = 155
    model._watch_plateau(5.0)
    assert model._lr_at(155) == 0.25


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradient_of_a_whole_batch_is_clipped_to_the_norm_of_the_recipe(
    data, tmp_path, monkeypatch, accumulate
):
    gradients = []
    step = torch.optim.AdamW.step

    def watched(self, closure):
        loss = closure()
        given = [p.grad for group in self.param_groups for p in group["params"]]
        gradients.append(torch.cat([x.flatten() for x in given if x is not None]))
        return step(self, lambda: loss)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    for name, clip in (("as it is", None), ("clipped", 0.01)):
        recipe = replace(SMOKE, clip=clip, accumulate=accumulate).at_most(2)
        runs.fit("listops", data, recipe, "linear", tmp_path / name, workers=0)
    first, second, clipped, other = gradients
    assert min(first.norm(), second.norm()) > 0.02
    torch.testing.assert_close(clipped, first * 0.01 / first.norm(), rtol=1e-4, atol=1e-8)
    assert other.norm().item() == pytest.approx(0.01, rel=1e-3)


def test_a_run_cut_off_while_its_learning_rate_rises_says_so(data, tmp_path):
    with pytest.warns(UserWarning, match="ends at step 3, and its learning rate rises until step"):
        result = runs.fit("listops", data, SMOKE.at_most(3), "linear", tmp_path / "run", workers=0)
    assert len(result["fit"]["warnings"]) == 1
    result = runs.fit("listops", data, SMOKE, "linear", tmp_path / "run", workers=0, resume=True)
    assert result["fit"]["warnings"] == []


def test_evaluation_has_no_gradients_and_no_dropout(run, data, tmp_path, monkeypatch):
    seen = []
    evaluate = train.Classifier._evaluate

    def watched(self, batch):
        seen.append((torch.is_grad_enabled(), self.encoder.training))
        return evaluate(self, batch)

    monkeypatch.setattr(train.Classifier, "_evaluate", watched)
    runs.fit("listops", data, SMOKE.at_most(5), "linear", tmp_path / "run", workers=0)
    fitted = len(seen)
    runs.evaluate(run)
    assert 0 < fitted < len(seen)
    assert set(seen) == {(False, False)}


def test_the_protocol_of_2020_tests_the_last_checkpoint(data, tmp_path):
    recipe = replace(SMOKE, phases=(Phase(steps=20, batch_size=8, lr=1e-12),), warmup=0)
    runs.fit("listops", data, recipe, "linear", tmp_path / "run", workers=0, protocol="lra2020")
    ours = runs.evaluate(tmp_path / "run", protocol="default")["test"]
    theirs = runs.evaluate(tmp_path / "run")["test"]
    assert (ours["checkpoint"], theirs["checkpoint"]) == ("best", "last")
    assert ours["step"] < theirs["step"] == 20  # all are as good, and the first stays the best
    assert theirs["protocol"] == "lra2020"
    assert theirs["max_length"] == TASKS["listops"].load(data).record["max_length"]


def test_every_parameter_is_in_one_group():
    model = train.Classifier(TASKS["listops"], SMOKE.on(200, 40), "linear", {})
    groups = model.configure_optimizers()["optimizer"].param_groups
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]


def test_a_run_prints_its_groups_of_parameters(data, tmp_path, capsys):
    assert fit(data, tmp_path / "run", "--max-steps", 1) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = ["parameters", "decay", "tensors", "numbers"]
    assert rows.count(header) == 1
    start = rows.index(header)
    model = train.Classifier(TASKS["listops"], SMOKE.on(200, 40), "linear", {})
    for row, name, group in zip(
        rows[start + 1 :],
        ("matrices", "vectors"),
        model.configure_optimizers()["optimizer"].param_groups,
        strict=False,
    ):
        params = group["params"]
        numbers = (group["weight_decay"], len(params), sum(p.numel() for p in params))
        assert row[0] == name
        assert tuple(map(float, row[1:])) == numbers


def test_the_peak_memory_of_a_gpu_is_that_of_the_run(data, tmp_path, monkeypatch):
    peak = SimpleNamespace(bytes=9 * 2**30)  # of what was before
    cuda = SimpleNamespace(
        is_available=lambda: True,
        get_device_name=lambda: "a GPU",
        reset_peak_memory_stats=lambda: setattr(peak, "bytes", 5 * 2**20),
        max_memory_allocated=lambda: peak.bytes,
    )
    monkeypatch.setattr(runs, "torch", SimpleNamespace(cuda=cuda, __version__="0"))
    result = runs.fit("listops", data, SMOKE.at_most(1), "linear", tmp_path, workers=0)
    assert (result["device"], result["fit"]["peak_memory_mib"]) == ("a GPU", 5)


def test_bad_recipes_raise():
    with pytest.raises(ValueError, match="warmup must be shorter than the run's 20 steps"):
        replace(SMOKE, warmup=20)
    with pytest.raises(ValueError, match="decay must be one of constant, cosine, linear"):
        Phase(steps=1, batch_size=1, lr=1.0, decay="step")
    with pytest.raises(ValueError, match="given together"):
        Phase(steps=1, batch_size=1, lr=1.0, lengths=(1, 2))
    with pytest.raises(ValueError, match="max-steps must be at least 1"):
        SMOKE.at_most(0)
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    ours = {"smoke", "listops-demo", "listops-plain", "listops-long", "listops-budget"}
    ours |= {f"{task}-minutes" for task in TASKS}
    assert {name for name, source in SOURCES.items() if source == "fastattn"} == ours
    assert SOURCES.keys() == RECIPES.keys()


# Bad input


def test_another_vocabulary_is_refused(run, tmp_path, data, capsys, monkeypatch):
    checkpoint = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    checkpoint["fastattn"]["vocabulary"] = "0" * 16
    copied = tmp_path / "run"
    (copied / "checkpoints").mkdir(parents=True)
    torch.save(checkpoint, copied / "checkpoints/best.ckpt")
    (copied / "result.json").write_text((run / "result.json").read_text())
    assert main(["test", "--run", str(copied)]) == 2
    assert "its token ids mean something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("checkpoints/best.ckpt", b"", "best.ckpt is damaged"),
        ("checkpoints/best.ckpt", b"PK\x03\x04 nonsense", "best.ckpt is damaged"),
        ("checkpoints/best.ckpt", "half", "best.ckpt is damaged"),
        ("checkpoints/best.ckpt", {"state_dict": {}}, "not written by fastattn"),
        ("result.json", "half", "result.json is damaged"),
        ("result.json", b"{}", "result.json is damaged"),
        ("result.json", ('"width": 32', '"width": 64'), "does not fit the recipe"),
        ("result.json", ('"width": 32', '"breadth": 32'), "breadth"),
    ],
)
def test_a_damaged_run_is_one_sentence(run, tmp_path, capsys, name, content, message):
    out = tmp_path / "run"
    shutil.copytree(run, out)
    whole = (out / name).read_bytes()
    if content == "half":
        content = whole[: len(whole) // 2]
    elif isinstance(content, tuple):
        content = whole.replace(*(x.encode() for x in content))
    if isinstance(content, dict):
        torch.save(content, out / name)
    else:
        (out / name).write_bytes(content)
    assert main(["test", "--run", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_that_cannot_start_leaves_nothing_behind(data, tmp_path, capsys):
    assert fit(data, tmp_path / "a", "--workers", -3) == 2
    recipe = replace(SMOKE, positions="learned", max_length=10)
    with pytest.raises(ValueError, match="learned positions end at 10"):
        runs.fit("listops", data, recipe, "linear", tmp_path / "b")
    with pytest.raises(ValueError, match="linformer is made for 12 tokens"):
        runs.fit("listops", data, SMOKE, "linear linformer:seq_len=12", tmp_path / "b")
    with pytest.raises(ValueError, match=r"take linformer:seq_len=\d+"):
        runs.fit(
            "listops", data, replace(SMOKE, pool="cls"), "linformer:seq_len=38", tmp_path / "b"
        )
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_other_data_is_said_to_be_other_data(run, tmp_path, capsys):
    out, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(run, out)
    sizes = {"num_train": 20, "num_val": 9, "num_test": 11}
    TASKS["listops"].generate(other, seed=5, **sizes, min_length=5, max_length=40, workers=1)
    assert main(["test", "--run", str(out), "--data-dir", str(other)]) == 0
    assert "not the test set that belongs to" in capsys.readouterr().out
    assert json.loads((out / "result.json").read_text())["test"]["samples"] == 11


def test_generate_does_not_overwrite(data, capsys):
    assert main(["generate", "listops", "--out", str(data)]) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [(-2, None, "had 53 samples, and has"), ("\t3\n", "\t4\n", "no longer what was generated")],
)
def test_a_file_cut_at_a_line_or_edited_is_noticed(data, tmp_path, capsys, old, new, message):
    out = tmp_path / "data"
    shutil.copytree(data, out)
    path = out / "basic_test.tsv"
    text = path.read_text()
    if new is None:
        path.write_text("".join(text.splitlines(keepends=True)[:old]))
    else:
        assert old in text
        path.write_text(text.replace(old, new, 1))
    assert main(["verify", str(out)]) == 2
    assert message in capsys.readouterr().err


def test_missing_things_are_named(tmp_path, run, data, capsys):
    assert main(["test", "--run", str(tmp_path)]) == 2
    assert "is not a run: it has no result.json" in capsys.readouterr().err
    assert fit(tmp_path, tmp_path / "run") == 2
    assert "basic_train.tsv" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["verify", str(tmp_path)]) == 2
    assert "basic_train.tsv" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--task", "listops", "--data-dir", "x", "--mixer", "flash", "--out", "y"],
        ["fit", "--task", "listops", "--data-dir", "x", "--mixer", "linear", "--outt", "y"],
        ["generate", "cifar", "--out", "x"],
        ["train"],
        [],
    ],
)
def test_an_unknown_word_is_an_error(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_verify_prints_counts_labels_fingerprints_and_floors(data, capsys):
    assert main(["verify", str(data)]) == 0
    out = capsys.readouterr().out
    split = TASKS["listops"].load(data)["test"]
    assert f"test: 53 samples, fingerprint {split.fingerprint()}" in out
    assert f"majority {100 * np.bincount(split.labels).max() / 53:.2f} %" in out


def test_a_run_below_the_floors_fails_when_asked(run, capsys):
    assert main(["test", "--run", str(run), "--require-above-floors", "60"]) == 1
    assert "above the floors, not 60" in capsys.readouterr().err
