"""Times with random weights in a well-known model's shape that fits the GPU, each next to its goal.

Steps run on a decode worker's own loop, without its process: as in a worker, one step ahead on a GPU.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from bench.gpu_checks.card import (
    SLACK,
    SLACK_MANY,
    measure_bandwidth,
    measure_products,
    prefill_operations,
    require,
    scale_for,
    step_bytes,
    synchronize,
    time_calls,
)
from bench.gpu_checks.loop import CHUNK_TOKENS, build_requests, run_jobs
from bench.gpu_checks.models import build_random_engine
from bench.spec import SyntheticDrafter
from decode_worker.speculation.drafters import ModelDrafter
from decode_worker.speculation.lengths import CostMeter
from decode_worker.speculation.speculator import Speculator, build_speculator, measure
from engine.batch import ForwardRow
from engine.compose import FullEngine
from engine.formats.fp8 import has_fp8
from runtime.config import DecodeConfig
from wire.sampling import SamplingParams
from worker.chunks import FEWEST_ON_GPU

MAX_DRAFTS = 3
MOST_DRAINED = 0.05  # of launches without drafts
BESIDE = {"cuda": (16, 64), "cpu": (2,)}  # answers


def time_drains(device: torch.device) -> str:
    """8 streams: launches for which the device has run out of steps, and TPOT with the default drafter"""
    scale = scale_for(device)
    config = DecodeConfig(model=scale.large)
    engine = build_random_engine(scale.large, device, 8, 8 + 5 * scale.num_steps, max_drafts=config.max_draft_tokens)
    speculator = build_speculator(engine, DecodeConfig(model=scale.large, steps_ahead=1))
    drafter, max_drafts = speculator.resolve("", 0)
    found = {}
    for name in ("off", drafter):
        requests = build_requests(8, 8, 4 * scale.num_steps, engine.config.vocab_size, name, max_drafts)
        found[name] = run_jobs(engine, requests, speculator, steps_ahead=1)
    ran, ratio = found[drafter], found[drafter].per_token_s / found["off"].per_token_s
    off = found["off"]
    drained = f"{off.num_drained} of {off.num_launched} launches drained (goal 5 %)"
    detail = f"{drained}; {drafter}: {ran.num_drafted} drafts, {ratio:.2f} of the TPOT without drafts"
    is_met = off.num_drained <= MOST_DRAINED * off.num_launched and ratio <= 1.05
    return require(is_met, f"{detail} ({off.per_token_s * 1e3:.2f} ms; goal 1.05)", device)


def time_one_stream(device: torch.device) -> str:
    """bfloat16, one stream, short context"""
    scale = scale_for(device)
    engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens)
    tpot = run_jobs(engine, build_requests(1, 64, scale.num_steps, engine.config.vocab_size)).tpot_s
    return compare_to_reading(f"{scale.large}:", tpot, SLACK, step_bytes(engine), device)


def compare_to_reading(
    name: str, tpot: float, slack: float, num_bytes: int, device: torch.device, computing_s: float = 0.0
) -> str:
    """Against the time in which the GPU reads the step's bytes, or computes its products if that takes longer."""
    reading_s = num_bytes / measure_bandwidth(device)
    goal = slack * max(reading_s, computing_s)
    detail = f"{name} TPOT {tpot * 1e3:.2f} ms (goal {goal * 1e3:.2f}), {reading_s / tpot:.0%} of a copy's bandwidth"
    return require(tpot <= goal, detail, device)


def time_many_streams(device: torch.device) -> str:
    """30 streams of 1,000 + 250 tokens"""
    scale = scale_for(device)
    return _time_streams(device, scale.streams, scale.prompt_tokens, scale.num_tokens)


def time_most_streams(device: torch.device) -> str:
    """256 streams of 128 + 64 tokens"""
    return _time_streams(device, *((256, 128, 64) if device.type == "cuda" else (4, 8, 8)))


def _time_streams(device: torch.device, count: int, prompt_tokens: int, num_tokens: int) -> str:
    engine = build_random_engine(scale_for(device).large, device, count, prompt_tokens + num_tokens + 16)
    requests = build_requests(count, prompt_tokens, num_tokens, engine.config.vocab_size)
    tpot = run_jobs(engine, requests).tpot_s
    num_bytes = step_bytes(engine, count, prompt_tokens + num_tokens // 2)
    computing_s = count * step_bytes(engine) / measure_products(device)  # 2 operations for a weight of 2 bytes
    return compare_to_reading(f"{count / tpot:.0f} tok/s in all,", tpot, SLACK_MANY, num_bytes, device, computing_s)


def time_mixed(device: torch.device) -> str:
    """Prompts beside 16 and 64 answers: the chunk that is settled on, and what it and any chunk add to a step"""
    scale, found, smallest = scale_for(device), [], CHUNK_TOKENS
    for count in BESIDE[device.type]:
        context = max(scale.prefill_tokens, 64 + scale.num_steps) + 16
        engine = build_random_engine(scale.small, device, count + 1, context)
        vocab_size = engine.config.vocab_size
        answers = build_requests(count, 64, scale.num_steps, vocab_size)
        prompts = build_requests(12, scale.prefill_tokens, 2, vocab_size, first=count + 1)
        chunks = run_jobs(engine, [*answers, *prompts], at_once=count + 1).chunks
        smallest = min(smallest, chunks.beside)
        found.append(
            f"{count} answers: {chunks.quiet_s * 1e3:.2f} ms a step; chunks of {chunks.beside} tokens add "
            f"{(chunks.predict(count, chunks.beside) - chunks.quiet_s) * 1e3:.2f} ms, any {chunks.fixed_s * 1e3:.2f}"
        )
        del engine
    return require(smallest > FEWEST_ON_GPU, f"{scale.small}: {'; '.join(found)} (goal: more than 256)", device)


def time_host(device: torch.device) -> str:
    """How long the GPU waits for the host in a step (goal 3 %); host time of a launch, by graph and eager"""
    scale, found, worst = scale_for(device), [], 0.0
    for count in BESIDE[device.type]:
        context = scale.prompt_tokens + scale.num_steps + 16
        engine = build_random_engine(scale.large, device, count, context, has_graphs=False)
        halfway = scale.prompt_tokens + scale.num_steps // 2
        eager_s, eager_launch_s = time_steps_alone(engine, count, halfway, device)
        engine.warm_up(count)
        alone_s, launch_s = time_steps_alone(engine, count, halfway, device)
        requests = build_requests(count, scale.prompt_tokens, scale.num_steps, engine.config.vocab_size)
        period_s = run_jobs(engine, requests).tpot_s
        share = max(0.0, 1 - alone_s / period_s)
        worst = max(worst, share)
        found.append(
            f"{count} sequences: {period_s * 1e3:.2f} ms a step, {alone_s * 1e3:.2f} alone, {share:.1%} waiting, "
            f"launch {launch_s * 1e3:.2f} ms; eager {eager_s * 1e3:.2f} alone, launch {eager_launch_s * 1e3:.2f} ms, "
            f"{eager_launch_s / engine.config.num_layers * 1e6:.0f} us a layer"
        )
        del engine
    return require(worst <= 0.03, "; ".join(found), device)


def time_steps_alone(
    engine: FullEngine, count: int, context_tokens: int, device: torch.device
) -> tuple[float, float]:  # fmt: skip
    """(seconds of a step of `count` sequences if all are launched before the first is collected, of a launch)"""
    requests = open_rows(engine, [context_tokens] * count)
    seconds = time_calls(lambda: engine.runner.launch(requests), device, 20)
    launches = []
    for _ in range(20):
        synchronize(device)
        started = time.perf_counter()
        engine.runner.launch(requests)
        launches.append(time.perf_counter() - started)
    for row in range(count):
        engine.rows.close(row)
    return seconds, statistics.median(launches)


def open_rows(engine: FullEngine, contexts: Sequence[int]) -> list[ForwardRow]:
    """Rows with contexts of these lengths over shared pages, and the request for each one's last token."""
    pages = engine.rows.page_table.shape[1]
    for row, context in enumerate(contexts):
        engine.rows.open(row, np.zeros(context, np.int32), SamplingParams(temperature=0.0), context)
        engine.rows.write_pages(row, 0, [page % engine.num_pages for page in range(row * pages, (row + 1) * pages)])
    return [ForwardRow(row, context - 1, 1, 1) for row, context in enumerate(contexts)]


def time_prefill(device: torch.device) -> str:
    """A prompt of 2,048 tokens in one step, and in steps of 512"""
    return _time_prompt(device, scale_for(device).prefill_tokens, (1, 4), 0.55)


def time_long_prompt(device: torch.device) -> str:
    """A prompt of 32k tokens in steps of 4,096"""
    return _time_prompt(device, scale_for(device).long_tokens, (8,), 0.45)


def _time_prompt(device: torch.device, count: int, numbers: Sequence[int], goal: float) -> str:
    """`numbers`: of steps. The goal is a share of a large product's speed in the first of them."""
    engine = build_random_engine(scale_for(device).large, device, 1, count + 16, has_graphs=False)
    open_rows(engine, [count])
    rate, found, shares = measure_products(device), [], []
    for number in numbers:
        size = -(-count // number)
        steps = [ForwardRow(0, begin, min(size, count - begin), 1) for begin in range(0, count, size)]
        seconds = time_calls(lambda own=steps: [engine.runner.launch([step]) for step in own], device, 3)  # type: ignore[misc]
        shares.append(prefill_operations(engine, count) / seconds / rate)
        found.append(f"steps of {size}: {seconds * 1e3:.1f} ms, {count / seconds:.0f} tokens/s, MFU {shares[-1]:.2f}")
    detail = f"{'; '.join(found)} of {rate / 1e12:.0f} TFLOP/s measured (goal {goal})"
    return require(shares[0] >= goal, detail, device)


def time_speculation(device: torch.device) -> str:
    """With a 1B draft model, drafts right at 70 %, three a step, one stream, no step ahead"""
    scale = scale_for(device)
    engine = build_random_engine(
        scale.large, device, 1, 4 * scale.prompt_tokens, draft=scale.small, max_drafts=MAX_DRAFTS
    )
    assert engine.draft_runner is not None
    vocab_size = engine.config.vocab_size
    off = run_jobs(engine, build_requests(1, 64, scale.num_steps, vocab_size))
    inner = ModelDrafter(engine.draft_runner, CostMeter(), CHUNK_TOKENS)
    drafter = SyntheticDrafter(inner, off.tokens, 0.7, vocab_size)
    speculator = Speculator({"draft": drafter}, measure(engine.runner, engine.rows), "draft", MAX_DRAFTS)
    on = run_jobs(engine, build_requests(1, 64, scale.num_steps, vocab_size, "draft"), speculator, steps_ahead=0)
    ratio = on.per_token_s / off.tpot_s
    drafts = f"{on.num_drafted / len(on.full):.1f} drafts a step, {on.num_accepted / max(on.num_drafted, 1):.0%} right"
    detail = f"{ratio:.2f} of the TPOT without ({off.tpot_s * 1e3:.2f} ms), goal 0.75; {drafts}"
    return require(ratio <= 0.75, detail, device)


def time_fp8(device: torch.device) -> str:
    """fp8 weights, one stream"""
    scale = scale_for(device)
    if not has_fp8(device):
        return "skipped: fp8 needs compute capability 8.9"
    engine = build_random_engine(scale.large, device, 1, 4 * scale.prompt_tokens, quantization="fp8")
    tpot = run_jobs(engine, build_requests(1, 64, scale.num_steps, engine.config.vocab_size)).tpot_s
    return compare_to_reading(f"{scale.large}:", tpot, SLACK_MANY, step_bytes(engine), device)


def time_start(device: torch.device) -> str:
    """From weights in memory to ready, with graphs for up to 64 sequences"""
    scale, num_rows = scale_for(device), 64 if device.type == "cuda" else 2
    engine = build_random_engine(scale.large, device, num_rows, 512, has_graphs=False)
    started = time.perf_counter()
    engine.warm_up(num_rows)
    synchronize(device)
    seconds = time.perf_counter() - started
    return require(seconds <= 20, f"{seconds:.1f} s (goal 20)", device)
