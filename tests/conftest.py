"""Set before any import: Triton kernels are interpreted where there is no GPU, and libraries of
models are found where the Makefile has put them."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

sys.path.append(str(Path(__file__).parent.parent / ".venv" / "models"))
vision = importlib.util.find_spec("torchvision")
with_cuda = vision and "+cu" in Path(vision.origin).with_name("version.py").read_text()
if with_cuda and torch.version.cuda is None:
    # Built with CUDA, beside a torch without: it looks for two operators, which no model needs.
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    importlib.import_module("interpreted").quicken()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests of the GPU are skipped without one, and say so; with one, ``-m gpu`` takes those too
    of files that run on it where there is one."""
    for item in items:
        if getattr(getattr(item, "module", None), "DEVICE", "cpu") == "cuda":
            item.add_marker("gpu")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where a test runs: on the CPU, and with ``-m gpu`` on a GPU."""
    return request.param


@pytest.fixture
def kernel_device(device):
    """The same, of a test that names kernels: on a CPU they are interpreted, or do not run."""
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    return device


@pytest.fixture
def compiler(device):
    """A backend of torch.compile: on a CPU without the minutes of code generation."""
    return "inductor" if device == "cuda" else "aot_eager"


@pytest.fixture
def quick_compile(monkeypatch):
    """torch.compile as one graph or an error, without the minutes of code generation."""
    real = torch.compile

    def quickly(function, *, dynamic, mode):
        return real(function, dynamic=dynamic, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", quickly)
