"""Layers with states: the torch twin, the CPU's kernels and interpreted Triton against a loop over tokens; in models
against transformers: test_families.py.

States are views of layer 1 of 3 in a pool like the engine's; slots that no sequence reads hold NaN.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine.cpu import cpu_states
from engine.cpu.ops import CpuOps
from engine.cuda.ops import CudaOps
from engine.hybrids.ops import RecurrentOps
from engine.hybrids.recurrent import DeltaNet, DeltaStates, GatedConv
from engine.layers.mixer import StateRows
from tests.support.attention import needs_compiler
from tests.support.combinations import combination
from tests.support.instruction_sets import WIDTHS, built_for

EPS = 1e-6
NUM_SLOTS = 9
TWIN, CPU, TRITON = RecurrentOps(), CpuOps(), CudaOps()
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # two ulps of 1: the interpreter truncates bfloat16


def randn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


class Step(NamedTuple):
    """Rows of sequences, and the slots that they read and write."""

    counts: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]

    def rows(self) -> StateRows:
        counts = np.array(self.counts, np.int32)
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        return StateRows(torch.tensor(self.sources), torch.tensor(self.targets), starts, counts)


MIXED = Step([1, 5, 1, 2, 9], [3, 3, -1, 4, -1], [7, 8, 2, 5, 6])  # two continue one state
DECODE = Step([1, 1, 1, 1], [1, 2, -1, 1], [5, 6, 7, 7])  # the last two are surplus rows: they share a target
LONG = Step([70, 66], [3, -1], [0, 8])  # more than a chunk
STEPS = [pytest.param(MIXED, id="mixed"), pytest.param(DECODE, id="decode")]
# Hk, Hv, Kd, Vd, K: whole vectors; parts of vectors and columns past a block; one head, a plain recurrence.
SIZES = [(2, 4, 16, 16, 4), (1, 3, 20, 70, 3), (1, 1, 3, 5, 2)]
CHANNELS = [(2, 32, 3), (3, 70, 4), (1, 5, 2)]  # heads, channels of each, K


@pytest.fixture(params=WIDTHS, ids=str)
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    with built_for(request.param):
        yield


def make_states(step: Step, *parts: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """A pool, [NUM_SLOTS, ...], and one layer's views of its parts. parts: heads, then the sizes of a head's state."""
    sizes = [(part[0], 3, *part[1:]) for part in parts]
    pool = randn(NUM_SLOTS, sum(map(np.prod, sizes)), seed=5)
    pool[[slot for slot in range(NUM_SLOTS) if slot not in step.sources]] = torch.nan
    split = torch.split(pool, [int(np.prod(size)) for size in sizes], dim=1)
    return pool, [part.view(NUM_SLOTS, *size)[:, :, 1] for part, size in zip(split, sizes, strict=True)]


def make_delta_net(num_key_heads: int, num_heads: int, key_dim: int, value_dim: int, kernel: int) -> DeltaNet:
    width = 2 * num_key_heads * key_dim + num_heads * value_dim
    rates, biases = -(2 * randn(num_heads, seed=2)).exp(), randn(num_heads, seed=3)
    conv, norm = randn(width, kernel, seed=1) / 2, 1 + randn(value_dim, seed=4) / 4
    return DeltaNet(num_key_heads, num_heads, key_dim, value_dim, conv, rates, biases, norm, EPS)


def make_rows(step: Step, width: int, dtype: torch.dtype) -> Tensor:
    return randn(sum(step.counts), width + 3).to(dtype)[:, :width]


def convolve(rows: Tensor, past: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [L, C], past: [C, K - 1] |-> [L, C], the next past."""
    kernel, joined = weight.shape[1], torch.cat([past.mT, rows])
    out = torch.stack([(joined[row : row + kernel] * weight.mT).sum(0) for row in range(len(rows))])
    return out, joined[len(rows) :].mT


def true_conv(rows: Tensor, layer: GatedConv, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One sequence in float64, its state [N, C / N, K - 1] |-> [L, C], the state after it."""
    assert layer.bias is not None
    gate, out_gate, value = rows.chunk(3, dim=1)
    out, past = convolve(gate * value, state.flatten(0, 1), layer.weight)
    return out_gate * (out + layer.bias), [past.view_as(state)]


def true_delta_net(rows: Tensor, layer: DeltaNet, *states: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One sequence in float64, token by token |-> [L, Hv Vd], the states after it."""
    num_key_heads, num_heads, key_dim, value_dim = layer[:4]
    width, memory = len(layer.conv), states[3]  # [Hv, Kd, Vd]
    mixed, past = convolve(rows[:, :width], torch.cat([one.flatten(0, 1) for one in states[:3]]), layer.conv)
    key_width, outs = num_key_heads * key_dim, []
    for token, row in zip(functional.silu(mixed), rows[:, width:], strict=True):
        heads = token[: 2 * key_width].view(2, num_key_heads, key_dim).repeat_interleave(num_heads // num_key_heads, 1)
        query, key = heads * (heads.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        value, z = token[2 * key_width :].view(num_heads, value_dim), row[: num_heads * value_dim]
        b, a = row[num_heads * value_dim :].view(2, num_heads)
        memory = memory * (layer.decay_rate * functional.softplus(a + layer.dt_bias)).exp()[:, None, None]
        change = b.sigmoid()[:, None] * (value - torch.einsum("hkv,hk->hv", memory, key))
        memory = memory + key[:, :, None] * change[:, None]
        out = torch.einsum("hkv,hk->hv", memory, query) * key_dim**-0.5
        out = out * (out.square().mean(1, keepdim=True) + layer.eps).rsqrt() * layer.norm
        outs.append(out.flatten() * functional.silu(z))
    sizes = [one.shape[0] * one.shape[1] for one in states[:3]]
    pasts = [part.view_as(one) for part, one in zip(torch.split(past, sizes), states[:3], strict=True)]
    return torch.stack(outs), [*pasts, memory]


def doubled(layer: Any) -> Any:
    return layer._make(part.double() if isinstance(part, Tensor) else part for part in layer)


def check(out: Tensor, rows: Tensor, step: Step, before: Sequence[Tensor], after: Sequence[Tensor], truth: Any) -> None:
    """Outputs, and states in targets, of each sequence alone; nothing else may have changed."""
    assert out.dtype is rows.dtype
    slack, begin = TOLERANCES[rows.dtype], 0
    for count, source, target in zip(*step, strict=True):
        own = [part[source].double() if source >= 0 else torch.zeros_like(part[0]).double() for part in before]
        expected, states = truth(rows[begin : begin + count].double(), *own)
        torch.testing.assert_close(out[begin : begin + count].double(), expected, rtol=slack, atol=slack)
        begin += count
        if step.targets.count(target) == 1:
            for part, state in zip(after, states, strict=True):
                torch.testing.assert_close(part[target].double(), state, rtol=1e-5, atol=1e-5)


def check_conv(ops: RecurrentOps, step: Step, sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> None:
    num_heads, head_dim, kernel = sizes
    width = num_heads * head_dim
    layer = GatedConv(randn(width, kernel, seed=1), randn(width, seed=2))
    pool, (states,) = make_states(step, (num_heads, head_dim, kernel - 1))
    rows, old = make_rows(step, 3 * width, dtype), pool.clone()
    before = states.clone()
    out = ops.gated_conv(rows, layer, step.rows(), states)
    check(out, rows, step, [before], [states], lambda own, state: true_conv(own, doubled(layer), state))
    states[list(step.targets)] = before[list(step.targets)]
    assert torch.equal(pool.view(torch.int32), old.view(torch.int32)), "something but targets has changed"


def check_delta_net(ops: RecurrentOps, step: Step, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
    num_key_heads, num_heads, key_dim, value_dim, kernel = sizes
    layer = make_delta_net(*sizes)
    keys, values = (num_key_heads, key_dim, kernel - 1), (num_heads, value_dim, kernel - 1)
    pool, states = make_states(step, keys, keys, values, (num_heads, key_dim, value_dim))
    rows = make_rows(step, len(layer.conv) + num_heads * (value_dim + 2), dtype)
    old, before = pool.clone(), [part.clone() for part in states]
    out = ops.delta_net(rows, layer, step.rows(), DeltaStates(*states))
    check(out, rows, step, before, states, lambda own, *state: true_delta_net(own, doubled(layer), *state))
    for part, was in zip(states, before, strict=True):
        part[list(step.targets)] = was[list(step.targets)]
    assert torch.equal(pool.view(torch.int32), old.view(torch.int32)), "something but targets has changed"


@pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sizes", CHANNELS, ids=str)
def test_short_convolutions_are_a_loop_over_tokens(sizes: tuple[int, int, int], step: Step, ops: RecurrentOps) -> None:
    check_conv(ops, step, sizes)


@pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
@pytest.mark.parametrize(
    ("sizes", "step"),
    [
        (SIZES[0], MIXED), combination(SIZES[0], DECODE), combination(SIZES[1], MIXED), (SIZES[1], DECODE),
        (SIZES[2], MIXED), (SIZES[2], DECODE),
    ],
    ids=[f"{sizes}-{step}" for sizes in SIZES for step in ("mixed", "decode")],
)  # fmt: skip
def test_delta_nets_are_a_loop_over_tokens(sizes: tuple[int, ...], step: Step, ops: RecurrentOps) -> None:
    check_delta_net(ops, step, sizes)


def test_long_sequences_and_many_of_them() -> None:
    """More tokens than the twin's chunk, more sequences than Triton's kernels look through at a time."""
    check_delta_net(TWIN, LONG, SIZES[1])
    check_conv(TRITON, Step([1] * 300, [1, 2, -1] * 100, [7] * 300), CHANNELS[2])


@needs_compiler
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.usefixtures("instructions")
def test_kernels_on_cpus(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gated_conv", "delta_net"):
        monkeypatch.delattr(RecurrentOps, name)  # what kernels must not leave to the twin
    for step in (MIXED, DECODE):
        for channels in CHANNELS:
            check_conv(CPU, step, channels, dtype)
        for sizes in SIZES:
            check_delta_net(CPU, step, sizes, dtype)
    check_delta_net(CPU, LONG, (1, 2, 128, 128, 4), dtype)  # several threads, and whole blocks of columns


@pytest.mark.usefixtures("instructions")
def test_what_kernels_cannot_do_is_left_to_the_twin() -> None:
    check_conv(CPU, DECODE, (1, 8, cpu_states.MOST_TAPS + 1))
    check_delta_net(CPU, DECODE, (1, 1, cpu_states.MOST_KEYS + 1, 2, 2))


def test_shapes_that_kernels_would_misread_are_refused() -> None:
    layer, rows = GatedConv(randn(8, 3), None), randn(4, 24)
    states = randn(NUM_SLOTS, 2, 4, 2)
    for given, kept in ((randn(24, 4).T, states), (randn(4, 25), states), (rows, randn(NUM_SLOTS, 2, 2, 4).mT)):
        with pytest.raises(ValueError, match="rows"):
            TRITON.gated_conv(given, layer, DECODE.rows(), kept)
