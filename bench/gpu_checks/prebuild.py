"""Compiles the FlashInfer modules that Baton uses, ahead of time. Needs nvcc but no GPU; its output needs neither.

    CUDA_HOME=/usr/local/cuda python -m bench.gpu_checks.prebuild FOLDER

Writes FOLDER/NAME/NAME.so, the layout of flashinfer/data/aot, where FlashInfer looks before it compiles. A module holds
code for every architecture, those of fa3 for 9.0a alone; FOLDER/architectures.txt lists them for
`engine/cuda/modules.py`. Knows which modules a plan needs; nothing of what they compute.
"""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from cyclopts import App

from engine.attention.shape import AttentionShape
from engine.cuda.modules import (
    ARCHITECTURES,
    EXPANDED_DIMS,
    FA3_HEAD_DIMS,
    HEAD_DIMS,
    ROTATED_DIM,
    SINK_HEAD_DIMS,
    Kernels,
    specify_sinks,
)
from engine.cuda.toolkit import find_nvcc, link_toolkit

DType = Literal["bfloat16", "float16"]
KvDType = Literal["auto", "fp8"]
FAMILIES_SINCE = (12, 9)  # nvcc compiles for all of 10.x and all of 12.x at once
NO_POSITIONS = 0  # FlashInfer's PosEncodingMode.NONE: queries and keys are already rotated

app = App(help=__doc__)


def choose_architectures(nvcc: tuple[int, int]) -> tuple[str, ...]:
    """All GPUs that FlashInfer attends on, for a version of nvcc.

    8.0 is A100 and also runs on 8.6 (A10, RTX 30); 8.9 is L4, L40S and RTX 40; 9.0 H100 and H200; 10.x B200 and B300;
    12.x RTX 50. From 9.0 on FlashInfer takes only targets of one architecture ("a") or family ("f").
    """
    suffix = "f" if nvcc >= FAMILIES_SINCE else "a"
    return "8.0", "8.9", "9.0a", f"10.0{suffix}", f"12.0{suffix}"


def complete(architecture: str) -> str:
    """9.0 and later with the "a" that FlashInfer would add, so that the list says what was compiled."""
    return architecture if architecture[-1].isalpha() or float(architecture) < 9 else f"{architecture}a"


def read_nvcc_version() -> tuple[int, int]:
    """Version of the nvcc that FlashInfer will call: (major, minor). Raises ValueError."""
    done = subprocess.run([find_nvcc() or "nvcc", "--version"], capture_output=True, text=True, check=True, timeout=60)
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    if found is None:
        raise ValueError(f"nvcc does not say its version: {done.stdout!r}")
    return int(found[1]), int(found[2])


def check_folder(folder: Path, architectures: tuple[str, ...]) -> None:
    """Raises ValueError if there are modules for other architectures: one list holds for all."""
    listed = folder / ARCHITECTURES
    if listed.is_file() and tuple(listed.read_text().split()) != architectures:
        raise ValueError(f"{folder} has modules for {listed.read_text().strip()}: set FOLDER to another folder")


def build_environment(folder: Path, architectures: tuple[str, ...]) -> dict[str, str]:
    """Variables for FlashInfer's import: it writes everything to `folder`."""
    return {
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(architectures),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
    }


def build_specs(
    modules: Any,
    sinks: str,
    dtypes: tuple[DType, ...],
    head_dims: tuple[int, ...],
    kv_dtypes: tuple[KvDType, ...],
    has_softcap: bool = False,
    has_fa3: bool = False,
    has_latents: bool = False,
) -> Iterator[Any]:
    """For each dtype, head size and KV type, with and without a window: fa2, and fa3 for prompts in KV of that dtype.
    Then those for DeepSeek's latents.

    Heads that fa3 does not have are those of layers without a window (Gemma 4). Some are built with sinks as well.
    `modules` is flashinfer.jit.attention.modules, `sinks` its variants.attention_sink_decl for fa2. Our K and V have
    equal strides, as fa2's primary module expects.
    """
    for dtype, head_dim, kv_dtype, has_window in product(dtypes, head_dims, kv_dtypes, (False, True)):
        has_fa3s_heads = head_dim in FA3_HEAD_DIMS
        if has_window and not has_fa3s_heads:
            continue
        own = getattr(torch, dtype)
        kv = torch.float8_e4m3fn if kv_dtype == "fp8" else own
        shared = (own, kv, own, torch.int32, head_dim, head_dim, NO_POSITIONS, has_window, has_softcap)
        yield modules._gen_batch_prefill_primary_module("fa2", *shared, False)
        if has_fa3 and has_fa3s_heads and kv is own:
            yield modules.gen_batch_prefill_module("fa3", *shared, False)
        if head_dim in SINK_HEAD_DIMS and not has_softcap:
            shape, window = AttentionShape(1, 1, head_dim, 1.0), 1 if has_window else None
            arguments = specify_sinks(shape, window, (own, kv), torch.int32, sinks)
            yield modules.gen_customize_batch_prefill_module("fa2", *arguments)
    kinds: tuple[Kernels, ...] = ("fa2", "fa3") if has_fa3 else ("fa2",)
    for dtype, kind in product(dtypes if has_latents else (), kinds):
        own = getattr(torch, dtype)
        build = modules._gen_batch_prefill_primary_module if kind == "fa2" else modules.gen_batch_prefill_module
        yield build(kind, own, own, own, torch.int32, *EXPANDED_DIMS, NO_POSITIONS, False, False, False)
        for kv_dtype in kv_dtypes:
            if kv_dtype == "auto" or (has_fa3 and dtype == "bfloat16"):  # e4m3: on Hopper alone
                kv = torch.float8_e4m3fn if kv_dtype == "fp8" else own
                yield modules.gen_batch_mla_module(kind, own, kv, own, torch.int32, 512, ROTATED_DIM, False)


@app.default
def main(
    folder: Path,
    *,
    dtypes: tuple[DType, ...] = ("bfloat16", "float16"),
    head_dims: tuple[int, ...] = HEAD_DIMS,
    kv_dtypes: tuple[KvDType, ...] = ("auto", "fp8"),
    architectures: str = "",
    softcap: bool = False,
    latents: bool = True,
) -> int:
    """Compile into `folder`; MAX_JOBS limits parallel compilers.

    Args:
        architectures: Such as "8.0 9.0a"; empty: all that this nvcc knows and attention is used on.
        softcap: Modules for models whose scores have a soft cap (Gemma 2) instead of those without.
        latents: Also those for latent attention (DeepSeek, Kimi).
    """
    started = time.monotonic()
    targets = tuple(map(complete, architectures.split())) or choose_architectures(read_nvcc_version())
    check_folder(folder, targets)
    with tempfile.TemporaryDirectory(prefix="flashinfer-") as scratch:
        os.environ.update(build_environment(Path(scratch), targets))
        link_toolkit(Path(scratch))
        names = "core", "attention.modules", "attention.variants"
        core, modules, variants = (importlib.import_module(f"flashinfer.jit.{name}") for name in names)
        sinks = variants.attention_sink_decl["fa2"]
        has_fa3 = "9.0a" in targets
        specs = list(build_specs(modules, sinks, dtypes, head_dims, kv_dtypes, softcap, has_fa3, latents))
        core.build_jit_specs(specs, verbose=True, skip_prebuilt=False)
        for spec in specs:
            target = folder / spec.name / f"{spec.name}.so"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(spec.jit_library_path, target)
            print(f"{target.stat().st_size / 1e6:6.1f} MB  {spec.name}")
    (folder / ARCHITECTURES).write_text(" ".join(targets) + "\n")
    print(f"{len(specs)} modules for {' '.join(targets)} in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(app())
