"""Measures batching: one stream against transformers' own generate, and 16 streams against one, in one run.

    python -m bench.batching --model FOLDER --threads 2

Contenders take turns, so a noisy machine affects them equally; figures are medians and ratios.
"""

import json
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import torch
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from protos import inference_pb2, inference_pb2_grpc
from tests.support.live import serve

app = App(help=__doc__)


@dataclass(frozen=True, slots=True)
class Timing:
    """One answer, or several in parallel."""

    ttft_s: float  # until the first token
    tpot_s: float  # between tokens, mean
    tokens_per_s: float  # all answers together, prompt time included


def time_transformers(model: Any, prompt_ids: list[int], num_tokens: int) -> Timing:
    """`generate` for one prompt. Takes the time of each token as it leaves the model."""
    moments: list[float] = []

    class Clock:
        def put(self, value: object) -> None:
            moments.append(time.perf_counter())

        def end(self) -> None:
            pass

    ids = torch.tensor([prompt_ids])
    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=Clock(),
    )
    return summarise(started, moments[1:])  # the first is the prompt


def time_baton(stub: inference_pb2_grpc.InferenceStub, prompt_ids: list[int], num_tokens: int) -> Timing:
    """One stream through the whole service. Its prompt is never cached."""
    request = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt_ids), max_tokens=num_tokens, temperature=0, ignore_eos=True,
        cache_salt=secrets.token_hex(8),
    )  # fmt: skip
    started = time.perf_counter()
    moments = [
        time.perf_counter() for response in stub.Generate(request, timeout=1200) for _token in response.token_ids
    ]
    if len(moments) != num_tokens:
        raise RuntimeError(f"{len(moments)} tokens came, {num_tokens} were asked for")
    return summarise(started, moments)


def time_baton_at_once(stub: inference_pb2_grpc.InferenceStub, prompts: list[list[int]], num_tokens: int) -> Timing:
    """All prompts as concurrent streams: median TTFT and TPOT, and their total rate."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as threads:
        timings = list(threads.map(lambda prompt: time_baton(stub, prompt, num_tokens), prompts))
    seconds = time.perf_counter() - started
    return Timing(
        statistics.median(timing.ttft_s for timing in timings),
        statistics.median(timing.tpot_s for timing in timings),
        len(prompts) * num_tokens / seconds,
    )


def summarise(started: float, moments: list[float]) -> Timing:
    """From the times at which one answer's tokens came."""
    tpot = (moments[-1] - moments[0]) / (len(moments) - 1)
    return Timing(moments[0] - started, tpot, len(moments) / (moments[-1] - started))


def median_of(timings: list[Timing]) -> Timing:
    return Timing(*(statistics.median(getattr(one, name) for one in timings) for name in Timing.__slots__))


@app.default
def main(
    model: Path,
    *,
    threads: int = 2,
    prompt_tokens: int = 128,
    num_tokens: int = 64,
    streams: int = 16,
    rounds: int = 3,
    out: Annotated[Path | None, Parameter(help="also write the figures here, as JSON")] = None,
) -> None:
    """Measure, print a table, and write it to `out` if set."""
    torch.set_num_threads(threads)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, trust_remote_code=False)
    vocab = reference.config.vocab_size
    prompts = [
        torch.randint(10, vocab, (prompt_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed in range(streams)
    ]
    flags = ("--dtype=bfloat16", f"--threads={threads}", "--max-context-tokens=4096")
    with serve(model, *flags) as live, grpc.insecure_channel(live.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        contenders: dict[str, Callable[[], Timing]] = {
            "transformers, 1 stream": lambda: time_transformers(reference, prompts[0], num_tokens),
            "baton, 1 stream": lambda: time_baton(stub, prompts[0], num_tokens),
            f"baton, {streams} streams": lambda: time_baton_at_once(stub, prompts, num_tokens),
        }
        timings: dict[str, list[Timing]] = {name: [] for name in contenders}
        time_baton(stub, prompts[0], 4)  # warms up
        time_transformers(reference, prompts[0], 4)
        for _ in range(rounds):
            for name, measure in contenders.items():
                timings[name].append(measure())
    report({name: median_of(found) for name, found in timings.items()}, out)


def report(figures: dict[str, Timing], out: Path | None) -> None:
    """The table and the two main ratios."""
    base, one, many = figures.values()
    table = Table("", "TTFT ms", "TPOT ms", "tokens/s")
    for name, timing in figures.items():
        table.add_row(name, f"{timing.ttft_s * 1e3:.0f}", f"{timing.tpot_s * 1e3:.1f}", f"{timing.tokens_per_s:.1f}")
    console = Console()
    console.print(table)
    tpot_ratio, rate_ratio = one.tpot_s / base.tpot_s, many.tokens_per_s / one.tokens_per_s
    console.print(f"one stream's TPOT is {tpot_ratio:.2f} x transformers'")
    console.print(f"all streams together give {rate_ratio:.2f} x the tokens per second of one")
    if out is not None:
        rows = {name: {field: getattr(timing, field) for field in Timing.__slots__} for name, timing in figures.items()}
        out.write_text(json.dumps({"tpot_ratio": tpot_ratio, "rate_ratio": rate_ratio, "figures": rows}, indent=1))


if __name__ == "__main__":
    app()
