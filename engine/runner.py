"""One forward and its sampled tokens: the engine's interface for the worker loops.

A step is launched, then collected later. On a GPU several may be launched before the first is collected: the host lays
out a step from lengths alone, and the device reads and writes `InputBatch` in launch order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import Batch, ForwardRow, LogitsChunk, Prepared
from engine.input_batch import InputBatch
from engine.masks import with_masks
from engine.models.decoder import Decoder
from engine.prepared import build_batch, prepare
from engine.sampling.batch import SamplingBatch
from engine.sampling.logprobs import FoundLogprobs, find_logprobs
from engine.staging import download, mark, upload
from wire.logprobs import TokenLogprobs
from wire.sampling import MAX_DRAFT_TOKENS

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


Finish = Callable[[Prepared], Launched]
"""Launches the rest of a step whose forward is launched, given the same step, perhaps with masks."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose forward is launched and whose tokens are still to be chosen, before any other launch."""

    requests: Sequence[ForwardRow]
    step: Prepared
    choose: Finish


class Follower:
    """Goes on from each step of a model. This one does nothing; a draft head: engine/heads/follower.py."""

    def add_taps(self, batch: Batch) -> Batch:
        """The batch with memory for what it takes from the model."""
        return batch

    def plan(self, batch: Batch) -> None:
        """The model's step is about to be launched: `follow` or `run` comes next."""

    def follow(self, batch: Batch, step: Prepared, hidden: Tensor, tokens: Tensor) -> None:
        """The model's step gave `hidden`, [S, H], and has chosen `tokens`, [S]. Only launches."""

    def for_graph(self, num_sequences: int, num_tokens: int, num_pages: int) -> "Follower":
        """For captured steps, which call `find_lasts` and `run`: see `AttentionBackend.for_graph`."""
        return self

    def find_lasts(self, read_tokens: Callable[[], Tensor], chosen: Tensor, num_drafts: Tensor) -> Tensor:
        """[B, K] the step's tokens, and those chosen after them; [B] drafts |-> [B] outputs after the last right
        tokens."""
        return num_drafts

    def run(self, batch: Batch, hidden: Tensor, lasts: Tensor, row_ids: Tensor) -> None:
        """lasts, row_ids: [B], see `find_lasts`, and the sequences' rows. Only launches."""


class Forwards:
    """How a runner's forwards are launched: operation by operation. engine/cuda/captured.py: as graphs."""

    shapes: Sequence[tuple[int, int]] = ()  # (sequences, new tokens of each) of steps that are one launch

    def begin(self, runner: "Runner", step: Prepared) -> Finish:
        return runner.begin_step(step)

    def compute(self, runner: "Runner", batch: Batch) -> Tensor:
        """[S, H]"""
        return runner.model.forward(batch, runner.pages, runner.attention)


class Runner:
    """Owns a model and the attention backend. Writes KV into the pages of `rows`, and sampled tokens into `rows`."""

    is_head = False  # a draft head's: it follows the model's steps
    most_drafts = MAX_DRAFT_TOKENS  # in a row
    carried: Tensor | None = None  # [rows + 1, H] that steps go on from and leave; None: they begin with tokens alone

    def __init__(
        self, model: Decoder, attention: AttentionBackend, pages: Tensor, rows: InputBatch, drafts: bool = False,
        follower: Follower | None = None,
    ) -> None:  # fmt: skip
        """pages: this model's part of a pool. Runners of two models may share rows.

        drafts: it drafts, without adapters or images. follower: None: nothing goes on from its steps.
        """
        self.model, self.attention, self.pages, self.rows = model, attention, pages, rows
        self.follower = follower or Follower()
        self.forwards = Forwards()
        self._drafts = drafts

    @property
    def vocab_size(self) -> int:
        return self.rows.vocab_size

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
        if masks:
            chunks = with_masks(step.chunks, begun.requests, masks, self.rows.vocab_size)
            step = replace(step, chunks=chunks)
        return begun.choose(step)

    def _prepare(self, requests: Sequence[ForwardRow]) -> Prepared:
        """Plan the step on the host. Counts tokens for penalties."""
        step = prepare(self.rows, requests, chunk_rows=max(1, self.rows.max_logits // self.rows.vocab_size))
        return replace(step, layout=step.layout._replace(features=())) if self._drafts else step

    def _run(self, step: Prepared) -> Launched:
        return self._begin(step)(step)

    @torch.inference_mode()
    def _begin(self, step: Prepared) -> Finish:
        return self.forwards.begin(self, step)

    @torch.inference_mode()
    def begin_step(self, step: Prepared) -> Finish:
        """Launch the forward of any step, operation by operation."""
        batch = self.follower.add_taps(build_batch(step.layout, self.rows))
        self.follower.plan(batch)
        hidden = self._forward(step, batch)
        return lambda completed: self._finish(completed, batch, hidden)

    def _forward(self, step: Prepared, batch: Batch) -> Tensor:
        """[S, H]"""
        return self.forwards.compute(self, batch)

    @torch.inference_mode()
    def _finish(self, step: Prepared, batch: Batch, hidden: Tensor) -> Launched:
        rows, model = self.rows, self.model
        if not step.chunks:
            nothing = hidden.new_empty(0, dtype=torch.int64)
            self.follower.follow(batch, step, hidden, nothing)
            return Launched(nothing, [])
        (places,) = upload([step.outputs.places], rows.device)  # [S]
        parts: list[Tensor] = []
        scores: list[Scores] = []
        for chunk in step.chunks:
            if model.ranks.size > 1 and not chunk.scored and chunk.chosen is None:
                parts.append(self._choose_among_ranks(chunk, hidden[chunk.span]))
                continue
            logits = model.logits(hidden[chunk.span])  # [n, V]
            logprobs = torch.log_softmax(take_rows(logits, chunk.scored), -1) if chunk.scored else None
            parts.append(self._choose(chunk, logits, places[chunk.span]))
            if logprobs is not None:
                scores.append(score(chunk, logprobs, parts[-1]))
        tokens = parts[0] if len(parts) == 1 else torch.cat(parts)
        rows.flat_tokens.index_copy_(0, places, tokens.clamp(min=0).to(torch.int32))  # a step may be launched on them
        for feature in step.layout.features:
            feature.keep(batch, tokens, self.pages, rows.flat_tokens)
        self.follower.follow(batch, step, hidden, tokens)
        return Launched(tokens, scores)

    def _choose(self, chunk: LogitsChunk, logits: Tensor, places: Tensor) -> Tensor:
        """[n, V], [n] places of the tokens in the flat InputBatch.tokens -> [n] int64. Modifies `logits`."""
        if chunk.chosen is None:
            return self.model.ops.sample(logits, self._complete(chunk))
        tokens = self.rows.tokens.take(places).long()  # correct for given tokens
        if len(chunk.chosen):
            (chosen,) = upload([chunk.chosen], logits.device)
            tokens.index_copy_(0, chosen, self.model.ops.sample(logits.index_select(0, chosen), self._complete(chunk)))
        return tokens

    def _choose_among_ranks(self, chunk: LogitsChunk, hidden: Tensor) -> Tensor:
        """[n, H] -> [n] int64: each rank samples some of the rows, and needs only their logits."""
        ranks = self.model.ranks
        own, logits = ranks.own_rows(len(hidden)), self.model.own_logits(hidden)
        if own.start == own.stop:
            return ranks.gather_rows(logits.new_empty(0, dtype=torch.int64), len(hidden))
        return ranks.gather_rows(self.model.ops.sample(logits, self._complete(chunk).take(own)), len(hidden))

    def _complete(self, chunk: LogitsChunk) -> SamplingBatch:
        """Add the fields that are on the device, without waiting for it."""
        if not chunk.has_penalties:
            return chunk.sampling
        extra_ids = None
        if chunk.drafts is not None:
            (drafts,) = upload([chunk.drafts], self.rows.device)
            taken = self.rows.tokens.take(drafts)
            extra_ids = taken if taken.is_cuda else taken.numpy()
        return chunk.sampling._replace(counts=self.rows.counts, extra_ids=extra_ids)


def score(chunk: LogitsChunk, logprobs: Tensor, tokens: Tensor) -> Scores:
    """[R, V] of the scored outputs, [n] tokens sampled or given."""
    found = find_logprobs(logprobs, take_rows(tokens, chunk.scored), chunk.num_top)
    return [chunk.span.start + output for output in chunk.scored], found


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """[n, ...] -> the given rows; `values` itself if all."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, upload([np.array(rows)], values.device)[0])
