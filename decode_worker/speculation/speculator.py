"""Has drafters propose for a planned step, and keeps what planning needs: acceptance, and what forwards cost.

Runs on the engine thread, which measures the first forwards before the first request comes.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from decode_worker.interfaces import Drafts
from decode_worker.speculation.drafters import Drafter, NgramDrafter, Wanted, build_drafter
from decode_worker.speculation.lengths import (
    NEWEST_SHARE,
    SEARCH_S,
    Acceptance,
    Candidate,
    CostMeter,
    Costs,
    choose_lengths,
    probe_length,
)
from decode_worker.speculation.trees import MOST_BRANCHES, Branches, Choices
from engine.batch import ForwardRow
from engine.cuda.graph_shapes import Shape
from engine.engine import Engine
from engine.input_batch import InputBatch
from engine.out_of_memory import is_out_of_memory
from engine.runner import Runner
from runtime.config import DecodeConfig
from runtime.settings import ConfigError
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Sequence
from worker.thread import call_in_thread

log = structlog.get_logger()
FIRST_DRAIN_S = 1e-3  # until one was measured
MEASURED_ROWS = (1, 16, 4, 64, 8, 32, 2)  # in the order of what is missed most when time runs out
MOST_FORKING = 8  # answers of a step whose drafts may be trees: more leave no rows for other guesses, only chains
BUDGET_S = 1.0  # for each model; later steps are measured while they run, so a slow machine measures less here


class Speculator(Drafts):
    """Owns the drafters of a worker, by name."""

    def __init__(
        self, drafters: Mapping[str, Drafter], meter: CostMeter, speculate: str, max_draft_tokens: int,
        is_ahead: bool = False, graphs: Seq[Shape] | None = None, takes_trees: bool = False,
    ) -> None:  # fmt: skip
        """`meter`: of the model's own forwards. `speculate`, `max_draft_tokens`: for requests that do not set them.

        is_ahead: steps are launched before the last one is collected. graphs: the only steps that may have drafts;
        None: any. takes_trees: drafts may be trees, where drafters have some.
        """
        self._takes_trees = takes_trees
        self._last: WeakKeyDictionary[Sequence, Choices] = WeakKeyDictionary()  # of the step under way
        self._graphs = graphs
        self._drain_s = FIRST_DRAIN_S if is_ahead else 0.0
        self._drafters = drafters
        self._meter = meter
        self._failing = set[str]()  # drafters whose last drafts failed
        self._search_s: dict[str, float] = {}  # of the host, by drafter, for the drafts of a sequence
        self._speculate = speculate
        self._max_draft_tokens = max_draft_tokens
        self._acceptance: WeakKeyDictionary[Sequence, Acceptance] = WeakKeyDictionary()

    def resolve(self, drafter: str, max_draft_tokens: int) -> tuple[str, int]:
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
        """The cost of drafts; None if nothing is measured yet."""
        step = self._meter.curve()
        draft = next((curve for one in self._drafters.values() if (curve := one.cost()) is not None), None)
        return None if step is None else Costs(step, draft, self._drain_s)

    def measured_s(self) -> float | None:
        costs = self.costs()
        return None if costs is None else costs.step.seconds(1)

    def most_drafts(self, num_sequences: int, has_prompts: bool) -> int:
        """Drafts that each of so many sequences may have in a step."""
        if self._graphs is None:
            return MAX_DRAFT_TOKENS
        fitting = (shape.num_tokens - 1 for shape in self._graphs if shape.num_sequences >= num_sequences)
        return 0 if has_prompts else max(fitting, default=0)

    def plan(self, scheduler: Scheduler, planned: Seq[ScheduledSequence]) -> None:
        plain = [step for step in planned if step.wants_token and step.count == 1]
        if not any(step.sequence.params.max_draft_tokens for step in plain) or (costs := self.costs()) is None:
            return
        most = self.most_drafts(len(planned), len(plain) < len(planned))
        candidates = [self._candidate(step, most, len(planned)) for step in plain]
        lengths = choose_lengths(candidates, sum(step.count for step in planned) - len(plain), costs)
        for step, length in zip(plain, lengths, strict=True):
            if length:
                step.num_drafts = scheduler.make_room_for_drafts(step.sequence, length)

    def _candidate(self, step: ScheduledSequence, most: int, num_answers: int) -> Candidate:
        sequence = step.sequence
        drafter = self._drafters.get(sequence.params.drafter)
        num_behind = None if drafter is None else drafter.num_behind(sequence, step.begin)
        most = 0 if drafter is None or num_behind is None else min(most, drafter.most_drafts)
        num_steps = sequence.num_steps + sequence.num_coming - 1  # before this one: the same when they are collected
        num_left = max(sequence.most_tokens - len(sequence.tokens), 1)  # steps to come, which all gain by catching up
        rate, most, branches = self._rate(sequence), min(most_drafts(sequence), most), self._forks(drafter, num_answers)
        nodes: list[tuple[float, bool]] = []
        if most and branches is not None:  # as wide as it may be
            most, most_depth = most_drafts(sequence), most
            nodes = branches.list_nodes(most, rate, most_depth)
            most = len(nodes)
        return Candidate(
            rate,
            most,
            sequence.params.drafter == "ngram",
            -(-(num_behind or 0) // num_left),
            probe_length(num_steps) if sequence.params.probes else 0,
            nodes,
            self._search_s.get(sequence.params.drafter, SEARCH_S),
        )

    def _find_branches(self, drafter: Drafter | None) -> Branches | None:
        """The branches of a drafter whose drafts may be trees here; None: they are chains."""
        return drafter.branches if self._takes_trees and drafter is not None else None

    def _forks(self, drafter: Drafter | None, num_answers: int) -> Branches | None:
        """The same, in a step with so many answers."""
        return self._find_branches(drafter) if num_answers <= MOST_FORKING else None

    def _rate(self, sequence: Sequence) -> float:
        """To 2 %, so that many plan the same trees."""
        return round(self._acceptance.get(sequence, Acceptance()).rate * 50) / 50

    def needs_device(self, planned: Seq[ScheduledSequence]) -> bool:
        following = [name for name, drafter in self._drafters.items() if drafter.reads_prompts]
        return any(one.num_drafts or (one.count > 1 and one.sequence.params.drafter in following) for one in planned)

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        """Give the steps their drafts. If a drafter fails, its sequences go without."""
        for name, drafter in self._drafters.items():
            mine = [step for step in planned if step.sequence.params.drafter == name]
            if not mine:
                continue
            started, drafter.forwards_s = time.perf_counter(), 0.0
            try:
                answers = drafter.propose([self._want(step, drafter, len(planned)) for step in mine])
            except Exception as error:
                if name not in self._failing:  # one line, not one a step
                    traceback = not is_out_of_memory(error)
                    log.error("speculation failed", drafter=name, reason=str(error), exc_info=traceback)
                self._failing.add(name)
                continue
            self._failing.discard(name)
            if num_drafted := sum(bool(step.num_drafts) for step in mine):
                host_s = max(time.perf_counter() - started - drafter.forwards_s, 0.0) / num_drafted
                known_s = self._search_s.get(name, SEARCH_S)
                self._search_s[name] = known_s + NEWEST_SHARE * (host_s - known_s)
            for step, draft in zip(mine, answers, strict=True):
                step.drafts, step.parents, step.draft_lead = draft.token_ids, draft.parents, draft.lead
                if draft.choices is not None:
                    self._last[step.sequence] = draft.choices

    def _want(self, step: ScheduledSequence, drafter: Drafter, num_answers: int) -> Wanted:
        forks = self._forks(drafter, num_answers) is not None
        rate = self._rate(step.sequence) if forks and step.num_drafts else None
        return Wanted(step.sequence, step.begin + step.count, step.num_drafts, step.count > 1, rate)

    def note_drain(self, seconds: float) -> None:
        self._drain_s += NEWEST_SHARE * (seconds - self._drain_s)

    def note_step(self, planned: Seq[ScheduledSequence], rows: int, seconds: float) -> None:
        """A step is over: its forward of `rows` rows took `seconds`."""
        self._meter.note(rows, seconds)
        self._meter.end_step()
        for drafter in self._drafters.values():
            drafter.end_step()

    def note_drafts(self, step: ScheduledSequence, chosen: Seq[int]) -> None:
        """The step is over. If drafts were planned and the drafter found none, that counts as one wrong draft."""
        before, num_accepted = self._acceptance.get(step.sequence, Acceptance()), max(len(chosen) - 1, 0)
        choices = self._last.pop(step.sequence, None)
        branches = self._find_branches(self._drafters.get(step.sequence.params.drafter))
        ranks = [] if choices is None else rank_choices(choices, chosen)
        for depth, rank in enumerate(ranks):
            if rank and branches is not None:
                branches.note(depth, rank)
        if not step.parents:
            tried = len(step.drafts) or min(step.num_drafts, 1)
            self._acceptance[step.sequence] = before.after(tried, num_accepted)
            return
        was_tried = bool(chosen) and step.path[-1] in step.parents  # what came after the right drafts
        self._acceptance[step.sequence] = before.after_tree(num_accepted + was_tried, ranks[:num_accepted].count(0))


def most_drafts(sequence: Sequence) -> int:
    """Tokens that may be drafted in a step that has begun, which itself gives one more."""
    left = sequence.most_tokens - len(sequence.tokens) - sequence.num_coming
    return max(min(sequence.params.max_draft_tokens, left), 0)


def rank_choices(choices: Choices, chosen: Seq[int]) -> list[int]:
    """Which choice each token was, as far as there were some; MOST_BRANCHES: none of them."""
    ranks = []
    for depth, token in enumerate(chosen):
        options = list(choices(chosen[:depth]))
        if not options:
            break
        ranks.append(options.index(token) if token in options else MOST_BRANCHES)
    return ranks


# -- at start --------------------------------------------------------------------------------------------------------


def build_speculator(engine: Engine, config: DecodeConfig) -> Speculator:
    """A drafter for repeats and, with a draft model, one for that. Page 0 must be unused yet: it is written to."""
    is_ahead = bool(engine.steps_ahead if config.steps_ahead is None else config.steps_ahead)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    if engine.draft_runner is not None:
        meter = _measure_aside(engine.draft_runner, engine.rows)
        drafters["draft"] = build_drafter(
            engine.draft_runner, meter, config.local_prefill_chunk_tokens, engine.has_draft_kv
        )
    elif config.speculate == "draft":
        raise ConfigError("speculate='draft' cannot be used: --speculate draft needs a --draft-model")
    meter = _measure_aside(engine.runner, engine.rows)
    graphs = [Shape(*shape) for shape in engine.runner.forwards.shapes] or None  # without any, drafts leave no graph
    return Speculator(
        drafters, meter, config.speculate, config.max_draft_tokens, is_ahead, graphs, engine.why_chains is None
    )


def _measure_aside(runner: Runner, rows: InputBatch) -> CostMeter:
    return call_in_thread(lambda: measure(runner, rows))  # see build_rank_engine


def measure(runner: Runner, rows: InputBatch) -> CostMeter:
    """Times forwards of one-token sequences."""
    meter = CostMeter()
    counts = [count for count in MEASURED_ROWS if count <= rows.num_rows]
    for row in range(max(counts)):
        rows.open(row, np.zeros(2, np.int32), SamplingParams(temperature=0.0), 2)
        rows.write_pages(row, 0, [0])
    _time(runner, 1)  # the first one allocates and warms up
    began = time.perf_counter()
    for count in counts:
        taken = _time(runner, count)
        if time.perf_counter() - began < BUDGET_S:
            taken = min(taken, _time(runner, count))
        meter.note(count, taken)
        if time.perf_counter() - began > BUDGET_S:
            break
    for row in range(max(counts)):
        rows.close(row)
    return meter


def _time(runner: Runner, count: int) -> float:
    started = time.perf_counter()
    second = int(runner.is_head)  # a head computes nothing for position 0, and for its first draft
    one = ForwardRow(0, second, 1, num_logits=1, num_drafted=second, state_to=0)
    runner.launch([one._replace(row=row) for row in range(count)]).collect()
    return time.perf_counter() - started
