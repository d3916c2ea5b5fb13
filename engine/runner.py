"""One forward and its sampled tokens: the engine's interface for the worker loops.

A step is launched, then collected later. On a GPU several may be launched before the first is collected: the host lays
out a step from lengths alone, and the device reads and writes `InputBatch` in launch order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.choose import reference_attention
from engine.batch import Batch, ForwardRow, Layout, build_batch, count_right, shift
from engine.cuda.graph_shapes import CHUNK_VALUES, Shape
from engine.cuda.graphs import Capture, DecodeGraph, DecodeGraphs, OnCaptured
from engine.cuda.pieces import PieceGraphs
from engine.heads.follower import HeadFollower
from engine.input_batch import InputBatch
from engine.models.decoder import Decoder
from engine.out_of_memory import is_out_of_memory
from engine.prepared import LogitsChunk, Prepared, Preparer, with_masks
from engine.ranges import Ints
from engine.sampling.batch import SamplingBatch
from engine.sampling.logprobs import FoundLogprobs, find_logprobs
from engine.staging import Stager, download, mark, upload
from wire.logprobs import TokenLogprobs
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

log = structlog.get_logger()
WARM_UP_TOKENS = (1, 5, 20, 40, 100)  # prompt lengths: one for each kernel that depends on the number of rows
NO_PADDING = 1 << 62  # no slot is so high
LAG_LENGTHS, WRONG_DRAFTS, LAG_ERROR = (16, 48, 512, 4096), 3, 0.1  # of find_lag_error; the last: rounding in bfloat16
Masks = Mapping[int, NDArray[np.int32]]  # index of a request |-> its mask, see `ForwardRow`


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """The results for a step's rows of logits, in order."""

    tokens: list[int]  # sampled or given; NOT_A_NUMBER where the logits are NaN
    logprobs: list[TokenLogprobs | None]  # one per token; empty if no request asks for any
    num_accepted: dict[int, int] = field(default_factory=dict)  # index of a request with drafts |-> how many were right


Scores = tuple[list[int], FoundLogprobs]  # indices of some outputs of a step, and their log-probabilities


class Launched:
    """A step that the device is computing."""

    def __init__(
        self, tokens: Tensor, scores: Sequence[Scores], drafted: Sequence[int] = (), accepted: Tensor | None = None
    ) -> None:
        """tokens: [S] on the device. Call this after all other launches of the step.

        drafted: J requests with drafts; accepted: [J] on the device, how many of each one's drafts were right.
        """
        self._num_tokens = len(tokens)
        self._numbers = download(tokens if accepted is None else torch.cat((tokens, accepted)))
        self._scores = scores
        self._drafted = drafted
        self._done = mark() if tokens.is_cuda else None

    def collect(self) -> ModelOutput:
        """Wait until the step is done; its KV is then in the pages. Raises errors from the device."""
        if self._done is not None:
            self._done.synchronize()
        numbers: list[int] = self._numbers.tolist()
        tokens, accepted = numbers[: self._num_tokens], numbers[self._num_tokens :]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens) if self._scores else []
        for outputs, found in self._scores:
            for output, one in zip(outputs, found.read(), strict=True):
                logprobs[output] = one
        return ModelOutput(tokens, logprobs, dict(zip(self._drafted, accepted, strict=True)))


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
        """pages: this model's part of a pool. Runners of two models may share rows; one that drafts judges nothing.

        head: follows each step.
        """
        self._model = model
        self._drafts = drafts
        self._head = head
        self._attention = attention
        self._pages = pages
        self._rows = rows
        self._graphs: DecodeGraphs | None = None
        self._pieces: PieceGraphs | None = None
        self._preparer = Preparer(rows)
        self._stager = Stager(rows.device)

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
            shapes, self._model, self._attention, self._pages, self._rows, padding_page, not self._drafts, capture,
            on_progress, self._head,
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

    def find_lag_error(self) -> str | None:
        """How a step that begins earlier than planned differs from one planned right; None if it does not. Uses page 0.

        Where attention's kernels divide a context depends on the plan, so lengths end where a part may begin.
        """
        rows = self._rows
        self._pages[0].zero_()
        for length in LAG_LENGTHS:
            if length + WRONG_DRAFTS > rows.width - MAX_DRAFT_TOKENS:
                break
            rows.open(0, np.zeros(length, np.int32), SamplingParams(temperature=0.0), length)
            rows.write_pages(0, 0, [0] * -(-(length + WRONG_DRAFTS) // rows.page_tokens))
            planned = ForwardRow(0, length - 1, 1, 1, chosen_logprobs=0)
            rows.lag[0] = WRONG_DRAFTS
            lagging = planned._replace(begin=planned.begin + WRONG_DRAFTS, num_unjudged=WRONG_DRAFTS)
            right, found = (self.launch([one]).collect() for one in (planned, lagging))
            rows.close(0)
            (truth,), (told,) = right.logprobs, found.logprobs
            assert truth is not None and told is not None
            if right.tokens != found.tokens or not abs(truth.logprob - told.logprob) <= LAG_ERROR:
                told_apart = f"token {found.tokens[0]} ({told.logprob:.3f}) for {right.tokens[0]} ({truth.logprob:.3f})"
                return f"a context of {length} tokens that was planned {WRONG_DRAFTS} longer gives {told_apart}"
        return None

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

        At least one request, at most two per row (see `ForwardRow`). They do not affect each other otherwise. Sampled
        tokens are written to InputBatch.tokens at their positions, or none if this raises. ValueError says what is
        wrong with a request.
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
        """Plan the step on the host. Counts tokens for penalties. What drafts has no adapters and sees no images."""
        step = self._preparer.prepare(requests, chunk_rows=max(1, CHUNK_VALUES // self._rows.vocab_size))
        if not self._drafts:
            return step
        return replace(step, layout=step.layout._replace(adapters=None, turns=None, images=None))

    def _run(self, step: Prepared) -> Launched:
        return self._begin(step)(step)

    @torch.inference_mode()
    def _begin(self, step: Prepared) -> Callable[[Prepared], Launched]:
        """Launch the forward. Returns what launches the rest, given the same step, perhaps with masks."""
        graph = self._find_graph(step)
        if graph is not None:
            rows = graph.forward(step)
            return lambda completed: self._finish_graph(graph, completed, rows)
        batch = build_batch(step.layout, self._rows, self._stager)
        hidden, shifted = self._forward(step, batch)
        return lambda completed: self._finish(completed, shifted, hidden)

    def _find_graph(self, step: Prepared) -> DecodeGraph | None:
        return None if self._graphs is None else self._graphs.find(step)

    @torch.inference_mode()
    def _finish_graph(self, graph: DecodeGraph, step: Prepared, rows: Ints) -> Launched:
        chunk = step.chunks[0]
        tokens, logits, accepted = graph.choose(step, rows)
        scores = []
        if chunk.scored:
            wanted = rows[chunk.scored].tolist()
            if self._model.ranks.size > 1:  # no rank has all logits
                logits, wanted = self._model.logits(_take(graph.hidden, wanted)), list(range(len(wanted)))
            scores.append(_score(chunk, torch.log_softmax(_take(logits, wanted), -1), tokens))
        drafted = [] if step.drafts is None or accepted is None else step.drafts.requests.tolist()
        return Launched(tokens, scores, drafted, accepted)

    def _forward(self, step: Prepared, batch: Batch) -> tuple[Tensor, Batch]:
        """[S, H], and the batch at the positions that it really has."""
        layout, pieces, attention = step.layout, self._pieces, self._attention
        if batch.images is not None:
            pieces = None
            if batch.images.sees is not None:  # which other backends do not read
                attention = reference_attention(self._model.config.attention_shapes, self._rows.page_tokens)
        piece = None if pieces is None or layout.adapters is not None else pieces.find(len(layout.places))
        if self._head is not None:
            batch = replace(batch, taps=self._model.new_taps(len(layout.places)))
            self._head.plan(batch)
        shifted, lag = self._shift(layout, batch)
        if piece is None and lag is None:
            return self._model.forward(batch, self._pages, attention), batch
        run_planned = self._model.run_planned if piece is None else piece.run
        attention.plan(self._pages, batch)
        if lag is not None:
            attention.correct(shifted, lag)
            if self._head is not None:
                self._head.correct(shifted, lag)
        return run_planned(shifted, attention), shifted

    def _shift(self, layout: Layout, batch: Batch) -> tuple[Batch, Tensor | None]:
        """The batch at the positions that it really has, and how much earlier sequences begin, [B]; None: none does."""
        if layout.lag_rows is None:
            return batch, None
        lag_rows, owners = upload([layout.lag_rows, layout.owners], self._rows.device)
        lag = self._rows.lag.index_select(0, lag_rows)  # [B]
        return shift(batch, lag, owners, self._rows, NO_PADDING), lag

    @torch.inference_mode()
    def _finish(self, step: Prepared, batch: Batch, hidden: Tensor) -> Launched:
        rows = self._rows
        if not step.chunks:
            self._lead_head(batch, step)
            return Launched(hidden.new_empty(0, dtype=torch.int64), [])
        (places,) = upload([step.outputs.places], rows.device)  # [S]
        if step.layout.lag_rows is not None:
            step, places = self._shift_outputs(step, batch, places)
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
        if step.drafts is None or self._drafts:
            self._lead_head(batch, step)
            return Launched(tokens, scores)
        _, of_rows, num_drafts, inputs, outputs = upload(list(step.drafts), rows.device)
        accepted = count_right(batch.token_ids[inputs], tokens[outputs], num_drafts)
        rows.lag.index_copy_(0, of_rows, num_drafts - accepted)
        self._lead_head(batch, step, num_drafts - accepted)
        return Launched(tokens, scores, step.drafts.requests.tolist(), accepted)

    def _lead_head(self, batch: Batch, step: Prepared, num_wrong: Tensor | None = None) -> None:
        """Have the head follow. Drafts are worse if it cannot; ranks would differ then."""
        if self._head is None:
            return
        try:
            self._head.follow(batch, step, num_wrong)
        except Exception as error:
            if self._model.ranks.size > 1 or not is_out_of_memory(error):
                raise
            log.warning("the draft head could not follow a step", reason=str(error))

    def _shift_outputs(self, step: Prepared, batch: Batch, places: Tensor) -> tuple[Prepared, Tensor]:
        """The outputs' positions and places as they really are."""
        actual = batch.places.index_select(0, batch.logits_rows) + 1  # [S]
        (laid_out,) = upload([step.outputs.positions], places.device)
        positions = laid_out - (places - actual)
        chunks = []
        for chunk in step.chunks:
            own = positions[chunk.span]
            if chunk.chosen is not None:
                own = own.index_select(0, upload([chunk.chosen], places.device)[0])
            moved = chunk.sampling._replace(positions=own if own.is_cuda else own.numpy())
            chunks.append(chunk._replace(sampling=moved))
        return replace(step, chunks=chunks), actual

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
