"""A decode worker's engine loop without its process: sessions go in, tokens come out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event

from decode_worker.loop import DecodeLoop
from decode_worker.metrics import DecodeMetrics
from decode_worker.session import Delta, Reservation
from decode_worker.session_table import SessionTable
from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.drafters import Drafter
from decode_worker.speculation.speculator import Speculator
from engine.choice import TokenLogprobs
from engine.engine import Engine

NO_SPECULATION = Speculator({}, CostMeter(), "off", 0)
PATIENCE_S = 600.0
NOT_SPARING = 1e-9  # seconds: forwards that seem to cost the same however many rows they have


@dataclass
class Answers:
    """What sessions told, by handle."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[int, Delta] = field(default_factory=dict)

    def take(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self.tokens.setdefault(delta.handle, []).extend(delta.token_ids)
            self.logprobs.setdefault(delta.handle, []).extend(delta.logprobs)
            if delta.finish_reason:
                self.ends[delta.handle] = delta


def build_eager_speculator(drafters: Mapping[str, Drafter]) -> Speculator:
    """One that always guesses as far as it may: rows seem free."""
    meter = CostMeter()
    for rows in (1, 256):
        meter.note(rows, 1.0 + rows * NOT_SPARING)
    return Speculator(drafters, meter, "off", 0)


def decode(
    engine: Engine, speculator: Speculator, reservations: Sequence[Reservation], chunk_tokens: int = 64
) -> Answers:
    """Run all reservations together, prefill included, until each has ended; no page is held afterwards."""
    table = SessionTable(engine.allocator, engine.pool.shape.page_tokens, max_running=64, lease_s=60.0)
    answers, is_done = Answers(), Event()

    def publish(_step: int, deltas: list[Delta]) -> None:
        answers.take(deltas)
        if len(answers.ends) == len(reservations):
            is_done.set()

    metrics = DecodeMetrics(table)
    loop = DecodeLoop(table, engine.runner, engine.pool, speculator, chunk_tokens, publish, metrics)
    with loop.thread.lock:
        for wanted in reservations:
            table.reserve(wanted, 0.0)
    loop.thread.start()
    try:
        with loop.thread.lock:
            loop.thread.wake()
        assert is_done.wait(PATIENCE_S), f"{len(answers.ends)} of {len(reservations)} ended"
    finally:
        loop.thread.stop(10)
    table.check()
    assert not engine.allocator.num_used
    return answers
