"""The house of the library: layers, public names, and an import that does nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fastattn

SOURCE = Path(fastattn.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# A file imports only from layers to its left.
LAYERS = ("_", "kernels", "ops", "testing", "nn", "convert integrations env", "lra")


def layer(module: str) -> int:
    """The place in LAYERS of ``fastattn.<module>``."""
    head = module.split(".")[0]
    if head.startswith("_"):
        return 0
    return next(i for i, names in enumerate(LAYERS) if head in names.split())


def imports(path: Path) -> list[str]:
    """The fastattn modules a file imports, relative to fastattn."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{a.name}" if node.module == "fastattn" else node.module
                      for a in node.names]  # fmt: skip
    return [name.removeprefix("fastattn.") for name in found if name.startswith("fastattn.")]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_from_its_left(path):
    module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    if module == "__init__":
        return
    for name in imports(path):
        assert layer(name) <= layer(module), f"{module} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_short_and_says_what_it_is(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 450
    if text:
        assert ast.get_docstring(ast.parse(text))


def test_the_trainer_is_the_module_of_lightning_and_its_data_in_under_500_lines():
    """``python -m fastattn.lra.train`` is the command; the files of a run are runs.py's."""
    text = (SOURCE / "lra/train.py").read_text()
    assert len(text.splitlines()) < 500
    (trainer,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert [ast.unparse(base) for base in trainer.bases] == ["lightning.LightningModule"]
    methods = {node.name for node in trainer.body if isinstance(node, ast.FunctionDef)}
    assert {"train_dataloader", "training_step", "configure_optimizers"} <= methods
    assert "lra.cli" in imports(SOURCE / "lra/train.py")


def test_lra_imports_only_public_names_and_the_native_part():
    for path in (SOURCE / "lra").rglob("*.py"):
        for name in imports(path):
            private = any(part.startswith("_") for part in name.split("."))
            assert name == "_native" or not private, (path, name)


def test_the_public_names():
    assert set(fastattn.__all__) == {
        "BigBirdAttention",
        "MECHANISMS",
        "LinearAttention",
        "LinformerAttention",
        "LongConv",
        "PerformerAttention",
        "ToeplitzMix",
        "__version__",
        "convert",
        "ops",
        "revert",
    }
    assert set(fastattn.ops.__all__) == {
        "BlockLayout",
        "ConvState",
        "LinearState",
        "block_sparse_attention",
        "block_sparse_attention_reference",
        "draw_projection",
        "favor_attention",
        "favor_attention_reference",
        "favor_attention_scan",
        "favor_error",
        "fft_conv",
        "fft_conv_prefill",
        "fft_conv_reference",
        "fft_conv_step",
        "linear_attention",
        "linear_attention_reference",
        "linear_attention_scan",
        "linear_attention_scan_reference",
        "linformer_attention",
        "linformer_attention_reference",
        "oprf_constant",
    }
    assert set(fastattn.MECHANISMS) == {"linear", "performer", "bigbird", "linformer"}
    for name in fastattn.__all__:
        assert hasattr(fastattn, name)


def test_every_public_callable_is_documented_with_what_it_raises():
    for module in (fastattn, fastattn.ops):
        for name in module.__all__:
            thing = getattr(module, name)
            if callable(thing):
                assert thing.__doc__, name
                if name.islower() and not name.endswith("reference"):
                    assert "Raises:" in thing.__doc__, name


def test_importing_starts_nothing_and_needs_neither_triton_nor_lightning():
    program = """
import sys
for name in ("triton", "lightning", "matplotlib", "tensorflow", "jax"):
    sys.modules[name] = None  # importing it raises
import torch
state = torch.get_rng_state()
import fastattn, fastattn.lra, fastattn.lra.tasks, fastattn.lra.encoder
assert torch.equal(state, torch.get_rng_state())
assert not torch.cuda.is_initialized()
x = torch.randn(1, 2, 5, 4)
assert fastattn.ops.linear_attention(x, x, x).isfinite().all()
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""


def test_the_version_is_the_package_version():
    assert (
        f'version = "{fastattn.__version__}"'
        in (SOURCE.parent.parent / "pyproject.toml").read_text()
    )
