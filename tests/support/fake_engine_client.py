"""A scripted `EngineClient` for tests of the APIs: answers with given tokens and records how each generation ends."""

import asyncio
import queue
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

from gateway.errors import ApiError
from gateway.router.attempt_record import AttemptRecord
from gateway.router.engine_client import Admitted, FinishReason, Load, TokenizedRequest, Tokens
from wire.logprobs import TokenLogprobs
from wire.timing import ReadTokens, Timing

PLACES = 16
TIMING = Timing(
    queue_s=0.5, grammar_s=5.5, prefill_s=1.5, transfer_s=2.5, transfer_bytes=5120, transport="grpc", first_step_s=3.5,
    decode_s=4.5, cached_tokens=1, read_tokens=ReadTokens(3, 4, 5), draft_tokens=9, accepted_tokens=7, attempts=2,
    prefill_reason="no prefill worker is alive",
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """What the engine does with its next generations."""

    token_ids: Sequence[int] = ()  # cut at the request's stop token or max_tokens
    group: int = 1  # tokens that come together
    delay_s: float = 0.0  # before each group and the end
    error: ApiError | None = None  # raised after the tokens
    is_hanging: bool = False  # nothing follows the tokens
    bug: Exception | None = None  # raised after the tokens
    timing: Timing = TIMING


class FakeEngineClient:
    """Usable from any thread's event loop."""

    def __init__(self) -> None:
        self.generations: list[TokenizedRequest] = []
        self.num_inside = 0  # requests admitted and not yet finished
        self.num_running = self.num_waiting = 0  # choices: begun, and admitted but not begun
        self.reset(Script())

    def reset(self, script: Script, *first: Script) -> None:
        """Clear all records. `first`: scripts for one generation each; later ones follow `script`."""
        self.script, self.scripts = script, list(first)
        self.unready: str | None = None
        self.is_asleep = False  # until the next generation
        self.refusal: ApiError | None = None  # of further requests
        self.generations.clear()
        self.num_given = 0  # tokens
        self.admitted: list[int] = []  # numbers of choices, one a request
        self.hanging: queue.Queue[str] = queue.Queue()  # request ids: all tokens are taken, nothing follows
        self.endings: queue.Queue[str] = queue.Queue()  # "complete", "failed" or "closed", one a generation

    @property
    def sent(self) -> list[dict[str, Any]]:
        """What reached the engine of each request: names |-> values, including the sampling parameters."""
        found = [asdict(generation) for generation in self.generations]
        return [one | one.pop("sampling") for one in found]

    def load(self) -> Load:
        return Load(self.num_inside, self.num_waiting, PLACES, max(PLACES - self.num_running, 0))

    def readiness(self) -> str | None:
        return self.unready

    def can_serve(self, adapter: str = "") -> bool:
        return self.unready is None and not self.is_asleep

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        """Count the request, or refuse it as scripted."""
        if self.refusal is not None:
            raise self.refusal
        self.admitted.append(num_choices)
        self.num_inside += 1
        self.num_waiting += num_choices
        admitted = Admitted(num_choices)
        try:
            yield admitted
        finally:
            self.num_inside -= 1
            self.num_waiting -= admitted.num_unplaced

    async def generate(
        self, generation: TokenizedRequest, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        self.is_asleep = False
        admitted.num_unplaced -= 1
        self.num_waiting -= 1
        self.num_running += 1
        assert admitted.num_unplaced >= 0 and self.num_inside, "each generation needs an admitted request"
        script, ending = self.scripts.pop(0) if self.scripts else self.script, "closed"
        self.generations.append(generation)
        record = AttemptRecord(1, time.monotonic())
        if attempts is not None:
            attempts.append(record)
        try:
            for part in _parts(script, generation):
                await asyncio.sleep(script.delay_s)
                self.num_given += len(part.token_ids)
                if part.finish_reason is not None:
                    ending = "complete"
                yield part
                if part.finish_reason is not None:
                    return
            if script.is_hanging:
                self.hanging.put(generation.request_id)
                await asyncio.Event().wait()
            await asyncio.sleep(script.delay_s)
            if script.error or script.bug:
                ending = "failed"
                raise script.error or script.bug or AssertionError
        finally:
            try:
                await asyncio.sleep(0)  # releasing pages may await, too
            finally:
                record.close(time.monotonic())
                self.num_running -= 1
                self.endings.put(ending)

    def wait_ending(self, timeout_s: float = 60.0) -> str:
        """How the oldest generation that was not yet waited for ended."""
        return self.endings.get(timeout=timeout_s)


def _parts(script: Script, generation: TokenizedRequest) -> Iterator[Tokens]:
    ids, finish = list(script.token_ids)[: generation.max_tokens], cast(FinishReason | None, None)
    if len(ids) == generation.max_tokens:
        finish = "length"
    for rank, token_id in enumerate(ids):
        if token_id in generation.stop_token_ids:
            ids, finish = ids[: rank + 1], "stop"
            break
    for start in range(len(generation.emitted), len(ids), script.group):
        group = tuple(ids[start : start + script.group])
        is_last = start + script.group >= len(ids)
        yield Tokens(
            group,
            finish if is_last else None,
            likely(group, generation.num_logprobs),
            None if start or generation.num_prompt_logprobs is None
            else likely(generation.prompt_ids[1:], generation.num_prompt_logprobs),
            script.timing if not start or (is_last and finish) else None,
            "weights",
        )  # fmt: skip


def likely(ids: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...]:
    """Made-up log-probabilities: each token's depends on its id; an odd token is the likeliest at its position."""
    if num_top is None:
        return ()
    return tuple(TokenLogprobs(_likeliness(token_id), *_top(token_id, num_top)) for token_id in ids)


def _likeliness(token_id: int) -> float:
    return -1 - token_id / 64


def _top(token_id: int, num_top: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    own = (token_id, _likeliness(token_id))
    others = [(40 + rank, own[1] + 0.75 - rank / 2) for rank in range(num_top)]  # the first is likelier than the token
    top = [own, *others[1:]][:num_top] if token_id % 2 else others
    return tuple(other for other, _ in top), tuple(logprob for _, logprob in top)
