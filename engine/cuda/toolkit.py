"""CUDA's compiler, by which FlashInfer builds modules that were not built ahead: a toolkit's, or Python packages'.

`baton[cuda]` brings the packages. FlashInfer looks for no compiler there, and links libraries by names that they lack.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.weights.folders import cache_folder

JIT_CACHE = "flashinfer_jit_cache"  # FlashInfer's own modules; it picks them by architecture
NO_JIT = "FLASHINFER_DISABLE_JIT"
LINK_FLAGS = "FLASHINFER_EXTRA_LDFLAGS"


def find_packages() -> Path | None:
    """The folder of CUDA's packages with a compiler for torch's CUDA, such as site-packages/nvidia/cu13."""
    spec = find_spec("nvidia")
    major = (torch.version.cuda or "").partition(".")[0]
    folders = [Path(place, f"cu{major}") for place in (spec and spec.submodule_search_locations) or ()]
    return next((folder for folder in folders if (folder / "bin/nvcc").is_file()), None)


def find_nvcc() -> str:
    """CUDA's compiler for FlashInfer: CUDA_HOME's, that of packages, PATH's; empty: nowhere."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return shutil.which("nvcc", path=f"{home}/bin") or ""
    packages = find_packages()
    own = shutil.which("nvcc", path=f"{packages}/bin") if packages else None
    return own or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin") or ""


def explain_no_compiler() -> str:
    """Why FlashInfer cannot compile a module that is not built ahead; empty if it can."""
    if find_spec(JIT_CACHE):
        return ""
    if os.environ.get(NO_JIT):
        return f"{NO_JIT} is set"
    if not find_nvcc():
        return "there is no nvcc"
    return "" if shutil.which(os.environ.get("CXX", "c++")) and shutil.which("gcc") else "there is no g++"


def choose_toolkit() -> None:
    """Call it before FlashInfer compiles: shows it a compiler of packages, which it would not find."""
    if find_packages() is None or explain_no_compiler():
        return
    folder = cache_folder() / "cuda-links"
    folder.mkdir(exist_ok=True)
    link_toolkit(folder)


def link_toolkit(folder: Path) -> None:
    """Sets FlashInfer's variables. `folder`: of what modules are linked against; others may be doing the same."""
    nvcc, packages = Path(find_nvcc()), find_packages()
    if packages is not None and nvcc.is_relative_to(packages):
        os.environ["CUDA_HOME"] = str(packages)
    if not (nvcc.parents[1] / "lib64").exists():  # it is that of packages
        (library,) = nvcc.parents[1].glob("lib/libcudart.so.*")
        _make(folder / "libcudart.so", lambda out: out.symlink_to(library))
    _make(folder / "libcuda.so", _write_driver_stub)
    flags = os.environ.get(LINK_FLAGS, "")
    if f"-L{folder}" not in flags:
        os.environ[LINK_FLAGS] = f"{flags} -L{folder}".strip()


def _write_driver_stub(out: Path) -> None:
    """An empty libcuda: the real one comes with a GPU's driver."""
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", "/dev/null", "-o", str(out)]
    subprocess.run(command, check=True, timeout=60)


def _make(path: Path, write: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder, path.name)
        write(made)
        made.replace(path)
