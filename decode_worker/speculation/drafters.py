"""Who guesses ahead. A drafter only ever changes how fast tokens come: every guess is checked by the model.

Runs on the engine thread. Trained heads would be one more drafter.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_worker.session import Session
from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.lengths import CostCurve
from decode_worker.speculation.ngram import propose_repeat
from engine.batch import SequenceSlice
from engine.choice import Choice
from engine.runner import Runner

NGRAM_WINDOW = 8192  # tokens searched for a repeat: 40 microseconds


@dataclass(frozen=True, slots=True)
class Wanted:
    """Guess up to `count` tokens that may follow those of `session`. Its pages have room for their KV."""

    session: Session
    end: int  # the step under way computes the model's KV up to here
    count: int  # 0: nothing to guess, only to keep up


@dataclass(frozen=True, slots=True)
class Guess:
    """What a drafter gives."""

    token_ids: tuple[int, ...] = ()
    draft_computed: int | None = None  # how far its own KV goes now; None where it has none


class Drafter(Protocol):
    """Guesses what follows sequences. Does not modify the sessions."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Guess]:
        """One guess for each, shorter or empty where nothing comes to mind."""
        ...

    def cost(self) -> CostCurve | None:
        """Seconds of one more token for so many sequences at once; None when that is next to nothing, or not known."""
        ...

    def end_step(self) -> None:
        """An engine step is over, whether it had guesses or not."""
        ...


class NgramDrafter:
    """Reads on where the last few tokens stood before. For answers that repeat their prompt or themselves."""

    def propose(self, wanted: Sequence[Wanted]) -> list[Guess]:
        return [Guess(_repeat(one)) if one.count else Guess() for one in wanted]

    def cost(self) -> CostCurve | None:
        return None

    def end_step(self) -> None:
        pass


def _repeat(one: Wanted) -> tuple[int, ...]:
    return tuple(propose_repeat(array("i", one.session.tokens[-NGRAM_WINDOW:]), one.count))


class ModelDrafter:
    """A small model that runs ahead, one forward a token for all sequences together.

    It chooses with each sequence's own parameters and noise, so that it agrees with the model wherever both find the
    same token best. Its KV lies in the second part of the sequences' pages. What it lacks there, while the model
    prefills or after steps without guesses, it computes before it guesses, a chunk a step.
    """

    def __init__(self, runner: Runner, meter: CostMeter, chunk_tokens: int) -> None:
        self._runner = runner
        self._meter = meter
        self._chunk_tokens = chunk_tokens

    def propose(self, wanted: Sequence[Wanted]) -> list[Guess]:
        behind = [self._catch_up(one) for one in wanted]
        late = [part for part in behind if part is not None]
        if late:
            self._runner.run(late, [])
        ready = [i for i, one in enumerate(wanted) if one.count and behind[i] is None]
        guesses = self._run_ahead([wanted[i] for i in ready])
        answers = [Guess((), None if part is None else part.begin + len(part.token_ids)) for part in behind]
        for i, tokens in zip(ready, guesses, strict=True):
            answers[i] = Guess(tuple(tokens), len(wanted[i].session.tokens) + len(tokens) - 1)
        return answers

    def _catch_up(self, one: Wanted) -> SequenceSlice | None:
        """What to compute first of a sequence that lacks more than its last steps; None for one that does not."""
        session, begin = one.session, one.session.draft_computed
        is_prefilled = one.end - session.computed > 1
        end = min(one.end if is_prefilled else len(session.tokens) - 1, begin + self._chunk_tokens)
        is_far = len(session.tokens) - begin > self._chunk_tokens
        if end <= begin or not (is_prefilled or (is_far and one.count)):
            return None
        return SequenceSlice(session.tokens[begin:end], begin, session.pages, num_logits=0)

    def _run_ahead(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        guesses: list[list[int]] = [[] for _ in wanted]
        for depth in range(max((one.count for one in wanted), default=0)):
            deep = [i for i, one in enumerate(wanted) if one.count > depth]
            slices = [_next_slice(wanted[i].session, guesses[i]) for i in deep]
            choices = [_next_choice(wanted[i].session, guesses[i]) for i in deep]
            started = time.perf_counter()
            chosen = self._runner.run(slices, choices)
            if depth:  # the first forward also computes what is missing
                self._meter.note(len(deep), time.perf_counter() - started)
            for i, one in zip(deep, chosen, strict=True):
                guesses[i].append(one.token)
        return guesses

    def cost(self) -> CostCurve | None:
        return self._meter.curve()

    def end_step(self) -> None:
        self._meter.end_step()


def _next_slice(session: Session, guesses: Sequence[int]) -> SequenceSlice:
    if not guesses:
        begin = session.draft_computed
        return SequenceSlice(session.tokens[begin:], begin, session.pages, num_logits=1)
    begin = len(session.tokens) + len(guesses) - 1
    return SequenceSlice(guesses[-1:], begin, session.pages, num_logits=1)


def _next_choice(session: Session, guesses: Sequence[int]) -> Choice:
    end = len(session.tokens) + len(guesses)
    return Choice(
        session.sampling, end, session.tokens, session.answer_begin, session.forbidden_at(end),
        guesses=tuple(guesses), history=session.count_tokens(),
    )  # fmt: skip
