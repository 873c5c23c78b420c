"""Weights that move between mixers: what means the same moves, all else is reported."""

import json

import pytest
import torch

from fastattn.lra.cli import main
from fastattn.lra.encoder import MIXERS, Encoder
from fastattn.lra.tasks import TASKS
from fastattn.lra.transfer import summary, transfer
from fastattn.nn import MECHANISMS

ATTENTIONS = ("softmax", *MECHANISMS)


def encoder(mixer, seed=0, classes=10, **options):
    torch.manual_seed(seed)
    sizes = {"max_length": 32, "width": 16, "depth": 2, "heads": 2, "ff": 24, "positions": "none"}
    return Encoder(20, classes, mixer=mixer, **sizes | options)


def move(target, source):
    return transfer(target, source, source.state_dict())


def projections(model, layer=0):
    mixer = model.blocks[layer].mixer
    own = mixer.in_proj if hasattr(mixer, "in_proj") else mixer
    names = ("weight", "bias") if own is not mixer else ("in_proj_weight", "in_proj_bias")
    return *(getattr(own, name) for name in names), mixer.out_proj.weight, mixer.out_proj.bias


@pytest.mark.parametrize("to", ATTENTIONS)
@pytest.mark.parametrize("of", ATTENTIONS)
def test_projections_move_between_attentions(of, to):
    source, target = encoder(of, 1), encoder(to, 2)
    report = move(target, source)
    for layer in range(2):
        for a, b in zip(projections(source, layer), projections(target, layer), strict=True):
            assert torch.equal(a, b)
    for name in ("embedding.weight", "blocks.1.ff.0.weight", "norm.weight", "head.weight"):
        assert name in report["moved"]
        assert torch.equal(source.state_dict()[name], target.state_dict()[name])


@pytest.mark.parametrize("mixer", MIXERS)
def test_everything_moves_between_equal_models(mixer):
    source, target = encoder(mixer, 1), encoder(mixer, 2)
    report = move(target, source)
    assert report["new"] == report["dropped"] == []
    for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("to", MIXERS)
def test_the_report_has_every_tensor_once_and_new_ones_are_as_initialised(to):
    source, target = encoder("softmax", 1), encoder(to, 2)
    before = {name: x.clone() for name, x in target.state_dict().items()}
    report = move(target, source)
    assert sorted(report["moved"] + report["new"]) == sorted(before)
    for name in report["new"]:
        assert torch.equal(target.state_dict()[name], before[name])
    assert set(report["dropped"]) <= source.state_dict().keys()
    assert len(report["dropped"]) + len(report["moved"]) == len(source.state_dict())


def test_softmax_with_the_weights_of_softmax_by_another_way_gives_the_same_logits():
    source, between, target = encoder("softmax", 1), encoder("linear", 2), encoder("softmax", 3)
    move(between, source)
    move(target, between)
    tokens = torch.randint(0, 20, (3, 9))
    lengths = torch.tensor([9, 4, 1])
    assert torch.equal(source(tokens, lengths), target(tokens, lengths))


def test_a_projection_of_another_kind_does_not_move_where_its_shape_fits():
    source, target = encoder("gmlp:hidden=16"), encoder("softmax", 2)
    report = move(target, source)
    assert "blocks.0.mixer.out_proj.weight" in report["new"]
    assert "blocks.0.mixer.out_proj.weight" in report["dropped"]


def test_another_number_of_classes_leaves_the_head_and_moves_the_rest():
    report = move(encoder("linear", 1, classes=2), encoder("linear", 2))
    assert report["new"] == report["dropped"] == ["head.weight", "head.bias"]


def test_a_bias_alone_in_common_is_an_error_and_changes_nothing():
    target = encoder("softmax", 1, width=32, ff=48)
    before = {name: x.clone() for name, x in target.state_dict().items()}
    with pytest.raises(ValueError, match="no matrix of the same name and shape"):
        move(target, encoder("softmax", 2))
    assert all(torch.equal(x, before[name]) for name, x in target.state_dict().items())


def test_a_summary_puts_blocks_together():
    text = summary({"moved": ["a.0.w", "a.1.w", "b"], "new": []})
    assert text == "moved: 3 tensors (a.*.w, b)\nnew: 0 tensors"


def test_a_run_begins_with_another_mixer_and_says_what_moved(tmp_path, capsys):
    data = tmp_path / "data"
    sizes = {"num_train": 20, "num_val": 9, "num_test": 9, "min_length": 5, "max_length": 20}
    TASKS["listops"].generate(data, **sizes, workers=1)
    words = f"fit --task listops --data-dir {data} --workers 0 --max-steps 2 --mixer".split()
    assert main([*words, "softmax", "--out", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    begin = ["--from", str(tmp_path / "a"), "--out", str(tmp_path / "b")]
    assert main([*words, "linformer", *begin]) == 0
    assert "blocks.*.mixer.in_proj_weight" in capsys.readouterr().out
    result = json.loads((tmp_path / "b/result.json").read_text())
    assert result["begin"]["mixer"] == "softmax"
    assert "blocks.0.mixer.in_proj_weight" in result["transfer"]["moved"]
    assert all("mixer" in name for name in result["transfer"]["new"])
    assert result["transfer"]["dropped"] == []
    assert main([*words, "linformer", "--out", str(tmp_path / "b"), "--resume"]) == 0
    assert "transfer" in json.loads((tmp_path / "b/result.json").read_text())


@pytest.mark.slow
def test_pathfinder_is_tuned_from_its_easy_set_to_its_hard_one(tmp_path, capsys):
    sets = tmp_path / "data"
    for seed, difficulty in enumerate(("easy", "intermediate", "hard")):
        words = f"generate pathfinder --out {sets} --n 60 --difficulty {difficulty} --seed {seed}"
        assert main(words.split()) == 0

    def tuned(name, *options):
        words = f"fit --task pathfinder --data-dir {sets} --recipe pathfinder-gru --workers 0"
        words += f" --max-steps 2 --out {tmp_path / name}"
        assert main([*words.split(), *options]) == 0
        return json.loads((tmp_path / name / "result.json").read_text())

    easy = tuned("easy", "--protocol", "easy")
    middle = tuned("middle", "--protocol", "intermediate", "--from", str(tmp_path / "easy"))
    hard = tuned("hard", "--from", str(tmp_path / "middle"))
    fingerprints = [x["data"]["fingerprints"] for x in (easy, middle, hard)]
    assert len({json.dumps(x) for x in fingerprints}) == 3
    assert [x["data"]["difficulty"] for x in (easy, middle, hard)] == [
        "easy", "intermediate", "hard",
    ]  # fmt: skip
    assert "begin" not in easy
    assert hard["begin"]["run"] == str(tmp_path / "middle")
    assert hard["begin"]["fingerprints"] == fingerprints[1]
    assert hard["begin"]["begin"] == middle["begin"]
    assert middle["begin"]["run"] == str(tmp_path / "easy")
    assert middle["begin"]["fingerprints"] == fingerprints[0]
    assert middle["begin"]["begin"] is None
    for before, after in ((easy, middle), (middle, hard)):
        assert after["begin"]["step"] == before["fit"]["best"]["step"]
        assert after["transfer"]["new"] == after["transfer"]["dropped"] == []
    assert main(["test", "--run", str(tmp_path / "hard")]) == 0
    assert json.loads((tmp_path / "hard/result.json").read_text())["test"]["samples"] == 6
    # it goes on with the hard set, which it was not begun with
    again = tuned("hard", "--resume", "--max-steps", "3")
    assert again["begin"] == hard["begin"]
    assert again["fit"]["history"][:2] == hard["fit"]["history"][:2]
