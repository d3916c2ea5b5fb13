"""Launches the engine's Triton kernels on a double of a GPU's driver, which compiles but does not run them.

The engine's own launchers are used, so types, alignment, constants and options are those of a real step. Triton refuses
a kernel that takes more shared memory than the GPU has. The compiler cannot run in a process with interpreted kernels,
so `compile_kernels` starts another: `python -m tests.support.cross_compile FOLDER ARCHITECTURE`.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from engine import cuda, ops, sampling
from engine.adapters import rows as adapter_rows
from engine.adapters.rows import AdapterTiles, AdapterWeights
from engine.attention import qkv
from engine.attention.qkv import RopeArgs
from engine.cuda import gpu_blocks, gpu_groups, gpu_ranks, gpu_sampling
from engine.cuda.gpu_experts import MAX_ROWS as MAX_EXPERT_ROWS
from engine.cuda.gpu_experts import add_slots, choose_experts, mix, mix_many, sort
from engine.cuda.gpu_layers import join_pages, rope_and_write, round_rows
from engine.cuda.gpu_linear import MAX_ROWS, multiply
from engine.cuda.gpu_logits import BLOCK
from engine.cuda.gpu_pages import copy_pages
from engine.cuda.ops import CudaOps
from engine.cuda.sampling import sample
from engine.experts.routing import Routing
from engine.formats import fp8
from engine.formats.fp8 import E4M3_MAX, NEEDED_CAPABILITY, SMALLEST_PEAK
from engine.hybrids import recurrent
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv
from engine.layers.mixer import StateRows
from engine.weights.folders import cache_folder
from tests.support.batches import build_sampling_batch
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS, pool_sizes
from wire.sampling import SamplingParams

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
HOPPER = 90
IS_NIGHTLY = bool(os.environ.get("TEST_CARDS"))
SHARED_KIB = {80: 163, 86: 99, 89: 99, HOPPER: 227, 100: 227, 120: 99}  # architecture |-> what one program may take


class Compiled(NamedTuple):
    name: str
    ptx: str
    shared: int  # bytes of shared memory that one program takes
    may_fuse: bool  # whether a product and a sum may be fused into one rounding


def compile_kernels(architecture: int = HOPPER, timeout_s: float = 500) -> dict[str, list[Compiled]]:
    """Case |-> the kernels it launches and no earlier case does.

    Recompiled when what launches kernels, or Triton, has changed.
    """
    sources = [Path(module.__file__ or "") for module in (sys.modules[__name__], recurrent, qkv, fp8, adapter_rows)]
    for package in (cuda, ops, sampling):
        sources += sorted(Path(package.__path__[0]).glob("*.py"))
    key = hashlib.sha256(b"".join(path.read_bytes() for path in sources) + triton.__version__.encode()).hexdigest()
    folder = cache_folder() / f"triton-{key[:16]}-{architecture}{'-all' * IS_NIGHTLY}"
    with (cache_folder() / "triton.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may compile the same
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder(), ignore_cleanup_errors=True) as building:
                _compile(Path(building), architecture, timeout_s)
                for earlier in cache_folder().glob("triton-*-*"):
                    if key[:16] not in earlier.name:
                        shutil.rmtree(earlier)
                Path(building).rename(folder)
    return {
        case: [_read(cubin, architecture) for cubin in sorted((folder / case).glob("*/*.cubin"))]
        for case in choose_cases(architecture)
    }


def choose_cases(architecture: int) -> dict[str, Callable[[], None]]:
    """All on Hopper, on others those that fill shared memory. Nightly one of each kernel on the oldest and the newest.

    e4m3 only where the engine keeps it.
    """
    if architecture == HOPPER:
        return CASES
    wanted = TILES | (SMALL if IS_NIGHTLY and architecture in (min(SHARED_KIB), max(SHARED_KIB)) else set())
    if IS_NIGHTLY and divmod(architecture, 10) >= NEEDED_CAPABILITY:
        wanted |= FP8_TILES
    return {case: launch for case, launch in CASES.items() if case in wanted}


def _compile(folder: Path, architecture: int, timeout_s: float) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.cross_compile", str(folder), str(architecture)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)
    if done.returncode:
        raise RuntimeError(f"a kernel does not compile: {done.stderr[-4000:]}")


def _read(cubin: Path, architecture: int) -> Compiled:
    about = json.loads(cubin.with_suffix(".json").read_text())
    assert about["target"]["arch"] == architecture and cubin.stat().st_size
    return Compiled(about["name"], cubin.with_suffix(".ptx").read_text(), about["shared"], about["enable_fp_fusion"])


def empty(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*sizes, dtype=dtype)


def launch_layers() -> None:
    operations, rows = CudaOps(), empty(4, 4096)
    operations.norm(rows, empty(4096), 1e-5)
    operations.add_norm_(empty(4, 4096, dtype=torch.float32), rows, empty(4096), 1e-5)
    operations.gate(empty(4, 28672))
    join_pages(empty(4, 64, dtype=torch.int32), empty(5, dtype=torch.int32), empty(256, dtype=torch.int32))


def launch_rounding() -> None:
    for width, has_gate in product((14336, 128), (False, True)):  # for each row, and for each 128 columns
        round_rows(empty(100, 28672 if has_gate else 14336), width, SMALLEST_PEAK, E4M3_MAX, has_gate)


def launch_write(dtype: torch.dtype, head_dim: int, has_norm: bool) -> None:
    """32 heads, 8 of them KV heads."""
    qkv, table = empty(4, 48, head_dim), empty(4, 1, head_dim)
    rope = RopeArgs(table, table, empty(40, head_dim) if has_norm else None, 1e-5)
    pool = empty(*pool_sizes(num_pages=3, num_kv_heads=8, num_layers=2, page_tokens=16, head_dim=head_dim), dtype=dtype)
    keys, values = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)[1]
    where = empty(4, dtype=torch.int64)
    rope_and_write(qkv[:, :40], qkv[:, 40:], *rope, keys, values, where, 448.0 if dtype is FP8 else 0.0)


def launch_product(num_rows: int, dtype: torch.dtype, num_outputs: int) -> None:
    scale, bias = (empty(num_outputs, dtype=torch.float32), empty(num_outputs)) if dtype is FP8 else (None, None)
    multiply(empty(num_rows, 4096), empty(num_outputs, 4096, dtype=dtype), scale, bias)


def launch_groups(
    num_rows: int, num_outputs: int, bits: int, has_minimums: bool, dtype: torch.dtype = torch.float16
) -> None:
    """256 rows or fewer, or widening. Without minimums the middle code stands for 0."""
    codes, scale = empty(num_outputs, 512 * bits, dtype=torch.uint8), empty(num_outputs, 128, dtype=dtype)
    second = scale if has_minimums else None
    if num_rows:
        gpu_groups.multiply(empty(num_rows, 4096), codes, scale, second, bits, has_minimums, empty(num_outputs))
    else:
        gpu_groups.widen(codes, scale, second, bits, has_minimums, BF16)


def launch_blocks(num_rows: int, num_outputs: int) -> None:
    """More rows than 64 are e4m3."""
    weight, scale = empty(num_outputs, 4096, dtype=FP8), empty(num_outputs, 32, dtype=torch.float32)
    if num_rows <= MAX_ROWS:
        gpu_blocks.multiply(empty(num_rows, 4096), weight, scale, empty(num_outputs))
    else:
        rows, row_scale = empty(num_rows, 4096, dtype=FP8), empty(num_rows, 32, dtype=torch.float32)
        gpu_blocks.multiply_rounded(rows, row_scale, weight, scale, None, BF16)


def launch_experts(activation: str, hidden: int, width: int, has_bias: bool, top_k: int = 4) -> None:
    """Some of 32 experts for each row, then sums in the order of `places`."""
    ids, weights = (empty(MAX_EXPERT_ROWS, top_k, dtype=dtype) for dtype in (torch.int64, torch.float32))
    biases = (empty(32, 2 * width), empty(32, hidden)) if has_bias else (None, None)
    gate_up, down = empty(32, 2 * width, hidden), empty(32, hidden, width)
    mix(empty(MAX_EXPERT_ROWS, hidden), ids, weights, gate_up, down, activation, *biases)
    add_slots(empty(ids.numel(), hidden), weights, ids.int(), BF16)


def launch_many_experts(num_rows: int, activation: str, has_bias: bool, dtype: torch.dtype = BF16) -> None:
    """Four of 32 experts for each row."""
    ids, weights = (empty(num_rows, 4, dtype=one) for one in (torch.int64, torch.float32))
    biases = (empty(32, 1536, dtype=dtype), empty(32, 2048, dtype=dtype)) if has_bias else (None, None)
    gate_up, down = empty(32, 1536, 2048, dtype=dtype), empty(32, 2048, 768, dtype=dtype)
    choose_experts(empty(num_rows, 128, dtype=dtype), Routing(128, 8, renormalise=True, precision="rounded"))
    grouped = Routing(256, 8, "sigmoid", num_groups=8, top_groups=4, group_peaks=2)
    choose_experts(empty(num_rows, 256, dtype=torch.float32), grouped, empty(256, dtype=torch.float32))
    mix_many(empty(num_rows, 2048, dtype=dtype), ids, weights, gate_up, down, activation, *biases)
    sort(ids, 32, 64, has_places=True)


def launch_coded_experts(form: str) -> None:
    """Four of 128 experts of gpt-oss for each of 64 rows, in few bits."""
    ids, weights = (empty(64, 4, dtype=one) for one in (torch.int64, torch.float32))
    halves, dtype = 2 if form in ("mxfp4", "groups4") else 1, FP8 if form == "e4m3" else torch.uint8

    def stack(num_outputs: int) -> tuple[Tensor, tuple[str, Tensor | None, Tensor | None]]:
        codes, num_groups = empty(128, num_outputs, 2816 // halves, dtype=dtype), 22 if form == "e4m3" else 96
        table = {"mxfp4": torch.uint8, "e4m3": torch.float32}.get(form, torch.float16)
        tables = [empty(128, num_outputs, num_groups, dtype=table) for _ in range(2)]
        return codes, (form, tables[0], tables[1] if form.startswith("groups") else None)

    (gate_up, up_form), (down, down_form) = stack(5632), stack(2816)
    mix_many(empty(64, 2816), ids, weights, gate_up, down, "silu", None, None, up_form, down_form)


def launch_adapters() -> None:
    """gate and up of an 8B model, eight slots of rank 16, on tiles of 64 rows at most."""
    weights = AdapterWeights(
        empty(8, 32, 4096), empty(8, 16, 28_672), empty(8, dtype=torch.int32), empty(448, 3, dtype=torch.int32)
    )
    tiles = AdapterTiles(empty(64, dtype=torch.int32), empty(64, 3, dtype=torch.int32))
    CudaOps().add_adapters_(empty(64, 28_672), empty(64, 4096), tiles, weights)


def launch_pages() -> None:
    pages = empty(3, dtype=torch.int64)
    copy_pages(16, 1 << 16, empty(4, 1 << 16, dtype=torch.int32), pages, pages)


def launch_sampling(vocabulary: int) -> None:
    params = [SamplingParams(repetition_penalty=1.1, logit_bias=((1, 1.0),))]
    lines, counts = np.zeros(2, np.int32), torch.zeros(1, vocabulary, dtype=torch.int32)
    batch = build_sampling_batch(params * 2, [0, 1], counts=counts, counts_line=lines)
    sample(empty(2, vocabulary, dtype=torch.float32), batch)


def launch_joins_of_one_block() -> None:
    """Triton turns an argument of 1 into a constant. Surveys never see a 1 and are left out."""
    with patch.object(gpu_sampling, "NUM_PLANES", 0):
        launch_sampling(BLOCK.value)


def launch_sums(size: int) -> None:
    rows, offsets, epochs = (
        empty(4, 4096),
        empty(size, dtype=torch.int64),
        empty(gpu_ranks.MAX_ROWS, dtype=torch.int32),
    )
    shared = gpu_ranks.SharedRows(empty(gpu_ranks.buffer_bytes(size), dtype=torch.uint8), offsets, epochs, 1, size)
    gpu_ranks.all_reduce_(rows, shared)
    gpu_ranks.add_norm_(empty(4, 4096, dtype=torch.float32), rows, empty(4096), 1e-5, shared)


def launch_states() -> None:
    """Layers of LFM2-1.2B and Qwen3.5-9B over the second of three layers of a pool."""

    def views(*parts: tuple[int, ...]) -> list[Tensor]:
        sizes = [(9, part[0], 3, *part[1:]) for part in parts]
        pool = empty(9, sum(prod(size[1:]) for size in sizes), dtype=torch.float32)
        split = torch.split(pool, [prod(size[1:]) for size in sizes], dim=1)
        return [part.view(size)[:, :, 1] for part, size in zip(split, sizes, strict=True)]

    def weights(*sizes: int) -> Tensor:
        return empty(*sizes, dtype=torch.float32)

    slots, starts = empty(4, dtype=torch.int64), empty(5, dtype=torch.int32)
    at, ops = StateRows(slots, slots, starts, np.full(4, 2, np.int32)), CudaOps()
    ops.gated_conv(empty(8, 6144), GatedConv(weights(2048, 3), weights(2048)), at, *views((8, 256, 2)))
    layer = DeltaNet(16, 32, 128, 128, weights(8192, 4), weights(32), weights(32), weights(128), 1e-6)
    states = DeltaStates(*views((16, 128, 3), (16, 128, 3), (32, 128, 3), (32, 128, 128)))
    ops.delta_net(empty(8, 8192 + 4096 + 64), layer, at, states)


CASES: dict[str, Callable[[], None]] = {
    "layers": launch_layers,
    "write bf16 64": partial(launch_write, BF16, 64, False),
    "write bf16 128 norm": partial(launch_write, BF16, 128, True),
    "write fp8 64 norm": partial(launch_write, FP8, 64, True),
    "write fp8 128": partial(launch_write, FP8, 128, False),
    "fp8 rounding": launch_rounding,
    "fp8 row": partial(launch_product, 1, FP8, 4096),
    "fp8 rows": partial(launch_product, MAX_ROWS, FP8, 28_672),
    "fp8 rows in splits": partial(launch_product, MAX_ROWS, FP8, 4096),
    "bf16 row": partial(launch_product, 1, BF16, 4096),
    "bf16 rows in splits": partial(launch_product, 2, BF16, 4096),
    "4 bits row": partial(launch_groups, 1, 4096, 4, False),
    "4 bits rows": partial(launch_groups, 4 * MAX_ROWS, 28_672, 4, False),
    "4 bits rows in splits": partial(launch_groups, MAX_ROWS, 4096, 4, True, torch.float32),
    "8 bits row": partial(launch_groups, 1, 4096, 8, True, torch.float32),
    "8 bits rows in splits": partial(launch_groups, 2, 4096, 8, False),
    "widen 4 bits": partial(launch_groups, 0, 4096, 4, False),
    "blocks rows in splits": partial(launch_blocks, 2, 4096),
    "blocks rows": partial(launch_blocks, MAX_ROWS, 28_672),
    "blocks many": partial(launch_blocks, 512, 4096),
    "experts silu": partial(launch_experts, "silu", 2048, 768, False),
    "one expert silu": partial(launch_experts, "silu", 5120, 8192, False, top_k=1),
    "experts gelu": partial(launch_experts, "gelu_tanh", 2816, 704, False),
    "experts clamped biased": partial(launch_experts, "clamped", 2880, 2880, True),
    "experts of 17 rows": partial(launch_many_experts, 17, "clamped", True, torch.float16),
    "experts of many rows": partial(launch_many_experts, 2048, "silu", False),
    **{f"experts in {form}": partial(launch_coded_experts, form) for form in ("mxfp4", "groups4", "groups8", "e4m3")},
    **{f"sums of {size} ranks": partial(launch_sums, size) for size in (2, 8)},
    "states": launch_states,
    "adapters": launch_adapters,
    "pages": launch_pages,
    "sampling": partial(launch_sampling, 128_256),
    "sampling from one block": launch_joins_of_one_block,
}
SMALL = {"layers", "write bf16 128 norm", "bf16 row", "widen 4 bits", "sums of 2 ranks", "states", "pages", "sampling"}
TILES = {
    "bf16 rows in splits",
    "4 bits rows in splits",
    "8 bits row",
    "adapters",
    "experts clamped biased",
    "experts of many rows",
    "experts in mxfp4",
    "experts in groups4",
}
FP8_TILES = {"experts in e4m3", "write fp8 128", "fp8 rounding", "fp8 row", "fp8 rows", "blocks rows", "blocks many"}


class Driver:
    """What Triton asks of a CUDA driver, answered for an architecture; a launch does nothing."""

    def __init__(self, architecture: int) -> None:
        self.utils, self._architecture = self, architecture

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._architecture, 32)

    def get_current_device(self) -> int:
        return self._architecture  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_KIB[self._architecture] << 10}

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills, maximum threads of a program."""
        return 1, 1, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_args: None


if __name__ == "__main__":
    architecture = int(sys.argv[2])
    triton.runtime.driver.set_active(Driver(architecture))
    for case, launch in choose_cases(architecture).items():
        os.environ["TRITON_CACHE_DIR"] = str(Path(sys.argv[1]) / case)
        try:
            launch()
        except Exception as error:
            raise RuntimeError(f"{case} for {architecture}") from error
