"""Drafters propose tokens ahead. They only change how fast tokens come: the model checks every draft.

Runs on the engine thread.
"""

import time
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from decode_worker.speculation.lengths import CostCurve, CostMeter
from engine.batch import ForwardRow
from engine.masks import allowed_words
from engine.runner import Runner
from engine.sampling.sample import NOT_A_NUMBER
from wire.sampling import MAX_DRAFT_TOKENS
from worker.chunks import ChunkSizer
from worker.sequences import Sequence

TOKEN_BYTES = array("i").itemsize
ANY_SLOT = 0  # of the model's states, which what drafts does not touch
NGRAM_WINDOW = 8192  # tokens searched for a repeat: 40 microseconds
LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # tokens; one alone repeats by chance all the time


@dataclass(frozen=True, slots=True)
class Wanted:
    """Draft up to `count` tokens that may follow the first `end` of `sequence`. Its pages have room for their KV."""

    sequence: Sequence
    end: int  # the step under way computes KV up to here
    count: int  # 0: nothing to draft, only to keep up with the prompt
    is_prompt: bool = False  # the step computes several positions


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter gives."""

    token_ids: Seq[int] = ()
    parents: Seq[int] = ()  # of a tree, see `ScheduledSequence`; none: a chain
    lead: int | None = None  # how far its own KV goes beyond `end` then; None where it has none, or as before


class Drafter:
    """Drafts what follows sequences; does not modify them."""

    most_drafts = MAX_DRAFT_TOKENS  # of a sequence in a step
    reads_prompts = False  # it computes in steps without drafts, too: with no step in flight, since it measures itself

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

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        """A step with drafts is in flight alone: none is waited for where what is known repeats nothing."""
        is_in_flight = sequence.num_coming > 1  # 1: of the step that is planned
        return None if is_in_flight and not propose_repeat(sequence.tokens[-NGRAM_WINDOW:], 1) else 0

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        return [
            Draft(propose_repeat(one.sequence.tokens[-NGRAM_WINDOW:], one.count)) if one.count else Draft()
            for one in wanted
        ]


def propose_repeat(tokens: "array[int]", count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier place where the sequence's last tokens stand.

    `tokens`: array("i"). The longest match wins, among equals the latest. A place near the end, as in "ababab", is read
    on into what it proposes itself. Empty when nothing repeats.
    """
    history = tokens.tobytes()
    for size in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
        begin = _find_last(history, history[-size * TOKEN_BYTES :])
        if begin is not None:
            found = list(tokens[begin + size : begin + size + count])
            while len(found) < count:
                found.append(found[begin + size - len(tokens)])
            return found
    return []


def _find_last(history: bytes, pattern: bytes) -> int | None:
    """Index of the last token at which `pattern` begins, its own place at the end excepted."""
    end = len(history) - 1
    while (at := history.rfind(pattern, 0, end)) >= 0:
        if at % TOKEN_BYTES == 0:
            return at // TOKEN_BYTES
        end = at + len(pattern) - 1  # a match across token borders is none
    return None


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
            self._chunks.note_step(0, sum(part.count for part in late), time.perf_counter() - started)
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
            tokens = self._runner.launch([self._next_request(wanted[i], depth) for i in deep]).collect().tokens
            if NOT_A_NUMBER in tokens:
                raise ValueError("the draft model's logits are NaN")
            if depth:  # the first forward also computes what is missing
                self._meter.note(len(deep), time.perf_counter() - started)
            for i, token in zip(deep, tokens, strict=True):
                drafts[i].append(token)
        return drafts

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
    """A draft head (EAGLE-3, Medusa, MTP), which has followed each step of the model: it lacks nothing, and its first
    draft needs no forward."""

    reads_prompts = False

    def __init__(self, runner: Runner, meter: CostMeter, chunk_tokens: int) -> None:
        super().__init__(runner, meter, chunk_tokens)
        self.most_drafts = runner.most_drafts

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        drafts = iter(self._run_ahead([one for one in wanted if one.count]))
        return [Draft(next(drafts)) if one.count else Draft() for one in wanted]

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        return 0 if sequence.num_steps else None

    def _find_begin(self, one: Wanted) -> int:
        return one.end - 1


def build_drafter(runner: Runner, meter: CostMeter, chunk_tokens: int) -> ModelDrafter:
    """Of a draft model or a head. Parameters: see `ModelDrafter`."""
    kind = HeadDrafter if runner.is_head else ModelDrafter
    return kind(runner, meter, chunk_tokens)
