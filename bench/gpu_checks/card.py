"""Abilities of a machine and its GPU, and what follows: sizes that fit its memory, and goals as a share of its speed.

A goal is never a figure of one GPU: bytes that a step reads by the bandwidth of a copy, operations by the rate of a
large product.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from engine.compose import FullEngine

GIB = 1 << 30
DOCTOR_S = 60.0
SLACK = 1.15  # a step's time, by that of reading its bytes
SLACK_MANY = 1.3  # where attention reads KV beside products of few rows


class MissedError(AssertionError):
    """A figure is worse than its goal."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes: real on a GPU, small where only the code is tested."""

    large: str  # of SHAPES
    small: str
    streams: int
    prompt_tokens: int
    num_tokens: int
    prefill_tokens: int
    long_tokens: int  # of a long prompt
    num_steps: int


TRIAL = Scale("tiny", "tiny", 3, 40, 8, 64, 150, 24)


def choose_scale(memory_bytes: int) -> Scale:
    """An 8B model, its draft model, 30 streams and graphs take 30 GB: smaller GPUs get 3B or 1B. 0: a CPU. Pure."""
    if not memory_bytes:
        return TRIAL
    large = "8B" if memory_bytes >= 36 * GIB else "3B" if memory_bytes >= 18 * GIB else "1B"
    return Scale(large, "1B", 30, 1000, 250, 2048, 32_768, 200)


def scale_for(device: torch.device) -> Scale:
    return choose_scale(torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0)


def step_bytes(engine: FullEngine, num_sequences: int = 0, context_tokens: int = 0) -> int:
    """Bytes that a decode step reads: all weights except the embedding's other rows, and the sequences' KV."""
    config = engine.config
    per_layer = config.hidden_size * (
        (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.intermediate_size
    )
    itemsize = 1 if engine.quantization == "fp8" else 2
    weights = config.num_layers * per_layer * itemsize + config.vocab_size * config.hidden_size * 2
    shape = engine.pool.shape
    return weights + num_sequences * context_tokens * shape.page_bytes // shape.page_tokens


def prefill_operations(engine: FullEngine, count: int) -> int:
    """Floating-point operations of a prompt of `count` tokens; attention's lower triangle alone."""
    config = engine.config
    layers = step_bytes(engine) // 2 - config.vocab_size * config.hidden_size
    return 2 * layers * count + 2 * config.num_layers * count**2 * config.num_heads * config.head_dim


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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@cache
def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy on the device reads and writes. Fits beside a model on a GPU of 24 GB."""
    size = GIB if device.type == "cuda" else 16 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / time_calls(lambda: target.copy_(source), device)


@cache
def measure_products(device: torch.device) -> float:
    """Floating-point operations per second of a large bfloat16 product of random numbers."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_calls(lambda: a @ b, device)


def describe_card(device: torch.device) -> str:
    """Bandwidth of a copy and rate of a large product, which goals are scaled to"""
    rates = f"{measure_bandwidth(device) / 1e12:.2f} TB/s, {measure_products(device) / 1e12:.0f} TFLOP/s"
    if device.type != "cuda":
        return rates
    facts = torch.cuda.get_device_properties(device)
    return (
        f"{rates}, {facts.total_memory / GIB:.0f} GiB, {facts.multi_processor_count} SMs, sm_{facts.major}{facts.minor}"
    )


def check_doctor(device: torch.device) -> str:
    """`baton doctor` finds all that it needs for this device."""
    command = [sys.executable, "-m", "cli.main", "doctor", "--json", f"--device={device.type}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_S, check=False)
    assert ended.stdout, f"exit {ended.returncode}: {''.join(ended.stderr.splitlines()[-1:])}"
    rows = json.loads(ended.stdout)["rows"]
    troubles = [f"{row['part']}: {row['found']}" for row in rows if row["status"] == "missing"]
    assert ended.returncode == 0, "; ".join(troubles)
    warnings = [f"{row['part']}: {row['found']}" for row in rows if row["status"] == "warning"]
    workers = [f"{row['part']}: {row['found']}" for row in rows if row["part"] in ("prefill-0", "decode-0", "hand-off")]
    return "; ".join([*(f"warning, {one}" for one in warnings), *workers])


def require(is_met: bool, detail: str, device: torch.device) -> str:
    """Returns `detail`; on a GPU, MissedError if the goal is not met."""
    if device.type == "cuda" and not is_met:
        raise MissedError(detail)
    return detail
