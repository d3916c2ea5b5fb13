"""A decode worker's loop without its thread, over a small model with random weights."""

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.batches import SAMPLINGS
from bench.decoding import NO_SPECULATION, Answers, build_eager_speculator
from bench.gpu_checks.loop import WatchedLoop
from decode_worker.loop import DraftsAndMasks
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.drafters import Drafter, ModelDrafter, NgramDrafter
from decode_worker.speculation.lengths import CostMeter
from decode_worker.speculation.speculator import Speculator
from engine.engine import ALONE, Engine, Place, build_engine
from engine.graph_shapes import choose_shapes
from engine.models.load import load_model
from tests.support.grammars import DEMO_SIZE, compile_here, vocabulary
from tests.support.late_runner import LateRows, LateRunner
from worker.kv_cache import KVCacheManager
from worker.plan import TokenBudget
from worker.prefix_cache import NoRoomError, PrefixCache
from worker.scheduler import Scheduler
from worker.sequences import SequenceParams, Update

PAGE_TOKENS, NUM_PAGES, NUM_ROWS, CHUNK_TOKENS, CONTEXT = 8, 300, 24, 24, 256
MAX_AT_ONCE = 9  # sequences: later ones find their prompts cached


def build(folder: Path, draft_folder: Path, place: Place = ALONE) -> Engine:
    return build_engine(
        str(folder), str(draft_folder), "float32", "cpu", 1, PAGE_TOKENS, NUM_ROWS,
        lambda *_: (NUM_PAGES + 1, 0), lambda _done, _total: None, CONTEXT, place=place,
    )  # fmt: skip


def make_late(engine: Engine, folder: Path, draft_folder: Path) -> Engine:
    rows = LateRows(NUM_ROWS, CONTEXT, PAGE_TOKENS, DEMO_SIZE, engine.device)
    assert engine.pool.draft_tensor is not None
    runner, draft_runner = (
        LateRunner(load_model(path, "float32", engine.device), engine.attention.backend, pages, rows, drafts)
        for path, pages, drafts in ((folder, engine.pool.tensor, False), (draft_folder, engine.pool.draft_tensor, True))
    )
    return capture(replace(engine, rows=rows, runner=runner, draft_runner=draft_runner))


def capture(engine: Engine) -> Engine:
    """Its steps run as doubles of graphs, which run the captured code again."""
    for one in (engine.runner, engine.draft_runner):
        assert one is not None
        one.capture_graphs(choose_shapes(NUM_ROWS, 6, 256), lambda compute: compute, padding_page=NUM_PAGES)
    return engine


def build_requests(drafter: str) -> list[SequenceParams]:
    """Every sampling with every kind of answer; each fourth prompt repeats an earlier one."""
    draw = random.Random(0)
    grammars = [
        compile_here(kind, text, vocabulary())
        for kind, text in (("regex", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"), ("ebnf", 'root ::= [a-z]+ ("," [a-z]+)* "."'))
    ]
    requests: list[SequenceParams] = []
    for number in range(4 * len(SAMPLINGS)):
        size = draw.choice((1, 4, 8, 9, 12, 30))
        prompt = np.array([draw.randrange(2, DEMO_SIZE) for _ in range(size)] * 2, np.int32).tobytes()
        if number % 4 == 3:
            prompt = requests[draw.randrange(number)].prompt
        num_prompt = len(prompt) // 4
        max_tokens = draw.choice((1, 2, 12, 40, 60))
        requests.append(
            SequenceParams(
                f"r{number}", prompt, num_prompt - 1, max_tokens, gateway="g", handle=number + 1,
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                num_prompt_logprobs=draw.choice((None, None, None, 0, 2)),
                num_logprobs=draw.choice((None, None, 0, 3)),
                stop_token_ids=frozenset(draw.sample(range(DEMO_SIZE), draw.choice((0, 0, 40)))),
                min_tokens=draw.choice((0, 0, max_tokens // 2)),
                num_emitted=draw.choice((0, 0, num_prompt // 2)),
                drafter=drafter, max_draft_tokens=0 if drafter == "off" else 1 + number % 6,
                grammar=grammars[number % 2] if number % 5 == 4 else None,
            )
        )  # fmt: skip
    return requests


class Bench:
    """A loop without its thread, checked after every step."""

    def __init__(
        self, engine: Engine, speculator: Speculator, steps_ahead: int, num_pages: int, aborted: dict[int, int]
    ) -> None:
        """aborted: handle |-> number of its tokens after which it is aborted."""
        cache = PrefixCache(num_pages, engine.pool.generations)
        self.scheduler = Scheduler(KVCacheManager(cache, PAGE_TOKENS), NUM_ROWS // 2, lease_s=60.0)
        self.answers = Answers()
        self._aborted = aborted
        metrics = DecodeMetrics(self.scheduler)
        self._step_seconds = metrics.step_seconds
        self._loop = WatchedLoop(
            DraftsAndMasks(speculator, self.scheduler),
            self.scheduler, engine.runner, engine.rows, engine.pool, TokenBudget(CHUNK_TOKENS, "--chunk-tokens"),
            self._publish, metrics, steps_ahead,
        )  # fmt: skip

    @property
    def num_launches(self) -> int:
        return self._loop.num_launched

    @property
    def num_drained(self) -> int:
        """Launches for which the device had nothing left to do."""
        return self._loop.num_drained

    def _publish(self, _step: int, updates: list[Update]) -> None:
        self.answers.take(updates)
        for handle, after in self._aborted.items():
            if len(self.answers.tokens.get(handle, ())) >= after:
                self.scheduler.abort("g", [handle])

    def run(self, requests: Sequence[SequenceParams]) -> Answers:
        waiting = deque(requests)
        started = time.perf_counter()
        while waiting or len(self.scheduler):
            while waiting and len(self.scheduler) < MAX_AT_ONCE:
                try:
                    self.scheduler.admit(waiting[0], 0.0)
                except NoRoomError:
                    break
                waiting.popleft()
            assert self._loop.step(), "no step is left although jobs are unfinished"
            self.scheduler.check()
        assert not self.scheduler.kv.cache.num_held and not self.scheduler.num_launched
        (metric,) = self._step_seconds.collect()
        (total,) = (one.value for one in metric.samples if one.name.endswith("_sum"))
        assert total < time.perf_counter() - started, "time was counted twice"
        return self.answers


def speculators(engine: Engine, is_ahead: bool = False, step_s: float = 0.0) -> dict[str, Speculator]:
    assert engine.draft_runner is not None
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(), "draft": ModelDrafter(engine.draft_runner, CostMeter(), CHUNK_TOKENS, is_ahead),
    }  # fmt: skip
    built = {name: build_eager_speculator({name: one}, is_ahead, step_s) for name, one in drafters.items()}
    return {"off": NO_SPECULATION, **built}
