"""Plain decode steps as graphs equal kernels launched one by one.

The double of a capture runs the function again at each replay and checks that a real graph would work: the same
operations in the same order, on memory at the same addresses, none of which waits for the device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import ForwardRow, take_turns
from engine.compose import load_model
from engine.cuda import graphs as graphs_module
from engine.cuda import pieces
from engine.cuda.captured import CapturedForwards, capture_graphs, capture_pieces
from engine.cuda.field_ops import FieldOps
from engine.cuda.graph_shapes import Shape, choose_shapes, powers_to
from engine.cuda.graphs import Compute
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.models.decoder import Decoder
from engine.runner import ModelOutput, Runner
from tests.support.batches import SAMPLINGS
from tests.support.checkpoints import write_checkpoint
from tests.support.late_runner import LateRows, LateRunner
from tests.support.steps import (
    CONTEXT,
    CPU,
    NUM_TOKENS,
    PAGE_TOKENS,
    PROMPTS,
    ROW_PAGES,
    VOCAB,
    Unwatched,
    build_pages,
    decoder,
    expected,
    open_row,
    plan,
)
from tests.support.threads import one_thread
from wire.sampling import SamplingParams

__all__ = ["decoder", "expected", "one_thread"]  # fixtures

EVERYONE = range(len(SAMPLINGS))
MOST_DRAFTS = 3
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that ran, and the memory they used but did not allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self.memory: list[int] = []
        self._made: list[Tensor] = []  # kept, so that no address is used twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = {tensor.untyped_storage().data_ptr() for tensor in self._made}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.memory += [
            address for tensor in given if (address := tensor.untyped_storage().data_ptr()) not in made and address
        ]
        assert not any(name in str(func) for name in WAITING), f"{func} waits for the device"
        self.operations.append(str(func))
        result = func(*args, **(kwargs or {}))
        self._made += [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.memory
        ]
        return result


class Captures:
    """Satisfies `Capture`."""

    def __init__(self) -> None:
        self._num_replays = 0

    @property
    def num_replays(self) -> int:
        """Of whole steps: a forward and the choice of its tokens."""
        assert not self._num_replays % 2
        return self._num_replays // 2

    def __call__(self, compute: Compute) -> Compute:
        def run() -> Watch:
            watch = Watch()
            with watch:
                compute()
            return watch

        captured = run()

        def replay() -> None:
            self._num_replays += 1
            watch = run()
            assert watch.operations == captured.operations
            assert watch.memory == captured.memory

        return replay


@pytest.fixture(autouse=True)
def _sampling_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU uses another sampling kernel than the CPU."""

    def choose(*args: Any) -> None:
        with _disable_current_modes():
            sample_into(*args)

    sample_into = FieldOps.sample_into
    monkeypatch.setattr(FieldOps, "sample_into", choose)


class Built:
    """A runner with graphs; its last page is for padding."""

    def __init__(self, decoder: Decoder, rows: InputBatch, runner_type: Callable[..., Runner] = Runner) -> None:
        self.rows = rows
        attention, pages = Unwatched(decoder.config.attention_shapes[0]), build_pages(decoder)
        self.pages = torch.cat((pages, torch.zeros_like(pages[:1])))
        self.captures = Captures()
        self.progress: list[tuple[int, int]] = []
        self.runner = runner_type(decoder, attention, self.pages, rows)
        capture_graphs(
            self.runner, choose_shapes(len(SAMPLINGS), MOST_DRAFTS, 256), self.captures, len(pages),
            lambda done, total: self.progress.append((done, total)),
        )  # fmt: skip


def build(decoder: Decoder) -> Built:
    return Built(decoder, InputBatch(len(SAMPLINGS), CONTEXT, PAGE_TOKENS, VOCAB, CPU))


def test_every_number_of_sequences_has_a_graph_and_few_those_with_drafts() -> None:
    assert powers_to(1) == [1]
    assert powers_to(12) == [1, 2, 4, 8, 12]
    assert powers_to(64) == [1, 2, 4, 8, 16, 32, 64]
    assert choose_shapes(3, 0, 256) == [Shape(1), Shape(2), Shape(3)]
    assert choose_shapes(2, 1, 256) == [Shape(1), Shape(2), Shape(1, 2), Shape(2, 2)]
    most = {length: max(size for size, own in choose_shapes(200, 8, 256) if own == length) for length in (1, 2, 4, 9)}
    assert most == {1: 200, 2: 128, 4: 64, 9: 28}
    assert max(shape.num_rows for shape in choose_shapes(512, 8, 128)) == 128  # 2^25 logits of 262,144 tokens
    assert choose_shapes(2, 8, 1) == [Shape(1)]


def test_tokens_are_those_of_eager_steps_whatever_the_sampling(decoder: Decoder, expected: list[list[int]]) -> None:
    built = build(decoder)
    total = len(choose_shapes(len(SAMPLINGS), MOST_DRAFTS, 256))
    assert built.progress == [(done, total) for done in range(1, total + 1)]
    before = built.pages.clone()
    for row in EVERYONE:
        open_row(built.rows, row, row)
    told: list[list[int]] = [[] for _ in EVERYONE]
    for step in range(NUM_TOKENS):
        left = range(max(0, step - 4), len(SAMPLINGS))
        answers = built.runner.launch(plan(step, left, left)).collect()
        for row, token in zip(left, answers.tokens, strict=True):
            told[row].append(token)
    assert told == [answer[: len(own)] for answer, own in zip(expected, told, strict=True)]
    assert built.captures.num_replays == NUM_TOKENS - 1  # all but the prompts
    ends = [row * ROW_PAGES - (-(len(PROMPTS[row]) + NUM_TOKENS) // PAGE_TOKENS) for row in EVERYONE]
    untouched = [page for row in EVERYONE for page in range(ends[row], (row + 1) * ROW_PAGES)]
    assert len(untouched) > 20
    assert torch.equal(built.pages[untouched], before[untouched])


def test_graphs_keep_no_logits(decoder: Decoder) -> None:
    """They are in memory that all graphs of a model share, of which one runs at a time."""
    built = build(decoder)
    forwards = built.runner.forwards
    assert isinstance(forwards, CapturedForwards) and forwards.graphs is not None
    kept = [leaf for graph in forwards.graphs._graphs.values() for leaf in vars(graph).values()]
    assert not [one for one in kept if isinstance(one, Tensor) and one.shape[-1] == VOCAB]


def test_steps_ahead_go_through_graphs(decoder: Decoder, expected: list[list[int]]) -> None:
    rows = LateRows(len(SAMPLINGS), CONTEXT, PAGE_TOKENS, VOCAB, CPU)
    built = Built(decoder, rows, LateRunner)
    for row in EVERYONE:
        open_row(rows, row, row)
    launched = [built.runner.launch(plan(step, EVERYONE, EVERYONE)) for step in range(NUM_TOKENS)]
    told = [step.collect().tokens for step in launched]
    assert [list(answer) for answer in zip(*told, strict=True)] == expected
    assert built.captures.num_replays == NUM_TOKENS - 1


@pytest.fixture
def pair(decoder: Decoder) -> Iterator[Callable[[Sequence[ForwardRow]], ModelOutput]]:
    """Both runners take the same steps; their answers must be equal. Returns the graphs' answers."""
    built, eager_rows = build(decoder), InputBatch(len(SAMPLINGS), CONTEXT, PAGE_TOKENS, VOCAB, CPU)
    eager_pages = build_pages(decoder)
    eager = Runner(decoder, TorchSdpaAttention(decoder.config.attention_shapes[0]), eager_pages, eager_rows)
    runners = (built.runner, eager)

    def both(requests: Sequence[ForwardRow]) -> ModelOutput:
        answers, truth = (runner.launch(requests).collect() for runner in runners)
        assert answers.tokens == truth.tokens
        for one, other in zip(answers.logprobs, truth.logprobs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.top_ids == other.top_ids and one.logprob == pytest.approx(other.logprob, abs=1e-5)
        both.num_replays = built.captures.num_replays  # type: ignore[attr-defined]
        return answers

    for rows in (built.rows, eager_rows):
        for row in range(3):
            open_row(rows, row, row)
    both(plan(0, range(3), range(3)))
    both.rows = (built.rows, eager_rows)  # type: ignore[attr-defined]
    both.pages = (built.pages, eager_pages)  # type: ignore[attr-defined]
    yield both


def test_masks_and_log_probabilities_in_a_graph(pair: Any) -> None:
    mask = np.zeros((1, -(-VOCAB // 32)), np.int32)
    mask[0, 2] = 0b1010000
    first, second, third = plan(1, range(3), range(3))
    answers = pair([first, second._replace(mask=mask, chosen_logprobs=3), third._replace(chosen_logprobs=0)])
    assert answers.tokens[1] in (68, 70)
    assert [one is None for one in answers.logprobs] == [True, False, False]
    pair(plan(2, range(3), range(3)))
    assert pair.num_replays == 2


def test_more_biases_than_a_graph_takes_go_without_one(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "MAX_BIASES", 10)
    built = build(decoder)
    bias = tuple((token, 50.0 + token) for token in (7, 17, 27, 37, 47))
    for row in range(3):
        built.rows.open(row, PROMPTS[0], SamplingParams(0.0, logit_bias=bias), len(PROMPTS[0]))
        built.rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))
    built.runner.launch(plan(0, range(3), [0, 0, 0])).collect()
    for num_rows, num_replays in ((2, 1), (3, 1), (1, 2)):
        answers = built.runner.launch(plan(1, range(num_rows), [0] * num_rows)).collect()
        assert answers.tokens == [47] * num_rows
        assert built.captures.num_replays == num_replays


def test_drafts_and_missing_tokens_go_through_graphs_of_several_tokens(pair: Any) -> None:
    first, second, third = plan(1, range(3), range(3))
    for rows in pair.rows:
        for part in (first, second):
            rows.write_tokens([(part.row, part.begin + 1, np.array([5, 6, 7], np.int32))])
    mask = np.full((3, -(-VOCAB // 32)), -1, np.int32)
    mask[1] = 1 << 9
    for number, requests in enumerate(
        (
            [first._replace(count=4, num_logits=4), second._replace(count=2, num_logits=2), third],
            [first._replace(count=3, num_logits=3, mask=mask, chosen_logprobs=2), third._replace(num_logits=0)],
            [second._replace(begin=second.begin - 1, count=2)],
            [first, second._replace(num_logits=0)],
        ),
        start=1,
    ):
        pair(requests)
        assert pair.num_replays == number
    ours, theirs = pair.pages
    assert torch.allclose(ours[:-1], theirs, atol=1e-5)


def test_steps_that_graphs_cannot_do_go_without_one(pair: Any) -> None:
    first, _second, third = plan(1, range(3), range(3))
    for rows in pair.rows:
        rows.write_tokens([(0, first.begin + 1, np.array([5, 6, 7, 8], np.int32))])
        open_row(rows, 3, 7)  # with penalties
    length = len(PROMPTS[7])
    pair([ForwardRow(3, 0, length, 1)])
    for requests in (
        [first, third._replace(num_given=1)],
        [first._replace(count=5, num_logits=5)],
        [ForwardRow(1, 0, 3, 1)],
        [ForwardRow(3, length, 1, 1, num_drafted=1)],
    ):
        pair(requests)
        assert pair.num_replays == 0
    pair([first])
    assert pair.num_replays == 1


def test_a_row_is_taken_over_while_steps_of_its_last_sequence_are_on_their_way(
    decoder: Decoder, expected: list[list[int]]
) -> None:
    rows = LateRows(len(SAMPLINGS), CONTEXT, PAGE_TOKENS, VOCAB, CPU)
    runner = LateRunner(decoder, TorchSdpaAttention(decoder.config.attention_shapes[0]), build_pages(decoder), rows)
    first, second = 9, 11
    open_row(rows, 0, first)
    leaving = [runner.launch(plan(step, [0], [first])) for step in range(4)]
    assert leaving[0].collect().tokens == expected[first][:1]
    rows.close(0)
    open_row(rows, 0, second)
    launched = [runner.launch(plan(step, [0], [second])) for step in range(NUM_TOKENS)]
    assert [step.collect().tokens[0] for step in launched] == expected[second]


def test_prompts_run_in_captured_pieces_and_give_the_same_tokens(
    decoder: Decoder, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts at once, then a prompt beside answers, without and with logits; drafts of the step before wrong."""
    monkeypatch.setattr(pieces, "FEWEST", 20)
    built = build(decoder)
    captures = Captures()
    capture_pieces(built.runner, [32, 64, 256], captures, lambda: None)
    for row in EVERYONE:
        open_row(built.rows, row, row)
    first, *others = EVERYONE
    prompts = plan(0, others, others)
    half = [part._replace(count=part.count // 2, num_logits=0) for part in prompts]  # no logits are wanted
    built.runner.launch(half).collect()
    rest = [part._replace(begin=part.count // 2, count=part.count - part.count // 2) for part in prompts]
    assert built.runner.launch(rest).collect().tokens == [expected[row][0] for row in others]
    beside = [*plan(0, [first], [first]), *plan(1, others[:-3], others[:-3]), *plan(0, others[-3:], others[-3:])]
    tokens = built.runner.launch(beside).collect().tokens
    assert tokens[1:-3] == [expected[row][1] for row in others[:-3]] and tokens[0] == expected[first][0]
    num_steps = 3
    assert captures._num_replays == num_steps * decoder.config.num_layers
    big = built.rows.num_rows * CONTEXT
    forwards = built.runner.forwards
    assert isinstance(forwards, CapturedForwards) and forwards.pieces is not None and forwards.pieces.find(big) is None
    for graph in forwards.pieces._graphs:  # a layer's own heads would stay in memory for each layer and size
        assert all(wanted.heads.query_key is graph._query_key for wanted in graph._wanted.values())


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_states_go_through_graphs(family: str, tmp_path: Path) -> None:
    """Rows without a sequence write the last slot and leave all others as they are."""
    decoder = load_model(write_checkpoint(tmp_path, family, vocab=VOCAB), "auto", CPU)
    told: list[list[list[int]]] = []
    for has_graphs in (False, True):
        rows = InputBatch(3, CONTEXT, PAGE_TOKENS, VOCAB, CPU)
        states = PoolShape(2 * 3 + 1, decoder.config.state_parts, 1, torch.float32)
        rows.states = states.split(torch.zeros(states.num_pages, states.page_elements))
        shape = PoolShape(3 * ROW_PAGES + 1, decoder.config.kv_parts, PAGE_TOKENS, decoder.dtype)
        runner = Runner(decoder, Unwatched(decoder.config.attention_shapes[0]), torch.zeros(shape.sizes), rows)
        if has_graphs:
            capture_graphs(runner, choose_shapes(3, 0, 256), lambda compute: compute, 3 * ROW_PAGES)
        for row in range(3):
            open_row(rows, row, row)
        told.append([])
        for step in range(NUM_TOKENS):
            left = range(step // 6, 3)
            slots = [take_turns(row, step) for row in left]
            requests = [
                part._replace(state_from=source, state_to=target)
                for part, (source, target) in zip(plan(step, left, left), slots, strict=True)
            ]
            told[-1].append(runner.launch(requests).collect().tokens)
    assert told[0] == told[1]
