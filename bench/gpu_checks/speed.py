"""Times with random weights in an 8B and a 1B model's shape, each next to its goal.

Steps run on a decode worker's own loop, without its process: as in a worker, one step ahead on a GPU.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from bench.decoding import NO_SPECULATION, build_scheduler
from bench.gpu_checks.attention import synchronize
from bench.gpu_checks.models import build_random_engine
from bench.spec import SyntheticDrafter
from decode_worker.loop import DraftsAndMasks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.drafters import ModelDrafter
from decode_worker.speculation.speculator import Speculator
from decode_worker.speculation.start import measure
from engine.batch import ForwardRow
from engine.engine import Engine
from wire.sampling import SamplingParams
from worker.loop import WorkerLoop
from worker.plan import TokenBudget
from worker.sequences import SequenceParams, Update

CHUNK_TOKENS = 2048


class MissedError(AssertionError):
    """A figure is worse than its goal."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes: real on a GPU, small where only the code is tested."""

    large: str
    small: str
    streams: int
    prompt_tokens: int
    num_tokens: int
    prefill_tokens: int
    num_steps: int


FULL = Scale("8B", "1B", 30, 1000, 250, 2048, 200)
TRIAL = Scale("tiny", "tiny", 3, 40, 8, 64, 8)


def scale_for(device: torch.device) -> Scale:
    return FULL if device.type == "cuda" else TRIAL


@dataclass(frozen=True, slots=True)
class Decoded:
    """The results of all requests together."""

    tpot_s: float  # median over steps that yielded a token of every sequence
    tokens: dict[int, list[int]]  # by handle
    num_drafted: int
    num_accepted: int
    num_steps: int  # that yielded tokens
    decode_s: float  # from the first such step to the last


def run_jobs(
    engine: Engine, requests: Sequence[SequenceParams], speculator: Speculator = NO_SPECULATION,
    steps_ahead: int | None = None,
) -> Decoded:  # fmt: skip
    """Run a decode worker's loop until all requests have ended. steps_ahead: None for the device's default."""
    scheduler, updates, tokens = build_scheduler(engine), list[Update](), dict[int, list[int]]()
    loop = WorkerLoop(
        DraftsAndMasks(speculator, scheduler), scheduler, engine.runner, engine.rows, engine.pool,
        TokenBudget(CHUNK_TOKENS, "--chunk-tokens"), lambda _step, some: updates.extend(some), DecodeMetrics(scheduler),
        engine.steps_ahead if steps_ahead is None else steps_ahead,
    )  # fmt: skip
    for params in requests:
        scheduler.admit(params, time.monotonic())
    sequences = list(scheduler)
    full: list[tuple[float, int]] = []  # (time after a step of all sequences, tokens of one sequence so far)
    while len(scheduler):
        updates.clear()
        loop.step()
        for update in updates:
            tokens.setdefault(update.sequence.params.handle, []).extend(update.token_ids)
        if len([update for update in updates if update.token_ids]) == len(requests):
            full.append((time.perf_counter(), len(tokens[requests[0].handle])))
    steps = [(b - a) / (n - m) for (a, m), (b, n) in pairwise(full) if n > m]
    return Decoded(
        statistics.median(steps),
        tokens,
        sum(sequence.num_drafted for sequence in sequences),
        sum(sequence.num_accepted for sequence in sequences),
        len(full),
        full[-1][0] - full[0][0],
    )


def build_requests(
    count: int, prompt_tokens: int, num_tokens: int, vocab_size: int, drafter: str = "off"
) -> list[SequenceParams]:
    """Jobs whose prompts share nothing."""
    draw = np.random.default_rng(0)
    return [
        SequenceParams(
            str(number), draw.integers(0, vocab_size, prompt_tokens, np.int32).tobytes(), prompt_tokens - 1, num_tokens,
            gateway="bench", handle=number + 1, sampling=SamplingParams(temperature=0.0), drafter=drafter,
            max_draft_tokens=0 if drafter == "off" else 3,
        )
        for number in range(count)
    ]  # fmt: skip


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on the device reads and writes."""
    size = 4 << 30 if device.type == "cuda" else 64 << 20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_calls(lambda: target.copy_(source), device)


def measure_products(device: torch.device) -> float:
    """Floating-point operations per second of a large bfloat16 product of random numbers."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_calls(lambda: a @ b, device)


def time_calls(call: Callable[[], object], device: torch.device, count: int = 10) -> float:
    """Seconds per call, after three to warm up."""
    for _ in range(3):
        call()
    synchronize(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - started) / count


def weight_bytes(engine: Engine) -> int:
    """Bytes that one step reads: all of the model except the embedding's other rows."""
    config = engine.config
    per_layer = config.hidden_size * (
        (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.intermediate_size
    )
    itemsize = 1 if engine.quantization == "fp8" else 2
    return config.num_layers * per_layer * itemsize + config.vocab_size * config.hidden_size * 2


def require(is_met: bool, detail: str, device: torch.device) -> str:
    """Returns `detail`; on a GPU, MissedError if the goal is not met."""
    if device.type == "cuda" and not is_met:
        raise MissedError(detail)
    return detail


def time_one_stream(device: torch.device) -> str:
    """8B bfloat16, one stream, short context."""
    scale = scale_for(device)
    engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens)
    requests = build_requests(1, 64, scale.num_steps, engine.config.vocab_size)
    tpot = run_jobs(engine, requests).tpot_s
    bandwidth = measure_bandwidth(device)
    mbu = weight_bytes(engine) / tpot / bandwidth
    detail = f"TPOT {tpot * 1e3:.2f} ms (goal 4.6), MBU {mbu:.2f} of {bandwidth / 1e12:.2f} TB/s measured (goal 0.80)"
    return require(tpot <= 4.6e-3 and mbu >= 0.8, detail, device)


def time_many_streams(device: torch.device) -> str:
    """8B, 30 streams of 1,000 + 250 tokens."""
    scale = scale_for(device)
    engine = build_random_engine(scale.large, device, scale.streams, scale.prompt_tokens + scale.num_tokens + 16)
    requests = build_requests(scale.streams, scale.prompt_tokens, scale.num_tokens, engine.config.vocab_size)
    rate = 1 / run_jobs(engine, requests).tpot_s
    return require(rate >= 140, f"{rate:.0f} tok/s each of {scale.streams} streams (goal 140)", device)


def time_host(device: torch.device) -> str:
    """How long the GPU waits for the host in a step: its period less that of the same graph replayed at once."""
    scale, found, worst = scale_for(device), [], 0.0
    for count in (16, 64) if device.type == "cuda" else (2,):
        engine = build_random_engine(scale.large, device, count, scale.prompt_tokens + scale.num_steps + 16)
        requests = build_requests(count, scale.prompt_tokens, scale.num_steps, engine.config.vocab_size)
        period = run_jobs(engine, requests).tpot_s
        alone = time_steps_alone(engine, count, scale.prompt_tokens + scale.num_steps // 2, device)
        share = max(0.0, 1 - alone / period)
        worst = max(worst, share)
        found.append(f"{count} sequences: {period * 1e3:.2f} ms a step, {alone * 1e3:.2f} alone, {share:.1%} waiting")
        del engine
    return require(worst <= 0.03, "; ".join(found) + " (goal 3 %)", device)


def time_steps_alone(engine: Engine, count: int, context_tokens: int, device: torch.device) -> float:
    """Seconds per step of `count` sequences if all steps are launched before the first is collected."""
    pages = engine.rows.page_table.shape[1]
    for row in range(count):
        engine.rows.open(row, np.zeros(context_tokens, np.int32), SamplingParams(temperature=0.0), context_tokens)
        engine.rows.write_pages(row, 0, [page % engine.num_pages for page in range(row * pages, (row + 1) * pages)])
    requests = [ForwardRow(row, context_tokens - 1, 1, 1) for row in range(count)]
    seconds = time_calls(lambda: engine.runner.launch(requests), device, 20)
    for row in range(count):
        engine.rows.close(row)
    return seconds


def time_prefill(device: torch.device) -> str:
    """8B, one prompt of 2,048 tokens in one step."""
    scale = scale_for(device)
    engine = build_random_engine(scale.large, device, 1, 2 * scale.prefill_tokens)
    count, config = scale.prefill_tokens, engine.config
    engine.rows.open(0, np.zeros(count, np.int32), SamplingParams(temperature=0.0), count)
    engine.rows.write_pages(0, 0, range(-(-count // engine.rows.page_tokens)))
    seconds = time_calls(lambda: engine.runner.launch([ForwardRow(0, 0, count, 1)]), device, 5)
    layers = weight_bytes(engine) // 2 - config.vocab_size * config.hidden_size
    flops = 2 * layers * count + 2 * config.num_layers * count**2 * config.num_heads * config.head_dim  # causal half
    rate = measure_products(device)
    mfu = flops / seconds / rate
    detail = f"{seconds * 1e3:.1f} ms, MFU {mfu:.2f} of {rate / 1e12:.0f} TFLOP/s measured (goal 0.55)"
    return require(mfu >= 0.55, detail, device)


def time_speculation(device: torch.device) -> str:
    """8B with a 1B draft model, drafts right at 70 %, three a step, one stream, no step ahead."""
    scale = scale_for(device)
    engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens, draft=scale.small)
    assert engine.draft_runner is not None
    vocab_size = engine.config.vocab_size
    off = run_jobs(engine, build_requests(1, 64, scale.num_steps, vocab_size))
    inner = ModelDrafter(engine.draft_runner, CostMeter(), CHUNK_TOKENS)
    drafter = SyntheticDrafter(inner, off.tokens, 0.7, vocab_size)
    speculator = Speculator({"draft": drafter}, measure(engine.runner, engine.rows), "draft", 3)
    on = run_jobs(engine, build_requests(1, 64, scale.num_steps, vocab_size, "draft"), speculator, steps_ahead=0)
    per_token = on.decode_s / (len(on.tokens[1]) - 1)
    ratio = per_token / off.tpot_s
    drafts = f"{on.num_drafted / on.num_steps:.1f} drafts a step, {on.num_accepted / max(on.num_drafted, 1):.0%} right"
    detail = f"{ratio:.2f} of the TPOT without ({off.tpot_s * 1e3:.2f} ms), goal 0.75; {drafts}"
    return require(ratio <= 0.75, detail, device)


def time_fp8(device: torch.device) -> str:
    """8B with fp8 weights against bfloat16, one stream."""
    scale = scale_for(device)
    tpots = []
    for quantization in ("none", "fp8"):
        engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens, quantization=quantization)
        tpots.append(run_jobs(engine, build_requests(1, 64, scale.num_steps, engine.config.vocab_size)).tpot_s)
        del engine
    ratio = tpots[1] / tpots[0]
    detail = f"{tpots[1] * 1e3:.2f} ms, {ratio:.2f} of bfloat16's {tpots[0] * 1e3:.2f} (goal 0.62)"
    return require(ratio <= 0.62, detail, device)


def time_start(device: torch.device) -> str:
    """8B: from weights in memory to ready, with graphs for up to 64 sequences."""
    scale = scale_for(device)
    engine = build_random_engine(scale.large, device, 64 if device.type == "cuda" else 2, 1024, has_graphs=False)
    started = time.perf_counter()
    engine.warm_up(64 if device.type == "cuda" else 2)
    synchronize(device)
    seconds = time.perf_counter() - started
    return require(seconds <= 20, f"{seconds:.1f} s (goal 20)", device)
