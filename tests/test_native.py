"""The native part: its kernels on threads of a CPU, and its build with and without compilers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastattn import _native

ROOT = Path(__file__).parent.parent
CXX = shutil.which("g++")
NVCC = shutil.which("nvcc")
needs_compiler = pytest.mark.skipif(CXX is None, reason="needs g++")
needs_nvcc = pytest.mark.skipif(NVCC is None or CXX is None, reason="needs nvcc and g++")


@needs_compiler
@pytest.mark.slow
def test_the_cuda_kernels_are_right_on_threads_of_a_cpu(tmp_path):
    """The same code: barriers are real, shared memory is memory."""
    program = tmp_path / "emulate"
    folders = [f"-I{ROOT / 'csrc' / x}" for x in ("", "cuda", "include")]
    source = ROOT / "tests" / "native" / "emulate.cpp"
    command = [CXX, "-std=c++20", "-O2", *folders, source, "-o", program, "-pthread"]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("N=") >= 12


def build(folder, fails=False, **environment):
    """What setup.py leaves in a folder: the output, and _build_info's NATIVE."""
    pytest.importorskip("pybind11")
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    info = {}
    if not fails:
        exec((folder / "lib" / "fastattn" / "_build_info.py").read_text(), info)
    return done.stdout + done.stderr, info.get("NATIVE")


def works(folder):
    """Whether what was built loads and convolves, in a process that sees no other."""
    code = f"""
import importlib.util, pathlib
(path,) = pathlib.Path({str(folder)!r}).glob("lib/fastattn/_C.*")
spec = importlib.util.spec_from_file_location("fastattn._C", path)
part = importlib.util.module_from_spec(spec)
spec.loader.exec_module(part)
from array import array
u, k, y = array("f", [1, 2, 3, 4]), array("f", [1, 10]), array("f", [0] * 4)
shape = part.ConvShape(1, 1, 1, 4, 4, 0, 2, False, 0)
shape.length = 4
at = lambda x: (x.buffer_info()[0], 4, 4, 1)
part.conv_cpu(shape, at(u), None, None, at(y), k.buffer_info()[0], 0, 1)
print([round(x, 3) for x in y], part.cuda_refusal())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


NO_COMPILER = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
NO_NVCC = {"CUDA_HOME": "/no/such/folder"}


@needs_compiler
@pytest.mark.slow
def test_with_a_c_compiler_only(tmp_path):
    _, info = build(tmp_path, FASTATTN_NATIVE="auto", **NO_NVCC)
    assert info["cpu"] is True
    assert info["cuda"] is False
    assert "nvcc is neither" in info["cuda reason"]
    assert "[1.0, 12.0, 23.0, 34.0] built without CUDA" in works(tmp_path)


def test_without_any_compiler(tmp_path):
    _, info = build(tmp_path, FASTATTN_NATIVE="auto", **NO_COMPILER, **NO_NVCC)
    assert info["cpu"] is False
    assert "no-such-compiler" in info["reason"]
    assert not list(tmp_path.glob("lib/fastattn/_C.*"))


def test_what_is_required_fails_if_it_cannot_be_built(tmp_path):
    said, _ = build(tmp_path, True, FASTATTN_NATIVE="require", **NO_COMPILER, **NO_NVCC)
    assert "no-such-compiler" in said
    said, _ = build(tmp_path, True, FASTATTN_NATIVE="require", **NO_NVCC)
    assert "nvcc is neither" in said
    said, _ = build(tmp_path, True, FASTATTN_NATIVE="maybe")
    assert "FASTATTN_NATIVE must be one of" in said


@needs_nvcc
@pytest.mark.slow
def test_everything_compiles_for_hopper_within_its_registers(tmp_path):
    _, info = build(tmp_path, FASTATTN_NATIVE="require", FASTATTN_CUDA_ARCHS="90")
    assert info["cuda"] is True
    assert info["archs"] == ["90"]
    logs = sorted((tmp_path / "temp" / "cuda").glob("conv_*.log"))
    assert len(logs) == 9  # seven lengths, windows, and long rows
    for log in logs:
        more = {"conv_8192": (255, 128)}  # gradients
        if log.stem in ("conv_256", "conv_512", "conv_1024", "conv_2048"):
            more[log.stem] = (128, 460)  # of float32, strided
        limited(log.read_text(), *more.get(log.stem, ()))
    assert "[1.0, 12.0, 23.0, 34.0]" in works(tmp_path)


@pytest.mark.parametrize(
    ("here", "want"),
    [
        ("9.0\n8.0\n9.0\n", ["80", "90"]),
        ("99.0\n12.0\n", ["120"]),
        ("7.5\n8.0\n", ["80"]),
        ("7.5\n", ["80", "90", "120"]),
        ("99.0\n", ["80", "90", "120"]),
        ("[N/A]\n", ["80", "90", "120"]),
        (None, ["80", "90", "120"]),
    ],
)
def test_it_is_built_for_the_gpus_that_are_here(here, want, tmp_path):
    """Of those that the compiler knows; else for the usual ones."""
    pytest.importorskip("pybind11")

    def program(name, prints, code=0):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\nprintf '{prints}'\nexit {code}\n")
        path.chmod(0o755)
        return str(path)

    compiler = program("nvcc", "".join(f"compute_{x}\\n" for x in (75, 80, 90, 120)))
    program("nvidia-smi", (here or "no driver").replace("\n", "\\n"), int(here is None))
    code = "import runpy, setuptools; setuptools.setup = lambda **_: None; "
    code += f"print(runpy.run_path('setup.py')['archs']({compiler!r}))"
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    environment = os.environ | {"PATH": path, "FASTATTN_CUDA_ARCHS": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{want}\n", done.stderr


def limited(said, most_registers=128, most_spilt=128):
    """At most so many registers, and bytes of a thread's in memory."""
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", said)]
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill stores", said)]
    assert registers
    assert max(registers) <= most_registers
    assert max(spills) <= most_spilt, said


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 100, 120])
def test_other_generations_compile(arch, tmp_path):
    folders = [f"-I{ROOT / 'csrc' / x}" for x in ("", "cuda", "include")]
    source = ROOT / "csrc" / "cuda" / "conv_length.cu"
    command = [NVCC, "-std=c++17", "-O3", "-DFA_LENGTH=4096", *folders, "-Xptxas", "-v"]
    command += [
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-c",
        source,
        "-o",
        tmp_path / "x.o",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    limited(done.stderr + done.stdout)


@pytest.mark.parametrize(
    ("archs", "here", "wanted"),
    [
        (["90"], (8, 0), "80"),
        (["80", "90"], (8, 6), None),  # a generation runs what was built for its first
        (["86", "90"], (8, 0), "80"),
        (["90"], (12, 0), None),  # the newest is there for all that follow
        (["90a"], (9, 0), None),
    ],
)
def test_it_is_refused_on_a_gpu_that_it_was_not_built_for(archs, here, wanted, monkeypatch):
    module = SimpleNamespace(cuda_refusal=str)
    monkeypatch.setattr(_native, "load", lambda: (module, ""))
    monkeypatch.setattr(_native, "built", lambda: {"cuda": True, "archs": archs})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: here)
    said = _native._refusal.__wrapped__("cuda")
    if wanted is None:
        assert said is None
    else:
        assert said.endswith(f"install it with FASTATTN_CUDA_ARCHS={wanted}")


def test_why_it_cannot_run_is_said():
    assert "it needs the CPU or CUDA" in (_native.refusal("mps") or "installed without")
    module, reason = _native.load()
    assert (module is None) == bool(reason)
