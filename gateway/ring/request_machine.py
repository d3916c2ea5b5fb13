"""The decisions of one request's life, from the queue to its one end. Pure: events and `now` in, actions out.

    WAITING ──placed──► RESERVING ──reserved──► RUNNING ──last tokens──► ENDED
       ▲                    │                      │                       ▲
       └── no room after all, or failed: again ────┴── too often, too late, too long: `failure`

After `EndAttempt` nothing of the attempt is held any more: no session, no prefill, no places. A client that disconnects
needs no decision: its attempt ends, and that is all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Literal

import numpy as np

from gateway.ring.generation import Generation, Tokens
from gateway.ring.reasons import OUT_OF_TIME, Reason
from gateway.ring.request_steps import (
    Action,
    EndAttempt,
    Event,
    Forget,
    GiveBack,
    Placed,
    Prefilled,
    Refused,
    Remember,
    SessionLost,
    SessionUpdate,
)
from protos import decode_pb2, kv_pb2, prefill_pb2
from wire.logprobs import TokenLogprobs
from wire.messages import pack_sampling, pack_tokens
from wire.page_keys import TOKEN_BYTES, PageKey, page_keys, root_key
from wire.timing import Timing

MAX_ATTEMPTS = 3  # that failed in a row, none of them with a new token
GRAMMAR_PAUSE_S = 0.5  # before a worker is asked again that still compiles the grammar
MAX_LOSSES = 10  # the same when the last worker was gone or refused: mostly not the request's fault
MAX_STUCK = 3  # in all, with new tokens or without, that ended at a stuck worker: the request may be what hangs it


class Phase(Enum):
    WAITING = "waiting"
    RESERVING = "reserving"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True)
class Request:
    """One request and its attempts. Changed by `step` only."""

    generation: Generation
    deadline: float  # when it has taken too long
    patience_s: float  # how long it looks for a worker that answers
    silent_since: float  # when its client last got tokens; before the first, when it arrived, or queues again
    phase: Phase = Phase.WAITING
    failure: Reason | None = None  # why it ended, if not with its answer
    attempt: int = 1
    num_failures: int = 0
    stuck: list[str] = field(default_factory=list)  # why attempts ended whose worker was stuck in a step
    resumes_at: float = 0.0  # when it goes back to the queue, at the earliest
    is_new_again: bool = False  # it goes behind all that wait: its grammar was not compiled
    absent_since: float | None = None  # when it first found no worker, since one last took it
    emitted: list[int] = field(default_factory=list)  # the client has them: never sent again, never taken back
    avoid: set[str] = field(default_factory=set)  # incarnations blamed for failed attempts
    mistaken: set[str] = field(default_factory=set)  # incarnations that had less of the prompt than expected
    placed: Placed = field(default=Placed("", None, 0))  # of the present attempt
    num_cached: int = 0  # prompt tokens whose KV is not computed for the present attempt, as far as is known
    prefilled: Timing | None = None  # of the present attempt, where a prefill worker ran
    is_remembered: bool = False  # decode is known to have the KV of the present attempt's prompt
    reserving_since: float = 0.0  # in the present attempt
    grammar_s: float = 0.0  # waited for its grammar in attempts that ended before it was compiled
    queue_s: float = 0.0  # spent waiting for places in all attempts; set by the caller
    is_prompt_scored: bool = False  # the client has the log-probabilities of the prompt
    scored: list[TokenLogprobs] = field(default_factory=list)  # prompt tokens', so far in the present attempt
    held: list[SessionUpdate] = field(default_factory=list)  # back until all those are here
    _prompt: bytes = field(init=False)  # packed
    _keys: dict[tuple[str, int], list[PageKey]] = field(default_factory=dict)  # (weights, page_tokens) |-> keys so far

    def __post_init__(self) -> None:
        self._prompt = _pack(self.generation.prompt_ids)

    @property
    def packed_tokens(self) -> bytes:
        """All tokens so far: what the present attempt starts from."""
        return self._prompt + _pack(self.emitted)

    def page_keys(self, weights: str, page_tokens: int) -> Sequence[PageKey]:
        """Keys of the whole pages filled by all tokens so far but the last, whose KV the next step computes."""
        keys = self._keys.setdefault((weights, page_tokens), [])
        if page_tokens and len(keys) < self.num_missing // page_tokens:
            parent = keys[-1] if keys else root_key(weights, self.generation.cache_salt)
            rest = self.packed_tokens[len(keys) * page_tokens * TOKEN_BYTES : -TOKEN_BYTES]
            keys.extend(page_keys(parent, rest, page_tokens))
        return keys

    @property
    def num_missing(self) -> int:
        """Positions whose KV the present attempt needs before its first step."""
        return len(self.generation.prompt_ids) + len(self.emitted) - 1

    @property
    def num_left(self) -> int:
        """The most tokens that are still to come."""
        return self.generation.max_tokens - len(self.emitted)

    @property
    def is_retry(self) -> bool:
        """Whether it goes before new requests."""
        return self.attempt > 1 and not self.is_new_again

    @property
    def num_prompt_logprobs(self) -> int | None:
        """What the present attempt reports of the prompt: nothing twice."""
        return None if self.is_prompt_scored else self.generation.num_prompt_logprobs

    def step(self, event: Event, now: float) -> list[Action]:
        """What follows from `event`. Events of an earlier phase or attempt lead to nothing."""
        match self.phase, event:
            case Phase.RUNNING, SessionUpdate(attempt=self.attempt):
                return self._take_update(event, now)
            case Phase.WAITING, Placed():
                return self._reserve(event, now)
            case Phase.WAITING, Reason():
                return self._end(event)
            case Phase.RESERVING, decode_pb2.ReserveResponse():
                return self._run(event, now)
            case Phase.RESERVING | Phase.RUNNING, Refused():
                return self._take_refusal(event, now)
            case Phase.RUNNING, Prefilled():
                return self._take_prefilled(event, now)
            case Phase.RESERVING | Phase.RUNNING, SessionLost(detail, is_stuck, role):
                self.stuck += [detail] if is_stuck else []
                culprit = self.placed.prefill if role == "prefill" else self.placed.decode
                return self._fail(detail, culprit or self.placed.decode, now, MAX_LOSSES)
            case Phase.RUNNING, Reason():
                return self._end(event, EndAttempt(event.kind))
        return []

    def _reserve(self, placed: Placed, now: float) -> list[Action]:
        self.phase, self.reserving_since = Phase.RESERVING, now
        self.is_new_again = False
        self.placed = placed
        self.prefilled, self.is_remembered = None, False
        self.scored, self.held = [], []
        wanted = self.generation
        grammar, speculation = wanted.grammar, wanted.speculation
        request = decode_pb2.ReserveRequest(
            request_id=wanted.request_id,
            attempt=self.attempt,
            gateway=placed.stream,
            handle=placed.handle,
            prompt=self.packed_tokens,
            max_tokens=self.num_left,
            sampling=pack_sampling(wanted.sampling),
            stop_token_ids=sorted(wanted.stop_token_ids),
            local_prefill_max_tokens=placed.local_prefill_max_tokens,
            num_emitted=len(self.emitted),
            min_tokens=wanted.min_tokens,
            num_logprobs=wanted.num_logprobs,
            num_prompt_logprobs=self.num_prompt_logprobs,
            grammar=decode_pb2.Grammar(kind=grammar.kind, text=grammar.text) if grammar else None,
            speculation=decode_pb2.Speculation(
                drafter=speculation.drafter, max_draft_tokens=speculation.max_draft_tokens
            ),
            cache_salt=wanted.cache_salt,
        )
        return [request]

    def _run(self, reserved: decode_pb2.ReserveResponse, now: float) -> list[Action]:
        self.phase = Phase.RUNNING
        self.absent_since = None
        self.num_cached = reserved.ticket.begin
        if self.placed.prefill is not None:
            return [self._prefill(reserved.ticket)] if reserved.needs_prefill else [GiveBack("prefill", False)]
        if not reserved.needs_prefill:
            return []
        reason = "the decode worker lacks more of the prompt than was expected"
        if self.placed.decode in self.mistaken:
            return self._fail(reason, self.placed.decode, now)
        self.mistaken.add(self.placed.decode)
        return [Forget(self.num_cached), *self._again(EndAttempt(reason))]

    def _prefill(self, ticket: kv_pb2.Ticket) -> prefill_pb2.RunRequest:
        return prefill_pb2.RunRequest(
            request_id=self.generation.request_id,
            prompt=self.packed_tokens,
            cache_salt=self.generation.cache_salt,
            ticket=ticket,
            num_prompt_logprobs=self.num_prompt_logprobs,
        )

    def _take_prefilled(self, prefilled: Prefilled, now: float) -> list[Action]:
        self.prefilled, self.num_cached, self.is_remembered = prefilled.timing, prefilled.timing.cached_tokens, True
        self.scored.extend(prefilled.prompt_logprobs)
        remember = [Remember("prefill"), Remember("decode")]
        return [*remember, GiveBack("prefill", is_refused=False), *self._emit([], now)]

    def _take_refusal(self, refused: Refused, now: float) -> list[Action]:
        if refused.why == "no room":
            return [GiveBack(refused.role, is_refused=True), *self._again(EndAttempt(refused.detail))]
        if refused.why == "compiling":
            return self._pause(refused.detail, now)
        if refused.why == "invalid" and not self.emitted:  # later it is not the client's fault: another worker may do
            return self._end(self._impossible(refused), EndAttempt(refused.detail))
        if refused.role == "prefill" and self.placed.prefill is not None:  # at worst decode prefills by itself
            return self._fail(refused.detail, self.placed.prefill, now, MAX_LOSSES)
        if refused.why == "absent":
            return self._look_on(refused.detail, now)
        return self._fail(refused.detail, self.placed.decode, now)

    def _impossible(self, refused: Refused) -> Reason:
        if not refused.is_grammar or self.generation.grammar is None:
            return Reason("impossible", refused.detail)
        param = refused.param or self.generation.grammar.param
        return Reason("impossible", f"{param} cannot be used: {refused.detail}", param)

    def _pause(self, reason: str, now: float) -> list[Action]:
        """The grammar is being compiled: others get the places meanwhile, and go first unless the client has tokens."""
        self.absent_since = None
        self.grammar_s += now - self.reserving_since
        self.resumes_at = now + GRAMMAR_PAUSE_S
        end = EndAttempt(reason)
        if self.resumes_at >= self.deadline:
            return self._end(OUT_OF_TIME, end)
        if not self.emitted:
            self.is_new_again, self.silent_since = True, self.resumes_at
        return self._again(end)

    def _look_on(self, reason: str, now: float) -> list[Action]:
        """The worker was gone: nothing was tried, so only time counts."""
        self.avoid.add(self.placed.decode)
        if self.absent_since is None:
            self.absent_since = now
        end = EndAttempt(reason)
        if now >= self.deadline:
            return self._end(OUT_OF_TIME, end)
        if now - self.absent_since >= self.patience_s:
            detail = f"found no worker for {self.patience_s:g} s; the last: {reason}"
            return self._end(Reason("not ready", detail), end)
        return self._again(end)

    def _take_update(self, update: SessionUpdate, now: float) -> list[Action]:
        if update.finish_reason not in ("", "stop", "length"):
            return self._take_trouble(update, now)
        self.scored.extend(update.prompt_logprobs)
        return self._emit([update], now)

    def _take_trouble(self, update: SessionUpdate, now: float) -> list[Action]:
        detail, grammar = update.error or update.finish_reason, self.generation.grammar
        if update.finish_reason == "grammar_error" and grammar is not None:  # it would be so anywhere
            reason = Reason("impossible", f"the answer cannot follow {grammar.param}: {detail}", grammar.param)
            return self._end(reason, EndAttempt(detail))
        detail = f"{self.placed.address}: {detail}"
        if update.finish_reason != "expired":
            return self._fail(detail, self.placed.decode, now)
        return self._fail(detail, self.placed.prefill or self.placed.decode, now)

    def _emit(self, latest: list[SessionUpdate], now: float) -> list[Action]:
        """Tokens for the client; none before all log-probabilities of the prompt that it asked for are here."""
        updates = self.held + latest
        wants_prompt = self.num_prompt_logprobs is not None
        if not updates or (wants_prompt and len(self.scored) < len(self.generation.prompt_ids) - 1):
            self.held = updates
            return []
        self.held, last = [], updates[-1]
        token_ids = tuple(token for update in updates for token in update.token_ids)
        tokens = Tokens(
            token_ids,
            _reason(last.finish_reason),
            tuple(one for update in updates for one in update.logprobs),
            tuple(self.scored) if wants_prompt else None,
            self._timing(last.timing) if last.finish_reason or not self.emitted else None,
        )
        self.is_prompt_scored = self.is_prompt_scored or wants_prompt
        self.emitted.extend(token_ids)
        if token_ids:
            self.silent_since = now
            self.num_failures = 0  # that workers die one after the other is not the fault of a request that gets on
        if last.finish_reason:
            return [Remember("decode"), tokens, *self._end(None, EndAttempt())]
        if self.is_remembered or not token_ids:
            return [tokens]
        self.is_remembered = True
        return [Remember("decode"), tokens]

    def _timing(self, decode: Timing) -> Timing:
        """Of the whole request, from the decode worker's part. Where decode prefilled, it knows the prompt's times."""
        prompt = self.prefilled or decode
        return replace(
            decode,
            queue_s=self.queue_s,
            grammar_s=self.grammar_s + decode.grammar_s,
            prefill_s=prompt.prefill_s,
            transfer_s=prompt.transfer_s,
            transfer_bytes=prompt.transfer_bytes,
            transport=prompt.transport,
            cached_tokens=min(self.num_cached, len(self.generation.prompt_ids)),
            attempts=self.attempt,
            prefill_reason=self.placed.why,
        )

    def _fail(self, reason: str, culprit: str, now: float, limit: int = MAX_ATTEMPTS) -> list[Action]:
        self.num_failures += 1
        self.avoid.add(culprit)
        end = EndAttempt(reason, is_failure=True)
        if now >= self.deadline:
            return self._end(OUT_OF_TIME, end)
        if self.num_failures >= limit or len(self.stuck) >= MAX_STUCK:
            detail = f"gave up after {max(self.num_failures, len(self.stuck))} attempts; the last: {reason}"
            return self._end(Reason("gave up", detail), end)
        return self._again(end)

    def _again(self, end: EndAttempt) -> list[Action]:
        self.phase = Phase.WAITING
        self.attempt += 1
        return [end]

    def _end(self, failure: Reason | None, *last: EndAttempt) -> list[Action]:
        self.phase = Phase.ENDED
        if self.stuck and failure is not None and failure.kind in ("out of time", "not ready"):
            late = failure.detail or "the request's time (--request-timeout-s) is over"
            failure = Reason("not ready", f"{late}; an attempt was lost because {self.stuck[-1]}")
        self.failure = failure
        return list(last)


def _pack(token_ids: Sequence[int]) -> bytes:
    return pack_tokens(np.array(token_ids, np.int32))


def _reason(finish_reason: str) -> Literal["stop", "length"] | None:
    if not finish_reason:
        return None
    return "stop" if finish_reason == "stop" else "length"
