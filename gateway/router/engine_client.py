"""The border between text and workers: a request in token ids, and the tokens that come back."""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gateway.router.attempt_record import AttemptRecord
from wire.images import ImageSpan
from wire.logprobs import TokenLogprobs
from wire.names import Speculate
from wire.page_keys import PageKey
from wire.retention import KeptPart
from wire.sampling import SamplingParams
from wire.timing import Timing

FinishReason = Literal["stop", "length"]
DEFAULT_PRIORITY = 5  # of 0, which goes first, to 9
# of a model's workers; failed: like asleep, the last wake failed
State = Literal["awake", "falling asleep", "asleep", "waking", "failed"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that the whole answer must match. Compiled, and perhaps refused, by the decode worker."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "structural_tag"]
    text: str  # empty for json_object
    param: str  # the request's field it comes from, for errors
    warnings: tuple[str, ...] = ()  # what answers may disregard of it, for the client


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are drafted. Never changes the tokens."""

    drafter: Speculate = "auto"
    max_draft_tokens: int = 0  # 0 leaves it to the worker


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image in a prompt."""

    span: ImageSpan
    data: bytes  # the file


@dataclass(slots=True, eq=False)
class PromptMemo:
    """Values that the router has computed from a prompt, shared by the choices that answer it."""

    packed: bytes = b""
    # (adapter, weights, page_tokens, tokens after) |-> keys of its whole pages
    keys: dict[tuple[str, str, int, int], list[PageKey]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request for one answer, in tokens."""

    request_id: str
    prompt_ids: tuple[int, ...]  # at least one
    max_tokens: int  # at least one; prompt and answer fit the context
    sampling: SamplingParams
    stop_token_ids: frozenset[int]  # the model's own (unless ignore_eos) and the request's
    min_tokens: int = 0  # before a stop token may come; at most max_tokens
    num_logprobs: int | None = None  # log-probabilities of the tokens, and of this many most likely ones; None: none
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens
    grammar: Grammar | None = None
    speculation: Speculation = Speculation()
    cache_salt: str = ""  # KV is shared only between prompts with the same salt
    priority: int = DEFAULT_PRIORITY
    age_s: float = 0.0  # since its arrival, when `generate` is called
    deadline_s: float | None = None  # its first token must come within so many seconds of its arrival
    call: str = ""  # id of the client's request, to which this is one of the answers; empty: `request_id`
    session: str = ""  # name of the conversation that it is a turn of; empty: unknown
    owner: str = ""  # short name of the key whose share of the service it counts for
    images: tuple[PromptImage, ...] = ()  # in the prompt, by position
    kept: tuple[KeptPart, ...] = ()  # parts of the prompt that its client marks
    adapter: str = ""  # name of the adapter (LoRA) that computes it; empty: the base model alone
    emitted: tuple[int, ...] = ()  # tokens that its client has already: the answer goes on behind them
    computes: str = ""  # what has computed those (`Tokens.computes`)
    memo: PromptMemo = field(default_factory=PromptMemo, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The next part of one answer."""

    token_ids: tuple[int, ...]  # new tokens in order, a final stop token included; may be empty at the end
    finish_reason: FinishReason | None  # set exactly once, on the last part
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    # of prompt_ids[1:], once, with the first part, when asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    # with the first part, as far as it is known (a stop string may end the rest unseen), and with the last, in full
    timing: Timing | None = None
    computes: str = ""  # what has computed it: `WorkerView.computes`, and which adapter
    vector: bytes = b""  # float32 little-endian, of a model without answers: then it has no tokens, and is the last


@dataclass(slots=True, eq=False)
class Admitted:
    """A request that the queue has let in, until the block of `EngineClient.admit` ends."""

    num_unplaced: int  # choices that count as waiting and have not been generated yet; changed by the router only
    notes: list[str] = field(default_factory=list)  # what it got less of than asked for, for the client

    def note(self, text: str) -> None:
        """Add a note, once for all choices."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the service is."""

    num_inside: int  # requests that are not over
    num_waiting: int  # choices that wait for a worker
    num_places: int  # on decode workers that are alive
    num_free: int  # of these, on workers with free pages


class EngineClient(Protocol):
    """The engine as the gateway sees it: everything below the text."""

    def admit(self, num_choices: int) -> AbstractContextManager[Admitted]:
        """Let a request into the queue with all its choices, or with none: once per request, around all of `generate`.

        Until the block ends, each choice counts as waiting until it runs on a worker, and none is refused any more
        because the queue is full. Raises errors.ApiError on entry: 429 when the queue has no room, 503 while draining.
        """

    def generate(
        self, request: TokenizedRequest, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """Stream one choice of an admitted request. Closing the iterator (aclose) ends the work everywhere and frees
        its pages.

        `attempts`: gets a record of each attempt.

        Raises errors.ApiError: 400 when no worker can take it, 503 when no worker can serve it, 504 when it takes too
        long.
        """

    def load(self) -> Load:
        """The load now, of this gateway's requests and all workers."""

    def readiness(self) -> str | None:
        """Why the service is not ready: the first obstacle to a request for the base model or any adapter.

        None when it is, also where the model is asleep: the next request wakes it.
        """

    def can_serve(self, adapter: str = "") -> bool:
        """Whether a request, for the base model or an adapter, would be served now, and not first wait for workers."""
