"""The host's cost of a decode step: everything except the forward and the sampling.

    python -m bench.host

The model computes only the attention's plan, and the sampler always returns the same token. What remains, for the
runner: laying out a step, writing its tokens back and reading them; for the decode worker's loop: also the plan and
the scheduler; for the serving thread: the messages to a gateway. Medians over many steps.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from decode_worker.interfaces import Masks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.drafters import NgramDrafter
from decode_worker.step_extras import DraftsAndMasks
from decode_worker.streams import GatewayStreams
from engine.attention.base import AttentionBackend
from engine.attention.shape import AttentionShape
from engine.batch import Batch, ForwardRow
from engine.compose import choose_attention
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.models.decoder import Decoder
from engine.ops.base import Ops
from engine.ranks import ONE_RANK
from engine.runner import Runner
from engine.sampling.batch import SamplingBatch
from tests.support.decoding import build_eager_speculator
from wire.kv_layout import KvPart
from wire.sampling import SamplingParams
from worker.kv_cache import KVCacheManager
from worker.loop import WorkerLoop
from worker.params import SequenceParams
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import Update
from worker.table import num_rows_for

PAGE_TOKENS, VOCAB = 16, 32_000
TOKEN = 7  # always sampled
MOST_DRAFTS = 4  # for the drafter of the last line


@dataclass(frozen=True, slots=True)
class Case:
    num_sequences: int
    context_tokens: int
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    label: str = "greedy"


PENALTIES = SamplingParams(seed=1, top_p=0.9, frequency_penalty=0.5, repetition_penalty=1.1)
CASES = [
    *(Case(count, 500) for count in (1, 16, 64)),
    Case(64, 8000),
    Case(64, 500, PENALTIES, "penalties"),
]
DRAFT = 2  # index of the case also measured with drafts


class StubOps(Ops):
    """Samples always the same token."""

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        return torch.full((len(logits),), TOKEN)


class StubModel:
    """A model that computes nothing: only its attention is planned."""

    ranks = ONE_RANK
    ops = StubOps()

    def forward(self, batch: Batch, pages: Tensor, attention: AttentionBackend) -> Tensor:
        attention.plan(pages, batch)
        return torch.empty(len(batch.logits_rows), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.expand(-1, VOCAB)


def build_runner(case: Case, num_rows: int, num_steps: int) -> tuple[Runner, InputBatch]:
    rows = InputBatch(num_rows, case.context_tokens + num_steps + 1, PAGE_TOKENS, VOCAB, torch.device("cpu"))
    shape = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0)
    attention = choose_attention(shape, [None], rows.device, torch.float32).backend
    num_pages = case.num_sequences * rows.page_table.shape[1]
    pages = PoolShape(num_pages, (KvPart(1, 1, 1),), PAGE_TOKENS, torch.float32)
    return Runner(cast(Decoder, StubModel()), attention, torch.empty(pages.sizes), rows), rows


def time_runner(case: Case, num_steps: int) -> float:
    """Median seconds per step, from launch to tokens."""
    runner, rows = build_runner(case, case.num_sequences, num_steps)
    num_pages = rows.page_table.shape[1]
    prompt = np.arange(case.context_tokens, dtype=np.int32) % VOCAB
    for row in range(case.num_sequences):
        rows.open(row, prompt, replace(case.sampling, seed=row), case.context_tokens)
        rows.write_pages(row, 0, range(row * num_pages, (row + 1) * num_pages))
    times = []
    for begin in range(case.context_tokens - 1, case.context_tokens - 1 + num_steps):
        requests = [ForwardRow(row, begin, 1, 1) for row in range(case.num_sequences)]
        started = time.perf_counter()
        answers = runner.launch(requests).collect()
        times.append(time.perf_counter() - started)
        assert answers.tokens == [TOKEN] * case.num_sequences
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Medians, in seconds."""

    step: float  # from the plan to the updates, on the engine thread
    messages: float  # from the updates to the bytes of a gateway's message, on the serving thread


async def time_loop(case: Case, num_steps: int, steps_ahead: int = 0, drafter: str = "off") -> LoopFigures:
    """A decode worker's loop, step by step."""
    runner, rows = build_runner(case, num_rows_for(case.num_sequences), num_steps)
    num_pages = case.num_sequences * rows.page_table.shape[1]
    scheduler = Scheduler(
        KVCacheManager(PrefixCache(num_pages, np.zeros(num_pages, np.int64)), PAGE_TOKENS),
        max_running=case.num_sequences,
        lease_s=600.0,
    )
    updates: list[Update] = []
    loop = WorkerLoop(
        DraftsAndMasks(build_eager_speculator({"ngram": NgramDrafter()}), Masks(), scheduler),
        scheduler,
        runner,
        rows,
        cast(Any, None),
        TokenBudget(1 << 20, "--chunk-tokens"),
        lambda _step, some: updates.extend(some),
        DecodeMetrics(scheduler),
        steps_ahead,
    )
    loop.chunks.note_step(0, 1 << 20, 1e-6)  # all prompts in the first step
    for number in range(case.num_sequences):
        prompt = (np.arange(case.context_tokens, dtype=np.int32) + number) % VOCAB
        params = SequenceParams(
            str(number), prompt.tobytes(), case.context_tokens - 1, num_steps + 1, gateway="bench", handle=number + 1,
            sampling=replace(case.sampling, seed=number), drafter=drafter,
            max_draft_tokens=0 if drafter == "off" else MOST_DRAFTS,
        )  # fmt: skip
        scheduler.admit(params, time.monotonic())
    streams = GatewayStreams("bench")
    stream = streams.stream("bench")
    await anext(stream)
    steps: list[float] = []
    messages: list[float] = []
    num_tokens = 0
    while len(scheduler):
        updates.clear()
        started = time.perf_counter()
        loop.step()
        planned = time.perf_counter()
        if updates:
            streams.publish(len(steps), updates)
            (await anext(stream)).SerializeToString()
            messages.append(time.perf_counter() - planned)
        steps.append(planned - started)
        num_tokens += sum(len(update.token_ids) for update in updates)
    assert num_tokens == case.num_sequences * (num_steps + 1)
    return LoopFigures(statistics.median(steps[1:]), statistics.median(messages))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    num_steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("milliseconds a step                runner    loop  one step ahead  messages")
    for case in CASES:
        runner = time_runner(case, num_steps)
        loop, ahead = [await time_loop(case, num_steps, steps_ahead) for steps_ahead in (0, 1)]
        figures = f"{runner * 1e3:8.3f}{loop.step * 1e3:8.3f}{ahead.step * 1e3:16.3f}{loop.messages * 1e3:10.3f}"
        print(f"{case.num_sequences:3} x {case.context_tokens:5,} tokens, {case.label:13}{figures}", flush=True)
    case = CASES[DRAFT]
    loop = await time_loop(case, num_steps, drafter="ngram")
    name = f"{case.num_sequences:3} x {case.context_tokens:5,} tokens, {'ngram':13}"
    print(f"{name}{'':8}{loop.step * 1e3:8.3f}{'':16}{loop.messages * 1e3:10.3f}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
