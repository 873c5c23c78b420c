"""The example that converts a trained model: it runs, resumes and says what it did."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_pictures import idx

from fastattn import MECHANISMS
from fastattn.lra.pictures import IDX

ROOT = Path(__file__).parent.parent
TINY = {"patch": 7, "width": 8, "heads": 2, "depth": 1, "epochs": 1, "batch": 20, "device": "cpu"}


@pytest.fixture
def whole_example(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["from_checkpoint.py"])
    return runpy.run_path(str(ROOT / "examples" / "from_checkpoint.py"))


@pytest.fixture
def example(whole_example):
    found = whole_example
    some = ("softmax", "performer, 16 features", "linformer, n / 4 slots")
    kept = {name: found["ATTENTIONS"][name] for name in some}
    found["ATTENTIONS"].clear()
    found["ATTENTIONS"].update(kept)
    return found


@pytest.fixture
def pictures(tmp_path):
    """Ten kinds of stripes, easy to tell apart."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for images, labels, n in ((*IDX[:2], 200), (*IDX[2:], 50)):
        kind = rng.integers(0, 10, n).astype(np.uint8)
        pixels = rng.integers(0, 60, (n, 28, 28)).astype(np.uint8)
        pixels[np.arange(n), 2 * kind + 3] = 255
        (folder / images).write_bytes(idx(pixels))
        (folder / labels).write_bytes(idx(kind))
    return folder


def test_every_row_is_made_once_and_a_stopped_run_goes_on(example, pictures, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["--data", str(pictures), "--out", str(out)]
    arguments += [f"--{key}={value}" for key, value in TINY.items()]
    assert example["main"](arguments) == 0
    results = json.loads((out / "results.json").read_text())
    assert results["data"]["train"] == 200
    assert [*results["rows"]] == [*example["ATTENTIONS"]]
    for row in results["rows"].values():
        assert row.keys() == {"scratch", "converted", "tuned"}
        assert all(0 <= row[key]["accuracy"] <= 1 for key in row)
        assert row["scratch"]["ms_per_step"] > 0
    softmax = results["rows"]["softmax"]
    assert softmax["converted"]["accuracy"] == softmax["scratch"]["accuracy"]
    assert (out / "table.md").read_text() == example["table"](results)

    stopped = results["rows"]["linformer, n / 4 slots"]
    del results["rows"]["linformer, n / 4 slots"]
    (out / "results.json").write_text(json.dumps(results))
    assert example["main"](arguments) == 0
    again = json.loads((out / "results.json").read_text())
    assert {k: v for k, v in again["rows"].items() if k in results["rows"]} == results["rows"]
    for key in ("scratch", "tuned"):
        found = again["rows"]["linformer, n / 4 slots"][key]
        assert found["accuracy"] == stopped[key]["accuracy"]
        assert found["loss"] == pytest.approx(stopped[key]["loss"], abs=2e-4)
    with pytest.raises(SystemExit, match="was made with settings"):
        example["main"]([*arguments, "--lr", "0.1"])


def test_every_attention_converts_and_trains(whole_example):
    pixels = torch.zeros(2, 28, 28, 1, dtype=torch.uint8)
    assert len(whole_example["ATTENTIONS"]) == 12
    for name, (mechanism, _) in whole_example["ATTENTIONS"].items():
        model = whole_example["PatchClassifier"](7, 28, 1, 10, 8, 2, 1)
        assert whole_example["converted"](model, name) is model
        kind = MECHANISMS.get(mechanism, torch.nn.MultiheadAttention)
        assert type(model.encoder.layers[0].self_attn) is kind
        out = model(pixels)
        out.square().sum().backward()
        assert out.shape == (2, 10)
        assert all(p.grad.isfinite().all() for p in model.parameters()), name
        assert model.embedding.bias.grad.any(), name


def test_the_model_learns(example, pictures):
    from fastattn.lra.pictures import read_pictures

    data = read_pictures(pictures)
    model = example["PatchClassifier"](7, 28, 1, 10, 32, 2, 1)
    example["train"](model, data["train"], epochs=25, batch=20, lr=3e-3, seed=0)
    assert example["accuracy"](model, data["test"]) > 0.5


def test_what_does_not_fit_says_so(example, pictures):
    from fastattn.lra.pictures import read_pictures

    data = read_pictures(pictures)["train"]
    with pytest.raises(ValueError, match="batch must be at most the 200 pictures, got 256"):
        example["train"](torch.nn.Linear(2, 2), data, epochs=1, batch=256, lr=1e-3, seed=0)
    with pytest.raises(ValueError, match="must divide the side of 28 pixels, got 5"):
        example["PatchClassifier"](5, 28, 1, 10, 8, 2, 1)


def test_the_page_shows_the_recorded_run(whole_example):
    page = (ROOT / "docs/from_checkpoints.md").read_text()
    runs = list((ROOT / "benchmarks/results").glob("*/from_checkpoint/results.json"))
    assert runs
    for path in runs:
        results = json.loads(path.read_text())
        assert results["rows"].keys() == whole_example["ATTENTIONS"].keys()
        assert whole_example["table"](results) in page
        assert str(path.relative_to(ROOT)) in page
