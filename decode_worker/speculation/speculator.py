"""Has drafters propose for a planned step, and keeps what planning needs: acceptance, and what forwards cost.

Runs on the engine thread; knows drafters, not models.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import structlog

from decode_worker.speculation.costs import NEWEST_SHARE, CostMeter
from decode_worker.speculation.drafters import Drafter, Wanted
from decode_worker.speculation.lengths import Acceptance, Candidate, Costs, choose_lengths, probe_length
from engine.graph_shapes import Shape
from engine.out_of_memory import is_out_of_memory
from wire.sampling import MAX_DRAFT_TOKENS
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Sequence

log = structlog.get_logger()
FIRST_DRAIN_S = 1e-3  # until one was measured
UNKNOWN = Acceptance()


class Speculator:
    """Owns the drafters of a worker, by name."""

    def __init__(
        self, drafters: Mapping[str, Drafter], meter: CostMeter, speculate: str, max_draft_tokens: int,
        is_ahead: bool = False, graphs: Seq[Shape] | None = None,
    ) -> None:  # fmt: skip
        """`meter`: of the model's own forwards. `speculate`, `max_draft_tokens`: for requests that do not set them.

        is_ahead: steps are launched before the last one is collected. graphs: the only steps that may have drafts;
        None: any.
        """
        self._is_ahead = is_ahead
        self._graphs = graphs
        self._drain_s = FIRST_DRAIN_S
        self._drafters = drafters
        self._meter = meter
        self._failing = set[str]()  # drafters whose last drafts failed
        self._speculate = speculate
        self._max_draft_tokens = max_draft_tokens
        self._acceptance: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()

    def resolve(self, drafter: str, max_draft_tokens: int) -> tuple[str, int]:
        """The drafter for a request that asks for `drafter` ("" or "auto": the worker's choice), and its most drafts.

        ValueError for a drafter that is not here, or too many drafts.
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
        """What drafts cost; None if nothing is measured yet."""
        step = self._meter.curve()
        draft = next((curve for one in self._drafters.values() if (curve := one.cost()) is not None), None)
        return None if step is None else Costs(step, draft, self._drain_s)

    def drains(self, sequence: Sequence) -> bool:
        """Whether its drafts need the tokens of launched steps."""
        return self._is_ahead and sequence.needs_outcome

    def most_drafts(self, num_sequences: int, has_prompts: bool) -> int:
        """Drafts that each of so many sequences may have in a step."""
        if self._graphs is None:
            return MAX_DRAFT_TOKENS
        fitting = (shape.num_tokens - 1 for shape in self._graphs if shape.num_sequences >= num_sequences)
        return 0 if has_prompts else max(fitting, default=0)

    def note_drain(self, seconds: float) -> None:
        """For so long the device had no step, since the next one needed the last one's tokens."""
        self._drain_s += NEWEST_SHARE * (seconds - self._drain_s)

    def note_step(self, planned: Seq[ScheduledSequence], rows: int, seconds: float) -> None:
        """A step is over: its forward of `rows` rows took `seconds`, with drafting where that was not waited for."""
        for name, drafter in self._drafters.items():
            seconds -= drafter.hidden_s([one.num_drafted for one in planned if one.sequence.params.drafter == name])
        if seconds > 0:
            self._meter.note(rows, seconds)
        self._meter.end_step()
        for drafter in self._drafters.values():
            drafter.end_step()

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        """Give the steps their drafts. If a drafter fails, its sequences go without."""
        for name, drafter in self._drafters.items():
            mine = [step for step in planned if step.sequence.params.drafter == name]
            if not mine:
                continue
            try:
                answers = drafter.propose(
                    [
                        Wanted(
                            step.sequence,
                            step.begin + step.count,
                            step.num_drafts,
                            step.count > 1,
                            step.num_unjudged,
                            step.sequence.params.grammar is not None,
                        )
                        for step in mine
                    ]
                )
            except Exception as error:
                if name not in self._failing:  # one line, not one a step
                    traceback = not is_out_of_memory(error)
                    log.error("speculation failed", drafter=name, reason=str(error), exc_info=traceback)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            for step, draft in zip(mine, answers, strict=True):
                step.num_drafted = len(draft.token_ids) + draft.num_unseen
                step.drafts, step.draft_lead = draft.token_ids, draft.lead

    def acceptance(self, sequence: Sequence) -> Acceptance:
        """How often drafts for it were right."""
        return self._acceptance.get(sequence, UNKNOWN)

    def note_drafts(self, step: ScheduledSequence, num_accepted: int) -> None:
        """The step is over. If drafts were planned and the drafter found none, that counts as one wrong draft."""
        tried = step.num_drafted or min(step.num_drafts, 1)
        before = self.acceptance(step.sequence)
        self._acceptance[step.sequence] = before.after(tried, num_accepted)


def plan_drafts(scheduler: Scheduler, planned: Seq[ScheduledSequence], costs: Costs, speculator: Speculator) -> None:
    """Plan as many drafts as are worth their cost, if there are pages to spare for them."""
    plain = [step for step in planned if step.wants_token and step.count == 1]
    if not any(step.sequence.params.max_draft_tokens for step in plain):
        return
    most = speculator.most_drafts(len(planned), len(plain) < len(planned))
    candidates = [
        Candidate(
            speculator.acceptance(step.sequence).rate,
            min(most_drafts(step.sequence), most),
            step.sequence.params.drafter == "ngram",
            _spread(0 if step.num_unjudged else step.begin - step.sequence.draft_launched, step.sequence),
            probe_length(step.sequence.num_steps) if step.sequence.params.probes else 0,
            speculator.drains(step.sequence),
        )
        for step in plain
    ]
    lengths = choose_lengths(candidates, sum(step.count for step in planned) - len(plain), costs)
    for step, length in zip(plain, lengths, strict=True):
        if length:
            step.num_drafts = scheduler.make_room_for_drafts(step.sequence, length)


def most_drafts(sequence: Sequence) -> int:
    """Tokens that may be drafted in a step that has begun, which itself gives one more."""
    left = sequence.most_tokens - len(sequence.tokens) - sequence.num_coming
    return max(min(sequence.params.max_draft_tokens, left), 0)


def _spread(num_behind: int, sequence: Sequence) -> int:
    """Positions to catch up on, per step: shared among the steps of the rest of the answer, which all gain by it."""
    return -(-max(num_behind, 0) // max(sequence.most_tokens - len(sequence.tokens), 1))
