"""What a GPU does before the first request: all kernels are built and loaded, and graphs captured."""

import gc
from itertools import count

from engine.cuda.graph_shapes import CHUNK_VALUES, choose_shapes
from engine.cuda.graphs import CudaCapture, OnCaptured
from engine.engine import NO_STEPS_AHEAD, Engine
from engine.out_of_memory import explain_failed_warm_up


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
    max_rows = max(1, CHUNK_VALUES // engine.rows.vocab_size)  # logits of more are computed in parts
    max_drafts = 0 if engine.states else max_drafts
    shapes = choose_shapes(graph_rows, max_drafts, max_rows)
    done = count(1)
    try:
        for runner in runners:
            runner.warm_up(padding_page)
        wanted = [
            (one, one.choose_shapes(shapes if one.is_capturable else []), piece_tokens if one.has_pieces else ())
            for one in runners
        ]
        total = sum(len(own) + len(sizes) for _, own, sizes in wanted)
        gc.collect()
        gc.disable()  # freeing GPU memory during a capture would spoil it
        for runner, own, sizes in wanted:
            capture = CudaCapture()
            if own:
                runner.capture_graphs(own, capture, padding_page, lambda *_: on_captured(next(done), total))
            if sizes:
                runner.capture_pieces(sizes, capture, lambda: on_captured(next(done), total))
            if max_drafts and (error := runner.find_lag_error()):
                engine.trouble[NO_STEPS_AHEAD] = f"{error}: run `make gpu-check`, or set --speculate off"
    except Exception as error:
        raise explain_failed_warm_up(error) from error
    finally:
        gc.enable()
