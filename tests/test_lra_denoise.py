"""Denoising: what is selected, what is predicted, and what a run without it does not notice."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastattn.lra import runs, train
from fastattn.lra.cli import main
from fastattn.lra.denoise import DENOISE, Denoise
from fastattn.lra.encoder import MIXERS, Encoder, encoder_for
from fastattn.lra.loading import Shares, loader
from fastattn.lra.recipes import SMOKE, Recipe
from fastattn.lra.tasks import TASKS

SIZE = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("listops")
    TASKS["listops"].generate(
        out, num_train=49, num_val=20, num_test=20, min_length=5, max_length=40, workers=1
    )
    return out


def encoder(mixer="linear", **options):
    torch.manual_seed(0)
    sizes = {"max_length": 32, "width": 16, "depth": 1, "heads": 2, "ff": 24, "positions": "none"}
    return Encoder(SIZE, 10, mixer=mixer, **sizes | options)


def batch():
    lengths = torch.tensor([30, 10, 1])
    tokens = torch.randint(1, SIZE, (3, 30))
    return tokens * (torch.arange(30) < lengths[:, None]), lengths


# What is selected


def test_three_tenths_of_a_document_are_selected_and_no_padding():
    tokens, lengths = batch()
    corrupted, selected = Denoise().corrupt(tokens, lengths, mask=SIZE)
    assert selected.sum(1).tolist() == [9, 3, 1]
    assert not selected[torch.arange(30) >= lengths[:, None]].any()
    assert torch.equal(corrupted[~selected], tokens[~selected])


def test_a_third_of_them_is_another_token_of_the_document_and_the_rest_is_masked():
    tokens = torch.arange(2, 902)[None].repeat(2, 1)
    corrupted, selected = Denoise().corrupt(tokens, torch.tensor([900, 300]), mask=999)
    assert (corrupted == 999).sum(1).tolist() == [180, 60]
    other = selected & (corrupted != 999)
    assert other.sum(1).tolist() == [90, 30]
    assert corrupted[1][other[1]].max() < 302  # no padding comes in
    assert (corrupted == tokens)[other].float().mean() < 0.1
    assert len(corrupted[0][other[0]].unique()) > 60


def test_every_token_is_selected_as_often_as_another():
    torch.manual_seed(0)
    tokens, lengths = torch.zeros(4000, 10, dtype=torch.int64), torch.full((4000,), 10)
    _, selected = Denoise().corrupt(tokens, lengths, mask=1)
    assert abs(selected.float().mean(0) - 0.3).max() < 5 * (0.21 / 4000) ** 0.5


# The loss


def test_the_loss_is_the_mean_over_a_documents_selected_tokens():
    tokens, lengths = batch()
    selected = Denoise().corrupt(tokens, lengths, mask=SIZE)[1]
    logits = torch.randn(3, 30, SIZE, dtype=torch.float64)
    losses = Denoise().losses(logits[selected], tokens, selected, SIZE)
    for i in range(3):
        mine = selected[i]
        want = F.cross_entropy(logits[i][mine], tokens[i][mine])
        torch.testing.assert_close(losses[i].double(), want, rtol=1e-5, atol=1e-6)


def test_grey_levels_are_compared_from_0_to_1():
    tokens, selected = torch.tensor([[0, 51, 255]]), torch.tensor([[True, True, False]])
    predicted = torch.tensor([[0.25], [0.0]])
    losses = DENOISE["grey"].losses(predicted, tokens, selected, 256)
    assert losses.tolist() == pytest.approx([(0.25 + 0.2) / 2])


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_mask_and_the_token_head_get_gradients_from_every_mixer(mixer):
    model = encoder(mixer, denoise="tokens")
    tokens, lengths = batch()
    corrupted, selected = Denoise().corrupt(tokens, lengths, mask=SIZE)
    predicted = model.denoised(corrupted, lengths, selected)
    assert predicted.shape == (selected.sum(), SIZE)
    Denoise().losses(predicted, tokens, selected, SIZE).mean().backward()
    for p in (model.mask, model.embedding.weight, *model.denoiser.parameters()):
        assert p.grad.abs().max() > 0


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_a_token_is_predicted_at_its_own_place(pool):
    model = encoder("conv:kernel=1", denoise="tokens", pool=pool)
    tokens, lengths = batch()
    selected = torch.zeros_like(tokens, dtype=torch.bool)
    selected[0, 7] = True
    at_7 = model.denoised(tokens, lengths, selected)
    moved = tokens.clone()
    moved[0, :7] = 3
    assert torch.equal(model.denoised(moved, lengths, selected), at_7)
    moved[0, 7] = SIZE
    assert not torch.equal(model.denoised(moved, lengths, selected), at_7)


def test_what_stands_beyond_a_length_changes_no_prediction():
    model = encoder("softmax", denoise="tokens")
    tokens, lengths = batch()
    selected = torch.zeros_like(tokens, dtype=torch.bool)
    selected[1, :10] = True
    before = model.denoised(tokens, lengths, selected)
    tokens[1, 10:] = 9
    torch.testing.assert_close(model.denoised(tokens, lengths, selected), before)


# Without it


def test_initial_values_are_those_without_it():
    plain, denoising = encoder().state_dict(), encoder(denoise="tokens").state_dict()
    assert all(torch.equal(x, denoising[name]) for name, x in plain.items())
    assert denoising.keys() - plain.keys() == {
        "mask", "denoiser.0.weight", "denoiser.0.bias", "denoiser.1.weight", "denoiser.1.bias",
    }  # fmt: skip


def test_the_classification_loss_is_reported_alone(data, tmp_path):
    # at a learning rate that changes nothing it is the same with and without
    phases = tuple(replace(phase, lr=1e-12) for phase in SMOKE.phases)
    plain = replace(SMOKE, phases=phases)
    together = replace(plain, denoise=Denoise(weight=7.0))
    entries = {
        name: runs.fit("listops", data, recipe, "linear", tmp_path / name, workers=0)["fit"]
        for name, recipe in (("a", plain), ("b", together))
    }
    for a, b in zip(entries["a"]["history"], entries["b"]["history"], strict=True):
        for key in ("train_loss", "val_loss", "val_accuracy"):
            assert b[key] == pytest.approx(a[key], rel=1e-6)
        assert b.keys() - a.keys() == {"train_denoise_loss", "val_denoise_loss"}
        assert abs(b["val_denoise_loss"] - np.log(20)) < 1


def test_the_weight_of_denoising_is_in_the_loss(data):
    splits = TASKS["listops"].load(data)
    losses = {}
    for weight in (1.0, 3.0):
        recipe = replace(SMOKE, denoise=Denoise(weight=weight), dropout=0.0)
        torch.manual_seed(0)
        model = train.Classifier(TASKS["listops"], recipe.on(49, 40), "linear", splits)
        noted = {}
        model._note = lambda name, loss, batch, noted=noted: noted.update({name: loss})
        torch.manual_seed(1)
        share = next(iter(loader(Shares(model._stream(0), 0, 1), range(1), 0)))
        share = model.transfer_batch_to_device(share, torch.device("cpu"), 0)
        losses[weight] = model.training_step(share, 0), noted
    (one, noted), (three, same) = losses.values()
    assert torch.equal(noted["denoise_loss"], same["denoise_loss"])
    assert (three - one).item() == pytest.approx(2 * noted["denoise_loss"].item(), rel=1e-5)


def test_denoising_changes_what_is_learnt(data, tmp_path):
    recipe = replace(SMOKE, denoise=Denoise(), dropout=0.0)
    history = runs.fit("listops", data, recipe, "linear", tmp_path / "a", workers=0)["fit"]
    first, last = (history["history"][i]["val_denoise_loss"] for i in (0, -1))
    assert last < first - 0.1


# Runs


def test_a_resumed_run_gives_the_same_denoising_losses(data, tmp_path):
    recipe = replace(SMOKE, denoise=Denoise())
    whole = runs.fit("listops", data, recipe, "linear", tmp_path / "a", workers=0)
    out = tmp_path / "b"
    runs.fit("listops", data, recipe.at_most(10), "linear", out, workers=0)
    resumed = runs.fit("listops", data, recipe, "linear", out, workers=0, resume=True)
    keys = ("train_loss", "train_denoise_loss", "val_denoise_loss")
    one, two = ([[e[k] for k in keys] for e in x["fit"]["history"]] for x in (whole, resumed))
    assert one == two


def test_denoise_then_fine_tune(data, tmp_path, capsys):
    words = f"fit --task listops --data-dir {data} --mixer softmax --workers 0".split()
    first, then = tmp_path / "first", tmp_path / "then"
    assert main([*words, "--denoise", "tokens", "--out", str(first)]) == 0
    assert "validation loss of denoising" in capsys.readouterr().out
    fit = json.loads((first / "result.json").read_text())["fit"]
    assert "val_accuracy" not in fit["best"]
    losses = [entry["val_denoise_loss"] for entry in fit["history"]]
    assert fit["best"]["val_denoise_loss"] == min(losses)
    assert (first / "curve.png").is_file()
    assert main(["test", "--run", str(first)]) == 2
    assert "has only denoised" in capsys.readouterr().err
    assert main([*words, "--from", str(first), "--out", str(then)]) == 0
    report = json.loads((then / "result.json").read_text())["transfer"]
    assert report["new"] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert {"mask", "denoiser.1.weight", "head.weight"} <= set(report["dropped"])
    assert "embedding.weight" in report["moved"]


def test_a_run_that_only_denoises_leaves_the_head_as_initialised(data, tmp_path):
    recipe = replace(SMOKE, denoise=DENOISE["tokens"], weight_decay=0.9)
    runs.fit("listops", data, recipe, "linear", tmp_path / "a", workers=0)
    state = torch.load(tmp_path / "a/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    torch.manual_seed(recipe.seed)
    new = train.Classifier(TASKS["listops"], recipe.on(49, 40), "linear", {}).state_dict()
    assert torch.equal(state["encoder.head.weight"], new["encoder.head.weight"])
    assert not torch.equal(state["encoder.mask"], new["encoder.mask"])


def test_pictures_are_denoised_by_their_grey_levels(tmp_path):
    data, out = tmp_path / "data", tmp_path / "run"
    TASKS["image"].generate(data, num_train=20, num_val=10, num_test=10)
    words = f"fit --task image --data-dir {data} --mixer conv --workers 0 --max-steps 2"
    assert main([*words.split(), "--denoise", "grey", "--out", str(out)]) == 0
    best = json.loads((out / "result.json").read_text())["fit"]["best"]
    assert 0 < best["val_denoise_loss"] < 3


def test_two_documents_a_sample_are_denoised_each():
    task, recipe = TASKS["retrieval"], replace(SMOKE, denoise=Denoise()).on(10, 40)
    model = train.Classifier(task, recipe, "linear", {})
    tokens = torch.randint(1, 256, (6, 40))
    share = train.Share(train.Batch(tokens, torch.full((6,), 40), torch.zeros(3)), 3, 1.0)
    assert model._denoising(share).shape == (6,)


def test_a_recipe_with_it_passes_through_json():
    recipe = replace(SMOKE, denoise=DENOISE["grey"])
    assert Recipe.from_dict(json.loads(json.dumps(asdict(recipe)))) == recipe


def test_what_does_not_fit_is_an_error():
    small = SMOKE.on(20, 40)
    with pytest.raises(ValueError, match="denoise grey is for pictures, and listops has none"):
        encoder_for(TASKS["listops"], replace(small, denoise=DENOISE["grey"]), "linear")
    with pytest.raises(ValueError, match="denoise needs an embedding"):
        encoder_for(TASKS["image"], replace(small, denoise=Denoise()), "gru:embedding=false")
    with pytest.raises(ValueError, match="penalty needs a classification"):
        replace(SMOKE, penalty=1.0, pool="attention", denoise=DENOISE["tokens"])
    for wrong in ({"share": 0}, {"share": 1.5}, {"random": -1}, {"weight": 0}):
        with pytest.raises(ValueError, match="share must be in"):
            Denoise(**wrong)
    with pytest.raises(ValueError, match="predict must be one of tokens, grey"):
        Denoise(predict="bytes")
