"""Interfaces to what a decode worker may have besides its steps: drafts and grammars.

Each class is the interface, and the object of a worker without the thing; speculation/ and grammar/ implement them.
"""

from collections.abc import Sequence as Seq
from enum import Enum

from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Sequence


class Drafts:
    """Drafts tokens for steps. This worker drafts none."""

    def resolve(self, drafter: str, max_draft_tokens: int) -> tuple[str, int]:
        """The drafter for a request that asks for `drafter` ("" or "auto": the worker's choice), and its most drafts.

        ValueError for a drafter that is not here, or too many drafts.
        """
        if drafter not in ("", "auto", "off"):
            raise ValueError(f"speculation is {drafter!r}; this worker has off")
        return "off", 0

    def measured_s(self) -> float | None:
        """Seconds of a step with one answer; None if it was not measured."""
        return None

    def plan(self, scheduler: Scheduler, planned: Seq[ScheduledSequence]) -> None:
        """Plan as many drafts as are worth their cost, if there are pages to spare for them."""

    def needs_device(self, planned: Seq[ScheduledSequence]) -> bool:
        """As in StepExtras."""
        return False

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        """Give the steps their drafts."""

    def note_drain(self, seconds: float) -> None:
        """For so long the device had no step, since the next one needed the last one's tokens."""

    def note_step(self, planned: Seq[ScheduledSequence], rows: int, seconds: float) -> None:
        """A step is over: its forward of `rows` rows took `seconds`."""

    def note_drafts(self, step: ScheduledSequence, chosen: Seq[int]) -> None:
        """The step is over: it gave these tokens, all but the last of them right drafts. None: it failed."""


class Standing(Enum):
    """How an answer stands with its grammar."""

    OPEN = "it may continue"
    WHOLE = "it is complete"
    LATE = "there was no time: it continues in a later step"


class Masks:
    """Keeps answers to their grammars. Answers have none here."""

    def concerns(self, step: ScheduledSequence) -> bool:
        """Whether the step chooses tokens that must match a grammar."""
        return False

    def constrain(self, planned: Seq[ScheduledSequence]) -> list[Standing | Exception]:
        """Give the steps masks for the tokens they choose. OPEN if the step can be computed; otherwise why not."""
        return [Standing.OPEN] * len(planned)

    def follow(self, chosen: Seq[tuple[Sequence, Seq[int]]]) -> list[Standing | Exception]:
        """How each answer stands after its next tokens."""
        return [Standing.OPEN] * len(chosen)


class GrammarRefusedError(Exception):
    """The text cannot be compiled, or not within the limits. The message is for the client.

    `param`: the client's field at fault, if the text names it.
    """

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = param


class GrammarBusyError(Exception):
    """Not now: others are compiled first, the compiler is starting, or the machine is busy. Try again."""


class GrammarBrokenError(Exception):
    """This worker cannot compile any grammar. The message is for its operator."""


class GrammarSource:
    """(kind, text) |-> what a request's answer must match. This worker compiles none."""

    async def start(self) -> None:
        """Returns when it is ready, or has failed, which is logged."""

    async def get(self, kind: str, text: str, timeout_s: float) -> object:
        """The grammar of a text, within `timeout_s`. A compilation that takes longer continues: ask again.

        Raises GrammarRefusedError, GrammarBusyError or GrammarBrokenError.
        """
        raise GrammarBrokenError("this worker compiles no grammars")

    async def close(self) -> None:
        """End all waiting calls."""
