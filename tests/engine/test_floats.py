"""Products in float32 by oneDNN: torch's own product is the twin."""

import platform

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.cpu import build, floats
from engine.cpu.floats import MOST_ROWS, FloatLinear, count_padded, is_faster, multiply, use_floats

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="no oneDNN",
)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 5), (300,), (MOST_ROWS,), (MOST_ROWS + 70,)], ids=str)
@pytest.mark.parametrize(("depth", "num_outputs", "has_bias"), [(96, 130, True), (33, 7, False)])
def test_products_are_torchs(shape: tuple[int, ...], depth: int, num_outputs: int, has_bias: bool) -> None:
    rows, weight = torch.randn(*shape, depth), torch.randn(num_outputs, depth)
    bias = torch.randn(num_outputs) if has_bias else None
    check(multiply(rows, weight, bias), functional.linear(rows, weight, bias))
    apart = torch.randn(*shape, 2 * depth)[..., ::2]
    check(multiply(apart, weight, bias), functional.linear(apart, weight, bias))
    across = torch.randn(depth, num_outputs).T
    check(multiply(rows, across, bias), functional.linear(rows, across, bias))


@torch.inference_mode()
def test_what_fills_up_the_rows_changes_none() -> None:
    rows, weight = torch.randn(400, 64), torch.randn(48, 64)
    whole = multiply(rows, weight)
    for count in (2, 3, 33, 65, 257, 399):
        check(multiply(rows[:count], weight), whole[:count])
    rows[5] = float("nan")
    found = multiply(rows[:7], weight)
    assert found[5].isnan().all() and not found[:5].isnan().any() and not found[6].isnan().any()


def test_few_numbers_of_rows_are_multiplied() -> None:
    """oneDNN keeps code for each."""
    counts = range(1, MOST_ROWS + 1)
    padded = [count_padded(count) for count in counts]
    assert all(count <= own <= max(1.25 * count, 256) for count, own in zip(counts, padded, strict=True))
    assert all(own <= 2 * count for count, own in zip(counts, padded, strict=True))
    assert len(set(padded)) == 21 and max(padded) == MOST_ROWS


@torch.inference_mode()
def test_transformers_code_has_the_same_products() -> None:
    model = nn.Sequential(nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 8, bias=False)).eval()
    halves = nn.Linear(40, 24, dtype=torch.bfloat16)
    rows = torch.randn(2, 9, 40)
    expected = model(rows)
    use_floats(model)
    use_floats(halves)
    assert "forward" in vars(model[0]) and "forward" not in vars(halves)
    check(model(rows), expected)


def test_amds_cpus_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, expected in {"GenuineIntel": False, "AuthenticAMD": True}.items():
        monkeypatch.setattr(build, "_cpu_lines", lambda vendor=vendor: [f"vendor_id\t: {vendor}"])
        assert is_faster() is expected
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not is_faster()


@torch.inference_mode()
def test_a_layer_multiplies_so(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, rows = FloatLinear(torch.randn(6, 4), torch.randn(6)), torch.randn(3, 4)
    check(layer(rows), functional.linear(rows, layer.weight, layer.bias))
    monkeypatch.setattr(floats, "multiply", lambda rows, *_given: rows)
    assert layer(rows) is rows
