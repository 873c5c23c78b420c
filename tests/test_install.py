"""What pip does: an sdist, a wheel of it, an import; to build it there is no torch, nor a compiler.

pip builds in an environment that holds only what pyproject.toml asks for. To import torch there is
an error, the first that users of other kernels meet.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTHING = {"CC": "no-such-compiler", "CXX": "no-such-compiler", "CUDA_HOME": "/no/such/folder"}
BUILD = """
import sys
sys.modules.update(dict.fromkeys(("torch", "triton", "einops")))  # importing them raises
from setuptools import build_meta
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""
USE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, fastattn
assert fastattn.__file__.startswith(sys.argv[1])
x = torch.randn(1, 2, 30, 8)
assert fastattn.ops.linear_attention(x, x, x).isfinite().all()
assert fastattn.ops.fft_conv(x[0], x[0, 0]).isfinite().all()
"""


def run(folder, *arguments):
    command = [sys.executable, "-c", *map(str, arguments)]
    environment = os.environ | NOTHING | {"FASTATTN_NATIVE": "auto"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def files(folder):
    return {x.relative_to(folder) for x in folder.rglob("*") if x.is_file()}


def test_it_is_built_without_torch_and_compilers_and_works(tmp_path):
    pytest.importorskip("pybind11")
    pytest.importorskip("setuptools", minversion="77")
    tree = tmp_path / "tree"
    made_here = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", "_build_info.py")
    for folder in ("src", "csrc"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=made_here)
    source, compiled = files(tree / "src"), files(tree / "csrc")
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)

    run(tree, BUILD, "build_sdist", tmp_path)
    (sdist,) = tmp_path.glob("fastattn-*.tar.gz")
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert files(unpacked / "csrc") == compiled  # for those who have compilers

    run(unpacked, BUILD, "build_wheel", tmp_path)
    (wheel,) = tmp_path.glob("fastattn-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(installed)
    found = {x for x in files(installed) if x.parts[0] == "fastattn"}
    assert found == source | {Path("fastattn/_build_info.py")}
    info: dict = {}
    exec((installed / "fastattn" / "_build_info.py").read_text(), info)
    assert info["NATIVE"]["cpu"] is False
    assert "no-such-compiler" in info["NATIVE"]["reason"]
    run(tmp_path, USE, installed)
