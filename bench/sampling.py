"""Time to sample a batch on the CPU, by kernel and slow twin, and the host's part: `python -m bench.sampling`.

Takes the shortest of several calls, so that a busy machine matters little. Logits are in memory, as after a forward.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine.batch import ForwardRow
from engine.cpu.cpu_sampling import sample_on_cpu as sample
from engine.input_batch import InputBatch
from engine.prepared import prepare
from engine.sampling.batch import SamplingBatch
from engine.sampling.sample import sample_slowly
from wire.sampling import SamplingParams

NUM_ROWS, VOCABULARY = 16, 128_256
NUM_SEEN, PAGE_TOKENS = 1000, 16

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_k 50": SamplingParams(top_k=50),
    "penalties": SamplingParams(repetition_penalty=1.2, frequency_penalty=0.3),
}
SPREADS = {"flat": 0.0, "N(0, 0.3)": 0.3, "N(0, 3)": 3.0}


def build_batch(params: SamplingParams, num_rows: int = NUM_ROWS, vocabulary: int = VOCABULARY) -> SamplingBatch:
    """A step's: each row has seen NUM_SEEN tokens and chooses the next."""
    rows = InputBatch(num_rows, NUM_SEEN, PAGE_TOKENS, vocabulary, torch.device("cpu"))
    for row in range(num_rows):
        seen = torch.randint(vocabulary, (NUM_SEEN,), dtype=torch.int32)
        rows.open(row, seen.numpy(), replace(params, seed=row), 0)
    (chunk,) = prepare(rows, [ForwardRow(row, NUM_SEEN - 1, 1, 1) for row in range(num_rows)], num_rows).chunks
    return chunk.sampling._replace(counts=rows.counts if chunk.has_penalties else None)


def time_ms(run: Callable[[Tensor, SamplingBatch], Tensor], logits: Tensor, batch: SamplingBatch, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        own = logits.clone()
        begin = time.perf_counter()
        run(own, batch)
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--slow", action="store_true", help="time the slow twin too")
    options = parser.parse_args()
    print(f"ms for {NUM_ROWS} rows of {VOCABULARY} logits, {torch.get_num_threads()} threads")
    for spread, factor in SPREADS.items():
        logits = torch.randn(NUM_ROWS, VOCABULARY, generator=torch.Generator().manual_seed(0)) * factor
        for name, params in CASES.items():
            batch = build_batch(params)
            slow = f"{time_ms(sample_slowly, logits, batch, 1):10.1f}" if options.slow else ""
            print(f"{spread:>10} {name:>14} {time_ms(sample, logits, batch, options.rounds):8.2f}{slow}")
    batch = build_batch(CASES["greedy"], 64, 8)
    host_us = 1000 * time_ms(sample, torch.zeros(64, 8), batch, 1000)
    print(f"{host_us:.1f} us of the host for 64 greedy rows")


if __name__ == "__main__":
    main()
