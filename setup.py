"""The native part, where it can be built; everything else is in pyproject.toml.

FASTATTN_NATIVE: "auto" (what can be built), "0", "cpu", "cuda" (the same as auto), or "require"
(both parts, else the installation fails). FASTATTN_CUDA_ARCHS: for which GPUs, as in "90;100". What
was built, or why not, is left in fastattn/_build_info.py.
"""

import os
import pprint
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
MODE = os.environ.get("FASTATTN_NATIVE", "auto")
ARCHS = os.environ.get("FASTATTN_CUDA_ARCHS", "")
USUAL = ("80", "86", "90", "100", "120")
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
MODES = ("auto", "0", "cpu", "cuda", "require")


def nvcc() -> str:
    """The compiler's path; raises with the reason if there is none."""
    home = os.environ.get("CUDA_HOME")
    places = [f"{home}/bin"] if home else [None, "/usr/local/cuda/bin"]
    for place in places:
        if found := shutil.which("nvcc", path=place):
            return found
    raise FileNotFoundError(
        "nvcc is neither in $CUDA_HOME/bin, on the PATH, nor in /usr/local/cuda"
    )


def gpus() -> list[str]:
    """Of the GPUs that are here, 90 for compute capability 9.0; none older than the usual ones."""
    try:
        said = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    except (OSError, RuntimeError):
        return []
    found = {int(x) for x in said.replace(".", "").split() if x.isdigit()}
    return [str(x) for x in sorted(found) if x >= int(USUAL[0])]


def archs(compiler: str) -> list[str]:
    """Those asked for; or what is here, else the usual ones, of those that the compiler knows."""
    if ARCHS:
        return ARCHS.replace(",", ";").split(";")
    known = run([compiler, "--list-gpu-arch"]).split()
    for wanted in (gpus(), USUAL):
        if found := [x for x in wanted if f"compute_{x}" in known]:
            return found
    raise RuntimeError(f"{compiler} compiles for none of {', '.join(USUAL)}")


def run(command: list) -> str:
    """What the command says."""
    done = subprocess.run([str(x) for x in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def static_runtime(compiler: str) -> str:
    """Where this compiler has the CUDA runtime that needs no library at run time."""
    said = subprocess.run(
        [compiler, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    ).stderr
    for folder in re.findall(r'-L([^\s"]+)', said):
        path = Path(folder, "libcudart_static.a")
        if path.exists():
            return str(path)
    raise FileNotFoundError(f"{compiler} has no libcudart_static.a")


class Build(build_ext):
    """Compiles what it can, and writes down what it did."""

    def run(self) -> None:
        self.force = True  # what it is made of depends on more than its sources
        self.info = {"cpu": False, "cuda": False, "reason": "FASTATTN_NATIVE=0"}
        for folder in (Path(self.build_lib), ROOT / "src"):
            for stale in (folder / "fastattn").glob("_C.*"):
                if folder == Path(self.build_lib) or self.inplace or self.editable_mode:
                    stale.unlink()
        super().run()
        folder = ROOT / "src" if self.inplace or self.editable_mode else Path(self.build_lib)
        path = folder / "fastattn" / "_build_info.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = pprint.pformat(self.info, width=88, sort_dicts=False)
        path.write_text(f'"""What setup.py built, or why not."""\n\nNATIVE = {text}\n')
        print("native part:", self.info, flush=True)

    def build_extension(self, extension: Extension) -> None:
        self.info = info = {
            "cpu": True,
            "cuda": False,
            "reason": "",
            "date": time.strftime("%Y-%m-%d"),
        }
        try:
            program = getattr(self.compiler, "compiler_so", ["cl"])[0]
            if not shutil.which(program):  # nvcc would need it, and minutes to find out
                raise FileNotFoundError(f"there is no C++ compiler {program}")
            objects = self.cuda_objects(info)
            if not objects:
                extension.sources.append("csrc/no_cuda.cpp")
            extension.extra_objects += objects
            super().build_extension(extension)
        except Exception as error:
            if MODE == "require":
                raise
            info |= {"cpu": False, "cuda": False, "reason": short(error)}

    def cuda_objects(self, info: dict) -> list[str]:
        """Compiled CUDA, or nothing and the reason in ``info``."""
        if MODE == "cpu":
            info["cuda reason"] = "FASTATTN_NATIVE=cpu"
            return []
        try:
            compiler = nvcc()
        except FileNotFoundError as error:
            if MODE == "require":
                raise
            info["cuda reason"] = str(error)
            return []
        folder = Path(self.build_temp).absolute() / "cuda"
        folder.mkdir(parents=True, exist_ok=True)
        flags = [
            *("-std=c++17", "-O3", "-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
            *(f"-I{x}" for x in (CSRC, CSRC / "include", CSRC / "cuda")),
        ]
        jobs = [("conv.cu", [], "conv.o"), ("conv_long.cu", [], "conv_long.o")]
        jobs.append(("conv_windows.cu", [], "conv_windows.o"))
        jobs += [("conv_length.cu", [f"-DFA_LENGTH={n}"], f"conv_{n}.o") for n in LENGTHS]

        def compile_one(job: tuple) -> str:
            source, more, target = job
            print(f"nvcc {source} {' '.join(more)}", flush=True)
            path = folder / target
            said = run([compiler, *flags, *more, "-c", CSRC / "cuda" / source, "-o", path])
            path.with_suffix(".log").write_text(said)  # registers and spills
            return str(path)

        try:
            targets = archs(compiler)
            flags += [f"-gencode=arch=compute_{x},code=sm_{x}" for x in targets]
            flags += [f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}"]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = list(pool.map(compile_one, jobs))
            runtime = static_runtime(compiler)
        except Exception as error:
            if MODE == "require":
                raise
            info["cuda reason"] = short(error)
            return []
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
        info |= {"cuda": True, "archs": targets, "nvcc": version.strip().splitlines()[-1]}
        return [*objects, runtime]

    def copy_extensions_to_source(self) -> None:
        """Of an editable installation; what was not built is not copied."""
        built = [
            x
            for x in self.extensions
            if Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(x.name))).exists()
        ]
        self.extensions = built
        super().copy_extensions_to_source()


def short(error: Exception) -> str:
    """The end of a compiler's message is where the error is not: the first lines are."""
    return "\n".join(f"{type(error).__name__}: {error}".splitlines()[:12])


def extensions() -> list[Extension]:
    if MODE not in MODES:
        raise SystemExit(f"FASTATTN_NATIVE must be one of {', '.join(MODES)}, got {MODE!r}")
    if MODE == "0":
        return []
    try:
        import pybind11
    except ImportError:
        if MODE == "require":
            raise
        print("no native part: pybind11 is not installed", flush=True)
        return []
    windows = sys.platform == "win32"
    return [
        Extension(
            "fastattn._C",
            ["csrc/bindings.cpp", "csrc/cpu/conv.cpp", "csrc/cpu/pathfinder.cpp"],
            include_dirs=["csrc", "csrc/include", pybind11.get_include()],
            extra_compile_args=["/O2", "/std:c++17"]
            if windows
            else ["-O3", "-g0", "-std=c++17", "-fvisibility=hidden"],
            libraries=[] if windows else ["pthread", "dl"],
            language="c++",
        )
    ]


setup(ext_modules=extensions(), cmdclass={"build_ext": Build})
