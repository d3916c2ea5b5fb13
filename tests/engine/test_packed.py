"""Packed weights: the kernel equals its slow twins, with each row as if alone; files that share weights."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.linear import Int8Linear, Quantization, WidenedLinear, round_rows
from engine.models import load as weights
from engine.models.decoder import Decoder
from engine.models.load import load_model
from engine.ops.base import multiply_widened
from engine.weights import cache as weight_file
from engine.weights import packed
from engine.weights.cache import CannotShareError, MappedWeights, Weights, share_weights
from engine.weights.packed import NEVER, Epilogue, PackedLinear, PackedMatrix, PackedShape, pack, panel_order
from tests.support.attention import needs_compiler
from tests.support.checkpoints import write_checkpoint
from tests.support.instruction_sets import BUILDS, built_for

SHAPES = [(300, 64), (67, 2048), (5, 30), (33, 1000)]  # N, K
CPU = torch.device("cpu")


@pytest.fixture(params=BUILDS, ids=str)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    with built_for(request.param):
        yield


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    packed._load.cache_clear()
    yield
    packed._load.cache_clear()


def operands(num_rows: int, num_outputs: int, depth: int) -> tuple[Tensor, Tensor]:
    """x [T, K] of standard deviation 1, w [N, K]: products of standard deviation 1."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, depth, generator=generator)
    weight = torch.randn(num_outputs, depth, generator=generator) / depth**0.5
    return rows.bfloat16(), weight.bfloat16()


@needs_compiler
@pytest.mark.parametrize(("num_outputs", "depth"), SHAPES)
@pytest.mark.usefixtures("instructions")
def test_the_kernel_gives_what_its_twins_give(num_outputs: int, depth: int) -> None:
    for num_rows in (0, 1, 2, 5, 13, 33, 100):
        rows, weight = operands(num_rows, num_outputs, depth)
        sums = PackedLinear(pack(weight), epilogue=Epilogue.FLOATS)(rows)
        assert sums.dtype is torch.float32 and sums.shape == (num_rows, num_outputs)
        # Two orders of K float32 sums: about sqrt(K) roundings of values up to 5.
        torch.testing.assert_close(sums, multiply_widened(rows, weight), rtol=0, atol=depth**0.5 * 2**-24 * 10)
        rounded = PackedLinear(pack(weight, is_8bit=True), epilogue=Epilogue.FLOATS)(rows)
        assert torch.equal(rounded, Int8Linear(*round_rows(weight), dtype=torch.float32)(rows))  # codes are integers


@needs_compiler
@pytest.mark.parametrize("is_8bit", [False, True])
@pytest.mark.usefixtures("instructions")
def test_bias_gate_and_lookup(is_8bit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = operands(19, 2 * 40, 96)
    bias = torch.randn(80).bfloat16()
    codes, scale = round_rows(weight)
    weights = codes * scale if is_8bit else weight.float()
    x = (lambda found: found[0] * found[1])(round_rows(rows)) if is_8bit else rows.float()
    both = functional.linear(x, weights, bias.float()).bfloat16()
    matrix = pack(weight, is_8bit=is_8bit)
    plain = PackedLinear(matrix, panel_order([bias.float()], is_gated=False))
    torch.testing.assert_close(plain(rows), both, rtol=0.01, atol=1e-3)
    gate, up = both.chunk(2, dim=1)
    shape = PackedShape(80, 96, is_8bit)
    gated = PackedMatrix(Weights().take("", shape.num_bytes, lambda memory: None), shape)
    for half in range(2):
        gated.fill(weight[40 * half : 40 * half + 40], half, 2)
    linear = PackedLinear(gated, panel_order([*bias.float().chunk(2)], is_gated=True), Epilogue.GATED)
    torch.testing.assert_close(linear(rows), functional.silu(gate) * up, rtol=0.02, atol=1e-3)
    by_torch = [
        PackedLinear(matrix, panel_order([bias.float()], is_gated=False), torch_rows=2),
        PackedLinear(gated, panel_order([*bias.float().chunk(2)], is_gated=True), Epilogue.GATED, torch_rows=2),
    ]
    monkeypatch.setattr(packed, "UNPACKED_VALUES", 3 * 16 * 96)  # several parts
    for fast, twin in zip(by_torch, (plain, linear), strict=True):
        torch.testing.assert_close(fast(rows), twin(rows), rtol=0.02, atol=1e-3)
        assert torch.equal(fast(rows[:1]), twin(rows[:1]))
    ids = torch.tensor([0, 79, 16, 17, 3] * 3)
    torch.testing.assert_close(matrix.take_rows(ids), weights[ids].bfloat16(), rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("is_8bit", [False, True])
@pytest.mark.usefixtures("instructions")
def test_a_row_does_not_depend_on_the_others_or_on_threads(is_8bit: bool) -> None:
    rows, weight = operands(530, 301, 640)
    linear = PackedLinear(pack(weight, is_8bit=is_8bit))
    together = linear(rows)
    before = torch.get_num_threads()
    try:
        for num_threads, size in ((1, 1), (2, 4), (3, 17), (2, 64)):
            torch.set_num_threads(num_threads)
            pieces = [linear(rows[begin : begin + size]) for begin in range(0, 530, size)]
            assert torch.equal(torch.cat(pieces), together)
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_what_does_not_fit_is_refused() -> None:
    rows, weight = operands(3, 8, 64)
    linear = PackedLinear(pack(weight))
    for wrong in (rows[:, :32], rows.float()):
        with pytest.raises(ValueError, match=r"expected bfloat16 \[T, 64\]"):
            linear(wrong)
    strided = torch.cat((rows, rows), 1)[:, :64]
    assert torch.equal(linear(strided), linear(rows))
    with pytest.raises(ValueError, match="do not fit"):
        pack(weight).fill(weight, first_panel=2)
    with pytest.raises(ValueError, match="ids reach 8, expected 0 to 7"):
        pack(weight).take_rows(torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="expected float32"):
        PackedLinear(pack(weight), torch.zeros(8))


@pytest.mark.parametrize(("kernel_s", "torch_s", "rows"), [(1.0, 1.0, NEVER), (1.0, 0.7, 1), (0.5, 1.0, NEVER)])
@needs_compiler
def test_torch_multiplies_where_it_is_clearly_faster(
    kernel_s: float, torch_s: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = cycle([torch_s, kernel_s])
    monkeypatch.setattr(packed, "time_best", lambda call: (call(), next(taken))[1])
    assert packed.choose_torch_rows.__wrapped__() == rows


def hidden_products(decoder: Decoder, rows: Tensor) -> list[Tensor]:
    layer = decoder._layers[0]
    return [
        layer.qkv_proj(rows),
        layer.mlp(rows),
        decoder.logits(rows),
        decoder._embedding(torch.tensor([0, 5, 40])),
    ]


@needs_compiler
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_is_the_plain_one(
    tied: bool, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama", attention_bias=True, mlp_bias=True, layers=1, tied=tied)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    progress: list[tuple[int, int]] = []

    def build() -> Decoder:
        return load_model(folder, "bfloat16", CPU, lambda *bytes_: progress.append(bytes_), quantization)

    own = build()
    assert not list(tmp_path.glob("*/*.weights"))
    monkeypatch.setattr(weights, "SMALLEST_FILE_BYTES", 0)
    written, mapped = build(), build()
    assert len(list(tmp_path.glob("*/*.weights"))) == 1 and mapped.why_unshared is None
    assert sum(done == total for done, total in progress) >= 3
    monkeypatch.setattr(weights, "can_pack", lambda: False)
    slow = build()
    rows = torch.randn(5, own.config.hidden_size).bfloat16()
    expected = hidden_products(slow, rows)
    for decoder in (own, written, mapped):
        products = hidden_products(decoder, rows)
        for product, twin in zip(products, expected, strict=True):
            assert product.dtype is twin.dtype
            atol = 0.05 if quantization == "int8" and len(product) == 3 else 2e-3  # a tied embedding is rounded too
            torch.testing.assert_close(product, twin, rtol=0.02, atol=atol)
        assert all(map(torch.equal, products, hidden_products(own, rows)))


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_products_are_torchs(tmp_path: Path) -> None:
    decoder = load_model(write_checkpoint(tmp_path, "llama", layers=1), "bfloat16", CPU)
    assert isinstance(decoder._lm_head, WidenedLinear)
    assert decoder.logits(torch.randn(2, decoder.config.hidden_size).bfloat16()).dtype is torch.float32


def test_int8_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", layers=1)
    with pytest.raises(ValueError, match="--quantization int8 is for CPUs"):
        load_model(folder, "auto", torch.device("cuda"), quantization="int8")
    with pytest.raises(ValueError, match="set --dtype bfloat16 or auto"):
        load_model(folder, "float32", CPU, quantization="int8")


def take(store: weight_file.Weights) -> list[int]:
    """Two tensors, and their contents."""
    return [int(store.take(chr(code), 100, partial(torch.fill_, value=code))[0]) for code in b"ab"]


def test_a_file_is_written_once_and_made_anew_when_it_is_damaged(tmp_path: Path) -> None:
    packings: list[object] = []

    def pack_all(store: weight_file.Weights) -> None:
        packings.append(store)
        take(store)

    def open_file() -> list[int]:
        return take(share_weights(tmp_path, "model", 1000, pack_all))

    assert open_file() == open_file() == [97, 98] and len(packings) == 1
    path = tmp_path / "model.weights"
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-16] + (1 << 40).to_bytes(8, "little") + whole[-8:], b"", whole[1000:]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="not a file of packed weights"):
            MappedWeights(path)
        assert open_file() == [97, 98]
    assert len(packings) == 5 and path.read_bytes() == whole
    with pytest.raises(ValueError, match="c has -1 bytes in the cache file, expected 5"):
        MappedWeights(path).take("c", 5, lambda memory: None)


def test_a_file_that_cannot_be_written_is_explained_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(store: weight_file.Weights) -> None:
        take(store)
        raise OSError(28, "No space left on device")

    with pytest.raises(CannotShareError, match="No space left on device"):
        share_weights(tmp_path, "model", 1000, fail)
    with pytest.raises(CannotShareError, match="set XDG_CACHE_HOME to a folder with more"):
        share_weights(tmp_path, "model", 1 << 60, fail)
    monkeypatch.setattr(weight_file, "LOCK_S", 0.0)
    with (
        weight_file._locked(tmp_path / "model.lock"),
        pytest.raises(CannotShareError, match="another process has held"),
    ):
        share_weights(tmp_path, "model", 1000, fail)
    assert {path.name for path in tmp_path.iterdir()} == {"model.lock"}


def test_files_that_nobody_opens_go(tmp_path: Path) -> None:
    for name, age_s in (("old", weight_file.UNUSED_S + 60), ("young", 60)):
        share_weights(tmp_path, name, 1000, take)
        before = (tmp_path / f"{name}.weights").stat().st_mtime - age_s
        os.utime(tmp_path / f"{name}.weights", (before, before))
    share_weights(tmp_path, "new", 1000, take)
    assert {path.stem for path in tmp_path.glob("*.weights")} == {"young", "new"}


def test_processes_that_start_at_once_pack_once(tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom engine.weights.cache import share_weights\n"
        "def pack(store):\n"
        "    print('packs', flush=True)\n"
        "    store.take('a', 100, lambda memory: memory.fill_(7))\n"
        "    time.sleep(600 if sys.argv[2] == 'hang' else 0.2)\n"
        "print(int(share_weights(Path(sys.argv[1]), 'm', 100, pack).take('a', 100, None)[0]))\n"
    )

    def start(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", script, tmp_path, how], stdout=subprocess.PIPE, text=True)

    first = start("hang")
    assert first.stdout is not None and first.stdout.readline() == "packs\n"
    others = [start("go") for _ in range(2)]
    first.kill()
    first.communicate()
    printed = sorted(other.communicate(timeout=60)[0] for other in others)
    assert printed == ["7\n", "packs\n7\n"]
