"""Recipes: each builds its model and reaches its learning rate; what nothing uses is an error."""

import json
import runpy
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fastattn.lra import runs, train
from fastattn.lra.cli import main
from fastattn.lra.data import Split
from fastattn.lra.encoder import ACTIVATIONS, NORMS, encoder_for
from fastattn.lra.mixers import BODIES
from fastattn.lra.protocols import PROTOCOLS
from fastattn.lra.recipes import (
    LISTOPS_BUDGET,
    LISTOPS_FULL,
    LISTOPS_MINI,
    RECIPES,
    SMOKE,
    Phase,
    Recipe,
)
from fastattn.lra.tasks import TASKS

# longest document, training samples
SIZES = {
    "listops": (2000, 96_000),
    "text": (4096, 25_000),
    "retrieval": (4000, 147_086),
    "image": (1024, 45_000),
    "pathfinder": (1024, 160_000),
    "pathx": (16_384, 160_000),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp("listops")
    TASKS["listops"].generate(
        out, num_train=49, num_val=20, num_test=20, min_length=5, max_length=40, workers=1
    )
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_a_model_and_reaches_its_learning_rate(name):
    recipe = RECIPES[name]
    for task in [recipe.task] if recipe.task else SIZES:
        longest, samples = SIZES[task]
        whole = recipe.on(samples, longest)
        assert whole.on(samples, longest) == whole
        assert Recipe.from_dict(json.loads(json.dumps(asdict(whole)))) == whole
        every = range(0, whole.steps, max(1, whole.steps // 500))
        peak = max(whole.lr_at(step) for step in every)
        assert peak == pytest.approx(max(phase.lr for phase in whole.phases), rel=0.02)
        with torch.device("meta"):
            model = encoder_for(TASKS[task], whole, recipe.mixer or "linear")
        assert model.max_length == longest if recipe.max_length is None else recipe.max_length
        if (recipe.mixer or "linear").split(":")[0] not in BODIES:
            assert len(model.blocks) == recipe.depth
            for block in model.blocks:
                assert isinstance(block.norm_mixer, NORMS[recipe.norm])
                assert next(block.norm_mixer.parameters()).shape == (recipe.width,)
                assert block.dropout.p == recipe.dropout
                assert (block.ff is None) == (recipe.ff == 0)
                if block.ff is not None:
                    assert block.ff[0].out_features == recipe.ff
                    assert isinstance(block.ff[1], ACTIVATIONS[recipe.activation])
                heads = getattr(block.mixer, "num_heads", getattr(block.mixer, "heads", None))
                assert heads in (None, recipe.heads)
        groups = model.parameter_groups(whole.weight_decay)
        grouped = [id(p) for group in groups for p in group["params"]]
        assert sorted(grouped) == sorted(map(id, model.parameters()))
        assert any(p.ndim == 1 for p in groups[1]["params"])


def test_a_network_that_is_no_stack_of_blocks_says_what_is_not_used(data, tmp_path):
    other = replace(SMOKE, depth=5, ff=999)
    count = [
        runs.fit("listops", data, recipe.at_most(5), "gru", tmp_path / name, workers=0)
        for name, recipe in (("a", SMOKE), ("b", other))
    ]
    assert count[0]["parameters"] == count[1]["parameters"]
    never = ["min_delta", "plateau_patience"]
    assert count[0]["unused"] == ["depth", "heads", "ff", "activation", "norm", *never]


@pytest.mark.parametrize(
    ("mixer", "changes", "unused"),
    [
        ("linear", {}, ["min_delta", "plateau_patience"]),
        ("gru:embedding=false", {"patience": 1},
         ["depth", "heads", "ff", "activation", "embedding", "norm", "plateau_patience"]),
        ("long_conv", {"patience": 1}, ["heads", "plateau_patience"]),
        ("gmlp conv", {"patience": 1}, ["heads", "plateau_patience"]),
        ("long_conv linear", {"patience": 1}, ["plateau_patience"]),
        ("gmlp", {"patience": 1, "ff": 0}, ["heads", "activation", "plateau_patience"]),
        ("conv", {"patience": 1, "ff": 0}, ["heads", "plateau_patience"]),  # has one of its own
        ("softmax", {"phases": (Phase(steps=20, batch_size=1, lr=1.0, decay="plateau"),)},
         ["min_delta"]),
    ],
)  # fmt: skip
def test_what_a_run_does_not_use_is_listed_and_changes_nothing(mixer, changes, unused):
    recipe = replace(SMOKE, max_length=40, **changes)
    assert recipe.unused_for(mixer) == unused
    others = {"depth": 4, "heads": 4, "ff": 99, "activation": "gelu", "embedding": "numbers"}
    others["norm"] = "batch"
    task = TASKS["image"]
    for field, other in others.items():
        with torch.device("meta"):
            models = [encoder_for(task, x, mixer)
                      for x in (recipe, replace(recipe, **{field: other}))]  # fmt: skip
        alike = repr(models[0]) == repr(models[1]) and heads(models[0]) == heads(models[1])
        assert alike == (field in unused), field


def heads(model):
    names = ("num_heads", "heads")
    return [getattr(module, name, None) for module in model.modules() for name in names]


def test_three_sets_are_trained_a_third_of_the_epochs():
    one, three = (RECIPES[f"pathfinder-transformer{x}"] for x in ("", "-three"))
    assert (one.phases[0].epochs, three.phases[0].epochs) == (200, 67)
    assert (one.protocol, three.protocol) == (None, "locality")
    assert replace(three, name=one.name, protocol=None, phases=one.phases) == one
    assert PROTOCOLS["locality"].retrieval_length == 4096


@pytest.mark.slow
def test_the_recipe_of_three_sets_trains_on_three_and_is_refused_with_one(tmp_path, capsys):
    sets, out = tmp_path / "data", tmp_path / "run"
    for difficulty in ("easy", "intermediate", "hard"):
        sizes = {"num_train": 3, "num_val": 2, "num_test": 2}
        TASKS["pathfinder"].generate(sets, difficulty=difficulty, **sizes)
    words = f"fit --task pathfinder --data-dir {sets} --out {out} --workers 0 --max-steps 2"
    words = [*words.split(), "--recipe", "pathfinder-transformer-three"]
    for given in ([], ["--protocol", "easy"]):
        for seeds in ([], ["--seeds", "0,1"]):
            assert main([*words, *given, *seeds]) == 2
            error = capsys.readouterr().err
            assert "protocol must be locality with recipe pathfinder-transformer-three" in error
            assert "add --protocol locality" in error
            assert not out.exists()
    assert main([*words, "--protocol", "locality"]) == 0
    result = json.loads((out / "result.json").read_text())
    assert result["data"]["samples"] == {"train": 9, "val": 2, "test": 2}
    assert result["data"]["difficulty"] == "easy + intermediate + hard"
    assert [phase["steps"] for phase in result["recipe"]["phases"]] == [67]
    assert result["fit"]["steps"] == 2


def test_every_task_has_a_recipe_of_minutes():
    assert SIZES.keys() == TASKS.keys()
    for task in TASKS:
        assert RECIPES[f"{task}-minutes"].task == task


def test_the_published_runs_are_what_they_were():
    for recipe, phases, rest in (
        (LISTOPS_BUDGET, [(2500, 256, 1e-3), (7500, 64, 7e-4)], (256, 6, 4, 512, 0.0)),
        (LISTOPS_MINI, [(2500, 256, 1e-3), (7500, 64, 7e-4)], (256, 4, 4, 1024, 0.1)),
        (LISTOPS_FULL, [(180_000, 64, 1e-4)], (256, 6, 4, 512, 0.0)),
    ):
        assert [(p.steps, p.batch_size, p.lr) for p in recipe.phases] == phases
        sizes = (recipe.width, recipe.depth, recipe.heads, recipe.ff, recipe.dropout)
        assert sizes == rest
        assert recipe.on(96_000, 1999) == recipe
        assert (recipe.activation, recipe.pool_for("linear"), recipe.head) == ("relu", "mean", 0)
        assert recipe.max_length == 2000


def test_epochs_shares_and_lengths_become_numbers_of_the_data():
    recipe = Recipe(
        name="x",
        phases=(Phase(epochs=3, batch_size=10, lr=1.0), Phase(steps=7, batch_size=5, lr=1.0)),
        warmup=0.1,
        validate_every=0,
        max_length=None,
    )
    with pytest.raises(ValueError, match="x is given in epochs"):
        _ = recipe.steps
    whole = recipe.on(samples=101, longest=77)
    assert [phase.steps for phase in whole.phases] == [33, 7]
    assert (whole.warmup, whole.validate_every, whole.max_length) == (4, 11, 77)
    assert whole.at_most(12).last_step == 12
    assert recipe.at_most(100).on(101, 77).last_step == 40
    own = Phase(epochs=2, batch_size=10, lr=1.0, lengths=(1, 2), num_samples=50)
    assert own.on(1000).steps == 10


def test_what_nothing_would_use_is_an_error():
    small = SMOKE.on(200, 40)
    with pytest.raises(ValueError, match="recipe text-conv is for text, not for listops"):
        encoder_for(TASKS["listops"], RECIPES["text-conv"].on(100, 40), "conv")
    with pytest.raises(ValueError, match="penalty needs the pool attention"):
        encoder_for(TASKS["listops"], replace(small, penalty=1.0), "gru")
    with pytest.raises(ValueError, match="max_length must be a number here"):
        encoder_for(TASKS["listops"], SMOKE, "gru")
    with pytest.raises(ValueError, match="takes positions 'none'"):
        encoder_for(TASKS["listops"], replace(small, positions="learned"), "gru")
    with pytest.raises(TypeError, match="factors"):
        Recipe.from_dict({**asdict(small), "factors": "constant"})
    with pytest.raises(ValueError, match="one of steps and epochs"):
        Phase(batch_size=1, lr=1.0)
    with pytest.raises(ValueError, match="one of steps and epochs"):
        Phase(steps=1, epochs=1, batch_size=1, lr=1.0)
    with pytest.raises(ValueError, match="warmup must be shorter than the run's 40 steps"):
        RECIPES["listops-bert-mini"].on(30, 40)
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        replace(SMOKE, accumulate=0)
    with pytest.raises(ValueError, match="embedding numbers is for pictures, and listops has none"):
        encoder_for(TASKS["listops"], replace(SMOKE, embedding="numbers").on(9, 40), "linear")


# What a run does with them


def losses(result):
    keys = ("step", "train_loss", "val_loss", "val_accuracy")
    return np.array([[entry[key] for key in keys] for entry in result["fit"]["history"]])


def test_accumulation_changes_losses_by_rounding_only(data, tmp_path):
    phases = tuple(replace(phase, batch_size=7) for phase in SMOKE.phases)
    recipe = replace(SMOKE, phases=phases, dropout=0.0)
    whole = runs.fit("listops", data, recipe, "linear", tmp_path / "a", workers=0)
    recipe = replace(recipe, accumulate=3)
    for steps in (9, 20):  # and a run that is cut resumes
        shares = runs.fit(
            "listops", data, recipe.at_most(steps), "linear", tmp_path / "b",
            workers=0, resume=steps > 9,
        )  # fmt: skip
    np.testing.assert_allclose(losses(shares)[[0, -1]], losses(whole)[[0, -1]], rtol=1e-5)


def test_plain_torch_gives_the_same_losses(data, tmp_path):
    path = Path(__file__).parent.parent / "examples/plain_training.py"
    assert len(path.read_text().splitlines()) <= 80
    plain = runpy.run_path(str(path))["train"]
    splits = TASKS["listops"].load(data)
    recipe = SMOKE.on(len(splits["train"]), max(int(x.lengths.max()) for x in splits.values()))
    text = path.read_text()
    assert all(word in text for word in ("the penalty of", "redrawing random", "on plateaus"))
    result = runs.fit("listops", data, SMOKE, "bigbird linear", tmp_path / "run", workers=0)
    entries = list(plain(TASKS["listops"], recipe, "bigbird linear", splits, "cpu"))
    np.testing.assert_array_equal(losses(result), np.array(entries))


def test_a_run_that_has_learnt_nothing_says_so(data, tmp_path, monkeypatch):
    # labels that carry nothing, and a learning rate that changes nothing: the head guesses evenly
    recipe = replace(
        SMOKE, phases=(Phase(steps=40, batch_size=4, lr=1e-9),), warmup=0, validate_every=20
    )

    class Even(train.Classifier):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            for p in self.encoder.head.parameters():
                torch.nn.init.zeros_(p)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "Classifier", Even)
        with pytest.warns(UserWarning, match="stuck at chance: at step 20 of 40"):
            result = runs.fit("listops", data, recipe, "linear", tmp_path / "a", workers=0)
    assert len(result["fit"]["warnings"]) == 1
    assert "a lower learning rate" in result["fit"]["warnings"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", module="lightning")
        result = runs.fit("listops", data, recipe, "linear", tmp_path / "b", workers=0)
    assert result["fit"]["warnings"] == []


def test_chance_is_that_of_the_lists_of_the_phase_and_says_of_which_guess(data, monkeypatch):
    task = TASKS["listops"]
    splits = task.load(data)
    short = Phase(steps=20, batch_size=8, lr=1e-3, lengths=(4, 12), num_samples=40)
    recipe = replace(SMOKE, phases=(short, Phase(steps=40, batch_size=8, lr=1e-3)))
    model = train.Classifier(task, recipe.on(49, 40), "linear", splits)
    at = SimpleNamespace(step=20)
    monkeypatch.setattr(train.Classifier, "global_step", property(lambda self: at.step))

    def told(loss):
        model.warnings.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            model._watch_chance(loss, 20)
        return model.warnings

    for at.step, number in ((20, 0), (60, 1)):
        split = model._stream(number).split
        assert (split is splits["train"]) == bool(number)
        guesses = task.chance(split)
        assert list(guesses)[-1] == "the root operator"
        for name, loss in guesses.items():
            (text,) = told(loss + 0.001)
            assert f"stuck at chance: at step {at.step} of 60" in text
            assert f"that of guessing from {name} ({loss:.4f})" in text
        assert not told(min(guesses.values()) - 0.01)
    other = task.chance(model._stream(0).split)
    assert not told(other["how often each label occurs"])
    assert not told(other["the root operator"])


def test_a_penalty_is_trained_and_not_reported(data, tmp_path):
    def run(name, penalty, lr):
        phases = (Phase(steps=10, batch_size=4, lr=lr),)
        recipe = replace(SMOKE, phases=phases, pool="attention", penalty=penalty, dropout=0.0)
        return losses(runs.fit("listops", data, recipe, "gru", tmp_path / name, workers=0))

    np.testing.assert_allclose(run("a", 0.0, 1e-12), run("b", 9.0, 1e-12), rtol=1e-6)
    assert abs(run("c", 0.0, 1e-2) - run("d", 9.0, 1e-2)).max() > 1e-3


def test_chance_is_that_of_the_labels():
    split = TASKS["listops"].generate_split(64, seed=0, min_length=5, max_length=20)
    chances = TASKS["listops"].chance(split)
    assert chances["nothing"] == pytest.approx(np.log(10))
    share = np.bincount(split.labels, minlength=10) / 64
    entropy = -sum(x * np.log(x) for x in share if x)
    assert chances["how often each label occurs"] == pytest.approx(entropy, rel=1e-5)
    roots = split.tokens[split.offsets[:-1]]
    given = 0.0
    for root in set(roots):
        share = np.bincount(split.labels[roots == root]) / (roots == root).sum()
        given -= sum(x * np.log(x) for x in share if x) * (roots == root).mean()
    assert chances["the root operator"] == pytest.approx(given)
    assert TASKS["image"].chance(Split.of([split.tokens] * 4, [0, 0, 1, 1])) == {
        "nothing": pytest.approx(np.log(10)),
        "how often each label occurs": pytest.approx(np.log(2)),
    }


def test_waiting_for_data_is_in_the_result(data, tmp_path):
    result = runs.fit("listops", data, SMOKE, "gru", tmp_path / "run", workers=0)
    assert 0 < result["fit"]["data_wait"] < 1
    assert result["reach"] is None
    conv = runs.fit("listops", data, SMOKE, "conv:kernel=5", tmp_path / "conv", workers=0)
    assert tuple(conv["reach"]) == (4, 4)


@pytest.mark.parametrize(
    ("seconds", "wait", "told"),
    [(100, 0.2, True), (100, 0.1, False), (50, 0.2, False)],  # 4 %, 2 %, and too short to tell
)
def test_a_run_that_waits_for_data_says_so(data, tmp_path, monkeypatch, seconds, wait, told):
    class Waiting(train.Classifier):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.seconds = seconds

        def _wait(self, _):
            self.waited += wait

    monkeypatch.setattr(runs, "Classifier", Waiting)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = runs.fit("listops", data, SMOKE, "linear", tmp_path / "run", workers=0)
    found = result["fit"]["warnings"]
    assert len(found) == told
    if told:
        assert "% of the training time was spent waiting for data" in found[0]
        assert "by --workers, here 0, up to one a core" in found[0]
        assert found[0] in [str(x.message) for x in said]
