"""Every example in the README and the docs is run."""

import doctest
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastattn.lra.cli import _parser, main
from fastattn.lra.denoise import DENOISE
from fastattn.lra.encoder import encoder_for
from fastattn.lra.recipes import RECIPES
from fastattn.lra.tasks import TASKS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_examples_print_what_they_say(page):
    text = "\n".join(blocks(page, "python"))
    examples = doctest.DocTestParser().get_doctest(text, {}, str(page), str(page), 0)
    assert bool(examples.examples) == bool(text)
    failures = doctest.DocTestRunner().run(examples)
    assert failures.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_console_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "console"):
        for line in block.splitlines():
            assert line.startswith("$ fastattn-lra "), line
            assert main(shlex.split(line)[2:]) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_long_commands_are_ones_the_command_takes(page):
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words[0] == "fastattn-lra":
                options = _parser().parse_args(words[1:])
                if words[1] == "fit":
                    assert_it_would_train(options)
            elif words[0] == "make":
                assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
            else:
                assert words[:2] == ["pip", "install"], line


def assert_it_would_train(options):
    """The recipe is for the task, and its network can be made."""
    recipe = RECIPES[options.recipe].on(1000, 1024)
    changed = {"pool": options.pool, "positions": options.positions}
    recipe = replace(recipe, **{name: x for name, x in changed.items() if x is not None})
    if options.denoise:
        recipe = replace(recipe, denoise=DENOISE[options.denoise])
    with torch.device("meta"):
        encoder_for(TASKS[options.task], recipe, options.mixer or recipe.mixer)


def test_the_page_of_lra_names_every_recipe():
    named = set()
    for row in (ROOT / "docs" / "lra.md").read_text().splitlines():
        if row.startswith("| `"):
            words = re.findall(r"`([^`]+)`", row.split("|")[1])
            first = words[0].rsplit("-", 1)[0]
            words = [first + word if word.startswith("-") else word for word in words]
            named |= {word.replace("TASK", task) for word in words for task in TASKS}
    assert RECIPES.keys() <= named


def test_the_page_of_lra_makes_the_sets_of_pathfinder_that_it_trains_on():
    lines = [line for x in blocks(ROOT / "docs" / "lra.md", "sh") for line in x.splitlines()]
    of_pathfinder = [
        _parser().parse_args(line.split()[1:]) for line in lines if " pathfinder " in line
    ]
    made = {(x.out, x.difficulty) for x in of_pathfinder if hasattr(x, "difficulty")}
    trained = {(x.data_dir, x.protocol or "hard") for x in of_pathfinder if hasattr(x, "data_dir")}
    assert len(trained) > 1
    assert trained <= made


def test_the_languages_of_all_blocks_are_ones_that_are_tested():
    for page in PAGES:
        for language in re.findall(r"^```(\S+)", page.read_text(), re.MULTILINE):
            assert language in {"python", "console", "sh", "{toctree}", "{eval-rst}"}, page
