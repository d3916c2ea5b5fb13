"""Weights in groups of 32 on a GPU: how they are stored, their products, and what a checkpoint's weights become.

Kernels run in Triton's interpreter, whose tl.dot cannot multiply bfloat16: float16 and float32 replace it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.compose import LAYER_PARTS, choose_format, load_model, open_model
from engine.cuda import gpu_groups
from engine.cuda.ops import CudaOps
from engine.formats.checks import check_quantization
from engine.formats.fp8 import has_fp8
from engine.formats.groups import Groups, StoredGroups, round_to_4_bits, store_groups, with_zeros
from engine.formats.linear import Fp8Linear, GroupsLinear
from engine.formats.ops import FormatOps
from engine.formats.products import GpuFormat
from engine.formats.stacks import widen
from engine.layers.linear import Linear, PlainLinear, Quantization
from engine.models.assemble import build_decoder
from engine.models.table import build_table
from engine.ops.base import Ops
from engine.weights.formats import PlainFormat
from engine.weights.reader import ShardReader
from engine.weights.table import Shard
from tests.support.checkpoints import write_checkpoint
from tests.support.forward import logits_of
from tests.support.quantised import write_models

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Rows, outputs, depth: one row; no whole tile; a split depth; whole tiles; a tile's maximum of rows.
SHAPES = [(1, 131, 704), (2, 130, 704), (5, 65, 1120), (16, 128, 512), (64, 70, 352), (150, 130, 352)]


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def draw(num_outputs: int, depth: int, bits: int, kind: str) -> Groups:
    """kind: what stands for 0: the middle code, others (zeros), or a minimum is added; and the dtype of tables."""
    seeded = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (num_outputs, depth), dtype=torch.uint8, generator=seeded)
    scale = ((1 + torch.rand(num_outputs, depth // 32, generator=seeded)) / (depth**0.5 * (1 << bits))).half().float()
    if "float32" in kind:
        scale *= 1 + 2**-20
    if "minimums" in kind:
        minimum = (randn(*scale.shape) / depth**0.5).half().float()
        return Groups(codes, scale, minimum, bits)
    zeros = torch.randint(0, 1 << bits, scale.shape, generator=seeded) if "zeros" in kind else 1 << bits - 1
    return with_zeros(codes, scale, zeros, bits)


KINDS = ["middle", "zeros", "minimums", "middle float32", "minimums float32"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_values_stay_and_take_few_bytes(bits: int, kind: str) -> None:
    groups = draw(9, 1120, bits, kind)
    stored = store_groups(groups, CPU)
    assert torch.equal(stored.dense(), groups.dense())
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(gpu_groups.widen(*stored, dtype), groups.dense().to(dtype))
    is_wide, has_second = "float32" in kind, "middle" not in kind
    assert stored.scale.dtype is (torch.float32 if is_wide else torch.float16)
    assert (stored.second is not None, stored.has_minimums) == (has_second, "minimums" in kind)
    assert stored.codes.shape == (9, 1120 * bits // 8) and stored.scale.shape == (9, 48)  # 35 groups


@pytest.mark.parametrize(
    ("dtype", "bits", "kind"),
    [(torch.float32, 4, "zeros"), (torch.float16, 4, "middle"), (torch.float16, 8, "minimums")],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_multiplies_like_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, bits: int, kind: str
) -> None:
    num_rows, num_outputs, depth = shape
    rows = randn(num_rows, depth + 24).to(dtype)[:, :depth]
    bias = randn(num_outputs, seed=2).to(dtype) if bits == 4 else None
    stored = store_groups(draw(num_outputs, depth, bits, kind), CPU)
    weight = stored.dense() if num_rows == 1 else stored.dense().to(dtype)
    truth = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    product = gpu_groups.multiply(rows, *stored, bias)
    assert product.dtype is dtype
    torch.testing.assert_close(product.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)
    if num_rows > 1:
        twin = FormatOps().multiply_groups(rows, stored, bias)
        torch.testing.assert_close(product, twin, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(gpu_groups.multiply(rows[:2], *stored, bias), product[:2]), "a row depends on others"


def test_many_rows_widen_a_part_of_the_weights_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_groups, "WIDE_BYTES", 4 * 256 * 64)
    monkeypatch.setattr(gpu_groups, "MAX_ROWS", 64)
    widened = list[int]()
    widen: Callable[..., Tensor] = gpu_groups.widen

    def count(codes: Tensor, *rest: Any) -> Tensor:
        widened.append(len(codes))
        return widen(codes, *rest)

    monkeypatch.setattr(gpu_groups, "widen", count)
    rows, stored = randn(65, 64), store_groups(draw(600, 64, 4, "zeros"), CPU)
    for bias in (None, randn(600, seed=2)):
        layers = [GroupsLinear(stored, bias, ops) for ops in (CudaOps(), FormatOps())]
        torch.testing.assert_close(layers[0](rows), layers[1](rows), rtol=1e-5, atol=1e-5)
    assert widened == [256, 256, 88] * 2


def test_shapes_that_do_not_fit_are_refused() -> None:
    rows, stored = randn(2, 64), store_groups(draw(8, 64, 4, "zeros"), CPU)
    assert stored.second is not None
    faults: list[tuple[Tensor, StoredGroups]] = [
        (randn(257, 64), stored), (randn(2, 96), stored), (randn(64, 2).T, stored), (rows, stored._replace(bits=8)),
        (rows, stored._replace(scale=stored.scale[:, :1].contiguous())),
        (rows, stored._replace(second=stored.second.T.contiguous().T)),
    ]  # fmt: skip
    for other, weight in faults:
        with pytest.raises(ValueError, match=r"expected at most 256 rows of \d+ and|hold no groups of"):
            gpu_groups.multiply(other, *weight)


def products_of(decoder: Any) -> list[Linear]:
    (layer,) = decoder._layers
    return [layer.qkv_proj, layer.o_proj, layer.mlp.gated.gate_up, layer.mlp.down]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("awq", [GroupsLinear] * 4), ("ct-int8-zeros", [GroupsLinear] * 4), ("fp8-block", [Fp8Linear] * 4),
        ("fp8-tensor", [Fp8Linear] * 4), ("fp8-channel", [Fp8Linear] * 4),
        ("gptq4-order", [PlainLinear] * 4), ("ct-fp8-block", [PlainLinear] * 4),
    ],
)  # fmt: skip
def test_a_checkpoint_keeps_its_bits(name: str, kinds: list[type], tmp_path: Path) -> None:
    quantised, plain = write_models(tmp_path, name)
    config, checkpoint = open_model(quantised)
    progress: list[tuple[int, int]] = []
    reader = ShardReader(checkpoint, torch.float32, CPU, lambda *done: progress.append(done))
    decoder = build_decoder(config, GpuFormat(reader, Ops(), "none"), LAYER_PARTS)
    assert [type(one) for one in products_of(decoder)] == kinds
    assert progress == sorted(progress) and len({done for done, _total in progress}) > 9
    ids = list(range(2, 40))
    truth = logits_of(load_model(plain, "float32", CPU), ids)
    torch.testing.assert_close(logits_of(decoder, ids), truth, rtol=1e-4, atol=1e-4)


def test_experts_of_a_checkpoint_keep_its_bits(tmp_path: Path) -> None:
    """gpt-oss's in MXFP4, of whole models and of a rank's half."""
    config, checkpoint = open_model(write_models(tmp_path, "mxfp4")[0])
    for shard in (Shard(0, 1), Shard(1, 2)):
        reader = ShardReader(checkpoint, torch.float32, CPU, lambda *_: None, shard)
        for products in zip(*build_table(config).layers[0].experts, strict=True):
            stack = GpuFormat(reader, Ops(), "none").stack(products)
            assert stack.form == "mxfp4" and stack.scale is not None and stack.scale.dtype is torch.uint8
            assert torch.equal(widen(stack), PlainFormat(reader, Ops()).stack(products).codes)
            assert 8 * (stack.codes.nbytes + stack.scale.nbytes) == 4.25 * widen(stack).numel()


def test_int4_rounds_layers_and_leaves_embedding_and_head(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=1, intermediate=200)
    config, checkpoint = open_model(folder)
    reader = ShardReader(checkpoint, torch.bfloat16, CPU, lambda *_: None)
    decoder = build_decoder(config, GpuFormat(reader, Ops(), "int4"), LAYER_PARTS)
    plain = load_model(folder, "float32", CPU)
    *rounded, last = products_of(decoder)
    assert isinstance(last, PlainLinear), "200 columns are no groups"
    for layer, exact in zip(rounded, products_of(plain), strict=False):
        assert isinstance(layer, GroupsLinear) and isinstance(exact, PlainLinear)
        assert torch.equal(layer.weight.dense(), round_to_4_bits(exact.weight.bfloat16()).dense())
        assert layer.weight.second is None and layer.weight.scale.dtype is torch.float16
    assert torch.equal(decoder.embedding.weight, plain.embedding.weight.bfloat16())


def test_the_format_depends_on_device_dtype_and_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _config, checkpoint = open_model(write_checkpoint(tmp_path, "llama", layers=1))
    cases: list[tuple[torch.device, torch.dtype, Quantization, str]] = [
        (CUDA, torch.bfloat16, "none", "GpuFormat"), (CUDA, torch.float16, "int4", "GpuFormat"),
        (CUDA, torch.bfloat16, "fp8", "Fp8Format"), (CUDA, torch.float32, "none", "PlainFormat"),
        (CPU, torch.bfloat16, "none", "PlainFormat"), (CPU, torch.bfloat16, "int8", "Int8Format"),
    ]  # fmt: skip
    for device, dtype, quantization, expected in cases:
        reader = ShardReader(checkpoint, dtype, device, lambda *_: None)
        assert type(choose_format(reader, Ops(), quantization)).__name__ == expected
    check_quantization("int4", "auto", CUDA)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    assert not has_fp8(CUDA) and has_fp8(CPU)
    config, checkpoint = open_model(write_models(tmp_path / "fp8", "fp8-block")[0])
    for dtype, has in ((torch.float16, True), (torch.bfloat16, False), (torch.bfloat16, True)):
        monkeypatch.setattr("engine.formats.products.has_fp8", lambda device, has=has: has)
        reader = ShardReader(checkpoint, dtype, CPU, lambda *_: None)
        decoder = build_decoder(config, GpuFormat(reader, Ops(), "none"), LAYER_PARTS)
        is_kept = has and dtype is torch.bfloat16
        assert [type(one) for one in products_of(decoder)] == [Fp8Linear if is_kept else PlainLinear] * 4
