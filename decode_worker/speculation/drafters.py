"""Drafters propose tokens ahead. They only change how fast tokens come: the model checks every draft.

Runs on the engine thread.
"""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.lengths import CostCurve
from decode_worker.speculation.ngram import propose_repeat
from engine.batch import ForwardRow
from engine.runner import Runner
from engine.sampling.logits import NOT_A_NUMBER, allowed_words
from worker.chunks import ChunkSizer
from worker.sequences import Sequence

NGRAM_WINDOW = 8192  # tokens searched for a repeat: 40 microseconds


@dataclass(frozen=True, slots=True)
class Wanted:
    """Draft up to `count` tokens that may follow those of `sequence`. Its pages have room for their KV."""

    sequence: Sequence
    end: int  # the step under way computes a prompt's KV up to here; 0: none
    count: int  # 0: nothing to draft, only to keep up with the prompt


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter gives."""

    token_ids: Seq[int] = ()
    draft_computed: int | None = None  # how far its own KV goes now; None where it has none, or as before


class Drafter(Protocol):
    """Drafts what follows sequences; does not modify them."""

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        """A draft for each sequence; shorter than asked, or empty, if the drafter has none."""
        ...

    def cost(self) -> CostCurve | None:
        """Seconds of one more token, by the number of sequences; None if negligible or unknown."""
        ...

    def end_step(self) -> None:
        """An engine step is over, whether it had drafts or not."""
        ...


class NgramDrafter:
    """Continues from where the last few tokens occurred before. For answers that repeat their prompt or themselves."""

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        return [Draft(_repeat(one)) if one.count else Draft() for one in wanted]

    def cost(self) -> CostCurve | None:
        return None

    def end_step(self) -> None:
        pass


def _repeat(one: Wanted) -> tuple[int, ...]:
    return tuple(propose_repeat(one.sequence.tokens[-NGRAM_WINDOW:], one.count))


class ModelDrafter:
    """A small model that runs ahead, one forward a token for all sequences together.

    It chooses with each sequence's own parameters and noise, so that it agrees with the model wherever both find the
    same token best. Its KV lies in the second part of the sequences' pages. What it lacks there (while the model
    prefills, after steps without drafts, in cached pages that have none) it computes before it drafts, at most
    `chunk_tokens` positions of all sequences a step, and no more than fit a step's time.
    """

    def __init__(self, runner: Runner, meter: CostMeter, chunk_tokens: int) -> None:
        self._runner = runner
        self._meter = meter
        self._chunks = ChunkSizer(chunk_tokens)

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        answers = [Draft()] * len(wanted)
        late, ready, left = [], [], self._chunks.alone
        for i, one in enumerate(wanted):
            begin, end = one.sequence.draft_computed, len(one.sequence.tokens) - 1 if one.count else one.end
            count = min(max(end - begin, 0), left)
            left -= count
            if one.count and begin + count >= end:
                ready.append(i)  # its first forward also computes what it lacks
            elif count:
                late.append(ForwardRow(one.sequence.row, begin, count))
                answers[i] = Draft((), begin + count)
        if late:
            started = time.perf_counter()
            self._runner.launch(late).collect()
            self._chunks.note_step(0, sum(part.count for part in late), time.perf_counter() - started)
        drafts = self._run_ahead([wanted[i] for i in ready])
        for i, tokens in zip(ready, drafts, strict=True):
            answers[i] = Draft(tokens, len(wanted[i].sequence.tokens) + len(tokens) - 1)
        return answers

    def _run_ahead(self, wanted: Seq[Wanted]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        for depth in range(max((one.count for one in wanted), default=0)):
            deep = [i for i, one in enumerate(wanted) if one.count > depth]
            started = time.perf_counter()
            answers = self._runner.launch([self._next_request(wanted[i].sequence, depth) for i in deep]).collect()
            if NOT_A_NUMBER in answers.tokens:
                raise ValueError("the draft model's logits are NaN")
            if depth:  # the first forward also computes what is missing
                self._meter.note(len(deep), time.perf_counter() - started)
            for i, token in zip(deep, answers.tokens, strict=True):
                drafts[i].append(token)
        return drafts

    def _next_request(self, sequence: Sequence, depth: int) -> ForwardRow:
        """The forward that drafts after `depth` drafts, which the runner has written behind the sequence's tokens."""
        end = len(sequence.tokens) + depth
        begin = end - 1 if depth else sequence.draft_computed
        words = allowed_words(None, sequence.forbidden_at(end), self._runner.vocab_size)
        mask = None if words is None else words[None]
        return ForwardRow(sequence.row, begin, end - begin, num_logits=1, mask=mask, num_drafted=depth)

    def cost(self) -> CostCurve | None:
        return self._meter.curve()

    def end_step(self) -> None:
        self._meter.end_step()
