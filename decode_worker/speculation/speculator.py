"""Has guesses made for a planned step, and keeps what planning needs to know: what forwards cost.

Lives on the engine thread; knows drafters, not models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import structlog

from decode_worker.batching import Planned
from decode_worker.session import Guessed
from decode_worker.speculation.costs import CostMeter
from decode_worker.speculation.drafters import Drafter, Wanted
from decode_worker.speculation.lengths import Costs
from engine.out_of_memory import is_out_of_memory
from runtime.peer_input import MAX_DRAFT_TOKENS

log = structlog.get_logger()


class Speculator:
    """Owns the drafters of a worker, by name."""

    def __init__(
        self, drafters: Mapping[str, Drafter], meter: CostMeter, speculate: str, max_draft_tokens: int
    ) -> None:
        """`meter`: of the model's own forwards; the last two: for requests that leave it to the worker."""
        self._drafters = drafters
        self._meter = meter
        self._speculate = speculate
        self._max_draft_tokens = max_draft_tokens

    def resolve(self, drafter: str, max_draft_tokens: int) -> tuple[str, int]:
        """Who guesses for a request that asks for `drafter` ("" or "auto": the worker's choice), and how far at most.

        ValueError for a drafter that is not here, or too many guesses.
        """
        if drafter in ("", "auto"):
            drafter = self._speculate
        if drafter == "auto":
            drafter = "draft" if "draft" in self._drafters else "ngram"
        if drafter == "off":
            return "off", 0
        if drafter not in self._drafters:
            known = ", ".join(("off", *self._drafters))
            raise ValueError(f"speculation is {drafter!r}; this worker has {known} (a draft model: --draft-model)")
        if max_draft_tokens > MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens is {max_draft_tokens}, expected at most {MAX_DRAFT_TOKENS}")
        return drafter, max_draft_tokens or self._max_draft_tokens

    def costs(self) -> Costs | None:
        """What guesses cost; None while nothing was measured."""
        step = self._meter.curve()
        draft = next((curve for one in self._drafters.values() if (curve := one.cost()) is not None), None)
        return None if step is None else Costs(step, draft)

    def note_step(self, rows: int, seconds: float) -> None:
        """A step is over: its forward of the model with that many rows took that long."""
        self._meter.note(rows, seconds)
        self._meter.end_step()
        for drafter in self._drafters.values():
            drafter.end_step()

    def guess(self, planned: Sequence[Planned]) -> list[Planned]:
        """The step with its guesses. A drafter that fails costs its guesses, nothing else."""
        guessed = list(planned)
        for name, drafter in self._drafters.items():
            mine = [i for i, step in enumerate(planned) if step.session.wanted.drafter == name]
            if not mine:
                continue
            try:
                answers = drafter.propose([_wanted(planned[i]) for i in mine])
            except Exception as error:
                log.error(
                    "guessing ahead failed", drafter=name, reason=str(error), exc_info=not is_out_of_memory(error)
                )  # fmt: skip
                continue
            for i, guess in zip(mine, answers, strict=True):
                step = planned[i]
                tried = len(guess.token_ids) or min(step.num_guesses, 1)
                told = Guessed(len(guess.token_ids), tried, guess.draft_computed)
                guessed[i] = replace(step, guesses=guess.token_ids, guessed=told)
        return guessed


def _wanted(step: Planned) -> Wanted:
    return Wanted(step.session, step.session.computed + step.count, step.num_guesses)
