"""Every task from an empty directory to a tested classifier, by the command alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from fastattn.lra.cli import main
from fastattn.lra.data import BatchStream, Split, Task, collate
from fastattn.lra.encoder import Encoder
from fastattn.lra.loading import Shares, Stretch, loader
from fastattn.lra.protocols import PROTOCOLS
from fastattn.lra.tasks import TASKS

SMALL = {
    "listops": "--num-train 24 --num-val 6 --num-test 10 --min-length 5 --max-length 60",
    "text": "--num-train 24 --num-val 6 --num-test 10",
    "retrieval": "--num-train 12 --num-val 4 --num-test 6",
    "image": "--num-train 24 --num-val 6 --num-test 10",
    "pathfinder": "--n 60",
    "pathx": "--num-train 6 --num-val 2 --num-test 2",
}
SIZES = {
    "listops": (24, 6, 10),
    "text": (24, 6, 10),
    "retrieval": (12, 4, 6),
    "image": (24, 6, 10),
    "pathfinder": (48, 6, 6),
    "pathx": (6, 2, 2),
}
STAND_INS = {"text", "retrieval", "image"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("lra")
    for task, options in SMALL.items():
        assert main(["generate", task, "--out", str(root / task), *options.split()]) == 0
    return root


@pytest.mark.parametrize("task", TASKS)
def test_every_task_runs_from_nothing_to_a_result(task, data, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["verify", str(data / task)]) == 0
    verified = capsys.readouterr().out
    command = f"fit --task {task} --data-dir {data / task} --mixer linear --out {run}"
    assert main(command.split()) == 0
    assert main(["test", "--run", run]) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "run/result.json").read_text())

    train, val, test = SIZES[task]
    assert result["data"]["samples"] == {"train": train, "val": val, "test": test}
    assert result["test"]["samples"] == test
    assert f"test: {test} samples, fingerprint {result['test']['fingerprint']}" in verified
    assert f"floors: majority {100 * result['test']['floors']['majority']:.2f} %" in verified
    counted = next(x for name, x in result["test"].items() if name.startswith("by_"))
    assert sum(of["samples"] for of in counted.values()) == test
    # what the data is, and under which protocol it was read
    assert result["data"]["protocol"] == result["test"]["protocol"] == "default"
    assert result["data"]["max_length"] >= {"listops": 5, "image": 1024}.get(task, 1024)
    assert result["data"]["generated"]
    if task in STAND_INS:
        for text in (verified, out):
            assert f"stand-in, not LRA: {result['test']['stand_in']}" in text
    else:
        assert "generated, not the public files" in verified
        assert result["test"]["stand_in"] is None
    if task.startswith("path"):
        assert result["data"]["difficulty"] == "hard"


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_what_it_says(task, data):
    ours = TASKS[task]
    assert isinstance(ours, Task)
    assert ours.name == task
    loaded = ours.load(data / task)
    for split in loaded.values():
        assert split.parts == ours.parts
        assert split.labels.max() < ours.num_classes
        assert split.tokens.max() < len(ours.vocabulary)
        assert split.lengths.max() <= loaded.record["max_length"]
        assert split.document_lengths.min() > 0
    with pytest.raises(ValueError, match="protocol must be one of"):
        ours.load(data / task, "none")


@pytest.mark.parametrize("task", TASKS)
def test_what_was_generated_is_read_under_every_protocol_that_has_its_set(task, data):
    names = ("s4", "lra2020") if task == "text" else ()
    for name in ("mega", *names):
        warns = pytest.warns(UserWarning, match=f"protocol {name} validates Text on its test set")
        with warns if name in names else nullcontext():
            loaded = TASKS[task].load(data / task, name)
        assert loaded.record["protocol"] == name
        assert len(loaded["test"]) == SIZES[task][2]


def test_what_generate_prints_says_that_a_stand_in_is_one(tmp_path, capsys):
    for task, options in SMALL.items():
        out = tmp_path / ("text" if task.startswith("path") else task)  # may lie beside another
        assert main(["generate", task, "--out", str(out), *options.split()]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith(f"{task} written to {out}")
        if task in STAND_INS:
            kind = json.loads((out / "generated.json").read_text())["stand_in"]
            assert line.endswith(f"; stand-in, not LRA: {kind}")
        else:
            assert "stand-in" not in line


@pytest.mark.parametrize("task", TASKS)
def test_the_help_of_generate_says_what_is_a_stand_in(task, capsys):
    def helped(*words):
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        return " ".join(capsys.readouterr().out.split())

    assert "a stand-in for them" in helped()
    about = helped("generate").partition(f" {task} Write ")[2].partition(" Write ")[0]
    for text in (about, helped("generate", task)):
        assert ("a stand-in for" in text) == (task in STAND_INS)


def test_a_run_keeps_its_protocol(data, tmp_path, capsys):
    run = str(tmp_path / "run")
    fit = f"fit --task text --data-dir {data / 'text'} --mixer linear --max-steps 1 --out {run}"
    assert main([*fit.split(), "--protocol", "mega"]) == 0
    assert main(["test", "--run", run]) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["test"]["protocol"] == result["data"]["protocol"] == "mega"
    assert result["data"]["max_length"] == 4000
    assert "archive is not read" in PROTOCOLS["mega"].differs
    assert result["data"]["protocol_differs"] == PROTOCOLS["mega"].differs
    assert main([*fit.split(), "--resume", "--protocol", "default"]) == 2
    assert "was started with protocol 'mega', not 'default'" in capsys.readouterr().err


@pytest.mark.slow
def test_workers_give_the_losses_of_none_where_a_sample_is_two_documents(data, tmp_path):
    losses = []
    for workers in ("0", "2"):
        run = tmp_path / workers
        command = f"fit --task retrieval --data-dir {data / 'retrieval'} --mixer linear --out {run}"
        assert main([*command.split(), "--workers", workers]) == 0
        history = json.loads((run / "result.json").read_text())["fit"]["history"]
        losses.append([(entry["train_loss"], entry["val_loss"]) for entry in history])
    assert losses[0] == losses[1]


# Told to end

TOLD = """
import os, signal, sys

from fastattn.lra import train
from fastattn.lra.cli import main

step = train.Classifier.training_step

def told(self, batch, index):
    if self.global_step == 7 and os.environ.get("LOCAL_RANK", "0") == "0":
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self, batch, index)

train.Classifier.training_step = told
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--devices 2", "--seeds 0,1"])
def test_a_fit_that_is_told_to_end_says_so_and_goes_on_when_asked(options, data, tmp_path):
    """A shell goes on after ``fit && test`` where fit ends with 0, as Lightning alone does."""
    (tmp_path / "program.py").write_text(TOLD)
    run = tmp_path / "run"
    fit = f"fit --task listops --data-dir {data / 'listops'} --mixer linear --out {run} {options}"
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), *fit.split()],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-3000:]
    assert done.stderr.count("fastattn-lra: told to end (SIGTERM); --resume goes on") == 1
    one = run / "seed-0" if "seeds" in options else run
    assert "fit" not in json.loads((one / "result.json").read_text())
    assert (one / "checkpoints/last.ckpt").is_file()  # of step 5
    assert not (run / "seed-1").exists()
    if not options:
        assert main([*fit.split(), "--resume"]) == 0
        assert json.loads((run / "result.json").read_text())["fit"]["steps"] == 20


def test_verify_finds_every_task_of_a_directory_and_names_the_rest(data, tmp_path, capsys):
    release = tmp_path / "lra_release"
    release.mkdir()
    (release / "listops-1000").symlink_to(data / "listops")
    (release / "tsv_data").symlink_to(data / "retrieval")
    assert main(["verify", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "listops in " in out
    assert "retrieval in " in out
    assert "not here: text, image, pathfinder, pathx" in out
    assert main(["verify", str(tmp_path), "--task", "image"]) == 2
    assert "data_batch_1" in capsys.readouterr().err


def test_verify_checks_what_is_there_beside_what_is_damaged_or_there_in_part(
    data, tmp_path, capsys
):
    shutil.copytree(data / "listops", tmp_path / "listops-1000")
    (tmp_path / "listops-1000/basic_test.tsv").write_text("Source\tTarget\n")  # damaged
    shutil.copytree(data / "retrieval", tmp_path / "tsv_data")
    (tmp_path / "tsv_data/new_aan_pairs.eval.tsv").unlink()
    (tmp_path / "cifar-10-batches-bin").symlink_to(data / "image")
    assert main(["verify", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    damaged, lacking = err.splitlines()
    assert "listops: " in damaged
    assert "basic_test.tsv, line 2" in damaged
    assert "retrieval: " in lacking
    assert "lacks new_aan_pairs.eval.tsv" in lacking
    assert "image in " in out
    assert "test: 10 samples" in out
    assert out.endswith("not here: text, pathfinder, pathx\n")


def test_verify_says_what_a_directory_lacks(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    for name in ("basic_train.tsv", "train/pos", "new_aan_pairs.eval.tsv", "data_batch_1",
                 "pathfinder32", "pathfinder128"):  # fmt: skip
        assert name in error
    assert main(["verify", str(tmp_path / "absent")]) == 2
    assert capsys.readouterr().err.count("does not exist") == 1


def test_verify_says_that_samples_are_in_two_splits(data, tmp_path, capsys):
    for name, file in (("train", "train"), ("val", "eval"), ("test", "test")):
        source = "train" if name == "test" else file
        text = (data / f"retrieval/new_aan_pairs.{source}.tsv").read_bytes()
        (tmp_path / f"new_aan_pairs.{file}.tsv").write_bytes(text)
    assert main(["verify", str(tmp_path)]) == 0
    assert "note: 12 samples of test are in train as well" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        "listops --size 32",
        "listops --source x",
        "text --min-length 5",
        "text --difficulty hard",
        "image --ease 1",
        "pathfinder --source x",
        "pathfinder --difficulty mild",
        "pathfinder --size 31",
        "pathx --size 32",
        "pathx --difficulty easy",
        "cifar",
        "",
    ],
)
def test_generate_takes_the_options_of_its_task_only(options, tmp_path):
    with pytest.raises(SystemExit) as error:
        main(["generate", *options.split(), "--out", str(tmp_path / "out")])
    assert error.value.code == 2
    assert not (tmp_path / "out").exists()


def test_bytes_and_splits_are_the_same_in_another_process(data, tmp_path, capsys):
    """Whatever the hash seed: rows 3 and 47 are vocabularies and splits that it decided."""
    options = {"size": 32, "difficulty": "easy", "n": 20, "seed": 3}
    command = ["generate", "pathfinder", *(f"--{k}={v}" for k, v in options.items()), "--out"]
    assert main([*command, str(tmp_path / "a")]) == 0
    capsys.readouterr()
    verify = ["verify", str(data / "text")]
    assert main(verify) == 0
    other = f"""
from fastattn.lra.cli import main
main({[*command, str(tmp_path / "b")]!r})
main({verify!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", other],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": "17"},
    )
    assert done.stdout.endswith(capsys.readouterr().out)
    written = [
        {
            path.relative_to(tmp_path / name): path.read_bytes()
            for path in (tmp_path / name).rglob("*")
            if path.is_file() and not path.name.startswith(".fastattn")
        }
        for name in "ab"
    ]
    assert len(written[0]) == 22  # with metadata/0.npy and generated.json
    assert written[0] == written[1]


def test_a_black_image_is_attended_whole(data):
    """Row 36: a mask by id would hide all 1024 positions, and the mean over none is no number."""
    split = TASKS["image"].load(data / "image")["test"].take(2)
    split.tokens[:1024] = 0
    batch = collate(split, np.array([0, 1]))
    sizes = {"width": 16, "depth": 1, "heads": 2, "ff": 16}
    model = Encoder(256, 10, mixer="linear", positions="sinusoidal", max_length=1024, **sizes)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda block, given: seen.append(given[1].mask))
    with torch.no_grad():
        assert model(batch.tokens, batch.lengths).isfinite().all()
    assert not seen[0].any()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_flat_over_epochs(data):
    """Row 45: a loader that keeps its batches grows by 12 MB an epoch here."""
    split = TASKS["image"].load(data / "image")["train"]
    many = Split.of([split.sample(i % len(split)) for i in range(1500)], [0] * 1500)
    stream = BatchStream(many, 32, seed=0)
    steps = stream.steps_per_epoch
    shares = iter(loader(Shares(stream, 0, 1), range(4 * steps), 0))
    resident = []
    for _ in range(4):
        assert sum(1 for _ in Stretch(shares, steps, lambda seconds: None)) == steps
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
    assert resident[-1] - resident[0] < 6
