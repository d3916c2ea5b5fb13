"""The head: logits in float32, by the C++ kernel as by its slow twin, each row as if it were alone."""

import platform

import pytest
import torch
from torch import Tensor

from engine.model import head
from engine.model.head import Head, multiply_widened
from tests.test_attention import needs_compiler

INSTRUCTIONS = ["", "-mno-avx512bf16", "-mno-avx512bf16 -mno-avx512f"] if platform.machine() == "x86_64" else [""]


def operands(num_rows: int, num_outputs: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [S, K] of standard deviation 1, w [V, K]: logits of standard deviation 1."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, depth, generator=generator)
    weight = torch.randn(num_outputs, depth, generator=generator) / depth**0.5
    return rows.to(dtype), weight.to(dtype)


@needs_compiler
@pytest.mark.parametrize("instructions", INSTRUCTIONS)
@pytest.mark.parametrize(("num_outputs", "depth"), [(300, 64), (67, 2048), (5, 30), (33, 1000)])
def test_the_kernel_gives_what_its_twin_gives(
    instructions: str, num_outputs: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"g++ {instructions}")
    for num_rows in (0, 1, 2, 5, 6, 7, 13, 100):
        rows, weight = operands(num_rows, num_outputs, depth, torch.bfloat16)
        built = Head(weight)
        assert built._kernel is not None
        logits = built(rows)
        assert logits.dtype is torch.float32 and logits.shape == (num_rows, num_outputs)
        # Two orders of K float32 sums: about sqrt(K) roundings of values up to 5.
        torch.testing.assert_close(logits, multiply_widened(rows, weight), rtol=0, atol=depth**0.5 * 2**-24 * 10)


@needs_compiler
def test_a_row_does_not_depend_on_the_others_or_on_threads() -> None:
    rows, weight = operands(130, 301, 640, torch.bfloat16)
    built = Head(weight)
    together = built(rows)
    before = torch.get_num_threads()
    try:
        for num_threads, size in ((1, 1), (2, 4), (3, 7), (2, 64)):
            torch.set_num_threads(num_threads)
            pieces = [built(rows[begin : begin + size]) for begin in range(0, 130, size)]
            assert torch.equal(torch.cat(pieces), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_compiler", [pytest.param(True, marks=needs_compiler), False])
def test_logits_are_not_rounded_to_the_weights_dtype(
    dtype: torch.dtype, has_compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_compiler:
        monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(head, "BLOCK_BYTES", 4 * 256 * 50)  # 50 rows of weights at a time, and some left over
    rows, weight = operands(9, 333, 256, dtype)
    logits = Head(weight)(rows)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), rows.double() @ weight.double().T, rtol=0, atol=1e-5)


@needs_compiler
def test_rows_that_do_not_fit_are_refused() -> None:
    rows, weight = operands(3, 8, 64, torch.bfloat16)
    for wrong in (rows[:, :32], rows.float()):
        with pytest.raises(ValueError, match=r"expected bfloat16 \[S, 64\]"):
            Head(weight)(wrong)
    strided = torch.cat((rows, rows), 1)[:, :64]
    assert torch.equal(Head(weight)(strided), Head(weight)(rows))
