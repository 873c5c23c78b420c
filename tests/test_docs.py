"""Every example in the README and the docs is run."""

import doctest
import re
import shlex
from pathlib import Path

import pytest

from fastattn.lra.cli import _parser, main

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
                _parser().parse_args(words[1:])
            elif words[0] == "make":
                assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
            else:
                assert words[:2] == ["pip", "install"], line


def test_the_languages_of_all_blocks_are_ones_that_are_tested():
    for page in PAGES:
        for language in re.findall(r"^```(\S+)", page.read_text(), re.MULTILINE):
            assert language in {"python", "console", "sh", "{toctree}", "{eval-rst}"}, page
