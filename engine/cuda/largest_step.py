"""The largest step that a worker may run, run once before its pool is sized, to see how much GPU memory it takes.

Knows a runner and rows, not pools: all sequences share one page. Every rank runs it at the same time.
"""

import gc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import ForwardRow
from engine.input_batch import InputBatch
from engine.runner import Runner
from wire.sampling import SamplingParams

SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9)  # all that sampling can be asked to do

Measure = Callable[[Callable[[], None], torch.device], int]
"""Runs the function; returns how many bytes of the device it took at most, beyond those held before."""


class LargestStep(NamedTuple):
    """Prompts of `chunk_tokens` in all, beside answers of all other sequences."""

    chunk_tokens: int
    num_sequences: int
    setting: str  # of the tokens, for errors


def measure_peak(work: Callable[[], None], device: torch.device) -> int:
    """Bytes that torch's allocator took from the GPU during `work`, fragments included."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def find_step_bytes(
    step: LargestStep, runners: Sequence[Runner], rows: InputBatch, measure: Measure = measure_peak
) -> int:
    """Bytes of the larger of two models' steps: they run in turn. Page 0 is written to; rows are free again after."""
    return max(measure(lambda one=runner: run(step, one, rows), rows.device) for runner in runners)  # type: ignore[misc]


def run(step: LargestStep, runner: Runner, rows: InputBatch) -> None:
    """One step, collected."""
    counts = split(step, rows.context_tokens)
    for row, count in enumerate(counts):
        rows.open(row, np.zeros(count, np.int32), SAMPLING, count)
        rows.write_pages(row, 0, [0] * -(-count // rows.page_tokens))
    asked = [ForwardRow(row, 0, count, 1, chosen_logprobs=0, state_to=0) for row, count in enumerate(counts)]
    runner.launch(asked).collect()
    for row in range(len(counts)):
        rows.close(row)


def split(step: LargestStep, context_tokens: int) -> list[int]:
    """New tokens of each sequence: one each, then as few prompts as hold the chunk."""
    counts: list[int] = []
    left = step.chunk_tokens
    while len(counts) < step.num_sequences:
        counts.append(max(1, min(left, context_tokens)))
        left -= counts[-1]
    return counts[::-1]
