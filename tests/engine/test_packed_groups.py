"""Packed groups of 32: the kernel equals its slow twins, on all instruction sets, with each row as if alone."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.weights import packed_groups
from engine.weights.cache import Weights
from engine.weights.groups import GROUP, Groups, Tables, round_to_4_bits
from engine.weights.packed import Epilogue, PackedEmbedding, PackedLinear, panel_order
from engine.weights.packed import pack as pack_plain
from engine.weights.packed_groups import ROW_BITS, GroupsShape, PackedGroups, round_groups
from tests.support.attention import needs_compiler
from tests.support.instruction_sets import BUILDS, Build, built_for

FORMS = [(bits, tables, ROW_BITS) for bits in (4, 8) for tables in Tables] + [(4, Tables.SCALES, 8)]
SHAPES = [(300, 64), (67, 2048), (5, 32)]  # N, K
TILES = [build for build in BUILDS if build.flags]
BUILT = [build for build in BUILDS if not build.isa.endswith(("bf16", "native"))]  # the others compile to the same


@pytest.fixture(params=BUILT, ids=str)
def instructions(request: pytest.FixtureRequest) -> Iterator[Build]:
    with built_for(request.param):
        yield request.param


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    packed_groups._load.cache_clear()
    yield
    packed_groups._load.cache_clear()


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


def pack(*parts: Groups, step: int = 1, row_bits: int = ROW_BITS) -> PackedGroups:
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
@pytest.mark.parametrize(("bits", "tables", "row_bits"), FORMS)
@pytest.mark.usefixtures("instructions")
def test_the_kernel_gives_what_its_twins_give(bits: int, tables: Tables, row_bits: int) -> None:
    for num_outputs, depth in SHAPES:
        groups = draw_groups(bits, tables, num_outputs, depth)
        matrix = pack(groups, row_bits=row_bits)
        assert (matrix.shape.tables, matrix.shape.row_bits) == (tables, row_bits)
        linear = PackedLinear(matrix, epilogue=Epilogue.FLOATS)
        for num_rows in (0, 1, 13, 100):
            rows = draw_rows(num_rows, depth)
            exact, bound = multiply_exactly(rows, groups, row_bits)
            found = linear(rows)
            assert found.dtype is torch.float32 and bool(((found.double() - exact).abs() <= bound).all())
        ids = torch.tensor([0, num_outputs - 1, 3] * 4)
        assert torch.equal(PackedEmbedding(matrix)(ids), groups.dense()[ids].bfloat16())


@needs_compiler
@pytest.mark.skipif(not TILES, reason="x86 only")
@pytest.mark.parametrize(("bits", "tables", "row_bits"), FORMS)
def test_many_rows_in_tiles_are_those_of_bfloat16(bits: int, tables: Tables, row_bits: int) -> None:
    groups, rows = draw_groups(bits, tables, 300, 640), draw_rows(530, 640)
    with built_for(TILES[0]):
        plain = PackedLinear(pack_plain(groups.dense().bfloat16()), epilogue=Epilogue.FLOATS)
        linear = PackedLinear(pack(groups, row_bits=row_bits), epilogue=Epilogue.FLOATS)
        for num_rows in (64, 75, 530):
            assert torch.equal(linear(rows[:num_rows]), plain(rows[:num_rows]))
        assert not torch.equal(linear(rows[:63]), plain(rows[:63]))  # codes


@needs_compiler
def test_all_instruction_sets_give_the_same() -> None:
    rows, found = draw_rows(21, 1024), []
    for build in BUILT:
        with built_for(build):
            linears = [
                PackedLinear(pack(draw_groups(bits, tables, 40, 1024), row_bits=row_bits), epilogue=Epilogue.FLOATS)
                for bits, tables, row_bits in FORMS
            ]
            found.append(torch.cat([linear(rows) for linear in linears]))
    assert all(torch.equal(one, found[0]) for one in found)


@needs_compiler
@pytest.mark.parametrize(("bits", "tables"), [(4, Tables.SCALES), (4, Tables.ZEROS), (8, Tables.MINIMUMS_32)])
@pytest.mark.usefixtures("instructions")
def test_bias_and_gate(bits: int, tables: Tables) -> None:
    rows, bias = draw_rows(19, 96), torch.randn(80)
    both = draw_groups(bits, tables, 80, 96)
    matrix, in_order = pack(both), panel_order([bias], is_gated=False)
    rounded = PackedLinear(matrix, in_order)(rows)
    plain = PackedLinear(matrix, epilogue=Epilogue.FLOATS)(rows) + bias
    assert torch.equal(rounded, plain.bfloat16())
    gate, up = (both.each(lambda rows, half=half: rows[40 * half : 40 * half + 40]) for half in range(2))  # type: ignore[misc]
    gated = PackedLinear(pack(gate, up, step=2), panel_order([*bias.chunk(2)], is_gated=True), Epilogue.GATED)
    expected = functional.silu(rounded[:, :40]) * rounded[:, 40:]
    torch.testing.assert_close(gated(rows), expected, rtol=0.02, atol=1e-3)


@needs_compiler
@pytest.mark.parametrize(("bits", "tables", "row_bits"), [(4, Tables.ZEROS, 13), (8, Tables.ZEROS, 13), FORMS[-1]])
@pytest.mark.usefixtures("instructions")
def test_a_row_does_not_depend_on_the_others_or_on_threads(bits: int, tables: Tables, row_bits: int) -> None:
    rows = draw_rows(150, 640)
    matrix = pack(draw_groups(bits, tables, 301, 640), row_bits=row_bits)
    linear = PackedLinear(matrix, epilogue=Epilogue.FLOATS)
    together = linear(rows)
    before = torch.get_num_threads()
    try:
        for num_rows in range(1, 41):
            torch.set_num_threads(1 + num_rows % 3)
            begin = num_rows % 7
            assert torch.equal(linear(rows[begin : begin + num_rows]), together[begin : begin + num_rows])
    finally:
        torch.set_num_threads(before)


@needs_compiler
@pytest.mark.usefixtures("instructions")
def test_rounding_is_its_twins() -> None:
    rows = torch.cat([draw_rows(40, 1024).float(), torch.randn(40, 1024) * 1e-6, torch.randint(-2, 3, (40, 1024))])
    rows[0, 0], rows[1, 0], rows[2, 0] = torch.nan, torch.inf, 1e6
    for given in (rows, rows.bfloat16()):
        found, expected = round_groups(given), round_to_4_bits(given)
        assert all(map(torch.equal, found[:3], expected[:3])) and found.bits == 4
    assert GroupsShape.of(found).num_bytes == 128 * 1024 * 4.5 / 8


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_torch_rounds() -> None:
    rows = torch.randn(3, 64)
    assert torch.equal(round_groups(rows).codes, round_to_4_bits(rows).codes)


@needs_compiler
def test_what_does_not_fit_is_refused() -> None:
    groups = draw_groups(4, Tables.SCALES, 40, 64)
    odd = draw_groups(4, Tables.MINIMUMS_32, 40, 64)
    for wrong, panel in ((odd, 0), (draw_groups(8, Tables.SCALES, 40, 64), 0), (groups, 2)):
        with pytest.raises(ValueError, match="do not fit"):
            pack(groups).fill(wrong, panel)
    assert GroupsShape.of(groups, odd) == GroupsShape(80, 64, 4, Tables.MINIMUMS_32)
    with pytest.raises(ValueError, match="do not make groups of 32"):
        GroupsShape(80, 48, 4, Tables.SCALES)
    with pytest.raises(ValueError, match="not finite"):
        GroupsShape.of(groups._replace(scale=groups.scale / 0))
    with pytest.raises(ValueError, match=r"expected bfloat16 \[T, 64\]"):
        PackedLinear(pack(groups))(torch.zeros(1, 32).bfloat16())
    with pytest.raises(ValueError, match="ids reach 40, expected 0 to 39"):
        pack(groups).take_rows(torch.tensor([40]))
    with pytest.raises(ValueError, match="cannot be rounded"):
        round_groups(torch.zeros(1, 48))
