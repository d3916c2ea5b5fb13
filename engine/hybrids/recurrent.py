"""Layers that keep a state of each sequence in place of KV: their weights, where states are, and the torch twin of the
kernels.

T rows of B sequences in a ragged batch, C channels, convolutions over K tokens; H = Hv heads. Sums are float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.layers.mixer import StateRows

CHUNK = 64  # tokens whose changes of a memory are solved for at once: as wide as heads, so that products are square
NORM_EPS = 1e-6  # of the norms of queries and keys


class GatedConv(NamedTuple):
    """Weights of LFM2's gated short convolution, one rank's channels."""

    weight: Tensor  # [C, K] float32, weight[:, -1] meets the newest token
    bias: Tensor | None  # [C] float32


class DeltaNet(NamedTuple):
    """Weights of a Gated DeltaNet, one rank's heads."""

    num_key_heads: int  # Hk
    num_value_heads: int  # Hv, a multiple of Hk: value head h uses key head h // (Hv // Hk)
    key_dim: int  # Kd
    value_dim: int  # Vd
    conv: Tensor  # [2 Hk Kd + Hv Vd, K] float32: channels of all queries, then keys, then values
    decay_rate: Tensor  # [Hv] float32, -exp(A_log)
    dt_bias: Tensor  # [Hv] float32
    norm: Tensor  # [Vd] float32
    eps: float


class DeltaStates(NamedTuple):
    """States of a Gated DeltaNet in all slots: float32 views whose heads are contiguous."""

    query: Tensor  # [num_slots, Hk, Kd, K - 1], last inputs of the convolution, oldest first
    key: Tensor  # [num_slots, Hk, Kd, K - 1]
    value: Tensor  # [num_slots, Hv, Vd, K - 1]
    memory: Tensor  # [num_slots, Hv, Kd, Vd]


def gated_conv(rows: Tensor, layer: GatedConv, at: StateRows, states: Tensor) -> Tensor:
    """See `RecurrentOps.gated_conv`."""
    gate, out_gate, value = rows.float().chunk(3, dim=-1)  # [T, C] each
    out = convolve(gate * value, layer.weight, at, [states])
    if layer.bias is not None:
        out += layer.bias
    return (out_gate * out).to(rows.dtype)


def delta_net(rows: Tensor, layer: DeltaNet, at: StateRows, states: DeltaStates) -> Tensor:
    """See `RecurrentOps.delta_net`."""
    num_key_heads, num_heads, key_dim, value_dim = layer[:4]
    mixed, z, b, a = torch.split(rows.float(), [len(layer.conv), num_heads * value_dim, num_heads, num_heads], dim=-1)
    mixed = functional.silu(convolve(mixed, layer.conv, at, states[:3]))
    query, key, value = torch.split(mixed, [num_key_heads * key_dim] * 2 + [num_heads * value_dim], dim=-1)
    query, key = (
        normalise(part.view(-1, num_key_heads, key_dim)).repeat_interleave(num_heads // num_key_heads, dim=1)
        for part in (query, key)
    )  # [T, H, Kd] each
    log_decay = layer.decay_rate * functional.softplus(a + layer.dt_bias)  # [T, H]
    heads = Heads(query * key_dim**-0.5, key, value.view(-1, num_heads, value_dim), log_decay, b.sigmoid())
    out = functional.rms_norm(remember(heads, at, states.memory), (value_dim,), layer.norm, layer.eps)  # [T, H, Vd]
    return (out.flatten(1) * functional.silu(z)).to(rows.dtype)


def normalise(heads: Tensor) -> Tensor:
    """To length 1. [..., Kd] |-> [..., Kd]"""
    return heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def load_states(states: Tensor, sources: Tensor) -> Tensor:
    """A copy of the states in [B] slots, zeros for -1. [num_slots, ...] |-> [B, ...]"""
    is_new = (sources < 0).view(-1, *[1] * (states.ndim - 1))
    return states.index_select(0, sources.clamp(min=0)).masked_fill_(is_new, 0.0)


def convolve(rows: Tensor, weight: Tensor, at: StateRows, states: Sequence[Tensor]) -> Tensor:
    """Each channel over the last K tokens of its sequence. Writes the new states to their targets.

    rows: [T, C] float32, weight: [C, K] |-> [T, C]. states: of consecutive channels, [num_slots, N, C' / N, K - 1].

    Each sequence's state goes before its rows, so that every row has its K inputs in a row:

        joined:  [ state of 0 | rows of 0 | state of 1 | rows of 1 | ... ]
    """
    num_past = weight.shape[1] - 1
    past = torch.cat([load_states(part, at.sources).flatten(1, 2) for part in states], 1).mT  # [B, K - 1, C]
    counts = torch.from_numpy(at.counts_host).to(rows.device, torch.int64)
    shifts = num_past * torch.arange(1, len(counts) + 1, device=rows.device)  # [B] of rows by states
    places = torch.arange(len(rows), device=rows.device) + shifts.repeat_interleave(counts, output_size=len(rows))
    before = torch.arange(-num_past, 0, device=rows.device)
    joined = rows.new_empty(len(rows) + num_past * len(counts), rows.shape[1])
    joined[places] = rows
    joined[(at.starts[:-1] + shifts)[:, None] + before] = past
    newest = joined[(at.starts[1:] + shifts)[:, None] + before].mT  # [B, C, K - 1]
    sizes = [part.shape[1] * part.shape[2] for part in states]
    for part, new in zip(states, torch.split(newest, sizes, dim=1), strict=True):
        part.index_copy_(0, at.targets, new.reshape(-1, *part.shape[1:]))
    out = rows * weight[:, -1]
    for step in range(-num_past, 0):
        out += joined[places + step] * weight[:, step - 1]
    return out


class Heads(NamedTuple):
    """Queries and memory updates of tokens, for H heads: of T rows, or [N, H, L] of N sequences with L tokens each."""

    query: Tensor  # [T, H, Kd]
    key: Tensor  # [T, H, Kd]
    value: Tensor  # [T, H, Vd]
    log_decay: Tensor  # [T, H], <= 0
    beta: Tensor  # [T, H], the part of the value under a key that the token replaces

    def take(self, places: Tensor) -> "Heads":
        """places: [N, L] of T rows |-> [N, H, L, ...]"""
        return Heads(*(part[places].transpose(1, 2) for part in self))

    def chunk(self, begin: int) -> "Heads":
        """[N, H, L, ...] |-> at most CHUNK of the L tokens, from `begin` on."""
        return Heads(*(part[:, :, begin : begin + CHUNK] for part in self))


def remember(heads: Heads, at: StateRows, memory: Tensor) -> Tensor:
    """Update the memory by each token; returns what the token's query finds in it afterwards, [T, H, Vd].

    memory: [num_slots, H, Kd, Vd]; new ones go to their targets. Sequences of equal numbers of tokens go together.
    """
    out = torch.empty_like(heads.value)
    for count in np.unique(at.counts_host).tolist():
        members = torch.from_numpy(np.flatnonzero(at.counts_host == count)).to(out.device)  # [N]
        places = at.starts[members, None] + torch.arange(count, device=out.device)  # [N, count]
        given, own = heads.take(places), load_states(memory, at.sources[members])
        for begin in range(0, count, CHUNK):
            found, own = recall(given.chunk(begin), own)
            out[places[:, begin : begin + CHUNK]] = found.transpose(1, 2)
        memory.index_copy_(0, at.targets[members], own)
    return out


def recall(given: Heads, memory: Tensor) -> tuple[Tensor, Tensor]:
    """A chunk of L tokens. memory: [N, H, Kd, Vd] |-> what their queries find [N, H, L, Vd], the memory after them.

    Token i changes the memory M by its key k[i] times a change u[i]; d(i, j) is the decay from j to i, and m the memory
    before the chunk:

        M[i] = d(i - 1, i) M[i - 1] + k[i] u[i]' = d(0, i) m + sum over j <= i of d(j, i) k[j] u[j]'
        u[i] = beta[i] (v[i] - d(i - 1, i) M[i - 1]' k[i])

    The second line with the first one's sum for M[i - 1] is a triangular system for all u.
    """
    query, key, value, log_decay, beta = given
    total = log_decay.double().cumsum(-1)  # [N, H, L] of differences that may be far smaller
    between = (total[..., :, None] - total[..., None, :]).tril().float().exp().tril()  # d(j, i) at [..., i, j], or 0
    before, beta = total.float().exp()[..., None], beta[..., None]  # d(0, i)
    changes = torch.linalg.solve_triangular(
        beta * (key @ key.mT) * between, beta * (value - before * (key @ memory)), upper=False, unitriangular=True
    )  # [N, H, L, Vd]
    found = before * (query @ memory) + (query @ key.mT * between) @ changes
    to_end = between[..., -1, :, None]  # [N, H, L, 1]
    return found, before[..., -1:, :] * memory + (key * to_end).mT @ changes
