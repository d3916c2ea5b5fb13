"""One forward and its sampled tokens: the engine's interface for the worker loops.

A step is launched, then collected later. On a GPU several may be launched before the first is collected: the host lays
out a step from lengths alone, and the device reads and writes `InputBatch` in launch order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch, ForwardRow, LogitsChunk, Prepared
from engine.cuda.graph_shapes import CHUNK_VALUES, Shape
from engine.cuda.graphs import Capture, DecodeGraph, DecodeGraphs, OnCaptured
from engine.cuda.pieces import PieceGraphs
from engine.heads.follower import HeadFollower
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.out_of_memory import is_out_of_memory
from engine.prepared import build_batch, prepare, with_masks
from engine.ranges import Ints
from engine.sampling.batch import SamplingBatch
from engine.sampling.logprobs import FoundLogprobs, find_logprobs
from engine.staging import download, mark, upload
from wire.logprobs import TokenLogprobs
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

log = structlog.get_logger()
WARM_UP_TOKENS = (1, 5, 20, 40, 100)  # prompt lengths: one for each kernel that depends on the number of rows
Masks = Mapping[int, NDArray[np.int32]]  # index of a request |-> its mask, see `ForwardRow`


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results for a step's rows of logits, in order."""

    tokens: list[int]  # sampled or given; NOT_A_NUMBER where the logits are NaN
    logprobs: list[TokenLogprobs | None]  # one per token; empty if no request asks for any


Scores = tuple[list[int], FoundLogprobs]  # indices of some outputs of a step, and their log-probabilities


class Launched:
    """A step that the device is computing."""

    def __init__(self, tokens: Tensor, scores: Sequence[Scores]) -> None:
        """tokens: [S] on the device. Call this after all other launches of the step."""
        self._tokens = download(tokens)
        self._scores = scores
        self._done = mark() if tokens.is_cuda else None

    def collect(self) -> ModelOutput:
        """Wait until the step is done; its KV is then in the pages. Raises errors from the device."""
        if self._done is not None:
            self._done.synchronize()
        tokens: list[int] = self._tokens.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens) if self._scores else []
        for outputs, found in self._scores:
            for output, one in zip(outputs, found.read(), strict=True):
                logprobs[output] = one
        return ModelOutput(tokens, logprobs)


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose forward is launched and whose tokens are still to be chosen, before any other launch."""

    requests: Sequence[ForwardRow]
    step: Prepared
    choose: Callable[[Prepared], Launched]


class Runner:
    """Owns a model and the attention backend. Writes KV into the pages of `rows`, and sampled tokens into `rows`."""

    is_head = False  # a draft head's: it follows the model's steps

    def __init__(
        self, model: Decoder, attention: AttentionBackend, pages: Tensor, rows: InputBatch, drafts: bool = False,
        head: HeadFollower | None = None,
    ) -> None:  # fmt: skip
        """pages: this model's part of a pool. Runners of two models may share rows.

        drafts: it drafts, without adapters or images. head: follows each step.
        """
        self._model = model
        self._drafts = drafts
        self._head = head
        self._attention = attention
        self._pages = pages
        self._rows = rows
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None

    def choose_shapes(self, shapes: Collection[Shape]) -> Collection[Shape]:
        """Those that its steps can have."""
        return shapes

    def capture_graphs(
        self,
        shapes: Collection[Shape],
        capture: Capture,
        padding_page: int,
        on_progress: OnCaptured = lambda done, total: None,
    ) -> None:
        """Capture graphs; from now on steps that fit run as graphs. See `DecodeGraphs`."""
        self._graphs = DecodeGraphs(
            shapes, self._model, self._attention, self._pages, self._rows, padding_page, capture, on_progress,
            self._head,
        )  # fmt: skip

    def capture_pieces(self, sizes: Collection[int], capture: Capture, on_captured: Callable[[], None]) -> None:
        """From now on steps with prompts run in captured pieces, if they fit `sizes`, numbers of tokens."""
        self._pieces = PieceGraphs(sizes, self._model, capture, on_captured)

    def warm_up(self, padding_page: int) -> None:
        """Run prompts of a few lengths in the free row 0, all on one page, to compile and load all kernels."""
        rows = self._rows
        for count in WARM_UP_TOKENS:
            count = min(count, rows.width - MAX_DRAFT_TOKENS)
            rows.open(0, np.zeros(count, np.int32), SamplingParams(), count)
            rows.write_pages(0, 0, [padding_page] * -(-count // rows.page_tokens))
            self.launch([ForwardRow(0, 0, count, num_logits=1, state_to=0)]).collect()
            rows.close(0)

    @property
    def graph_shapes(self) -> list[Shape]:
        """Of captured steps."""
        return [] if self._graphs is None else self._graphs.shapes

    @property
    def is_capturable(self) -> bool:
        """Whether its steps can be CUDA graphs."""
        return self._attention.is_capturable and self._model.is_capturable

    @property
    def has_pieces(self) -> bool:
        """Whether its steps with prompts can be captured in pieces."""
        return self.is_capturable and self._model.has_equal_pieces

    @property
    def vocab_size(self) -> int:
        return self._rows.vocab_size

    def launch(self, requests: Sequence[ForwardRow]) -> Launched:
        """Compute the requests' KV; sample or score the tokens after the rows of logits that they want.

        At least one request, at most one per row. They do not affect each other. Sampled tokens are written to
        InputBatch.tokens at their positions, or none if this raises. ValueError says what is wrong with a request.
        """
        return self._run(self._prepare(requests))

    def begin(self, requests: Sequence[ForwardRow]) -> Begun:
        """The first half of `launch`, for requests whose masks follow from steps that are not collected yet."""
        step = self._prepare(requests)
        return Begun(requests, step, self._begin(step))

    def choose(self, begun: Begun, masks: Masks) -> Launched:
        """The second half."""
        step = begun.step
        chunks = with_masks(step.chunks, begun.requests, masks, self._rows.vocab_size)
        return begun.choose(replace(step, chunks=chunks))

    def _prepare(self, requests: Sequence[ForwardRow]) -> Prepared:
        """Plan the step on the host. Counts tokens for penalties."""
        step = prepare(self._rows, requests, chunk_rows=max(1, CHUNK_VALUES // self._rows.vocab_size))
        if not self._drafts:
            return step
        return replace(step, layout=step.layout._replace(features=()))

    def _run(self, step: Prepared) -> Launched:
        return self._begin(step)(step)

    @torch.inference_mode()
    def _begin(self, step: Prepared) -> Callable[[Prepared], Launched]:
        """Launch the forward. Returns what launches the rest, given the same step, perhaps with masks."""
        graph = self._find_graph(step)
        if graph is not None:
            rows = graph.forward(step)
            return lambda completed: self._finish_graph(graph, completed, rows)
        batch = build_batch(step.layout, self._rows)
        if self._head is not None:
            batch = replace(batch, taps=self._model.new_taps(len(step.layout.places)))
            self._head.plan(batch)
        hidden = self._forward(step, batch)
        return lambda completed: self._finish(completed, batch, hidden)

    def _find_graph(self, step: Prepared) -> DecodeGraph | None:
        return None if self._graphs is None else self._graphs.find(step)

    @torch.inference_mode()
    def _finish_graph(self, graph: DecodeGraph, step: Prepared, rows: Ints) -> Launched:
        chunk = step.chunks[0]
        tokens, logits = graph.choose(step, rows)
        scores = []
        if chunk.scored:
            wanted = rows[chunk.scored].tolist()
            if self._model.ranks.size > 1:  # no rank has all logits
                logits, wanted = self._model.logits(_take(graph.hidden, wanted)), list(range(len(wanted)))
            scores.append(_score(chunk, torch.log_softmax(_take(logits, wanted), -1), tokens))
        return Launched(tokens, scores)

    def _forward(self, step: Prepared, batch: Batch) -> Tensor:
        """[S, H]"""
        layout, pieces, attention = step.layout, self._pieces, self._attention
        if batch.embedded is not None or batch.additions is not None:
            pieces = None
        piece = None if pieces is None else pieces.find(len(layout.places))
        if piece is None:
            return self._model.forward(batch, self._pages, attention)
        attention.plan(self._pages, batch)
        return piece.run(batch, attention)

    @torch.inference_mode()
    def _finish(self, step: Prepared, batch: Batch, hidden: Tensor) -> Launched:
        rows = self._rows
        if not step.chunks:
            nothing = hidden.new_empty(0, dtype=torch.int64)
            self._lead_head(batch, step, nothing)
            return Launched(nothing, [])
        (places,) = upload([step.outputs.places], rows.device)  # [S]
        parts: list[Tensor] = []
        scores: list[Scores] = []
        for chunk in step.chunks:
            if self._model.ranks.size > 1 and not chunk.scored and chunk.chosen is None:
                parts.append(self._choose_among_ranks(chunk, hidden[chunk.span]))
                continue
            logits = self._model.logits(hidden[chunk.span])  # [n, V]
            logprobs = torch.log_softmax(_take(logits, chunk.scored), -1) if chunk.scored else None
            parts.append(self._choose(chunk, logits, places[chunk.span]))
            if logprobs is not None:
                scores.append(_score(chunk, logprobs, parts[-1]))
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows.flat_tokens.index_copy_(0, places, tokens.clamp(min=0).to(torch.int32))  # a step may be launched on them
        self._lead_head(batch, step, tokens)
        return Launched(tokens, scores)

    def _lead_head(self, batch: Batch, step: Prepared, tokens: Tensor) -> None:
        """Have the head follow. Drafts are worse if it cannot; ranks would differ then."""
        if self._head is None:
            return
        try:
            self._head.follow(batch, step, tokens)
        except Exception as error:
            if self._model.ranks.size > 1 or not is_out_of_memory(error):
                raise
            log.warning("the draft head could not follow a step", reason=str(error))

    def _choose(self, chunk: LogitsChunk, logits: Tensor, places: Tensor) -> Tensor:
        """[n, V], [n] places of the tokens in the flat InputBatch.tokens -> [n] int64. Modifies `logits`."""
        if chunk.chosen is None:
            return self._model.ops.sample(logits, self._complete(chunk))
        tokens = self._rows.tokens.take(places).long()  # correct for given tokens
        if len(chunk.chosen):
            (chosen,) = upload([chunk.chosen], logits.device)
            tokens.index_copy_(0, chosen, self._model.ops.sample(logits.index_select(0, chosen), self._complete(chunk)))
        return tokens

    def _choose_among_ranks(self, chunk: LogitsChunk, hidden: Tensor) -> Tensor:
        """[n, H] -> [n] int64: each rank samples some of the rows, and needs only their logits."""
        ranks = self._model.ranks
        own, logits = ranks.own_rows(len(hidden)), self._model.own_logits(hidden)
        if own.start == own.stop:
            return ranks.gather_rows(logits.new_empty(0, dtype=torch.int64), len(hidden))
        return ranks.gather_rows(self._model.ops.sample(logits, self._complete(chunk).take(own)), len(hidden))

    def _complete(self, chunk: LogitsChunk) -> SamplingBatch:
        """Add the fields that are on the device, without waiting for it."""
        if not chunk.has_penalties:
            return chunk.sampling
        extra_ids = None
        if chunk.drafts is not None:
            (drafts,) = upload([chunk.drafts], self._rows.device)
            taken = self._rows.tokens.take(drafts)
            extra_ids = taken if taken.is_cuda else taken.numpy()
        return chunk.sampling._replace(counts=self._rows.counts, extra_ids=extra_ids)


def _score(chunk: LogitsChunk, logprobs: Tensor, tokens: Tensor) -> Scores:
    """[R, V] of the scored outputs, [n] tokens sampled or given."""
    found = find_logprobs(logprobs, _take(tokens, chunk.scored), chunk.num_top)
    return [chunk.span.start + output for output in chunk.scored], found


def _take(values: Tensor, rows: list[int]) -> Tensor:
    """[n, ...] -> the given rows; `values` itself if all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, upload([np.array(rows)], values.device)[0])
