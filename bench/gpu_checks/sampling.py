"""Sampling on a GPU: the same tokens as the CPU's kernel over many draws, and the time.

On the CPU, small shapes test the checks: with the GPU's kernels if Triton interprets, otherwise with the slow twin.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.compose import open_device
from engine.cpu.cpu_sampling import sample_on_cpu as sample
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import SEEN_BIT
from engine.sampling.sample import sample_slowly
from tests.support.batches import build_sampling_batch
from wire.sampling import SamplingParams

CASES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias=((3, 2.0), (77, 5.0))),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.95, top_k=20),
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=1.5, top_p=0.5),
    SamplingParams(top_k=50),
    SamplingParams(temperature=1.3, top_k=700, top_p=0.9),
    SamplingParams(min_p=0.05),
    SamplingParams(top_p=0.9, min_p=0.01, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(temperature=0.8, logit_bias=((5, 4.0), (20, -100.0))),
]
TIMED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "top_k 50, top_p 0.95": SamplingParams(top_k=50, top_p=0.95),
}
DRAWS_A_DIFFERENCE = 50_000  # devices differ in logarithms' last bits: one near tie per this many draws is fine

Sampler = Callable[[Tensor, SamplingBatch], Tensor]


def check_sampling(device: torch.device) -> str:
    """Tokens are the CPU's: all that are greedy, and all but a few in 100,000 of the others."""
    is_small = device.type == "cpu"
    num_rows, vocabulary, num_rounds = (len(CASES), 2500, 1) if is_small else (512, 32_000, 200)
    sampler = _find_sampler(device)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_rows, vocabulary, generator=generator) * 3
    logits[::2] = logits[::2].to(torch.bfloat16).float()  # ties
    there = logits.to(device)
    is_greedy = np.array([CASES[row % len(CASES)].is_greedy for row in range(num_rows)])
    num_different, num_greedy_different = 0, 0
    for number in range(num_rounds):
        batch = _build_batch(num_rows, vocabulary, number)
        expected = sample(logits.clone(), batch).numpy()
        on_device = batch if batch.counts is None else batch._replace(counts=batch.counts.to(device))
        is_different = sampler(there.clone(), on_device).cpu().numpy() != expected
        num_different += int(is_different.sum())
        num_greedy_different += int((is_different & is_greedy).sum())
    found = f"{num_different} of {num_rounds * num_rows} tokens differ, {num_greedy_different} of them greedy"
    assert num_greedy_different == 0, found
    assert num_different <= num_rounds * num_rows // DRAWS_A_DIFFERENCE, found
    return found


def time_sampling(device: torch.device) -> str:
    """Time of the kernels for a row and for many, of logits as wide as a model's; by a CUDA graph on a GPU."""
    sizes, vocabulary = ((1, 64), 128_256) if device.type == "cuda" else ((1,), 2500)
    found = []
    for num_rows in sizes:
        logits = torch.randn(num_rows, vocabulary, generator=torch.Generator().manual_seed(1)).mul_(3).to(device)
        for name, params in TIMED.items():
            rows = [replace(params, seed=seed) for seed in range(num_rows)]
            batch = build_sampling_batch(rows, range(num_rows))
            seconds = _time_graph(logits, batch) if device.type == "cuda" else _time_call(device, logits, batch)
            found.append(f"{name} {seconds * 1e6:.0f} us")
        found[-len(TIMED)] = f"{num_rows} x {vocabulary}: {found[-len(TIMED)]}"
    return ", ".join(found)


def _find_sampler(device: torch.device) -> Sampler:
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        from engine.cuda import sampling as gpu  # imports Triton

        return gpu.sample
    return sample_slowly if device.type == "cpu" else open_device(device).ops.sample


def _build_batch(num_rows: int, vocabulary: int, number: int) -> SamplingBatch:
    """Rows of all cases. Those with penalties have seen some tokens; each third row has a mask."""
    random = np.random.default_rng(number)
    rows = [replace(CASES[row % len(CASES)], seed=int(random.integers(2**63))) for row in range(num_rows)]
    counted = np.array([row.has_penalties for row in rows])
    counts = torch.zeros(int(counted.sum()), vocabulary, dtype=torch.int32)
    counts[:, torch.from_numpy(random.integers(0, vocabulary, 300))] = SEEN_BIT | 2
    masks = random.integers(-(2**31), 2**31, (2, -(-vocabulary // 32)), np.int32)
    return build_sampling_batch(
        rows,
        random.integers(0, 100_000, num_rows).tolist(),
        counts=counts,
        counts_line=np.where(counted, np.cumsum(counted) - 1, -1).astype(np.int32),
        masks=masks,
        mask_line=np.array([row % 2 if row % 3 == 0 else -1 for row in range(num_rows)], np.int32),
    )


def _time_graph(logits: Tensor, batch: SamplingBatch) -> float:
    """Seconds per replay. Checks that the graph's tokens are those of a call."""
    from engine.cuda.gpu_sampling import choose_tokens
    from engine.cuda.sampling import upload_batch

    fields = upload_batch(batch, logits.device)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    choose_tokens(logits, fields, tokens)  # compiles
    expected = tokens.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        choose_tokens(logits, fields, tokens)
    tokens.zero_()
    graph.replay()
    assert torch.equal(tokens, expected), "a graph's tokens are not those of a call"
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(50):
        graph.replay()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1000 / 50


def _time_call(device: torch.device, logits: Tensor, batch: SamplingBatch) -> float:
    sampler = _find_sampler(device)
    begin = time.perf_counter()
    sampler(logits.clone(), batch)
    return time.perf_counter() - begin
