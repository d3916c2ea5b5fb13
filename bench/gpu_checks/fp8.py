"""Linear layers on a GPU: fp8 products against dequantised ones, and the cost of few rows with each kernel.

Knows shapes and clocks. On a CPU the same code runs on small shapes, to test the checks, not speed; set
TRITON_INTERPRET=1 before importing this, since kernels then run in Triton's interpreter.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from engine.cuda import gpu_linear
from engine.cuda.gpu_layers import round_rows
from engine.cuda.ops import multiply_rounded
from engine.formats.fp8 import BLOCK, E4M3_MAX, SMALLEST_PEAK, has_fp8, quantise_rows
from engine.formats.ops import FormatOps

LAYER_SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # K, N of Llama-3-8B's four products
SMALL_SHAPES = ((256, 192),)
NUM_ROWS = (1, 4, 16, 32, 64)
READ_BYTES = 256 << 20  # distinct weights between two reads of the same one: several times an H200's L2 of 50 MB
NUM_REPEATS = 5
Weight = TypeVar("Weight", bound=Tensor | tuple[object, ...])  # with tensors
ROUNDED_ERROR = 0.05  # of the product's norm: e4m3's error is 2.6 % of a value on average, at most 1/16


def check_rounding(device: torch.device) -> str:
    """Rows rounded to e4m3 by the kernel, whole and by 128 columns: torch's, bit for bit"""
    if not has_fp8(device):
        return "skipped: fp8 needs compute capability 8.9"
    dtype, num_codes = torch.bfloat16 if device.type == "cuda" else torch.float16, 0
    for depth in (4096, 14336) if device.type == "cuda" else (256,):
        rows = 3 * rows_of(131, depth, dtype, device)
        rows[1], rows[2] = 0, rows[2] * 1000
        for width in (depth, BLOCK):
            codes, scale = round_rows(rows, width, SMALLEST_PEAK, E4M3_MAX)
            expected, expected_scale = quantise_rows(rows.reshape(-1, width))
            assert torch.equal(scale.view(-1), expected_scale), f"{depth} columns, {width} at once: another scale"
            different = codes.view(torch.uint8) != expected.view(codes.shape).view(torch.uint8)
            assert not different.any(), f"{depth} columns, {width} at once: {int(different.sum())} codes differ"
            num_codes += codes.numel()
    return f"{num_codes} codes equal"


def check_fp8(device: torch.device) -> str:
    """Triton's few-row products and torch's of many rows against the dequantised float32 product."""
    # the interpreter cannot multiply bfloat16
    dtype, shapes = (torch.bfloat16, LAYER_SHAPES) if device.type == "cuda" else (torch.float16, SMALL_SHAPES)
    worst_rounded = 0.0
    for depth, num_outputs in (*shapes, (200, 131)):  # the last shape fits no tile
        bias, *_ = rows_of(1, num_outputs, dtype, device)
        codes, scale = quantise_rows(weight_of(num_outputs, depth, device))
        for num_rows in NUM_ROWS:
            rows = rows_of(num_rows, depth, dtype, device)
            truth = FormatOps().multiply_fp8(rows.float(), codes, scale, bias)
            error = (gpu_linear.multiply(rows, codes, scale, bias).float() - truth).abs()
            # one rounding at the end, and float32 sums of up to 14,336 products in two orders
            is_near = error <= truth.abs() * torch.finfo(dtype).eps / 2 + 5e-4
            assert is_near.all(), f"{depth}x{num_outputs}, {num_rows} rows: off by {error.max().item():.2g}"
        if depth % 16 == num_outputs % 16 == 0:
            rows = rows_of(128, depth, torch.bfloat16, device)
            truth = FormatOps().multiply_fp8(rows.float(), codes, scale, None)
            rounded = multiply_rounded(rows, codes, scale, None).float()
            off = ((rounded - truth).norm() / truth.norm()).item()
            assert off < ROUNDED_ERROR, f"{depth}x{num_outputs}, rounded rows: off by {off:.1%} of the product's norm"
            worst_rounded = max(worst_rounded, off)
    return f"few rows equal; rounded rows off by {worst_rounded:.1%} of the product's norm"


def time_linear(device: torch.device) -> str:
    """A line for each shape and number of rows: microseconds and GB/s of weights, weights coming from memory."""
    is_cuda = device.type == "cuda"
    lines = []
    for depth, num_outputs in LAYER_SHAPES if is_cuda else SMALL_SHAPES:
        weight = weight_of(num_outputs, depth, device)
        codes, scale = quantise_rows(weight)
        # the interpreter cannot multiply bfloat16, and torch rounds nothing else
        wide = copies(weight.to(torch.bfloat16 if is_cuda else torch.float16))
        narrow = copies(codes)
        for num_rows in NUM_ROWS if is_cuda else NUM_ROWS[:2]:
            rows = rows_of(num_rows, depth, wide[0].dtype, device)
            found = {
                "torch": timed(partial(functional.linear, rows), wide),
                "Triton": timed(partial(gpu_linear.multiply, rows), wide),
                "Triton fp8": timed(partial(gpu_linear.multiply, rows, scale=scale), narrow),
                "rounded": timed(partial(multiply_rounded, rows.bfloat16(), scale=scale, bias=None), narrow),
            }
            figures = ", ".join(f"{name} {us:.1f} us {rate:.0f} GB/s" for name, (us, rate) in found.items())
            lines.append(f"{depth}x{num_outputs}, {num_rows} rows: {figures}")
    return "\n".join(lines)


def timed(multiply: Callable[[Weight], Tensor], weights: Sequence[Weight]) -> tuple[float, float]:
    """(microseconds of one product, best of several rounds over all weights; GB/s of weights)"""

    def read_all() -> None:
        for weight in weights:
            multiply(weight)

    read_all()  # compiles
    tensors = tensors_of(weights[0])
    seconds = (time_graph if tensors[0].is_cuda else time_calls)(read_all) / len(weights)
    return seconds * 1e6, sum(tensor.nbytes for tensor in tensors) / seconds / 1e9


def time_graph(work: Callable[[], None]) -> float:
    """Seconds of `work` without the host's cost per kernel, measured with a CUDA graph of some milliseconds."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(NUM_REPEATS):
        begin = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def time_calls(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def copies(weight: Weight) -> list[Weight]:
    """Equal weights at different addresses, enough that a GPU's cache holds none when it is read again."""
    tensors = tensors_of(weight)
    count = -(-READ_BYTES // sum(tensor.nbytes for tensor in tensors)) if tensors[0].is_cuda else 2
    return [copy.deepcopy(weight) for _ in range(count)]


def tensors_of(weight: Tensor | tuple[object, ...]) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else [part for part in weight if isinstance(part, Tensor)]


def weight_of(num_outputs: int, depth: int, device: torch.device) -> Tensor:
    """[N, K] float32; its products have the magnitude of their inputs."""
    generator = torch.Generator(device).manual_seed(depth)
    return torch.randn(num_outputs, depth, generator=generator, device=device).div_(depth**0.5)


def rows_of(num_rows: int, depth: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[M, K]"""
    generator = torch.Generator(device).manual_seed(num_rows)
    return torch.randn(num_rows, depth, generator=generator, device=device).to(dtype)
