"""A request on its way through the fleet: what its next attempt starts from, and whether there is a next one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gateway.errors import ApiError, bad_request, missed_deadline, not_ready, took_too_long
from gateway.router.engine_client import TokenizedRequest
from gateway.router.worker_view import Role, WorkerView
from wire.messages import pack_tokens
from wire.page_keys import TOKEN_BYTES, PageKey, page_keys, root_key
from wire.retention import ALL_TOKENS, KeptPart, Retention

MAX_ATTEMPTS = 3  # that failed in a row, none of them with a new token
MAX_LOSSES = 10  # the same when the last worker was gone or refused: mostly not the request's fault
MAX_STUCK = 3  # in all, with new tokens or without, that ended at a stuck worker: the request may be what hangs it
MAX_MISTAKES = 2  # about what workers have of the prompt: then it is computed
ADAPTER = " adapter "  # in `Tokens.computes`, before its digest
YIELDING_S = 30.0  # how long it waits in all rather than evict what its key's other sessions have just left
GRAMMAR_PAUSE_S = 0.5  # before a worker is asked again that still compiles the grammar


@dataclass(eq=False)
class AttemptFailed(Exception):  # noqa: N818  # it is mostly not an error: another attempt follows
    """An attempt ended without the whole answer, because of the worker of `role`."""

    # "lost": the worker or its stream is gone. "expired": it got no KV in time. "mistaken": it has less of the prompt
    # than was expected
    why: Literal[
        "no room",
        "no adapter",
        "no slot",
        "compiling",
        "restoring",
        "invalid",
        "absent",
        "failed",
        "lost",
        "expired",
        "mistaken",
    ]
    detail: str
    role: Role = "decode"
    is_stuck: bool = False  # the worker is in a step that does not end
    is_grammar: bool = False  # with "invalid": the grammar is at fault
    param: str = ""  # and of it what comes from this field of the client's; empty: all, or unknown
    is_failure: bool = False  # it counts against the request; set by `Request.go_on`


@dataclass(slots=True, eq=False)
class Request:
    """One request through all its attempts."""

    wanted: TokenizedRequest
    deadline: float  # when it has taken too long
    patience_s: float  # how long it looks for a worker that answers
    silent_since: float  # when its client last got tokens; before the first, when it arrived, or queues again
    first_by: float | None = None  # when its first token must be there
    adapter: str = ""  # content digest of its adapter
    attempt: int = 1
    num_failures: int = 0
    stuck: list[str] = field(default_factory=list)  # why attempts ended whose worker was stuck in a step
    resumes_at: float = 0.0  # when it goes back to the queue, at the earliest
    is_new_again: bool = False  # no retry: a worker had no room, or its grammar was not compiled
    absent_since: float | None = None  # when it first found no worker, since one last took it
    computes: str = field(init=False)  # what has computed what the client has (`WorkerView.computes`); empty: nothing
    emitted: list[int] = field(init=False)  # tokens the client has: never sent again, never taken back
    avoid: set[str] = field(default_factory=set)  # incarnations blamed for failed attempts
    mistaken: set[str] = field(default_factory=set)  # incarnations that had less of the prompt than expected
    num_mistakes: int = 0  # attempts that ended so
    grammar_s: float = 0.0  # waited for its grammar in attempts that ended before it was compiled
    wake_s: float = 0.0  # waited for its model to be awake
    queue_s: float = 0.0  # spent waiting for places in all attempts
    keep_s: float = 0.0  # for which its KV is worth keeping
    is_prompt_scored: bool = False  # the client has the log-probabilities of the prompt
    _prompt: bytes = field(init=False)  # packed
    _began_with: str = field(init=False)  # digest of the adapter that has computed `wanted.emitted`
    # (weights, page_tokens) |-> keys so far, once there is more than the prompt
    _keys: dict[tuple[str, int, int], list[PageKey]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.computes, _, self._began_with = self.wanted.computes.partition(ADAPTER)
        self.emitted = list(self.wanted.emitted)
        memo = self.wanted.memo
        self._prompt = memo.packed = memo.packed or _pack(self.wanted.prompt_ids)

    def hold_adapter(self, digest: str) -> None:
        """Use this adapter from now on. Raises ApiError if its answer began with another one."""
        if self._began_with and digest != self._began_with:
            name = f"adapter '{self.wanted.adapter}'"
            why = f"{name} is {digest} now, and the answer began with {self._began_with}; ask again"
            raise ApiError(409, why, "model", "adapter_changed")
        self.adapter = digest

    def name_computes(self, worker: WorkerView) -> str:
        """`Tokens.computes` of the answer's tokens, if this worker computes them."""
        base = self.computes or worker.computes
        return f"{base}{ADAPTER}{self.adapter}" if self.adapter else base

    def can_use(self, worker: WorkerView) -> bool:
        """Whether the worker has its adapter, and the weights that its answer began with."""
        return worker.can_serve(self.adapter, self.computes)

    @property
    def packed_tokens(self) -> bytes:
        """All tokens so far: what the present attempt starts from."""
        return self._prompt + _pack(self.emitted)

    def page_keys(self, worker: WorkerView) -> Sequence[PageKey]:
        """Keys of the whole pages filled by all tokens so far but the last, whose KV the next step computes.

        As the worker computes them.
        """
        weights, size, num_after = of = worker.weights, worker.page_tokens, worker.key_tokens_after
        keys = self.wanted.memo.keys.setdefault((self.adapter, *of), [])
        if self.emitted:
            keys = self._keys.setdefault(of, list(keys))
        if size and len(keys) < self.num_missing // size:
            parent = keys[-1] if keys else root_key(weights, self.wanted.cache_salt, self.adapter)
            end = (self.num_missing + min(num_after, 1)) * TOKEN_BYTES
            rest = self.packed_tokens[len(keys) * size * TOKEN_BYTES : end]
            first, images = len(keys) * size, [image.span for image in self.wanted.images]
            keys.extend(page_keys(parent, rest, size, num_after, images, first))
        return keys

    @property
    def num_missing(self) -> int:
        """Positions whose KV the present attempt needs before its first step."""
        return len(self.wanted.prompt_ids) + len(self.emitted) - 1

    @property
    def num_left(self) -> int:
        """The most tokens that are still to come."""
        return self.wanted.max_tokens - len(self.emitted)

    @property
    def due(self) -> float:
        """When it is given up: a deadline for the first token never ends an answer that has begun."""
        return self.deadline if self.emitted or self.first_by is None else min(self.first_by, self.deadline)

    @property
    def retention(self) -> Retention | None:
        """The parts whose KV is worth keeping; None: none more than others'."""
        own = [KeptPart(ALL_TOKENS, self.keep_s)] if self.keep_s and self.queue_s < YIELDING_S else []
        parts = [*self.wanted.kept, *own]
        return Retention(self.wanted.owner, parts) if parts else None

    def end_late(self) -> ApiError:
        """The error of a request that is due."""
        return self.end_with(took_too_long() if self.due == self.deadline else missed_deadline())

    @property
    def is_retry(self) -> bool:
        """Whether it goes before new requests."""
        return self.attempt > 1 and not self.is_new_again

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The prompt's log-probabilities that this attempt is to report, as in TokenizedRequest: nothing twice."""
        return None if self.is_prompt_scored else self.wanted.num_prompt_logprobs

    def believes(self, worker: WorkerView) -> bool:
        """Whether what the worker is said to have of the prompt is counted on."""
        return self.num_mistakes < MAX_MISTAKES and worker.incarnation not in self.mistaken

    def emit(self, token_ids: Sequence[int], worker: WorkerView, now: float) -> None:
        """Note that the client gets these tokens."""
        self.emitted.extend(token_ids)
        if not self.computes and (self.emitted or self.is_prompt_scored):
            self.computes = worker.computes
        if token_ids:
            self.silent_since = now
            self.num_failures = 0  # that workers die one after the other is not the fault of a request that gets on

    def go_on(self, failed: AttemptFailed, decode: str, prefill: str | None, now: float) -> ApiError | None:
        """Prepare for another attempt; returns the request's error where there is to be none.

        `decode`, `prefill`: incarnations of the failed attempt's workers.
        """
        self.attempt += 1
        self.is_new_again = False
        culprit = prefill if failed.role == "prefill" and prefill else decode
        match failed.why:
            case "no room" | "no adapter" | "no slot":
                self.is_new_again = not self.emitted and not self.num_failures  # it waits for its turn as before
                return None
            case "mistaken" if self.num_mistakes < MAX_MISTAKES:
                self.num_mistakes += 1
                self.mistaken.add(decode)
                return None
            case "compiling" | "restoring":
                return self._pause(now)
            case "invalid" if not self.emitted:  # later it is not the client's fault: another worker may do
                return self.end_with(self._impossible(failed))
            case "absent" if culprit == decode:
                return self._look_on(failed.detail, decode, now)
            case "lost":
                self.stuck += [failed.detail] if failed.is_stuck else []
                limit = MAX_LOSSES
            case "expired":
                limit = MAX_ATTEMPTS
            case _:
                limit = MAX_ATTEMPTS if culprit == decode else MAX_LOSSES  # at worst decode prefills by itself
        failed.is_failure = True
        self.num_failures += 1
        self.avoid.add(culprit)
        if now >= self.due:
            return self.end_late()
        if self.num_failures >= limit or len(self.stuck) >= MAX_STUCK:
            count = max(self.num_failures, len(self.stuck))
            message = f"gave up after {count} attempts; the last: {failed.detail}"
            return ApiError(503, message, code="failed", retry_after_s=1)
        return None

    def _impossible(self, failed: AttemptFailed) -> ApiError:
        grammar = self.wanted.grammar
        if not failed.is_grammar or grammar is None:
            return bad_request(failed.detail, None)
        param = failed.param or grammar.param
        return bad_request(f"{param} cannot be used: {failed.detail}", param)

    def _pause(self, now: float) -> ApiError | None:
        """The grammar is being compiled, or saved KV is being read: others get the places meanwhile.

        They go first unless the client has tokens.
        """
        self.absent_since = None
        self.resumes_at = now + GRAMMAR_PAUSE_S
        if self.resumes_at >= self.due:
            return self.end_late()
        if not self.emitted:
            self.is_new_again, self.silent_since = True, self.resumes_at
        return None

    def _look_on(self, detail: str, decode: str, now: float) -> ApiError | None:
        """Prepare for another attempt as the worker was gone: nothing was tried, so only time counts."""
        self.avoid.add(decode)
        if self.absent_since is None:
            self.absent_since = now
        if now >= self.due:
            return self.end_late()
        if now - self.absent_since >= self.patience_s:
            return self.end_with(not_ready(f"found no worker for {self.patience_s:g} s; the last: {detail}"))
        return None

    def end_with(self, error: ApiError) -> ApiError:
        """The request's error: one that is about time names the stuck worker that took it."""
        if not self.stuck or error.code not in ("timeout", "not_ready"):
            return error
        late = "the request's time (--request-timeout-s) is over" if error.code == "timeout" else error.message
        return not_ready(f"{late}; an attempt was lost because {self.stuck[-1]}")


def _pack(token_ids: Sequence[int]) -> bytes:
    return pack_tokens(np.array(token_ids, np.int32))
