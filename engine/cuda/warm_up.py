"""Warm-up of a GPU before the first request: all kernels are built and loaded, and graphs captured."""

import gc
from itertools import count

import numpy as np

from engine.batch import ForwardRow
from engine.cuda.advice import explain_failed_warm_up
from engine.cuda.captured import capture_graphs, capture_pieces, choose_shapes_of, has_pieces, is_capturable
from engine.cuda.graph_shapes import choose_shapes
from engine.cuda.graphs import CudaCapture, OnCaptured
from engine.cuda.sizes import SLOT_TILES
from engine.engine import Engine
from engine.experts.config import moe_of
from engine.models.config import ModelConfig
from engine.runner import Runner
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

WARM_UP_TOKENS = (1, 5, 20, 40, 100)  # prompt lengths: one for each kernel that depends on the number of rows


def warm_up(
    engine: Engine, graph_rows: int, max_drafts: int = 0, piece_tokens: tuple[int, ...] = (),
    on_captured: OnCaptured = lambda done, total: None,
) -> None:  # fmt: skip
    """Build and load all kernels before the first request, and capture graphs.

    graph_rows: decode steps of up to this many sequences run as graphs, if attention can be captured; steps of few
    sequences also with up to `max_drafts` drafts. 0: no such graphs. piece_tokens: see engine/cuda/pieces.py.
    ValueError says what cannot be built.
    """
    padding_page = engine.padding_page
    assert padding_page is not None
    runners = [runner for runner in (engine.runner, engine.draft_runner) if runner is not None]
    max_rows = max(1, engine.rows.max_logits // engine.rows.vocab_size)  # logits of more are computed in parts
    max_drafts = 0 if engine.states else max_drafts
    shapes = choose_shapes(graph_rows, max_drafts, max_rows)
    done = count(1)
    try:
        for runner in runners:
            if runner.carried is None:  # a draft head follows the model's prompts
                run_prompts(runner, padding_page)
        wanted = [
            (one, choose_shapes_of(one, shapes if is_capturable(one) else []), piece_tokens if has_pieces(one) else ())
            for one in runners
        ]
        total = sum(len(own) + len(sizes) for _, own, sizes in wanted)
        gc.collect()
        gc.disable()  # freeing GPU memory during a capture would spoil it
        for runner, own, sizes in wanted:
            capture = CudaCapture()
            if own:
                capture_graphs(runner, own, capture, padding_page, lambda *_: on_captured(next(done), total))
            if sizes:
                capture_pieces(runner, sizes, capture, lambda: on_captured(next(done), total))
    except Exception as error:
        raise explain_failed_warm_up(error) from error
    finally:
        gc.enable()


def run_prompts(runner: Runner, padding_page: int) -> None:
    """Run prompts of a few lengths in the free row 0, all on one page, to compile and load all kernels."""
    rows, config, lengths = runner.rows, runner.model.config, [*WARM_UP_TOKENS]
    if isinstance(config, ModelConfig) and (moe := moe_of(config)) is not None:  # an expert's larger tile, from here
        lengths.append(SLOT_TILES[0] * moe.routing.num_experts // moe.routing.top_k + 1)
    for length in lengths:
        length = min(length, rows.width - MAX_DRAFT_TOKENS)
        rows.open(0, np.zeros(length, np.int32), SamplingParams(), length)
        rows.write_pages(0, 0, [padding_page] * -(-length // rows.page_tokens))
        runner.launch([ForwardRow(0, 0, length, num_logits=1, state_to=0)]).collect()
        rows.close(0)
