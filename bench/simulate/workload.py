"""The requests and their times: conversations that start at random times, seeded. Pure.

A token is a byte, computed as a hash of its position, so prompts need not be stored; 16 of them distinguish pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import shake_128

import numpy as np
from numpy.typing import NDArray

from bench.simulate.settings import Workload

SIGMA = 0.6


@dataclass(frozen=True, slots=True)
class Conversation:
    """One client. Turn |-> its request."""

    number: int
    start: float
    prefix: bytes
    num_new: Sequence[int]  # prompt tokens
    num_answer: Sequence[int]
    think_s: Sequence[float]  # after the answer
    seed: int

    def prompt(self, turn: int, before: bytes) -> bytes:
        """The turn's prompt: everything said `before`, then its new tokens."""
        name = f"{self.seed}/{self.number}/{turn}"
        return (before or self.prefix) + draw_tokens(name, self.num_new[turn])


def draw_tokens(name: str, count: int) -> bytes:
    return shake_128(name.encode()).digest(count)


def build_conversations(workload: Workload) -> list[Conversation]:
    """In order of their starts. The last one may be shorter, so that there are `num_requests`."""
    draw = np.random.default_rng(workload.seed)
    count = -(-workload.num_requests // workload.turns)
    starts = _draw_starts(draw, workload, count)
    num_new = _draw_lengths(draw, workload, workload.input_tokens, count)
    num_answer = _draw_lengths(draw, workload, workload.output_tokens, count)
    if workload.change_s:
        is_next = np.array([[is_changed(workload, start)] for start in starts])
        num_new = np.where(is_next, _draw_lengths(draw, workload, workload.then_input_tokens, count), num_new)
        num_answer = np.where(is_next, _draw_lengths(draw, workload, workload.then_output_tokens, count), num_answer)
    pauses = draw.exponential(workload.think_s, (count, workload.turns))
    names = [f"{workload.seed}/prefix/{number}" for number in range(workload.num_prefixes)]
    prefixes = [draw_tokens(name, workload.prefix_tokens) for name in names]
    chosen = draw.integers(0, max(len(prefixes), 1), count)
    built = []
    for number in range(count):
        turns = slice(min(workload.turns, workload.num_requests - number * workload.turns))
        new, answer, think = (rows[number, turns].tolist() for rows in (num_new, num_answer, pauses))
        prefix = prefixes[chosen[number]] if prefixes else b""
        built.append(Conversation(number, float(starts[number]), prefix, new, answer, think, workload.seed))
    return built


def is_changed(workload: Workload, at: float) -> bool:
    """Whether lengths and rate are the next ones then."""
    return bool(workload.change_s) and int(at / workload.change_s) % 2 == 1


def _draw_starts(draw: np.random.Generator, workload: Workload, count: int) -> NDArray[np.float64]:
    """[count], of conversations."""
    gaps = draw.exponential(workload.turns, count)
    if not workload.change_s:
        return np.cumsum(gaps / workload.rate)
    starts, at = [], 0.0
    for gap in gaps.tolist():
        at += gap / (workload.then_rate if is_changed(workload, at) else workload.rate)
        starts.append(at)
    return np.array(starts)


def _draw_lengths(draw: np.random.Generator, workload: Workload, mean: int, count: int) -> NDArray[np.int64]:
    """[count, turns], each 2 or more."""
    shape = count, workload.turns
    if workload.lengths == "fixed":
        return np.full(shape, max(mean, 2))
    drawn = draw.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, shape)
    return np.maximum(np.rint(drawn), 2).astype(np.int64)
