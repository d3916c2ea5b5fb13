"""A decode worker's engine loop without its process and thread: requests in, tokens out."""

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

from decode_worker.grammar.constraints import Constraints
from decode_worker.interfaces import Drafts, Masks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.drafters import Draft, Drafter, NgramDrafter, Wanted, build_drafter
from decode_worker.speculation.lengths import CostMeter
from decode_worker.speculation.speculator import Speculator
from decode_worker.step_extras import DraftsAndMasks
from engine.engine import Engine
from wire.logprobs import TokenLogprobs
from worker.chunks import build_budget
from worker.compose import build_states
from worker.kv_cache import KVCacheManager
from worker.loop import WorkerLoop
from worker.params import SequenceParams
from worker.plan import ChunkSizes
from worker.prefix_cache import NoRoomError, PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Sequence, Update
from worker.table import num_rows_for

NO_SPECULATION = Speculator({}, CostMeter(), "off", 0)
LEASE_S = 600.0
NOT_SPARING = 1e-9  # seconds per row: makes forwards seem to cost the same for any number of rows


@dataclass(slots=True)
class Answers:
    """The results of all requests together; by handle, unless it says otherwise."""

    scheduler: Scheduler
    metrics: DecodeMetrics
    chunks: ChunkSizes  # as it was in the end
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    ends: dict[int, Update] = field(default_factory=dict)  # not of aborted ones
    full: list[tuple[float, int]] = field(default_factory=list)
    """(time after a step that yielded a token of every sequence, tokens of the first one so far)"""
    num_drafted: int = 0
    num_accepted: int = 0
    num_launched: int = 0  # steps
    num_drained: int = 0  # of these, launched while the device had nothing left to do

    @property
    def tpot_s(self) -> float:
        """Median over `full`."""
        return statistics.median((b - a) / (n - m) for (a, m), (b, n) in pairwise(self.full) if n > m)

    @property
    def per_token_s(self) -> float:
        """Mean over `full`: with drafts, steps differ."""
        (first_s, first), (last_s, last) = self.full[0], self.full[-1]
        return (last_s - first_s) / (last - first)

    def take(self, updates: Seq[Update], aborted: Mapping[int, int]) -> None:
        for update in updates:
            params = update.sequence.params
            tokens = self.tokens.setdefault(params.handle, [])
            tokens += update.token_ids
            self.logprobs.setdefault(params.handle, []).extend(update.logprobs)
            self.prompt_logprobs.setdefault(params.handle, []).extend(update.prompt_logprobs)
            if update.finish_reason:
                self.ends[params.handle] = update
            elif len(tokens) >= aborted.get(params.handle, len(tokens) + 1):
                self.scheduler.abort(params.gateway, [params.handle])


class WatchedLoop(WorkerLoop):
    """Counts launches, and those for which the device has nothing left to do."""

    num_launched = num_drained = 0

    def _launch(self, planned: list[ScheduledSequence], updates: list[Update]) -> None:
        self.num_launched += 1
        self.num_drained += not self._in_flight
        super()._launch(planned, updates)


class FixedCosts(CostMeter):
    """Costs that steps do not change."""

    def end_step(self) -> None:
        pass

    def note(self, rows: int, seconds: float) -> None:
        if len(self._known) < 2:
            super().note(rows, seconds)


class LyingDrafter(Drafter):
    """Drafts at random, sometimes right: rejections at every depth."""

    def __init__(self, truth: Mapping[int, list[int]], vocab_size: int) -> None:
        """truth: handle |-> answer."""
        self._truth, self._vocab_size = truth, vocab_size
        self._random = random.Random(0)

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        return [Draft(tuple(self._draft(one))) for one in wanted]

    def _draft(self, one: Wanted) -> list[int]:
        params = one.sequence.params
        begin = len(one.sequence.tokens) - params.num_prompt
        right = self._truth[params.handle][begin : begin + self._random.randint(0, one.count)]
        return [token if self._random.random() < 0.8 else self._random.randrange(self._vocab_size) for token in right]


class TreeDrafter(Drafter):
    """Trees of random shapes in which the right path is anywhere, or ends early."""

    def __init__(self, truth: Mapping[int, Seq[int]], vocab_size: int, right: float = 1.0, seed: int = 0) -> None:
        """truth: handle |-> answer. right: the chance that a draft on the right path has a right child."""
        self._truth, self._vocab_size, self._right = truth, vocab_size, right
        self._random = random.Random(seed)
        self.num_forked = self.num_right = 0

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        return [self._draft(one) for one in wanted]

    def _draft(self, one: Wanted) -> Draft:
        params = one.sequence.params
        rest = self._truth[params.handle][len(one.sequence.tokens) - params.num_prompt :]
        tokens, parents, children = list[int](), list[int](), dict[int, set[int]]()

        def add(parent: int, token: int) -> None:
            if token not in children.setdefault(parent, set()):
                children[parent].add(token)
                tokens.append(token)
                parents.append(parent)

        tip, depth = 0, 0  # of the right path
        while len(tokens) < one.count:
            before = len(tokens)
            if self._random.random() < 0.5 and tip >= 0 and depth < len(rest):
                if self._random.random() < self._right:
                    add(tip, rest[depth])
                    tip, depth = tokens.index(rest[depth], before) + 1 if len(tokens) > before else tip, depth + 1
                else:
                    tip = -1
            else:
                right = rest[depth] if depth < len(rest) else -1
                token = self._random.randrange(self._vocab_size)
                add(self._random.randrange(len(tokens) + 1), token if token != right else (token + 1) % 256)
        self.num_forked += len(set(parents)) < len(parents)
        self.num_right += depth
        return Draft(tokens, parents)


class FixedSpeculator(Speculator):
    """Does not measure how long the device waits for a step with drafts."""

    def note_drain(self, seconds: float) -> None:
        pass


def build_eager_speculator(
    drafters: Mapping[str, Drafter], is_ahead: bool = False, step_s: float = 0.0
) -> Speculator:  # fmt: skip
    """A speculator that drafts as many tokens as allowed: rows seem free, as on a GPU.

    step_s: what every forward takes; 0: what steps measure.
    """
    meter = FixedCosts() if step_s else CostMeter()
    for rows in (1, 256):
        meter.note(rows, (step_s or 1.0) + rows * NOT_SPARING)
    return (FixedSpeculator if step_s else Speculator)(drafters, meter, "off", 0, is_ahead)


class WatchedSpeculator(Speculator):
    """Counts steps whose drafts have siblings."""

    num_forked = 0

    def note_drafts(self, step: ScheduledSequence, chosen: Seq[int]) -> None:
        self.num_forked += bool(step.parents)
        super().note_drafts(step, chosen)


def build_forking_speculator(drafters: Mapping[str, Drafter], is_ahead: bool = False) -> WatchedSpeculator:
    """Rows seem free."""
    meter = FixedCosts()
    for rows in (1, 256):
        meter.note(rows, 1.0 + rows * 1e-9)
    return WatchedSpeculator(drafters, meter, "off", 0, is_ahead, takes_trees=True)


def build_speculators(
    engine: Engine, chunk_tokens: int, is_ahead: bool = False, step_s: float = 0.0
) -> Mapping[str, Speculator]:  # fmt: skip
    """Drafter's name |-> an eager speculator with that drafter alone."""
    assert engine.draft_runner is not None
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(), "draft": build_drafter(engine.draft_runner, CostMeter(), chunk_tokens),
    }  # fmt: skip
    built = {name: build_eager_speculator({name: one}, is_ahead, step_s) for name, one in drafters.items()}
    return {"off": NO_SPECULATION, **built}


def build_scheduler(engine: Engine, num_pages: int = 0) -> Scheduler:
    """A scheduler for as many sequences as the engine has rows, with an empty cache.

    num_pages: of the engine's; 0: all.
    """
    cache = PrefixCache(num_pages or engine.num_pages, engine.pool.generations)
    max_running = engine.rows.num_rows // num_rows_for(1)
    kv = KVCacheManager(
        cache, engine.pool.shape.page_tokens, num_after=engine.num_after, states=build_states(engine)
    )  # fmt: skip
    return Scheduler(kv, max_running, LEASE_S)


def decode(
    engine: Engine,
    requests: Seq[SequenceParams],
    drafts: Drafts = NO_SPECULATION,
    *,
    masks: Masks | None = None,
    steps_ahead: int | None = None,
    num_pages: int = 0,
    at_once: int = 0,
    aborted: Mapping[int, int] = {},
    chunk_tokens: int = 64,
    is_checked: bool = False,
    receive: Callable[[Scheduler, Sequence], None] = lambda scheduler, sequence: None,
) -> Answers:
    """Run all requests, prefill included, until they end; then no page is held.

    masks: None: those of grammars. steps_ahead: None for the device's default. num_pages: of the engine's; 0: all.
    at_once: requests admitted together; 0: all. aborted: handle |-> number of its tokens after which it is aborted.
    is_checked: the scheduler, every step. receive: brings the KV of a sequence that another worker computes.
    """
    scheduler, updates = build_scheduler(engine, num_pages), list[Update]()
    metrics, started = DecodeMetrics(scheduler), time.perf_counter()
    loop = WatchedLoop(
        DraftsAndMasks(drafts, masks or Constraints(), scheduler), scheduler, engine.runner, engine.rows, engine.pool,
        build_budget(chunk_tokens, "--chunk-tokens", engine.device.type), lambda _step, some: updates.extend(some),
        metrics, engine.steps_ahead if steps_ahead is None else steps_ahead,
    )  # fmt: skip
    done, waiting, sequences = Answers(scheduler, metrics, loop.chunks), deque(requests), list[Sequence]()
    while waiting or len(scheduler):
        while waiting and len(scheduler) < (at_once or len(requests)):
            try:
                sequences.append(scheduler.admit(waiting[0], time.monotonic()))
                receive(scheduler, sequences[-1])
            except NoRoomError:
                break
            waiting.popleft()
        updates.clear()
        assert loop.step(), "no step is left although requests are unfinished"
        done.take(updates, aborted)
        if len([update for update in updates if update.token_ids]) == len(requests):
            done.full.append((time.perf_counter(), len(done.tokens[requests[0].handle])))
        if is_checked:
            scheduler.check()
    scheduler.check()
    assert not scheduler.kv.cache.num_held and not scheduler.num_launched
    (metric,) = metrics.step_seconds.collect()
    (total,) = (one.value for one in metric.samples if one.name.endswith("_sum"))
    assert total < time.perf_counter() - started, "time was counted twice"
    done.num_drafted, done.num_accepted = (
        sum(getattr(one, name) for one in sequences) for name in ("num_drafted", "num_accepted")
    )
    done.num_launched, done.num_drained = loop.num_launched, loop.num_drained
    return done
