"""A runner's forwards as captured graphs: whole decode steps, and steps with prompts in pieces."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from engine.batch import Batch, Prepared
from engine.cuda.graph_shapes import Shape
from engine.cuda.graphs import Capture, DecodeGraph, DecodeGraphs, OnCaptured
from engine.cuda.pieces import PieceGraphs, has_equal_pieces
from engine.runner import Finish, Forwards, Launched, Runner, score, take_rows
from engine.staging import Ints


class CapturedForwards(Forwards):
    """Steps that fit no graph are launched operation by operation."""

    def __init__(self, runner: Runner) -> None:
        self.graphs: DecodeGraphs | None = None
        self.pieces: PieceGraphs | None = None
        runner.forwards = self

    def begin(self, runner: Runner, step: Prepared) -> Finish:
        graph = None if self.graphs is None else self.graphs.find(step)
        if graph is None:
            return super().begin(runner, step)
        rows = graph.forward(step)
        return lambda completed: _finish(runner, graph, completed, rows)

    def compute(self, runner: Runner, batch: Batch) -> Tensor:
        is_plain = batch.embedded is None and batch.additions is None
        piece = self.pieces.find(len(batch.token_ids)) if self.pieces is not None and is_plain else None
        if piece is None:
            return super().compute(runner, batch)
        runner.attention.plan(runner.pages, batch)
        return piece.run(batch, runner.attention)


@torch.inference_mode()
def _finish(runner: Runner, graph: DecodeGraph, step: Prepared, rows: Ints) -> Launched:
    """rows: of the step's outputs among the graph's.

    Log-probabilities are of a product of the scored rows alone: their last bits may differ from what was sampled.
    """
    chunk = step.chunks[0]
    tokens, scores = graph.choose(step, rows), []
    if chunk.scored:
        logits = runner.model.logits(take_rows(graph.hidden, rows[chunk.scored].tolist()))
        scores.append(score(chunk, torch.log_softmax(logits, -1), tokens))
    return Launched(tokens, scores)


def _forwards_of(runner: Runner) -> CapturedForwards:
    forwards = runner.forwards
    return forwards if isinstance(forwards, CapturedForwards) else CapturedForwards(runner)


def choose_shapes_of(runner: Runner, shapes: Collection[Shape]) -> Collection[Shape]:
    """Those that its steps can have: a draft head's have one token a sequence."""
    return [shape for shape in shapes if runner.carried is None or shape.num_tokens == 1]


def capture_graphs(
    runner: Runner, shapes: Collection[Shape], capture: Capture, padding_page: int,
    on_progress: OnCaptured = lambda done, total: None,
) -> None:  # fmt: skip
    """Capture graphs; from now on steps of the runner that fit run as graphs. See `DecodeGraphs`."""
    graphs = DecodeGraphs(
        choose_shapes_of(runner, shapes), runner.model, runner.attention, runner.pages, runner.rows, padding_page,
        capture, on_progress, runner.follower, runner.carried,
    )  # fmt: skip
    forwards = _forwards_of(runner)
    forwards.graphs, forwards.shapes = graphs, graphs.shapes


def capture_pieces(
    runner: Runner, sizes: Collection[int], capture: Capture, on_captured: Callable[[], None]
) -> None:  # fmt: skip
    """From now on steps with prompts run in captured pieces, if they fit `sizes`, numbers of tokens."""
    _forwards_of(runner).pieces = PieceGraphs(sizes, runner.model, capture, on_captured)


def is_capturable(runner: Runner) -> bool:
    """Whether its steps can be CUDA graphs."""
    return runner.attention.is_capturable and runner.model.is_capturable


def has_pieces(runner: Runner) -> bool:
    """Whether its steps with prompts can be captured in pieces. A draft head's follow the model's."""
    return is_capturable(runner) and runner.carried is None and has_equal_pieces(runner.model.config)
