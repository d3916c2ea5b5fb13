"""A step that cannot be computed costs only the sequences that are to blame, on either worker."""

from collections.abc import Sequence
from typing import Any, cast

from bench.decoding import NO_SPECULATION
from decode_worker.loop import DecodeLoop
from decode_worker.metrics import DecodeMetrics
from decode_worker.session import Delta, Reservation
from decode_worker.session_table import SessionTable
from engine.batch import SequenceSlice
from engine.choice import Choice, Chosen
from engine.kvcache.allocator import PageAllocator
from engine.runner import Runner
from engine.sampling import SamplingParams
from prefill_worker.batching import Planned
from prefill_worker.loop import PrefillLoop
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.run_table import RunTable
from runtime.rpc import new_incarnation
from tests.pool_process import build_pool

POISON = 13


class PoisonedRunner:
    """Fails whenever the poisonous token is in the batch."""

    def run(self, slices: Sequence[SequenceSlice], choices: Sequence[Choice]) -> list[Chosen]:
        if any(POISON in part.token_ids for part in slices):
            raise RuntimeError("cannot compute 13")
        return [Chosen(sum(part.token_ids), None) for part in slices if part.num_logits]


def allocator() -> PageAllocator:
    return PageAllocator(8, cast(Any, [0] * 8))


def test_decode_fails_the_poisonous_session_alone() -> None:
    table = SessionTable(allocator(), page_tokens=16, max_running=8, lease_s=60)
    news: list[Delta] = []
    runner, metrics = cast(Runner, PoisonedRunner()), DecodeMetrics(table)
    loop = DecodeLoop(
        table, runner, build_pool(1), NO_SPECULATION, 64, lambda _step, deltas: news.extend(deltas), metrics
    )
    for handle, prompt in enumerate(([1, 2], [POISON], [3, 4])):
        table.reserve(_wanted(handle, prompt), now=0.0)
    assert loop._step()
    table.check()
    assert [(delta.handle, delta.token_ids, delta.finish_reason) for delta in news] == [
        (0, (3,), ""),
        (1, (), "error"),
        (2, (7,), ""),
    ]
    assert "cannot compute 13" in news[1].error
    assert loop._step() and [delta.token_ids for delta in news[3:]] == [(3,), (7,)], "the others go on"


def _wanted(handle: int, prompt: list[int]) -> Reservation:
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0)
    gateway = new_incarnation()
    return Reservation(f"r{handle}", 1, gateway, handle, prompt, 8, sampling, frozenset(), 100)


def test_prefill_fails_the_poisonous_prompt_alone() -> None:
    table = RunTable(allocator(), page_tokens=16, max_running=8)
    told: list[tuple[list[str], str]] = []

    def publish(planned: list[Planned], _started: float, error: Exception | None) -> None:
        told.append(([step.run.request_id for step in planned], str(error or "")))

    loop = PrefillLoop(table, cast(Runner, PoisonedRunner()), 64, publish, PrefillMetrics(table), 1)
    runs = [table.start(name, prompt, len(prompt)) for name, prompt in (("a", [1, 2]), ("b", [POISON]), ("c", [3]))]
    assert loop._step()
    assert told == [(["a", "c"], ""), (["b"], "the engine step failed: cannot compute 13")]
    assert [run.computed for run in runs] == [2, 0, 1] and runs[1].is_failed
    table.check()
