"""Drafters propose tokens ahead. They only change how fast tokens come: the model checks every draft.

Runs on the engine thread.
"""

import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from decode_worker.speculation.lengths import CostCurve, CostMeter
from decode_worker.speculation.repeats import find_repeats, propose_repeat
from decode_worker.speculation.trees import MOST_BRANCHES, Branches, Choices, find_depth, plant
from engine.batch import ForwardRow
from engine.masks import allowed_words
from engine.runner import Runner
from engine.sampling.noise import build_keys, gumbel_noise
from engine.sampling.sample import NOT_A_NUMBER
from wire.logprobs import TokenLogprobs
from wire.sampling import LEAST_TEMPERATURE, MAX_DRAFT_TOKENS
from worker.chunks import ChunkSizer
from worker.sequences import Sequence

ANY_SLOT = 0  # of the model's states, which what drafts does not touch
NUM_LIKELIEST = 12  # tokens of which noise may make some the choices of a node
MOST_REPEATS = 4  # places that a tree goes on from


@dataclass(frozen=True, slots=True)
class Wanted:
    """Draft up to `count` tokens that may follow the first `end` of `sequence`. Its pages have room for their KV."""

    sequence: Sequence
    end: int  # the step under way computes KV up to here
    count: int  # 0: nothing to draft, only to keep up with the prompt
    is_prompt: bool = False  # the step computes several positions
    acceptance: float | None = None  # of the sequence's drafts, which may be a tree; None: a chain


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafts for one sequence."""

    token_ids: Seq[int] = ()
    parents: Seq[int] = ()  # of a tree, see `ScheduledSequence`; none: a chain
    choices: Choices | None = None  # of the same tokens and others; None: not known
    lead: int | None = None  # how far its own KV goes beyond `end` then; None where it has none, or as before


class Drafter:
    """Drafts what follows sequences; does not modify them."""

    most_drafts = MAX_DRAFT_TOKENS  # of a sequence in a step
    reads_prompts = False  # it computes in steps without drafts, too: with no step in flight, since it measures itself
    branches: Branches | None = None  # of one whose drafts may be trees
    forwards_s = 0.0  # so far of a `propose`, in forwards, which `cost` counts

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        """A draft for each sequence; shorter than asked, or empty, if the drafter has none."""
        raise NotImplementedError

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        """Positions before a step's `begin` that it computes before its first draft; None: it cannot draft yet."""
        return 0

    def cost(self) -> CostCurve | None:
        """Seconds of one more token, by the number of sequences; None if negligible or unknown."""
        return None

    def end_step(self) -> None:
        """An engine step is over, whether it had drafts or not."""


class NgramDrafter(Drafter):
    """Continues from where the last few tokens occurred before. For answers that repeat their prompt or themselves."""

    def __init__(self) -> None:
        self.branches = Branches()

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        """A step with drafts is in flight alone: none is waited for where what is known repeats nothing."""
        is_in_flight = sequence.num_coming > 1  # 1: of the step that is planned
        return None if is_in_flight and not propose_repeat(sequence.tokens, 1) else 0

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        return [self._propose(one) if one.count else Draft() for one in wanted]

    def _propose(self, one: Wanted) -> Draft:
        tokens = one.sequence.tokens
        if one.acceptance is None or self.branches is None:
            return Draft(propose_repeat(tokens, one.count))
        following: dict[tuple[int, ...], list[int]] = {}  # what was drafted |-> what goes on from it
        for found in islice(find_repeats(tokens, one.count), MOST_REPEATS):
            for depth, token in enumerate(found):
                options = following.setdefault(tuple(found[:depth]), [])
                if token not in options:
                    options.append(token)

        def choices(drafted: Seq[int]) -> Seq[int]:
            return following.get(tuple(drafted), ())

        return Draft(*plant(one.count, one.acceptance, self.branches, choices), choices)


class ModelDrafter(Drafter):
    """A small model that runs ahead, one forward a token for all sequences together.

    It chooses with each sequence's own parameters and noise, so that it agrees with the model wherever both find the
    same token best. Its KV lies in the second part of the sequences' pages. What it lacks there (while the model
    prefills, after steps without drafts, in cached pages that have none) it computes before it drafts, at most
    `chunk_tokens` positions of all sequences a step, and no more than fit a step's time.
    """

    reads_prompts = True

    def __init__(self, runner: Runner, meter: CostMeter, chunk_tokens: int) -> None:
        self._runner = runner
        self._meter = meter
        self._chunks = ChunkSizer(chunk_tokens)

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        answers = [Draft()] * len(wanted)
        late, ready, left = [], [], self._chunks.alone
        for i, one in enumerate(wanted):
            begin, end = self._find_begin(one), one.end - 1 if one.count else one.end if one.is_prompt else 0
            count = min(max(end - begin, 0), left)
            left -= count
            if one.count and begin + count >= end:
                ready.append(i)  # its first forward also computes what it lacks
            elif count:
                late.append(ForwardRow(one.sequence.row, begin, count, state_to=ANY_SLOT))
                answers[i] = Draft(lead=begin + count - one.end)
        if late:
            started = time.perf_counter()
            self._runner.launch(late).collect()
            taken = time.perf_counter() - started
            self.forwards_s += taken
            self._chunks.note_step(0, sum(part.count for part in late), taken)
        drafts = self._run_ahead([wanted[i] for i in ready])
        for i, token_ids in zip(ready, drafts, strict=True):
            answers[i] = Draft(token_ids, lead=wanted[i].count - 1)
        return answers

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        return max(begin - sequence.draft_launched, 0)

    def _run_ahead(self, wanted: Seq[Wanted]) -> list[list[int]]:
        """The drafts of each sequence."""
        drafts: list[list[int]] = [[] for _ in wanted]
        for depth in range(max((one.count for one in wanted), default=0)):
            deep = [i for i, one in enumerate(wanted) if one.count > depth]
            started = time.perf_counter()
            output = self._runner.launch([self._next_request(wanted[i], depth) for i in deep]).collect()
            taken = time.perf_counter() - started
            self.forwards_s += taken
            tokens = output.tokens
            if NOT_A_NUMBER in tokens:
                raise ValueError("the draft model's logits are NaN")
            if depth:  # the first forward also computes what is missing
                self._meter.note(len(deep), taken)
            for i, token in zip(deep, tokens, strict=True):
                drafts[i].append(token)
            self._note_likeliest(zip(deep, tokens, output.logprobs, strict=False), wanted, depth)
        return drafts

    def _note_likeliest(
        self, chosen: Iterable[tuple[int, int, TokenLogprobs | None]], wanted: Seq[Wanted], depth: int
    ) -> None:
        """The drafts after `depth` others: of which of `wanted`, the token, the likeliest ones if asked for."""

    def _next_request(self, one: Wanted, depth: int) -> ForwardRow:
        """The forward that drafts after `depth` drafts, which the runner has written behind the sequence's tokens."""
        end = one.end + depth
        begin = end - 1 if depth else self._find_begin(one)
        words = allowed_words(None, one.sequence.forbidden_at(end), self._runner.vocab_size)
        mask = None if words is None else words[None]
        return ForwardRow(
            one.sequence.row, begin, end - begin, num_logits=1, mask=mask, num_drafted=depth, state_to=ANY_SLOT
        )

    def cost(self) -> CostCurve | None:
        return self._meter.curve()

    def end_step(self) -> None:
        self._meter.end_step()

    def _find_begin(self, one: Wanted) -> int:
        """The first position that the draft model computes."""
        return min(one.sequence.draft_launched, one.end - 1)


class HeadDrafter(ModelDrafter):
    """Draft heads (EAGLE-3, Medusa, MTP), which have followed each step of the model: they lack nothing, and the first
    draft needs no forward. The likeliest tokens in place of a chain's drafts make it a tree."""

    reads_prompts = False

    def __init__(self, runner: Runner, meter: CostMeter, chunk_tokens: int, reads_drafts: bool = False) -> None:
        """reads_drafts: what follows a draft depends on it (EAGLE-3, MTP), so nothing is known to follow others than
        the chain's. Medusa's heads guess a place each, whatever goes before it."""
        super().__init__(runner, meter, chunk_tokens)
        self.most_drafts = runner.most_drafts
        self.branches: Branches = Branches(not reads_drafts)
        self._likeliest: list[list[list[int]]] = []  # of each sequence, by depth

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        self._likeliest = [[] for one in wanted if one.count]
        found = iter(self._run_ahead([self._as_deep(one) for one in wanted if one.count]))
        likeliest = iter(self._likeliest)
        return [self._plant(one, next(found), next(likeliest)) if one.count else Draft() for one in wanted]

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        return 0 if sequence.num_steps else None

    def _find_begin(self, one: Wanted) -> int:
        return one.end - 1

    def _as_deep(self, one: Wanted) -> Wanted:
        """As a chain of the depth of its tree."""
        if one.acceptance is None:
            return one
        return replace(one, count=find_depth(one.count, one.acceptance, self.branches, self.most_drafts))

    def _plant(self, one: Wanted, tokens: list[int], likeliest: list[list[int]]) -> Draft:
        if one.acceptance is None:
            return Draft(tokens)

        def choices(drafted: Seq[int]) -> Seq[int]:
            is_known = self.branches.go_on or list(drafted) == tokens[: len(drafted)]
            return likeliest[len(drafted)] if is_known and len(drafted) < len(likeliest) else ()

        return Draft(*plant(one.count, one.acceptance, self.branches, choices), choices)

    def _next_request(self, one: Wanted, depth: int) -> ForwardRow:
        request = super()._next_request(one, depth)
        return request if one.acceptance is None else request._replace(chosen_logprobs=NUM_LIKELIEST)

    def _note_likeliest(
        self, chosen: Iterable[tuple[int, int, TokenLogprobs | None]], wanted: Seq[Wanted], depth: int
    ) -> None:
        for i, token, found in chosen:
            if found is not None:
                self._likeliest[i].append(order_choices(wanted[i], depth, token, found))


def order_choices(one: Wanted, depth: int, token: int, found: TokenLogprobs) -> list[int]:
    """The token that was drafted, then others by what they have with the sequence's temperature and noise.

    Neither penalties nor filters change their order.
    """
    params, position = one.sequence.params, one.end + depth
    scores = np.array(found.top_logprobs)
    if params.sampling.temperature >= LEAST_TEMPERATURE:
        keys = build_keys(np.array([params.sampling.seed], np.uint64), np.array([position]), torch.device("cpu"))
        noise = gumbel_noise(torch.tensor(found.top_ids), keys[0])
        scores = scores / params.sampling.temperature + noise.numpy()
    others = [found.top_ids[i] for i in np.argsort(-scores, kind="stable").tolist()]
    forbidden = one.sequence.forbidden_at(position)
    return [token, *(other for other in others if other != token and other not in forbidden)][:MOST_BRANCHES]


def build_drafter(runner: Runner, meter: CostMeter, chunk_tokens: int, has_kv: bool = True) -> ModelDrafter:
    """Builds the drafter for a draft model or a head. has_kv: pages have its KV. Others: see `ModelDrafter`."""
    if not runner.is_head:
        return ModelDrafter(runner, meter, chunk_tokens)
    return HeadDrafter(runner, meter, chunk_tokens, reads_drafts=has_kv)
