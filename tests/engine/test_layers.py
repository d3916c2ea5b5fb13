"""The decoder's kernels between products, interpreted Triton and the CPU's, against their torch twins."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from engine.attention.qkv import NO_ROPE, QKV, RopeArgs
from engine.cpu.cpu_paged import apply_rope_in_place
from engine.cpu.ops import CpuOps
from engine.cuda.gpu_layers import join_pages, rope_and_write
from engine.cuda.ops import CudaOps
from engine.ops.base import Ops
from tests.support.attention import needs_compiler
from tests.support.instruction_sets import WIDTHS, built_for
from wire.kv_layout import HEAD_DIM, KEY_VALUE, KV_HEADS, LAYERS, PAGES, TOKENS, pool_sizes

EPS = 1e-5
TRITON, TORCH = CudaOps(), Ops()


@pytest.fixture(params=WIDTHS, ids=str)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    with built_for(request.param):
        yield


def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within an ulp of numbers around 1: the interpreter truncates bfloat16 where a GPU rounds."""
    assert found.dtype is expected.dtype and found.shape == expected.shape
    slack = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=slack, atol=slack)


@pytest.mark.parametrize("width", [64, 200, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_norms_are_those_of_torch(dtype: torch.dtype, width: int) -> None:
    check_norms(TRITON, dtype, width, [3])


@needs_compiler
@pytest.mark.parametrize("width", [64, 200, 2048])
@pytest.mark.usefixtures("instructions")
def test_norms_on_cpus(width: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        check_norms(CpuOps(), dtype, width, [0, 1, 30])


def check_norms(operations: Ops, dtype: torch.dtype, width: int, counts: Sequence[int]) -> None:
    for num_rows in counts:
        rows, delta, weight = (normal(*sizes, width, dtype=dtype) for sizes in ((num_rows,), (num_rows,), ()))
        assert_near(operations.norm(rows, weight, EPS), TORCH.norm(rows, weight, EPS))
        sums = [rows.float().clone(), rows.float().clone()]
        outs = operations.add_norm_(sums[0], delta, weight, EPS), TORCH.add_norm_(sums[1], delta, weight, EPS)
        assert_near(*sums)
        assert_near(*outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("width", [8, 1500])
def test_the_gate_is_that_of_torch(dtype: torch.dtype, width: int) -> None:
    gate_up = 5 * normal(4, 2 * width, dtype=dtype)
    assert_near(TRITON.gate(gate_up.clone()), TORCH.gate(gate_up.clone()))


def layer_of(pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    keys, values = pool.permute(LAYERS, KEY_VALUE, PAGES, KV_HEADS, TOKENS, HEAD_DIM)[layer]
    return keys, values


@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 16), (12, 4, 24)])
def test_queries_turn_and_keys_and_values_reach_their_pages(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool
) -> None:
    num_tokens, num_rotated = 5, num_heads + num_kv_heads
    qkv = normal(num_tokens, num_rotated + num_kv_heads, head_dim)
    cos, sin = (normal(num_tokens, 1, head_dim, dtype=torch.float32) * scale for scale in (1.0, -0.5))
    rope = RopeArgs(cos, sin, normal(num_rotated, head_dim) if has_norm else None, EPS)
    sizes = pool_sizes(num_pages=6, num_kv_heads=num_kv_heads, num_layers=3, page_tokens=4, head_dim=head_dim)
    before = normal(*sizes)
    pages, offsets = torch.tensor([5, 0, 0, 2, 5]), torch.tensor([0, 3, 1, 2, 1])

    query, key, value = QKV(qkv[:, :num_rotated], qkv[:, num_rotated:], rope).ready()
    expected = before.clone()
    for page_rows, rows in zip(layer_of(expected, 1), (key, value), strict=True):
        page_rows[pages, :, offsets] = rows
    pool = before.clone()
    fused = qkv.clone()
    queries = rope_and_write(
        fused[:, :num_rotated], fused[:, num_rotated:], *rope, *layer_of(pool, 1), pages * 4 + offsets
    )
    assert_near(queries, query)
    assert queries.data_ptr() == fused.data_ptr()
    assert_near(pool, expected)
    untouched = torch.ones_like(pool, dtype=torch.bool)
    for page_rows in layer_of(untouched, 1):
        page_rows[pages, :, offsets] = False
    assert torch.equal(pool[untouched], before[untouched])


def test_heads_that_are_ready_are_written_as_they_are_and_within_the_limits_of_the_pool() -> None:
    query_key, value = 3 * normal(2, 3, 8), 3 * normal(2, 1, 8)
    pool = torch.zeros(pool_sizes(num_pages=2, num_kv_heads=1, num_layers=1, page_tokens=2, head_dim=8))
    keys, values = layer_of(pool, 0)
    slots = torch.tensor([2, 1])
    queries = rope_and_write(query_key.clone(), value, *NO_ROPE, keys, values, slots, kv_limit=2.0)
    assert torch.equal(queries, query_key[:, :2])
    assert torch.equal(keys[[1, 0], :, [0, 1]], query_key[:, 2:].clamp(-2, 2))
    assert torch.equal(values[[1, 0], :, [0, 1]], value.clamp(-2, 2))


def test_views_that_a_kernel_would_misread_are_refused() -> None:
    pool = torch.zeros(pool_sizes(num_pages=2, num_kv_heads=1, num_layers=1, page_tokens=2, head_dim=8))
    keys, values = layer_of(pool, 0)
    heads, slots = QKV(normal(1, 3, 8), normal(1, 1, 8)), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected equal ones"):
        rope_and_write(heads.query_key, heads.value, *NO_ROPE, keys, values.clone(), slots)
    with pytest.raises(ValueError, match="contiguous heads"):
        rope_and_write(normal(1, 3, 16)[..., :8], normal(1, 1, 8), *NO_ROPE, keys, values, slots)
    with pytest.raises(ValueError, match="contiguous rows"):
        TRITON.norm(normal(8, 4).T, normal(8), EPS)


def test_pages_of_sequences_are_joined() -> None:
    table = torch.arange(3 * 600, dtype=torch.int32).view(3, 600)
    starts = torch.tensor([0, 1, 1, 599], dtype=torch.int32)
    out = torch.full((700,), -1, dtype=torch.int32)
    join_pages(table, starts, out)
    assert out.tolist() == [0, *range(1200, 1798), *[-1] * 101]


@needs_compiler
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (7, 1, 16), (12, 4, 24)])
@pytest.mark.usefixtures("instructions")
def test_heads_turn_as_in_torch(num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool) -> None:
    num_rotated = num_heads + num_kv_heads
    cos, sin = (normal(9, 1, head_dim, dtype=torch.bfloat16) * scale for scale in (1.0, -0.5))
    norm = normal(num_rotated, head_dim, dtype=torch.bfloat16) if has_norm else None
    qkv = normal(9, num_rotated + num_kv_heads, head_dim, dtype=torch.bfloat16)

    def split(values: torch.Tensor) -> QKV:
        return QKV(values[:, :num_rotated], values[:, num_rotated:], RopeArgs(cos, sin, norm, EPS))

    expected = split(qkv.clone()).ready()
    for found, twin in zip(apply_rope_in_place(split(qkv.clone())), expected, strict=True):
        torch.testing.assert_close(found, twin, rtol=0.02, atol=0.04)
    wide = split(qkv.float())._replace(
        rope=RopeArgs(cos.float(), sin.float(), norm, EPS)
    )  # the kernel does not support it
    assert apply_rope_in_place(wide)[0].dtype is torch.float32
