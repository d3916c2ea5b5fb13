"""The sequences of a worker: their progress and pages. Values; scheduler.py changes them.

One sequence's life, and what frees its pages:

        admit ─┬► RECEIVING ──all KV here──► ACTIVE ──last token──► gone
               │     ▲ │                     ▲   │ ▲
               │     └─┘ offers, one read    │   │ └── resume, when pages can be given out
               │         at a time           │   └───► PREEMPTED (holds no page; what is not cached is computed again)
               └── nothing to receive ───────┘
                     └─ abort, lease end, error: from every phase ──► ENDED ──► gone

    ENDED lasts while a copy, a launched step or a Run call still needs the pages; they are released after all of these.
    A prefill worker's sequence has no answer: it stays ACTIVE with nothing missing until its Run call ends it.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from wire.logprobs import TokenLogprobs
from wire.page_keys import PageKey
from wire.timing import NOTHING_READ, ReadTokens, Timing
from worker.params import SequenceParams


class Phase(Enum):
    RECEIVING = "receiving"
    ACTIVE = "active"
    PREEMPTED = "preempted"
    ENDED = "ended"


class AnswerFailedError(Exception):
    """An answer cannot continue on any worker."""

    finish_reason = "error"


class HeldAdapter(NamedTuple):
    """The adapter that computes a sequence."""

    slot: int  # of the engine
    key: str  # of its load


NO_ADAPTER = HeldAdapter(-1, "")


class SequenceState:
    """A sequence's share of the model's recurrent state: nothing, unless states/ says so."""

    __slots__ = ()

    @property
    def is_held(self) -> bool:
        """Whether its next step begins on a state, which drafts change."""
        return False

    @property
    def targets(self) -> list[int]:
        """Slots that may be written to."""
        return []


NO_STATE = SequenceState()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """One sequence's progress. Only scheduler and KV manager change it, except for the last two fields set here."""

    id: int
    params: SequenceParams
    phase: Phase
    tokens: "array[int]"  # prompt, then the tokens generated and collected
    keys: list[PageKey]  # of the first whole pages, prompt pages first
    pages: list[int]
    admitted_at: float
    deadline: float  # end of the lease while RECEIVING, renewed by Renew and every accepted offer
    scored: int  # log-probabilities of tokens[1:scored] are known after all launched steps, or not needed here
    num_cached: int = 0  # prompt tokens whose KV was cached at admission
    read_tokens: ReadTokens = NOTHING_READ  # of those, the ones read for it
    num_named: int = 0  # the first num_named pages have their keys
    computed: int = 0  # KV of positions [0, computed) is in `pages`
    launched: int = 0  # the same, after all launched steps
    num_coming: int = 0  # tokens that launched steps will choose, beside those of right drafts
    num_steps_launched: int = 0  # not yet collected: they use `pages`
    is_read: bool = False  # a copy into `pages` is running
    is_kept: bool = False  # a Run call offers `pages`
    draft_computed: int = 0  # the draft model's KV of positions [0, draft_computed) is in `pages`; may lag
    draft_launched: int = 0  # the same, after launched catching up
    num_drafted: int = 0
    num_accepted: int = 0
    kv_at: float | None = None  # when all KV of the prompt was here
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_steps: int = 0  # steps that yielded tokens
    num_preemptions: int = 0
    state: SequenceState = NO_STATE  # set by `States`; none while it holds no page
    adapter: HeldAdapter = NO_ADAPTER  # from admission on
    row: int = -1  # in the engine's InputBatch, from the first step on
    num_pages_in_row: int = -1  # `pages` already in the row; -1: it is to be opened. Set by the loop, like the next
    started_at: float | None = None  # start of the first step
    most_tokens: int = field(init=False)  # prompt and answer
    answer_begin: int = field(init=False)  # tokens[answer_begin:] is the answer, with what earlier attempts emitted

    def __post_init__(self) -> None:
        self.most_tokens = self.params.num_prompt + self.params.max_tokens
        self.answer_begin = self.params.num_prompt - self.params.num_emitted

    @property
    def is_waiting(self) -> bool:
        """Whether it is preempted, or active without a first step."""
        is_begun = self.kv_at is not None or self.launched > self.num_cached
        return self.phase is Phase.PREEMPTED or (self.phase is Phase.ACTIVE and not is_begun)

    @property
    def num_missing(self) -> int:
        """Positions to launch. An answer always lacks one: its last token, whose step yields the next."""
        if not self.params.max_tokens:
            return self.params.end - self.launched
        num_tokens = len(self.tokens) + self.num_coming
        return num_tokens - self.launched if num_tokens < self.most_tokens else 0

    @property
    def num_known(self) -> int:
        """Positions whose KV is wanted and whose tokens are known: all but an answer's last one."""
        return len(self.tokens) - 1 if self.params.max_tokens else self.params.end

    def num_to_score(self, count: int) -> int:
        """How many prompt tokens, from tokens[scored] on, get log-probabilities in the next `count` positions."""
        end = self.params.end
        return 0 if self.scored > end else max(min(self.launched + count, end) + 1 - self.scored, 0)

    def num_until_scored(self, num_scored: int) -> int:
        """How many positions to compute next so that `num_to_score` is at most `num_scored`."""
        is_scored = self.scored > self.params.end
        return self.num_missing if is_scored else self.scored - 1 - self.launched + num_scored

    def forbidden_at(self, position: int) -> frozenset[int]:
        """Tokens that are not allowed at `position`: stop tokens, while the answer is shorter than min_tokens."""
        is_short = position - self.answer_begin < self.params.min_tokens
        return self.params.stop_token_ids if is_short else frozenset()

    def keep(self, tokens: Seq[int]) -> tuple[Seq[int], str]:
        """The leading `tokens` that belong to the answer, and the finish_reason if it ends with them."""
        room = self.most_tokens - len(self.tokens)
        kept = tokens[:room]
        stop_token_ids = self.params.stop_token_ids
        if not stop_token_ids.isdisjoint(kept):
            at = next(at for at, token in enumerate(kept) if token in stop_token_ids)
            return kept[: at + 1], "stop"
        return kept, "length" if len(tokens) >= room else ""

    def timing(self, now: float) -> Timing:
        kv_at = now if self.kv_at is None else self.kv_at
        first_at = kv_at if self.first_token_at is None else self.first_token_at
        last_at = first_at if self.last_token_at is None else self.last_token_at
        return Timing(
            grammar_s=self.params.grammar_s,
            prefill_s=kv_at - self.admitted_at,
            first_step_s=first_at - kv_at,
            decode_s=last_at - first_at,
            cached_tokens=self.num_cached,
            read_tokens=self.read_tokens,
            draft_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            steps=self.num_steps,
            preemptions=self.num_preemptions,
        )


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence's part of a step: `count` positions from `begin` on. The decode role adds drafts and masks."""

    sequence: Sequence
    begin: int
    count: int
    num_scored: int = 0  # prompt tokens to score, from the sequence's `scored` on
    wants_token: bool = False  # the positions reach the last token, so the step samples the next one
    is_answer: bool = False  # of an answer: one position, or a few that are computed again
    num_drafts: int = 0  # drafts allowed
    drafts: Seq[int] = ()  # in the step, which is in flight alone
    parents: Seq[int] = ()  # of each draft: 0, or 1 + another's index; none: each follows the one before it
    draft_lead: int | None = None  # how far the draft model's KV goes beyond `count` positions; None: unchanged
    slots: tuple[int, int] = (-1, -1)  # with the state before the step, and for that after it
    is_dropped: bool = False  # it was launched, and its result is not used
    mask: Any = None  # [1 + drafts, ceil(V / 32)] int32: allowed tokens; None: all
    path: Seq[int] = ()  # what it chose after the right drafts is the answer's, by index: 0, then that of each draft

    @property
    def num_chosen(self) -> int:
        """Tokens that the engine samples: one after the positions, and one after each draft."""
        return len(self.drafts) + 1 if self.wants_token else 0

    def depths(self) -> Seq[int]:
        """How many drafts go before each chosen token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths if self.parents else range(self.num_chosen)


@dataclass(slots=True)
class Update:
    """The change of one sequence by a step, or by its end, for its gateway or its Run call."""

    sequence: Sequence
    token_ids: Seq[int] = ()
    finish_reason: str = ""  # "stop", "length", "error", "grammar_error", "expired" (no KV came); empty: not ended
    error: str = ""
    logprobs: Seq[TokenLogprobs] = ()  # one per token, if requested
    prompt_logprobs: Seq[TokenLogprobs] = ()  # of the next prompt tokens, if requested here
    timing: Timing | None = None  # with the last update
