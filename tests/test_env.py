"""python -m fastattn.env says what can run here, and never fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastattn
from fastattn import _native, env

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_json_has_versions_devices_and_backends(capsys):
    assert env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fastattn"].startswith(fastattn.__version__)
    assert found["torch"] == torch.__version__
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert found["torch c++11 abi"] == str(torch.compiled_with_cxx11_abi())
    assert found["nvidia driver"].startswith("none: ") == (DEVICE == "cpu")
    assert found["backends"].keys() == {
        name
        for name in fastattn.ops.__all__
        if name.endswith(("attention", "attention_scan", "fft_conv"))
    }
    native = _native.refusal(DEVICE)
    assert found["native part"][f"on {DEVICE}"] == (native or "runs")
    for answers in found["backends"].values():
        assert [*answers.values()].count("runs") == 1
        assert answers["reference"] == "would run if named"


@pytest.mark.parametrize("op", ["linear_attention", "block_sparse_attention"])
def test_what_it_says_of_a_backend_is_what_the_op_says(op):
    answers = env.report()["backends"][op]
    call = env._calls(DEVICE)[op]
    for name, answer in answers.items():
        os.environ["FASTATTN_BACKEND"] = name
        try:
            if answer.startswith("no: "):
                with pytest.raises(ValueError, match="it needs CUDA"):
                    call()
            else:
                assert call().isfinite().all()
        finally:
            del os.environ["FASTATTN_BACKEND"]
    runs = next(name for name, answer in answers.items() if answer == "runs")
    assert runs == ("triton" if DEVICE == "cuda" else "torch")


def run(**variables):
    done = subprocess.run(
        [sys.executable, "-m", "fastattn.env"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | variables,
    )
    return done.stdout.splitlines()


def test_text_is_one_line_an_entry_and_names_the_variables():
    lines = run(FASTATTN_BACKEND="torch", TRITON_INTERPRET="0")
    assert "  FASTATTN_BACKEND: torch" in lines
    assert f"torch: {torch.__version__}" in lines
    answers = lines[lines.index("  favor_attention:") + 1 :][:3]
    assert "    torch: runs" in answers
    assert "    reference: would run if named" in answers
    triton = "would run if named" if DEVICE == "cuda" else "no: the inputs are on the CPU, it needs"
    assert any(line.startswith(f"    triton: {triton}") for line in answers)
    assert lines[-1].startswith("for an issue: fastattn ")
    assert "linear_attention torch" in lines[-1]


def test_a_variable_that_names_no_backend_is_said_so():
    lines = run(FASTATTN_BACKEND="cudnn")
    at = lines.index("  fft_conv:")
    assert "FASTATTN_BACKEND=cudnn is not one of this op's" in lines[at + 1]


def test_a_broken_device_is_reported_and_no_error(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "zeros", broken)
    assert env.main([]) == 0
    assert "no: CUDA error: no kernel image" in capsys.readouterr().out


def test_gpus_that_do_not_answer_are_reported_and_no_error(monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: uncorrectable ECC error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", broken)
    monkeypatch.setattr(torch.backends.cudnn, "version", broken)
    monkeypatch.setenv("PATH", "/no/such/folder")
    assert env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gpus"] == ["none: CUDA error: uncorrectable ECC error (RuntimeError)"] * 2
    assert found["cudnn"] == "none: CUDA error: uncorrectable ECC error (RuntimeError)"
    assert "nvidia-smi" in found["nvidia driver"]
    if DEVICE == "cpu":
        assert found["backends"]["every op"]["cuda"].startswith("no: ")
    assert env.main([]) == 0


CLONED = {"fastattn"} if (Path(env.__file__).parents[2] / ".git").exists() else set()
LIBRARIES = {"triton", "lightning (extra lra)", "transformers", "timm"}
# what fails, and the parts of the report that then have no answer
BROKEN = {
    "git": (env, "_said", {"nvidia driver"} | CLONED),
    "python": (env.platform, "python_version", {"python"}),
    "platform": (env.platform, "platform", {"platform"}),
    "abi": (torch, "compiled_with_cxx11_abi", {"torch c++11 abi"}),
    "cudnn": (torch.backends.cudnn, "version", {"cudnn"}),
    "driver": (env, "_driver", {"nvidia driver"}),
    "libraries": (env.util, "find_spec", LIBRARIES),
    "triton driver": (env, "_triton_driver", {"triton driver"}),
    "cuda": (torch.cuda, "is_available", {"gpus", "backends"}),
    "count": (env, "_gpus", {"gpus"}),
    "native part": (_native, "refusal", {"native part", "backends"}),
    "what was built": (_native, "built", {"native part"}),
    "environment": (env, "_environment", {"environment"}),
    "inputs": (env, "_calls", {"backends"}),
    "an op": (env, "refusals", {"backends"}),
    "backends": (env, "_all_backends", {"backends"}),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_part_that_fails_as_nobody_foresaw_is_a_line_and_no_error(case, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("out of\norder")

    monkeypatch.setattr(env, "_said", lambda command: "1.2")  # which are here or not
    monkeypatch.setattr(env, "_triton_driver", lambda: "cuda 90")
    *where, parts = BROKEN[case]
    monkeypatch.setattr(*where, broken)
    assert env.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    why = "out of order (ZeroDivisionError)"
    failed = {name for name, part in found.items() if why in json.dumps(part)}
    assert failed == parts
    assert found.keys() == env.report().keys()
    assert env.main([]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert sum(why in line for line in lines) >= len(parts)
    assert all(": " in line or line.endswith(":") for line in lines)
    assert last.startswith("for an issue: fastattn ")


def test_bytes_that_are_no_text_are_printed():
    name, value = b"FASTATTN_ODD", b"\xff"
    command = [sys.executable, "-m", "fastattn.env"]
    done = subprocess.run(command, capture_output=True, env=os.environb | {name: value})
    assert done.returncode == 0
    assert b"  FASTATTN_ODD: \\udcff" in done.stdout
