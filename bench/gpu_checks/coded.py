"""Weights that stay in a checkpoint's bits on a GPU: groups of 4 and 8 bits, and e4m3 with a scale for 128 columns.

Knows shapes and clocks. On a CPU the same code runs on small shapes in Triton's interpreter: see fp8.py.
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpu_checks.fp8 import LAYER_SHAPES, NUM_ROWS, ROUNDED_ERROR, SMALL_SHAPES, copies, rows_of, timed, weight_of
from engine.cuda import gpu_blocks, gpu_experts, gpu_groups
from engine.cuda.ops import CudaOps
from engine.formats.fp8 import BLOCK, Fp8Matrix, quantise_rows
from engine.formats.groups import GROUP, Groups, StoredGroups, store_groups, with_zeros
from engine.formats.ops import FormatOps
from engine.formats.quantised_forms import MXFP4_CODES
from engine.formats.stacks import stack_fp8, stack_groups, widen
from engine.ops.base import multiply_widened
from engine.weights.formats import Stack
from tests.support.quantised import quantise_blocks

MANY_ROWS = 512


def check_groups(device: torch.device) -> str:
    """Products of weights in groups: each table and number of bits, few rows and many, against torch's."""
    # the interpreter cannot multiply bfloat16
    dtype, shapes = (torch.bfloat16, LAYER_SHAPES) if device.type == "cuda" else (torch.float16, SMALL_SHAPES)
    worst = 0.0
    for depth, num_outputs in (*shapes, (224, 131)):  # the last shape fits no tile
        for stored in (groups_of(num_outputs, depth, bits, has_zeros, device) for bits, has_zeros in CODINGS):
            wide = stored.dense()  # [N, K]
            assert torch.equal(gpu_groups.widen(*stored, dtype), wide.to(dtype)), f"{depth}x{num_outputs} widened"
            for num_rows in (*NUM_ROWS, 2 * NUM_ROWS[-1]):
                rows = rows_of(num_rows, depth, dtype, device)
                truth = multiply_widened(rows, wide if num_rows == 1 else wide.to(dtype))
                error = (CudaOps().multiply_groups(rows, stored, None).float() - truth).abs()
                # one rounding at the end, and float32 sums of up to 14,336 products in two orders
                is_near = error <= truth.abs() * torch.finfo(dtype).eps / 2 + 5e-4
                assert is_near.all(), f"{depth}x{num_outputs}, {num_rows} rows: off by {error.max().item():.2g}"
                worst = max(worst, error.max().item())
    return f"equal but for the last rounding: off by at most {worst:.2g}"


def check_blocks(device: torch.device) -> str:
    """Products of e4m3 in blocks: few rows as they are and many rounded ones, against torch's."""
    dtype, shapes = (torch.bfloat16, LAYER_SHAPES) if device.type == "cuda" else (torch.float16, SMALL_SHAPES)
    worst_rounded = 0.0
    for depth, num_outputs in (*shapes, (200, 131)):
        matrix = blocks_of(num_outputs, depth, device)
        for num_rows in NUM_ROWS:
            rows = rows_of(num_rows, depth, dtype, device)
            truth = FormatOps().multiply_fp8(rows.float(), *matrix, None)
            error = (gpu_blocks.multiply(rows, *matrix).float() - truth).abs()
            is_near = error <= truth.abs() * torch.finfo(dtype).eps / 2 + 5e-4
            assert is_near.all(), f"{depth}x{num_outputs}, {num_rows} rows: off by {error.max().item():.2g}"
        if depth % BLOCK == 0:
            rows = rows_of(2 * NUM_ROWS[-1], depth, torch.float32, device)
            truth, codes = FormatOps().multiply_fp8(rows, *matrix, None), quantise_blocks(rows)
            rounded = gpu_blocks.multiply_rounded(*codes, *matrix, None, torch.float32)
            same = FormatOps().multiply_fp8(
                Fp8Matrix(*codes).dense(), *matrix, None
            )  # tensor cores add e4m3 less exactly
            assert (rounded - same).norm() < 1e-3 * same.norm(), f"{depth}x{num_outputs}, rounded rows"
            off = ((rounded - truth).norm() / truth.norm()).item()
            assert off < ROUNDED_ERROR, f"{depth}x{num_outputs}, rounded rows: off by {off:.1%} of the product's norm"
            worst_rounded = max(worst_rounded, off)
    return f"few rows equal; rounded rows off by {worst_rounded:.1%} of the product's norm"


def check_experts(device: torch.device) -> str:
    """Experts in MXFP4, 4 bits and e4m3, few rows and many: equal to the same weights in the rows' dtype"""
    # the interpreter cannot multiply bfloat16
    dtype, depth = (torch.bfloat16, 2880) if device.type == "cuda" else (torch.float16, 64)
    num_experts, top_k = 8, 2
    for form in ("mxfp4", "groups4", "e4m3"):
        gate_up, down = (stack_of(form, num_experts, num_outputs, depth, device) for num_outputs in (2 * depth, depth))
        plain = [
            widen(Stack(one.codes.cpu(), one.form, *map(_on_host, one[2:]))).to(device, dtype)
            for one in (gate_up, down)
        ]
        for num_rows in (1, NUM_ROWS[-1]):
            rows, weights = rows_of(num_rows, depth, dtype, device), torch.rand(num_rows, top_k, device=device)
            ids = torch.rand(num_rows, num_experts, device=device).topk(top_k).indices
            found = gpu_experts.mix_many(
                rows, ids, weights, gate_up.codes, down.codes, "silu", None, None, gate_up[1:], down[1:]
            )
            truth = gpu_experts.mix_many(rows, ids, weights, plain[0], plain[1], "silu")
            assert torch.equal(found, truth), f"{form}, {num_rows} rows: off by {(found - truth).abs().max():.2g}"
    return "equal bits in 3 forms"


def _on_host(table: Tensor | None) -> Tensor | None:
    return None if table is None else table.cpu()


def stack_of(form: str, num_experts: int, num_outputs: int, depth: int, device: torch.device) -> Stack:
    """A random matrix of each expert."""
    if form == "e4m3":
        weights = [weight_of(num_outputs, depth, device).float() for _ in range(num_experts)]
        return stack_fp8([[Fp8Matrix(*quantise_rows(weight))] for weight in weights], device)
    groups = []
    for seed in range(num_experts):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 15, (num_outputs, depth), dtype=torch.uint8, generator=generator)
        scale = torch.full((num_outputs, depth // GROUP), 2.0**-8)
        is_mxfp4 = form == "mxfp4"
        groups.append(
            [with_zeros(MXFP4_CODES[codes.long()], scale, 12, 8) if is_mxfp4 else with_zeros(codes, scale, 8, 4)]
        )
    return stack_groups(groups, device)


def time_coded(device: torch.device) -> str:
    """A line for each shape and number of rows: microseconds and GB/s of weights, weights coming from memory."""
    is_cuda, ops = device.type == "cuda", CudaOps()
    lines = []
    for depth, num_outputs in LAYER_SHAPES if is_cuda else SMALL_SHAPES:
        # the interpreter cannot multiply bfloat16
        plain = copies(weight_of(num_outputs, depth, device).to(torch.bfloat16 if is_cuda else torch.float16))
        groups = {bits: copies(groups_of(num_outputs, depth, bits, False, device)) for bits in (4, 8)}
        blocks = copies(blocks_of(num_outputs, depth, device))
        for num_rows in (*NUM_ROWS, MANY_ROWS) if is_cuda else NUM_ROWS[:2]:
            rows = rows_of(num_rows, depth, plain[0].dtype, device)
            found = {"torch": timed(partial(functional.linear, rows), plain)}
            for bits, weights in groups.items():
                found[f"{bits} bits"] = timed(partial(ops.multiply_groups, rows, bias=None), weights)
            found["blocks"] = timed(partial(multiply_matrix, rows), blocks)
            figures = ", ".join(f"{name} {us:.1f} us {rate:.0f} GB/s" for name, (us, rate) in found.items())
            lines.append(f"{depth}x{num_outputs}, {num_rows} rows: {figures}")
    return "\n".join(lines)


def multiply_matrix(rows: Tensor, matrix: Fp8Matrix) -> Tensor:
    return CudaOps().multiply_fp8(rows, *matrix, None)


CODINGS = ((4, False), (4, True), (8, False))  # bits, and whether other codes than the middle one stand for 0


def groups_of(num_outputs: int, depth: int, bits: int, has_zeros: bool, device: torch.device) -> StoredGroups:
    """Random codes; products have about the magnitude of their inputs."""
    generator = torch.Generator().manual_seed(depth)
    codes = torch.randint(0, 1 << bits, (num_outputs, depth), dtype=torch.uint8, generator=generator)
    tables = torch.rand(2, num_outputs, depth // GROUP, generator=generator)
    scale = ((tables[0] + 0.5) * 4 / (depth**0.5 * (1 << bits))).half().float()
    zeros = (tables[1] * 15).round() if has_zeros else 1 << bits - 1
    return store_groups(Groups(codes, scale, -(scale * zeros), bits), device)


def blocks_of(num_outputs: int, depth: int, device: torch.device) -> Fp8Matrix:
    """The same."""
    weight = weight_of(num_outputs, depth, device)
    padded = functional.pad(weight, (0, -depth % BLOCK))
    codes, scale = quantise_blocks(padded)
    return Fp8Matrix(codes[:, :depth].contiguous(), scale)
