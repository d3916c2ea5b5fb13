"""fp8 weights: rounding, the slow product and the GPU's, loading, and workers with different weights.

Kernels run in Triton's interpreter, whose tl.dot cannot multiply bfloat16: float16 and float32 replace it.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.compose import FullEngine, build_engine, load_model
from engine.cuda import gpu_blocks, gpu_linear
from engine.cuda import ops as ops_module
from engine.cuda.gpu_layers import round_rows
from engine.cuda.ops import CudaOps
from engine.formats.fp8 import E4M3, E4M3_MAX, SMALLEST_PEAK, Fp8Matrix, quantise_rows
from engine.formats.linear import Fp8Linear
from engine.formats.ops import FormatOps
from engine.layer_config import Activation
from engine.layers.linear import GatedLinear, Mlp, PlainLinear, Quantization
from engine.ops.base import Ops
from kvtransfer.layout import find_mismatch
from runtime.config import PrefillConfig
from runtime.trust import load_trust
from tests.support.checkpoints import write_checkpoint
from tests.support.combinations import combination
from tests.support.quantised import quantise_blocks
from worker.process import build_worker
from worker.role import Worker

CPU = torch.device("cpu")
# Rows, outputs, depth: one row; no whole tile; a split depth; whole tiles; a tile's maximum of rows.
SHAPES = [(1, 131, 700), (2, 130, 700), (5, 65, 1100), (16, 128, 512), (64, 70, 333)]


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def operands(
    num_rows: int, num_outputs: int, depth: int, dtype: torch.dtype, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rows of a wider tensor, codes, scale, bias; outputs of standard deviation 1."""
    rows = randn(num_rows, depth + 24).to(dtype)[:, :depth]
    codes, scale = quantise_rows(randn(num_outputs, depth, seed=1) / depth**0.5)
    return rows, codes, scale, randn(num_outputs, seed=2).to(dtype) if has_bias else None


def exact(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.double() @ weight.double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_within_half_a_step(dtype: torch.dtype) -> None:
    rows = (randn(6, 4096) * torch.tensor([1e-4, 0.02, 1.0, 30.0, 1.0, 0.0])[:, None]).to(dtype)
    rows[4, 7] = 5000.0
    codes, scale = quantise_rows(rows)
    assert codes.dtype is E4M3 and scale.dtype is torch.float32
    error = (codes.double() * scale.double()[:, None] - rows.double()).abs()
    half_step = torch.maximum(rows.double().abs() / 16, scale.double()[:, None] / 1024)
    assert (error <= half_step * (1 + 1e-6)).all()
    assert (codes.float().abs().amax(dim=1)[:5] == 448).all()  # the whole range is used
    assert not codes[5].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(5, 700), (67, 128), (3, 4096)], ids=str)
def test_the_kernel_rounds_like_torch_bit_for_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows = randn(shape[0], shape[1] + 24).to(dtype)[:, : shape[1]]
    rows[1], rows[2] = 0, rows[2] * 1000
    rows[0, :4] = torch.tensor([1e-7, -3.0, 5.0, 2.5])
    codes, scale = round_rows(rows, rows.shape[1], SMALLEST_PEAK, E4M3_MAX)
    expected, expected_scale = quantise_rows(rows)
    assert torch.equal(scale[:, 0], expected_scale)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    for wrong, width in ((rows.T, 1), (rows, 99)):
        with pytest.raises(ValueError, match="expected contiguous columns in groups"):
            round_rows(wrong, width, SMALLEST_PEAK, E4M3_MAX)


@pytest.mark.parametrize("width", [128, 640], ids=str)
@pytest.mark.parametrize("has_gate", [False, True])
def test_groups_are_gated_and_rounded_in_one_kernel(has_gate: bool, width: int) -> None:
    rows = 3 * randn(67, 1304 if has_gate else 664)[:, : 1280 if has_gate else 640]  # not whole rows of memory
    values = Ops().gate(rows.clone()) if has_gate else rows
    codes, scale = round_rows(rows, width, SMALLEST_PEAK, E4M3_MAX, has_gate)
    expected, expected_scale = quantise_rows(values.reshape(-1, width))
    torch.testing.assert_close(scale.view(-1), expected_scale, rtol=1e-6, atol=0)
    near = expected.float() * expected_scale[:, None]
    half_step = torch.maximum(values.abs() / 16, scale.repeat_interleave(width, 1) / 1024)
    wide = codes.float() * scale.repeat_interleave(width, 1)
    assert ((wide - values).abs() <= half_step * (1 + 1e-5)).all()
    assert (wide - near.view(wide.shape)).norm() <= (2e-3 if has_gate else 0) * near.norm()  # a tie may fall otherwise


@pytest.mark.parametrize("has_blocks", [False, True])
def test_an_mlp_gates_and_rounds_many_rows_at_once(has_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = block_matrix(64, 256) if has_blocks else Fp8Matrix(*quantise_rows(randn(64, 256)))
    gate_up = PlainLinear((randn(512, 32) / 6).bfloat16())
    taken: list[bool] = []
    right: Any = ops_module.multiply_rounded

    def multiply(*args: Any, has_gate: bool = False) -> Any:
        taken.append(has_gate)
        return right(*args, has_gate=has_gate)

    monkeypatch.setattr(ops_module, "multiply_rounded", multiply)
    # the interpreter's dot cannot multiply e4m3 into bfloat16: only what it is given is checked
    monkeypatch.setattr(gpu_blocks, "multiply_rounded", lambda *args: args[0])
    rows = randn(gpu_linear.MAX_ROWS + 1, 32).bfloat16()
    cases: tuple[tuple[FormatOps, Activation, list[bool]], ...] = (
        (CudaOps(), "silu", [True]), (CudaOps(), "gelu_tanh", [False]), (FormatOps(), "silu", []),
    )  # fmt: skip
    for ops, activation, expected in cases:
        made = Mlp(GatedLinear(gate_up, ops, activation), Fp8Linear(weight, None, ops))(rows)
        assert taken == expected and len(made) == len(rows)
        taken.clear()
        if not has_blocks:
            twin = Mlp(GatedLinear(gate_up, Ops(), activation), Fp8Linear(weight, None, FormatOps()))(rows)
            assert (made.float() - twin.float()).norm() < 0.06 * twin.float().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounded_product_is_torchs(dtype: torch.dtype) -> None:
    rows, codes, scale, bias = operands(100, 64, 512, dtype, has_bias=True)
    truth = FormatOps().multiply_fp8(rows.float(), codes, scale, bias)
    product = CudaOps().multiply_fp8(rows, codes, scale, bias)
    assert product.dtype is dtype
    rounded, row_scale = quantise_rows(rows)
    torch.testing.assert_close(
        product.double(), exact(rounded.double() * row_scale[:, None], codes.double() * scale[:, None], bias),
        rtol=2**-8, atol=1e-2,
    )  # fmt: skip
    assert (product.float() - truth).norm() < 0.05 * truth.norm()


@pytest.mark.parametrize(
    ("dtype", "has_blocks"),
    [
        (torch.float32, False), combination(torch.float32, True), combination(torch.float16, False),
        (torch.float16, True),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", SHAPES, ids=str)
def test_products_are_those_of_the_values(
    size: tuple[int, int, int], dtype: torch.dtype, has_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in float32, one rounding at the end; the interpreter rounds to float16 as torch does."""
    monkeypatch.setattr("engine.ops.base.BLOCK_BYTES", 4 * 700 * 50)  # 50 outputs at a time, and a remainder
    num_rows, num_outputs, depth = size
    rows, codes, scale, bias = operands(*size, dtype, has_bias=num_rows % 2 == 0)
    matrix = block_matrix(num_outputs, depth) if has_blocks else Fp8Matrix(codes, scale)
    for ops in (CudaOps(), FormatOps()):
        product = Fp8Linear(matrix, bias, ops)(rows)
        assert product.dtype is dtype
        torch.testing.assert_close(
            product.double(), exact(rows, matrix.dense(), bias), rtol=torch.finfo(dtype).eps, atol=1e-5
        )
    first = CudaOps().multiply_fp8(rows[:1], *matrix, bias)
    if has_blocks:
        assert torch.equal(CudaOps().multiply_fp8(rows, *matrix, bias)[:1], first), "a row depends on others"
    plain = randn(*codes.shape, seed=3).to(dtype) / 16
    product = gpu_linear.multiply(rows, plain, None, bias)
    torch.testing.assert_close(product.double(), exact(rows, plain, bias), rtol=torch.finfo(dtype).eps, atol=1e-5)


def block_matrix(num_outputs: int, depth: int) -> Fp8Matrix:
    """Unlike scales; outputs of standard deviation 1."""
    scale = (1 + torch.arange(num_outputs * -(-depth // 128)) % 7) / (60 * 4 * depth**0.5)
    return Fp8Matrix((randn(num_outputs, depth, seed=1) * 60).to(E4M3), scale.view(num_outputs, -1))


def test_many_rows_are_rounded_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, matrix = randn(130, 384), block_matrix(131, 384)  # two tiles of each
    rows[3, :128], rows[3, 128:] = rows[3, :128] / 1000, rows[3, 128:] * 1000
    rounded, row_scale = quantise_blocks(rows)
    unrounded = Fp8Matrix(rounded, row_scale).dense()
    assert ((unrounded - rows).abs() <= rows.abs() / 16 + row_scale.repeat_interleave(128, 1) / 1024 * 1.01).all()
    bias = randn(131)
    product = gpu_blocks.multiply_rounded(rounded, row_scale, *matrix, bias, torch.float32)
    torch.testing.assert_close(product.double(), exact(unrounded, matrix.dense(), bias), rtol=1e-6, atol=1e-3)
    with pytest.raises(ValueError, match="do not fit together"):
        gpu_blocks.multiply(rows[:2], matrix.codes, matrix.scale[:, :2].contiguous())
    # the interpreter's bfloat16 is not torch's: only the path is checked
    taken = dict[str, Any]()
    monkeypatch.setattr(gpu_blocks, "multiply_rounded", lambda *args: taken.update(args=args))
    for dtype in (torch.bfloat16, torch.float16):
        CudaOps().multiply_fp8(rows.to(dtype), *matrix, bias)
        assert torch.equal(taken["args"][1], quantise_blocks(rows.to(dtype))[1]) and taken["args"][5] is dtype
    for other, narrow in ((rows, matrix), (rows[:, :300].bfloat16(), block_matrix(131, 300))):
        slow = FormatOps().multiply_fp8(other, *narrow, None)
        assert torch.equal(CudaOps().multiply_fp8(other, *narrow, None), slow)


def test_layers_are_rounded_and_fused_as_each_weight_alone(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True, layers=1)
    plain, rounded = (load_model(folder, "float32", CPU, quantization=how) for how in ("none", "fp8"))
    (exact, *_), (quantised, *_) = plain._layers, rounded._layers
    exact_mlp: Any = exact.mlp
    rounded_mlp: Any = quantised.mlp
    products = [
        (exact.qkv_proj, quantised.qkv_proj), (exact.o_proj, quantised.o_proj),
        (exact_mlp.gated.gate_up, rounded_mlp.gated.gate_up), (exact_mlp.down, rounded_mlp.down),
    ]  # fmt: skip
    for exact_layer, layer in products:
        assert isinstance(exact_layer, PlainLinear) and isinstance(layer, Fp8Linear)
        x = randn(3, exact_layer.weight.shape[1])
        expected = FormatOps().multiply_fp8(x, *quantise_rows(exact_layer.weight), exact_layer.bias)
        assert torch.equal(layer(x), expected)
    assert torch.equal(rounded.embedding.weight, plain.embedding.weight)


def build(folder: Path, quantization: Quantization) -> FullEngine:
    return build_engine(
        str(folder), str(folder), "float32", "cpu", 1, 16, 4, lambda *_: (4, 0),
        lambda _done, _total: None, 64, quantization,
    )  # fmt: skip


def test_workers_of_unlike_weights_are_told_apart(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=1, context=64)
    config = PrefillConfig(model=str(folder))

    async def present(engine: FullEngine) -> Worker:
        return build_worker("prefill", config, engine, "localhost:1", load_trust(config), "P1")

    engines = [build(folder, "none"), build(folder, "fp8")]
    plain, rounded = (asyncio.run(present(engine)) for engine in engines)
    digits = engines[0].weights
    said = f"weights differs: '{digits}' here, 'fp8:{digits}' there"
    assert find_mismatch(plain.me.layout, rounded.me.layout) == said
    assert (plain.scheduler.kv.model, rounded.scheduler.kv.model) == (digits, f"fp8:{digits}")  # the root of page keys
    for engine, how in zip(engines, ("none", "fp8"), strict=True):
        assert engine.describe()["quantization"] == how
        assert engine.draft_weights == engine.weights  # its draft model, here the same one, is quantised alike


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (7, 5)])
def test_gpus_without_fp8_are_refused(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    said = rf"fp8 needs .* 8\.9 or higher; NVIDIA A100 has {capability[0]}\.{capability[1]}: use "
    folder = write_checkpoint(tmp_path, "llama", layers=1)
    with pytest.raises(ValueError, match=f"--quantization {said}--quantization none"):
        load_model(folder, "auto", torch.device("cuda"), quantization="fp8")
    monkeypatch.setattr("engine.compose.choose_device", lambda *_: torch.device("cuda"))
    with pytest.raises(ValueError, match=f"--kv-dtype {said}--kv-dtype auto"):  # before weights are read
        build_engine(str(folder), "", "auto", "auto", 1, 16, 4, lambda *_: (8, 0), lambda *_: None, kv_dtype="fp8")
