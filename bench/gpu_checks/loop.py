"""A decode worker's loop in this process, without its thread: as in a worker, one step ahead on a GPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch

from decode_worker.speculation.speculator import Speculator
from engine.engine import Engine
from engine.runner import Runner
from engine.steps import Launcher
from tests.support.decoding import NO_SPECULATION, Answers, decode
from wire.sampling import SamplingParams
from worker.params import SequenceParams

CHUNK_TOKENS = 2048
GATEWAY = "bench"


@dataclass(frozen=True, slots=True)
class Unwaiting:
    """A runner; on a GPU any wait of the host during a launch raises."""

    inner: Launcher
    device: torch.device

    def __getattr__(self, name: str) -> Any:
        def call(*parts: Any) -> Any:
            with without_waiting(self.device):
                return getattr(self.inner, name)(*parts)

        return call


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU, any wait for it raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def run_jobs(
    engine: Engine, requests: Sequence[SequenceParams], speculator: Speculator = NO_SPECULATION, *,
    may_wait: bool = True, **options: Any,
) -> Answers:  # fmt: skip
    """`decode`, in which no request may fail. may_wait: see `Unwaiting`."""
    if not may_wait:
        engine = replace(engine, runner=cast(Runner, Unwaiting(engine.runner, engine.device)))
    answers = decode(engine, requests, speculator, **{"chunk_tokens": CHUNK_TOKENS, **options})
    for handle, end in answers.ends.items():
        assert end.finish_reason != "error", f"request {handle}: {end.error}"
    return answers


def build_requests(
    count: int, prompt_tokens: int, num_tokens: int, vocab_size: int, drafter: str = "off", max_drafts: int = 3,
    first: int = 1, **others: Any,
) -> list[SequenceParams]:  # fmt: skip
    """Greedy requests whose prompts share nothing; handles from `first` on."""
    draw = np.random.default_rng(first)
    return [
        SequenceParams(
            str(handle), draw.integers(0, vocab_size, prompt_tokens, np.int32).tobytes(), prompt_tokens - 1, num_tokens,
            gateway=GATEWAY, handle=handle, sampling=SamplingParams(temperature=0.0), drafter=drafter,
            max_draft_tokens=0 if drafter == "off" else max_drafts, **others,
        )
        for handle in range(first, first + count)
    ]  # fmt: skip
