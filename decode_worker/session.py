"""A session of a decode worker: one reservation, its tokens and its pages. Pure values; session_table.py changes them.

One session's life, and what frees its pages:

    reserve ─┬► RECEIVING ───all KV here───► ACTIVE ──last token──► gone   (ACTIVE at once when nothing is awaited:
             │     ▲                         ▲ │  ▲                        a prompt of one token, or computed here)
             │     └ offers, one read        │ │  └ resume, when pages are free
             │       at a time               │ └► PREEMPTED (holds no page; its KV is computed again)
             │                               │        ▲
             └► SHARING (holds no page) ─────┘────────┘ no page was free when its leader had all KV
                           its leader has all KV
                    └─ abort, lease end, error, leader's end: from every phase ──► ENDED ──► gone

ENDED lasts while a copy or an engine step still touches the pages; they are freed when both are over.

A session that shares waits for its *leader*, another session with the same prompt. KV of the prompt is the positions
[0, limit), limit being the prompt's length less one, and is never written again once it is there. So whole pages of
it have several holders, and the last one, if only partly filled, is copied: both write their own answer into it.

    leader    [ whole page ][ whole page ][ part | answer ... ]
                    │             │            │ copied before the first step
    sharer    [    same    ][    same    ][ part | answer ... ]
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from decode_worker.grammar.matcher import Grammar, Matcher
from decode_worker.speculation.lengths import Acceptance
from engine.choice import TokenLogprobs
from engine.history import History
from engine.sampling import SamplingParams


class Phase(Enum):
    RECEIVING = "receiving"
    SHARING = "sharing"
    ACTIVE = "active"
    PREEMPTED = "preempted"
    ENDED = "ended"


class OfferRefusedError(Exception):
    """An offer that the session does not want. `reason` is one word, as in OfferResponse.reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class NothingToShareError(Exception):
    """`share_with` names no open session with the same prompt."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a gateway asks for. ValueError at birth names a value that does not fit the others."""

    request_id: str
    attempt: int
    gateway: str
    handle: int
    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    local_prefill_max_tokens: int
    num_emitted: int = 0  # the last so many of prompt_ids are answer
    min_tokens: int = 0  # an answer with fewer tokens cannot be stopped
    num_logprobs: int | None = None  # tell each token's log-probability and those of so many likely ones
    num_prompt_logprobs: int | None = None  # the same of the prompt's tokens
    share_with: int = 0  # handle of the session whose prompt's KV to take over; 0: none
    drafter: str = "off"  # who guesses ahead
    max_draft_tokens: int = 0  # in one step
    grammar: Grammar | None = None  # what the answer must match

    def __post_init__(self) -> None:
        if self.num_emitted >= len(self.prompt_ids):
            raise ValueError(f"num_emitted is {self.num_emitted}, expected less than {len(self.prompt_ids)} prompt_ids")
        longest = self.num_emitted + self.max_tokens
        if self.min_tokens > longest:
            raise ValueError(f"min_tokens is {self.min_tokens}, but the answer has at most {longest} tokens")
        if self.share_with and self.num_prompt_logprobs is not None:
            raise ValueError(
                f"share_with is {self.share_with} and num_prompt_logprobs {self.num_prompt_logprobs}: "
                "a prompt is computed where its log-probabilities are told"
            )


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a session's time went, as in SessionTiming."""

    kv_seconds: float
    first_step_seconds: float
    decode_seconds: float
    steps: int
    preemptions: int
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One reservation. Changed only by SessionTable, but for the engine thread's `matcher` and `history`."""

    id: int
    wanted: Reservation
    phase: Phase
    tokens: list[int]  # prompt, then what was generated
    pages: list[int]  # the first ones perhaps shared
    reserved_at: float
    deadline: float  # end of the lease while RECEIVING, renewed by Renew and every accepted offer
    scored: int  # the log-probabilities of tokens[1:scored] were told, or nobody here is to tell them
    leader_id: int = 0  # session whose prompt's KV it waits for while SHARING
    copy: tuple[int, int] | None = None  # (source, target): pages to copy before its next step; holds the source too
    computed: int = 0  # KV of positions [0, computed) is in `pages`, once the copy is done
    is_read: bool = False  # a copy into `pages` is under way
    is_stepped: bool = False  # an engine step works on `pages`
    kv_at: float | None = None  # when all KV of the prompt was here
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_steps: int = 0  # that gave tokens
    num_preemptions: int = 0
    draft_computed: int = 0  # the draft model's KV of positions [0, draft_computed) is in `pages`; may lag behind
    acceptance: Acceptance = field(default_factory=Acceptance)
    num_drafted: int = 0
    num_accepted: int = 0
    matcher: Matcher | None = None  # how far the answer has come in its grammar; the engine thread's alone
    history: History | None = None  # counts of `tokens`, for penalties; trails behind; the engine thread's alone

    @property
    def request_id(self) -> str:
        return self.wanted.request_id

    @property
    def attempt(self) -> int:
        return self.wanted.attempt

    @property
    def gateway(self) -> str:
        return self.wanted.gateway

    @property
    def handle(self) -> int:
        """What the gateway calls it."""
        return self.wanted.handle

    @property
    def sampling(self) -> SamplingParams:
        return self.wanted.sampling

    @property
    def num_prompt(self) -> int:
        return len(self.wanted.prompt_ids)

    @property
    def limit(self) -> int:
        """KV of positions [0, limit) is the prompt's: its last token is the first step."""
        return self.num_prompt - 1

    @property
    def max_total(self) -> int:
        """Most tokens, prompt included."""
        return self.num_prompt + self.wanted.max_tokens

    @property
    def answer_begin(self) -> int:
        """tokens[answer_begin:] is the answer, what earlier attempts emitted included."""
        return self.num_prompt - self.wanted.num_emitted

    @property
    def num_missing(self) -> int:
        """Positions without KV. The last token always is one: its step gives the next token."""
        return len(self.tokens) - self.computed

    @property
    def held_pages(self) -> list[int]:
        """All that it counts as a holder of."""
        return self.pages if self.copy is None else [*self.pages, self.copy[0]]

    @property
    def most_guesses(self) -> int:
        """Tokens that may be guessed ahead in one step: the step itself gives one more."""
        return max(min(self.wanted.max_draft_tokens, self.max_total - len(self.tokens) - 1), 0)

    def num_to_score(self, count: int) -> int:
        """How many prompt tokens, from tokens[scored] on, the next `count` positions tell the log-probabilities of."""
        return max(min(self.computed + count, self.limit) + 1 - self.scored, 0)

    def num_until_scored(self, num_scored: int) -> int:
        """How many positions to compute next for `num_to_score` to be at most `num_scored`."""
        is_scored = self.scored == self.num_prompt
        return self.num_missing if is_scored else self.scored - 1 - self.computed + num_scored

    def forbidden_at(self, position: int) -> frozenset[int]:
        """Tokens that must not stand at `position`, where an answer would be too short if it stopped."""
        is_short = position - self.answer_begin < self.wanted.min_tokens
        return self.wanted.stop_token_ids if is_short else frozenset()

    def count_tokens(self) -> History | None:
        """The history, brought up to all of `tokens`; None without penalties. For the engine thread."""
        if not self.sampling.has_penalties:
            return None
        if self.history is None:
            self.history = History(self.sampling, self.answer_begin)
        self.history.follow(self.tokens)
        return self.history

    def keep(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Those of the new `tokens` that belong to the answer, and the finish_reason if it ends with them."""
        room = self.max_total - len(self.tokens)
        for at, token in enumerate(tokens[:room]):
            if token in self.wanted.stop_token_ids:
                return list(tokens[: at + 1]), "stop"
        return list(tokens[:room]), "length" if len(tokens) >= room else ""

    def timing(self, now: float) -> Timing:
        kv_at = now if self.kv_at is None else self.kv_at
        first_at = kv_at if self.first_token_at is None else self.first_token_at
        last_at = first_at if self.last_token_at is None else self.last_token_at
        return Timing(
            kv_at - self.reserved_at, first_at - kv_at, last_at - first_at, self.num_steps, self.num_preemptions,
            self.num_drafted, self.num_accepted,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guessed:
    """What a step guessed ahead for a session."""

    drafted: int  # tokens
    tried: int  # the same, or 1 when guesses were wanted and none came to mind
    draft_computed: int | None  # how far the draft model's KV goes, guesses included; None: as before


NO_GUESSES = Guessed(0, 0, None)


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one session for its gateway, as in SessionDelta."""

    gateway: str
    handle: int
    attempt: int
    token_ids: tuple[int, ...]
    finish_reason: str = ""  # at the end "stop", "length", "error", "grammar_error", or "expired" when no KV came
    error: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the next prompt tokens, if they are told here
    timing: Timing | None = None  # with the last news
