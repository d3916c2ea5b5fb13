"""A decode worker's loop without its thread, over a small model with random weights."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from decode_worker.speculation.speculator import Speculator
from engine.compose import FullEngine, build_engine
from engine.cuda.captured import capture_graphs
from engine.cuda.graph_shapes import choose_shapes
from engine.engine import ALONE, Place
from tests.support.batches import SAMPLINGS
from tests.support.decoding import NO_SPECULATION, Answers, build_speculators, decode
from tests.support.grammars import DEMO_SIZE, compile_here, vocabulary
from tests.support.late_runner import LateHeadRunner, LateRows, LateRunner
from worker.params import SequenceParams

PAGE_TOKENS, NUM_PAGES, NUM_ROWS, CHUNK_TOKENS, CONTEXT = 8, 300, 24, 24, 256
MAX_AT_ONCE = 9  # sequences: later ones find their prompts cached


LATE = Place(
    build_rows=LateRows, build_runner=lambda _number, *parts: LateRunner(*parts), build_head_runner=LateHeadRunner
)


def build(folder: Path, draft_folder: Path, place: Place = ALONE) -> FullEngine:
    return build_engine(
        str(folder), str(draft_folder), "float32", "cpu", 1, PAGE_TOKENS, NUM_ROWS,
        lambda *_: (NUM_PAGES + 1, 0), lambda _done, _total: None, CONTEXT, place=place,
    )  # fmt: skip


def capture(engine: FullEngine) -> FullEngine:
    """Its steps run as doubles of graphs, which run the captured code again."""
    for one in (engine.runner, engine.draft_runner):
        assert one is not None
        if one.model.is_capturable:
            capture_graphs(one, choose_shapes(NUM_ROWS, 6, 256), lambda compute: compute, padding_page=NUM_PAGES)
    return engine


def build_requests(drafter: str) -> list[SequenceParams]:
    """Every sampling with every kind of answer; each fourth prompt repeats an earlier one."""
    draw = random.Random(0)
    grammars = [
        compile_here(kind, text, vocabulary())
        for kind, text in (("regex", r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"), ("ebnf", 'root ::= [a-z]+ ("," [a-z]+)* "."'))
    ]
    requests: list[SequenceParams] = []
    for number in range(3 * len(SAMPLINGS)):
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


def run(
    engine: FullEngine,
    requests: Sequence[SequenceParams],
    speculator: Speculator = NO_SPECULATION,
    steps_ahead: int = 0,
    num_pages: int = NUM_PAGES,
    aborted: Mapping[int, int] = {},
) -> Answers:
    """`decode` with few sequences at once, so that some wait; checked after every step."""
    return decode(
        engine, requests, speculator, steps_ahead=steps_ahead, num_pages=num_pages, at_once=MAX_AT_ONCE,
        aborted=aborted, chunk_tokens=CHUNK_TOKENS, is_checked=True,
    )  # fmt: skip


def speculators(engine: FullEngine, is_ahead: bool = False, step_s: float = 0.0) -> Mapping[str, Speculator]:
    return build_speculators(engine, CHUNK_TOKENS, is_ahead, step_s)
