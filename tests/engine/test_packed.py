"""Packed weights: kernels equal their slow twins, on all instruction sets, with each row as if alone."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.cpu import packed
from engine.cpu.cache import Weights
from engine.cpu.packed import (
    NEVER,
    Epilogue,
    Matrix,
    PackedLinear,
    PackedMatrix,
    PackedShape,
    pack,
    panel_order,
)
from engine.cpu.packed_groups import ROW_BITS, GroupsShape, PackedGroups, round_groups
from engine.formats.groups import GROUP, Groups, Tables, round_to_4_bits
from engine.formats.linear import Int8Linear, round_rows
from engine.ops.base import multiply_widened
from tests.support.attention import needs_compiler
from tests.support.instruction_sets import BUILDS, ON_AMX, Build, built_for, no_compiler

__all__ = ["no_compiler"]  # a fixture

SHAPES = [(300, 64), (67, 2048), (33, 30)]  # N, K
FORMS = [(bits, tables, ROW_BITS) for bits in (4, 8) for tables in Tables] + [(4, Tables.SCALES, 8)]
GROUP_SHAPES = [(300, 64), (67, 2048), (5, 32)]
TILES = [build for build in BUILDS if build.flags]
BUILT = [build for build in BUILDS if not build.isa.endswith(("bf16", "native"))]  # groups: others compile to the same


@pytest.fixture(params=[*BUILDS, ON_AMX], ids=str)
def instructions(request: pytest.FixtureRequest) -> Iterator[Build]:
    with built_for(request.param):
        yield request.param


@pytest.fixture(params=BUILT, ids=str)
def group_instructions(request: pytest.FixtureRequest) -> Iterator[Build]:
    with built_for(request.param):
        yield request.param


def operands(num_rows: int, num_outputs: int, depth: int) -> tuple[Tensor, Tensor]:
    """x [T, K] of standard deviation 1, w [N, K]: products of standard deviation 1."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(num_rows, depth, generator=generator)
    weight = torch.randn(num_outputs, depth, generator=generator) / depth**0.5
    return rows.bfloat16(), weight.bfloat16()


def draw_rows(num_rows: int, depth: int) -> Tensor:
    """[T, K] bfloat16, whose groups have very different sizes; one group of zeros."""
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, depth, generator=generator)
    sizes = 10.0 ** torch.randint(-3, 2, (num_rows, depth // GROUP, 1), generator=generator)
    rows.view(num_rows, depth // GROUP, GROUP).mul_(sizes)
    rows[:1, :GROUP] = 0
    return rows.bfloat16()


def draw_groups(bits: int, tables: Tables, num_outputs: int, depth: int) -> Groups:
    """For which `tables` are the smallest."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 1 << bits, (num_outputs, depth), generator=generator, dtype=torch.uint8)
    scale = torch.randn(num_outputs, depth // GROUP, generator=generator) / 16 / depth**0.5
    minimum = torch.randn(scale.shape, generator=generator) / depth**0.5
    scale, minimum = scale.to(tables.dtype).float(), minimum.to(tables.dtype).float()
    if tables in (Tables.SCALES, Tables.SCALES_32):
        minimum = -(scale * (1 << bits - 1))
    if tables is Tables.ZEROS:
        minimum = -(scale * torch.randint(0, 1 << bits, scale.shape, generator=generator))
    return Groups(codes, scale, minimum, bits)


def pack_groups(*parts: Groups, step: int = 1, row_bits: int = ROW_BITS) -> PackedGroups:
    """With step 2 the panels of two parts alternate; else there is one part."""
    shape = GroupsShape.of(*parts, row_bits=row_bits)
    matrix = PackedGroups(Weights().take("", shape.num_bytes, lambda memory: None), shape)
    for panel, part in enumerate(parts):
        matrix.fill(part, panel, step)
    return matrix


def multiply_exactly(rows: Tensor, groups: Groups, row_bits: int) -> tuple[Tensor, Tensor]:
    """[T, N] float64: the product of rows rounded per group, and how much a sum in float32 may differ."""
    num_groups = rows.shape[1] // GROUP
    grouped = rows.float().view(-1, num_groups, GROUP)
    unit = grouped.abs().amax(2) / {13: 4064, 8: 127}[row_bits]
    factor = torch.where(unit > 0, 1 / unit, 0.0)
    codes = (grouped.double() * factor.double()[..., None]).round()
    middle = 1 << groups.bits - 1
    if not torch.equal(groups.minimum, -(groups.scale * middle)):
        middle = 0
    dots = torch.einsum("tgk,ngk->tgn", codes, groups.codes.double().view(-1, num_groups, GROUP) - middle)
    scaled = dots * unit.double()[..., None] * groups.scale.double().T
    shifted = (codes.sum(2) * unit.double())[..., None] * (groups.minimum.double() + groups.scale.double() * middle).T
    # Each group's two parts are rounded up to twice before they are added, and each sum is rounded.
    bound = (2 * num_groups + 4) * 2**-24 * (scaled.abs() + shifted.abs()).sum(1)
    return (scaled + shifted).sum(1), bound


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
@pytest.mark.parametrize(("bits", "tables", "row_bits"), FORMS)
@pytest.mark.usefixtures("group_instructions")
def test_groups_are_multiplied_exactly(bits: int, tables: Tables, row_bits: int) -> None:
    for num_outputs, depth in GROUP_SHAPES:
        groups = draw_groups(bits, tables, num_outputs, depth)
        matrix = pack_groups(groups, row_bits=row_bits)
        assert (matrix.shape.tables, matrix.shape.row_bits) == (tables, row_bits)
        linear = PackedLinear(matrix, epilogue=Epilogue.FLOATS)
        for num_rows in (0, 1, 13, 100):
            rows = draw_rows(num_rows, depth)
            exact, bound = multiply_exactly(rows, groups, row_bits)
            found = linear(rows)
            assert found.dtype is torch.float32 and bool(((found.double() - exact).abs() <= bound).all())
        ids = torch.tensor([0, num_outputs - 1, 3] * 4)
        assert torch.equal(matrix.take_rows(ids), groups.dense()[ids].bfloat16())


@pytest.mark.nightly
@needs_compiler
def test_codes_do_not_depend_on_what_the_compiler_contracts() -> None:
    """Without optimisation, GCC rounds a product before it is added to."""
    with built_for(replace(BUILDS[0], flags="-ffp-contract=off")):
        rows, weight = operands(13, 67, 2048)
        rounded = PackedLinear(pack(weight, is_8bit=True), epilogue=Epilogue.FLOATS)(rows)
        assert torch.equal(rounded, Int8Linear(*round_rows(weight), dtype=torch.float32)(rows))
        groups, rows = draw_groups(4, Tables.ZEROS, 67, 2048), draw_rows(13, 2048)
        exact, bound = multiply_exactly(rows, groups, ROW_BITS)
        found = PackedLinear(pack_groups(groups), epilogue=Epilogue.FLOATS)(rows)
        assert bool(((found.double() - exact).abs() <= bound).all())


@needs_compiler
@pytest.mark.parametrize("build", [*TILES, ON_AMX], ids=str)
@pytest.mark.parametrize(("bits", "tables", "row_bits"), FORMS)
def test_many_rows_in_tiles_are_those_of_bfloat16(bits: int, tables: Tables, row_bits: int, build: Build) -> None:
    groups, rows = draw_groups(bits, tables, 300, 640), draw_rows(530, 640)
    with built_for(build):
        plain = PackedLinear(pack(groups.dense().bfloat16()), epilogue=Epilogue.FLOATS)
        linear = PackedLinear(pack_groups(groups, row_bits=row_bits), epilogue=Epilogue.FLOATS)
        for num_rows in (64, 75, 530):
            assert torch.equal(linear(rows[:num_rows]), plain(rows[:num_rows]))
        assert not torch.equal(linear(rows[:63]), plain(rows[:63]))  # codes


MATRICES: dict[str, Callable[[], Matrix]] = {
    "bfloat16": lambda: pack(operands(1, 301, 640)[1]),
    "8 bits": lambda: pack(operands(1, 301, 640)[1], is_8bit=True),
    **{
        f"groups {bits} {tables.name} {row_bits}": partial(
            lambda bits, tables, row_bits: pack_groups(draw_groups(bits, tables, 301, 640), row_bits=row_bits),
            *(bits, tables, row_bits),
        )
        for bits, tables, row_bits in ((4, Tables.ZEROS, 13), (8, Tables.ZEROS, 13), FORMS[-1])
    },
}


@needs_compiler
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.usefixtures("instructions")
def test_a_row_does_not_depend_on_the_others_or_on_threads(matrix: str) -> None:
    rows = draw_rows(60 if "groups" in matrix else 530, 640)  # more rows of groups are multiplied in tiles
    linear = PackedLinear(MATRICES[matrix](), epilogue=Epilogue.FLOATS)
    together = linear(rows)
    before = torch.get_num_threads()
    try:
        for num_threads, size in ((1, 1), (3, 17)):
            torch.set_num_threads(num_threads)
            pieces = [linear(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
            assert torch.equal(torch.cat(pieces), together)
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("group_instructions")
def test_rounding_is_its_twins() -> None:
    rows = torch.cat([draw_rows(40, 1024).float(), torch.randn(40, 1024) * 1e-6, torch.randint(-2, 3, (40, 1024))])
    rows[0, 0], rows[1, 0], rows[2, 0] = torch.nan, torch.inf, 1e6
    for given in (rows, rows.bfloat16()):
        found, expected = round_groups(given), round_to_4_bits(given)
        assert all(map(torch.equal, found[:3], expected[:3])) and found.bits == 4
    assert GroupsShape.of(found).num_bytes == 128 * 1024 * 4.5 / 8


@needs_compiler
def test_what_does_not_fit_is_refused() -> None:
    rows, weight = operands(3, 8, 64)
    groups, odd = draw_groups(4, Tables.SCALES, 8, 64), draw_groups(4, Tables.MINIMUMS_32, 8, 64)
    linear = PackedLinear(pack(weight))
    assert torch.equal(linear(torch.cat((rows, rows), 1)[:, :64]), linear(rows))
    for matrix in (pack(weight), pack_groups(groups)):
        for wrong in (rows[:, :32], rows.float()):
            with pytest.raises(ValueError, match=r"expected bfloat16 \[T, 64\]"):
                PackedLinear(matrix)(wrong)
        with pytest.raises(ValueError, match="ids reach 8, expected 0 to 7"):
            matrix.take_rows(torch.tensor([0, 8]))
        for ids in (torch.tensor([0, 7], dtype=torch.int32), torch.tensor([0.0]), torch.tensor([[0]]), torch.tensor(0)):
            with pytest.raises(ValueError, match=r"expected int64 \[n\] on cpu"):
                matrix.take_rows(ids)
        with pytest.raises(ValueError, match="expected float32"):
            PackedLinear(matrix, torch.zeros(8))
    for spoiled in (groups._replace(codes=groups.codes.int()), groups._replace(scale=groups.scale[:, :1])):
        with pytest.raises(ValueError, match="expected uint8, and one of each group"):
            PackedGroups(Weights().take("", 1 << 16, lambda memory: None), pack_groups(groups).shape).fill(spoiled)
    with pytest.raises(ValueError, match="do not fit"):
        pack(weight).fill(weight, first_panel=2)
    for unlike, panel in ((odd, 0), (draw_groups(8, Tables.SCALES, 8, 64), 0), (groups, 2)):
        with pytest.raises(ValueError, match="do not fit"):
            pack_groups(groups).fill(unlike, panel)
    assert GroupsShape.of(groups, odd) == GroupsShape(16, 64, 4, Tables.MINIMUMS_32)
    with pytest.raises(ValueError, match="do not make groups of 32"):
        GroupsShape(80, 48, 4, Tables.SCALES)
    with pytest.raises(ValueError, match="not finite"):
        GroupsShape.of(groups._replace(scale=groups.scale / 0))
    with pytest.raises(ValueError, match="cannot be rounded"):
        round_groups(torch.zeros(1, 48))


@pytest.mark.parametrize(("kernel_s", "torch_s", "rows"), [(1.0, 1.0, NEVER), (1.0, 0.7, 1), (0.5, 1.0, NEVER)])
@needs_compiler
def test_torch_multiplies_where_it_is_clearly_faster(
    kernel_s: float, torch_s: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = cycle([torch_s, kernel_s])
    monkeypatch.setattr(packed, "time_best", lambda call: (call(), next(taken))[1])
    monkeypatch.setattr(packed, "cpu_flags", lambda: frozenset({"avx2", "amx_bf16"}))
    assert packed.choose_torch_rows.__wrapped__() == rows


def test_a_cpu_without_bfloat16_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "time_best", lambda call: pytest.fail("it was timed"))
    monkeypatch.setattr(packed, "cpu_flags", lambda: frozenset({"avx2", "avx512f"}))
    assert packed.choose_torch_rows.__wrapped__() == NEVER
