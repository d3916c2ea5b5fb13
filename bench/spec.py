"""The gain from speculation: TPOT with and without it, by drafter and number of streams, in one run.

    python -m bench.spec                                 # the demo model and its draft model
    python -m bench.spec --acceptance 0.7                # random weights: 213 M parameters, a draft model of 10 M
    python -m bench.spec --acceptance 0.7 --model FOLDER --draft-model FOLDER
    python -m bench.spec --model smollm2 --draft-model HEAD --dtype bfloat16      # HEAD: of `python -m demo.train_head`

Models with random weights never agree. So with --acceptance the draft model's forwards run at their real cost, but its
drafts are replaced: with this probability by the token of greedy decoding, otherwise by a wrong one. Runs the engine
loop of a decode worker in this process. Rounds alternate between the contenders, so that a noisy machine disturbs all
equally; figures are medians. The worker's own policy chooses the number of drafts.
"""

import gc
import random
import statistics
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from decode_worker.speculation.drafters import Draft, Drafter, NgramDrafter, Wanted, build_drafter
from decode_worker.speculation.lengths import CostCurve
from decode_worker.speculation.speculator import Speculator, measure
from demo.head_text import first_prompts
from engine.compose import build_engine
from engine.engine import Engine
from gateway.text.tokenizer import Tokenizer
from tests.support.decoding import NO_SPECULATION, decode
from tests.support.random_models import write_pair
from wire.sampling import SamplingParams
from worker.params import SequenceParams
from worker.sequences import Sequence
from worker.startup.models import locate_draft, locate_model
from worker.table import num_rows_for

app = App(help=__doc__)
GREEDY = SamplingParams(temperature=0.0)
STREAMS = (1, 4, 8, 16)
PAGE_TOKENS, CHUNK_TOKENS = 16, 256
QUESTIONS = (
    "Tell me a story about a fox.",
    "Tell me a story about a king and a ring.",
    "What is 120 plus 345?",
    "Repeat after me: the red boat is on the blue river.",
)


class SyntheticDrafter(Drafter):
    """A draft model whose drafts are right with a given probability, independently."""

    def __init__(self, inner: Drafter, truth: Mapping[int, Seq[int]], acceptance: float, vocab_size: int) -> None:
        """`truth`: handle |-> the whole answer."""
        self._inner = inner
        self._truth = truth
        self._acceptance = acceptance
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def propose(self, wanted: Seq[Wanted]) -> list[Draft]:
        drafts = self._inner.propose(wanted)
        return [replace(draft, token_ids=self._swap(one, draft)) for one, draft in zip(wanted, drafts, strict=True)]

    def _swap(self, one: Wanted, draft: Draft) -> tuple[int, ...]:
        params = one.sequence.params
        begin = one.end - params.num_prompt
        right = self._truth[params.handle][begin : begin + len(draft.token_ids)]
        return tuple(
            token if self._random.random() < self._acceptance else (token + 1) % self._vocab_size for token in right
        )

    def num_behind(self, sequence: Sequence, begin: int) -> int | None:
        return self._inner.num_behind(sequence, begin)

    def cost(self) -> CostCurve | None:
        return self._inner.cost()

    def end_step(self) -> None:
        self._inner.end_step()


@dataclass(frozen=True, slots=True)
class Figures:
    """One round of one contender."""

    tpot_s: float  # median over the streams
    tokens_per_step: float  # per stream
    accepted: float  # share of the drafts


def measure_round(
    engine: Engine, speculator: Speculator, wanted: Seq[SequenceParams], streams: int
) -> tuple[Figures, dict[int, list[int]]]:
    """Decode all `wanted`, so many at once. Returns the tokens of each handle, too."""
    gc.collect()
    parts = [
        decode(engine, wanted[begin : begin + streams], speculator, chunk_tokens=CHUNK_TOKENS)
        for begin in range(0, len(wanted), streams)
    ]
    timings = [end.timing for part in parts for end in part.ends.values() if end.timing is not None]
    tokens = {handle: some for part in parts for handle, some in part.tokens.items()}
    counts = [len(some) for some in tokens.values()]
    drafted = sum(one.draft_tokens for one in timings)
    figures = Figures(
        statistics.median(one.decode_s / (count - 1) for one, count in zip(timings, counts, strict=True)),
        sum(counts) / sum(one.steps for one in timings),
        sum(one.accepted_tokens for one in timings) / drafted if drafted else 0.0,
    )
    return figures, tokens


def build_prompts(folder: str, is_demo: bool, has_text: bool, vocab_size: int) -> list[list[int]]:
    """Questions: of the demo's kinds, or of those that heads are trained on; without a text, random tokens."""
    draw = random.Random(1)
    if not has_text:
        return [[draw.randrange(vocab_size) for _ in range(64)] for _ in range(16)]
    tokenizer = Tokenizer(Path(folder))
    questions = QUESTIONS if is_demo else islice(first_prompts(draw), max(STREAMS))
    texts = [tokenizer.render_chat([{"role": "user", "content": question}]) for question in questions]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def build_requests(prompts: Seq[Seq[int]], count: int, num_tokens: int, drafter: str) -> list[SequenceParams]:
    """`count` greedy requests of exactly `num_tokens` tokens."""
    return [
        SequenceParams(
            str(number), np.array(prompt, np.int32).tobytes(), len(prompt) - 1, num_tokens, gateway="bench",
            handle=number + 1, sampling=GREEDY, drafter=drafter, max_draft_tokens=8,
        )
        for number, prompt in enumerate(islice(cycle(prompts), count))
    ]  # fmt: skip


@app.default
def main(
    *,
    model: str = "demo",
    draft_model: str = "auto",
    acceptance: Annotated[float | None, Parameter(help="share of drafts that are right, for random weights")] = None,
    dtype: str = "float32",  # near ties that could change the compared answers are rare
    threads: int = 2,
    tokens: int = 64,
    answers: Annotated[int, Parameter(help="of a round, at least")] = 1,
    rounds: int = 3,
) -> int:
    """Print the table."""
    is_demo = model == "demo" and acceptance is None
    if model == "demo" and not is_demo:
        with TemporaryDirectory() as made:
            model, draft_model = map(str, write_pair(Path(made)))
            engine, folder = _build(model, draft_model, dtype, threads), model
    else:
        folder = locate_model(model)
        engine = _build(folder, locate_draft(model, draft_model), dtype, threads)
    prompts = build_prompts(folder, is_demo, acceptance is None, engine.config.vocab_size)
    meter = measure(engine.runner, engine.rows)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    if engine.draft_runner is not None:
        drafters["draft"] = build_drafter(
            engine.draft_runner, measure(engine.draft_runner, engine.rows), CHUNK_TOKENS, engine.has_draft_kv
        )
    table = Table("streams", "drafter", "TPOT off, ms", "TPOT on, ms", "on / off", "tokens a step", "drafts right")
    for streams in STREAMS:
        count = -(-answers // streams) * streams
        plain = build_requests(prompts, count, tokens, "off")
        truth = measure_round(engine, NO_SPECULATION, plain, streams)[1]
        contenders = dict(drafters)
        if engine.why_chains is None and acceptance is None:
            contenders |= {f"{name}, trees": one for name, one in drafters.items() if one.branches is not None}
        if acceptance is not None and "draft" in drafters:
            contenders["draft"] = SyntheticDrafter(drafters["draft"], truth, acceptance, engine.config.vocab_size)
        on: dict[str, list[Figures]] = {name: [] for name in contenders}
        off: dict[str, list[Figures]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, drafter in contenders.items():
                off[name].append(measure_round(engine, NO_SPECULATION, plain, streams)[0])
                kind, _, trees = name.partition(", ")
                speculator = Speculator({kind: drafter}, meter, "off", 0, takes_trees=bool(trees))
                drafted = build_requests(prompts, count, tokens, kind)
                figures, found = measure_round(engine, speculator, drafted, streams)
                on[name].append(figures)
                if engine.dtype == "float32" and found != truth:
                    raise AssertionError(f"{name} at {streams} streams changed the answers")
        for name in contenders:
            _add_row(table, streams, name, off[name], on[name])
    Console(width=120).print(table)
    return 0


def _build(folder: str, draft: str, dtype: str, threads: int) -> Engine:
    return build_engine(
        folder, draft, dtype, "cpu", threads, PAGE_TOKENS, num_rows_for(max(STREAMS)),
        lambda *_: (512, 0), lambda _done, _all: None,
    )  # fmt: skip


def _add_row(table: Table, streams: int, name: str, off: Seq[Figures], on: Seq[Figures]) -> None:
    ratio = statistics.median(one.tpot_s / other.tpot_s for one, other in zip(on, off, strict=True))
    table.add_row(
        str(streams),
        name,
        f"{statistics.median(one.tpot_s for one in off) * 1e3:.2f}",
        f"{statistics.median(one.tpot_s for one in on) * 1e3:.2f}",
        f"{ratio:.2f}",
        f"{statistics.median(one.tokens_per_step for one in on):.2f}",
        f"{statistics.median(one.accepted for one in on):.0%}",
    )


if __name__ == "__main__":
    app()
