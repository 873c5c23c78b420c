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


def pytest_collection_modifyitems(items):
    """Tests of the GPU are skipped without one, and say so."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def quick_compile(monkeypatch):
    """torch.compile as one graph or an error, without the minutes of code generation."""
    real = torch.compile

    def quickly(function, *, dynamic, mode):
        return real(function, dynamic=dynamic, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch, "compile", quickly)
