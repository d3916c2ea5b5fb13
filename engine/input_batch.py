"""State of running sequences between steps: tokens on the device, pages and sampling parameters on the host.

A sequence has a row from `open` to `close`. Changes arrive as deltas, so a step copies only what is new. The host knows
the length of each sequence; its latest tokens may exist only on the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Layout, StepFeature
from engine.layer_config import MAX_LOGITS_AT_ONCE
from engine.sampling.counts import CountedTokens
from engine.sampling.fields import PARAMS, to_row
from engine.staging import Ints, join_ranges, upload
from wire.images import ImageSpan
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

NO_SLOT = -1  # of a sequence without an adapter


def to_float32(values: Sequence[float]) -> NDArray[np.float32]:
    """Finite numbers; values beyond float32 become its largest."""
    most = np.finfo(np.float32).max
    return np.clip(np.array(values, np.float64), -most, most).astype(np.float32)


class RowFeature:
    """Something that sequences may have beside tokens, by row, and its part of their steps. This class: nothing.

    engine/adapters and engine/vision implement it.
    """

    def __init__(self, refusal: str) -> None:
        self._refusal = refusal

    def check(self, token_ids: NDArray[np.int32], wanted: Any) -> None:
        """ValueError if a sequence with these tokens cannot have it."""
        raise ValueError(self._refusal)

    def open(self, row: int, token_ids: NDArray[np.int32], wanted: Any) -> None:
        """A sequence that has it begins in a closed row. Raises like `check`."""
        self.check(token_ids, wanted)

    def close(self, row: int) -> None:
        """The row's sequence is over, whether it had it or not."""

    def lay_out(self, rows: Ints, layout: Layout) -> StepFeature | None:
        """[B] rows of a step's sequences |-> what is added to the step. None: nothing."""
        return None

    def fill(self, slot: int, key: str) -> None:
        """Put what the key names into a slot that no open row has."""
        raise ValueError(self._refusal)

    def forget(self, key: str) -> None:
        """No slot gets it any more. Idempotent."""


class InputBatch(CountedTokens):
    """Owns the rows. One caller at a time."""

    def __init__(
        self, num_rows: int, context_tokens: int, page_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        """context_tokens: the longest sequence."""
        # drafts may follow a sequence at its limit
        super().__init__(num_rows, context_tokens + MAX_DRAFT_TOKENS, vocab_size, device)
        self.page_tokens, self.context_tokens = page_tokens, context_tokens
        self.max_logits = MAX_LOGITS_AT_ONCE  # of a step, computed at once
        self.states: tuple[torch.Tensor, ...] = ()  # see `batch.States`; the engine sets it once
        self.page_table = np.zeros((num_rows, -(-self.width // page_tokens)), np.int32)
        self.params = np.zeros(num_rows, PARAMS)
        self.has_bias = np.zeros(num_rows, np.bool_)
        self.bias: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}  # row |-> token ids, biases
        # Set by an engine whose model has them.
        self.adapters = RowFeature("no slots for adapters: set --max-loras")
        self.images = RowFeature("images for a model that takes none")
        self.lay_out_trees: Callable[[Layout, Sequence[tuple[int, ...] | None]], Layout] | None = None  # see trees.py

    def open(
        self, row: int, token_ids: NDArray[np.int32], sampling: SamplingParams, answer_begin: int, slot: int = NO_SLOT,
        images: Sequence[tuple[ImageSpan, Any]] = (),
    ) -> None:  # fmt: skip
        """A sequence begins in a closed row. Tokens from `answer_begin` on are its answer. slot: of its adapter.

        images: in the prompt, by position, with their encodings; None: its KV comes from elsewhere. ValueError for
        images that the model cannot have. Biases of tokens beyond the vocabulary are dropped.
        """
        if images:
            self.images.open(row, token_ids, images)
        self.params[row] = to_row(sampling)
        if sampling.logit_bias:
            kept = [pair for pair in sampling.logit_bias if pair[0] < self.vocab_size]
            self.bias[row] = np.array([token for token, _ in kept], np.int32), to_float32([bias for _, bias in kept])
            self.has_bias[row] = True
        if sampling.has_penalties:
            self.open_counts(row, answer_begin)
        if slot != NO_SLOT:
            self.adapters.open(row, token_ids, slot)
        InputBatch.write_tokens(self, [(row, 0, token_ids)])  # not what sends further tokens to ranks

    def close(self, row: int) -> None:
        """The sequence ended or was evicted. Steps already launched may still write to the row."""
        self.page_table[row] = 0
        self.images.close(row)
        self.adapters.close(row)
        if self.has_bias[row]:
            self.has_bias[row] = False
            del self.bias[row]
        self.close_counts(row)

    def write_tokens(self, parts: Sequence[tuple[int, int, NDArray[np.int32]]]) -> None:
        """(row, first position, tokens) of each part: a prompt or drafts. Arrays must not change afterwards."""
        for _, begin, token_ids in parts:
            if begin + len(token_ids) > self.width:
                raise ValueError(f"{begin + len(token_ids)} tokens in a row of {self.width}")
        if parts:
            self._put(parts)

    def write_pages(self, row: int, first: int, pages: Sequence[int]) -> None:
        """Write ids of the sequence's pages, from its `first`-th page on."""
        self.page_table[row, first : first + len(pages)] = pages

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """[T], [T]: where the KV of these positions is, page * page_tokens + offset in the page."""
        pages, offsets = np.divmod(positions, self.page_tokens)
        return self.page_table[rows, pages].astype(np.int64) * self.page_tokens + offsets

    def fill_slot(self, slot: int, digest: str) -> None:
        """Put an adapter into a slot that no open row has."""
        self.adapters.fill(slot, digest)

    def drop_adapter(self, digest: str) -> None:
        """Free an adapter's memory on the host: no slot gets it any more. Idempotent."""
        self.adapters.forget(digest)

    def _put(self, parts: Sequence[tuple[int, int, NDArray[np.int32]]]) -> None:
        """In one copy, on the device, after everything launched before."""
        rows, begins, token_ids = zip(*parts, strict=True)
        firsts = np.array(rows, np.int64) * self.width + np.array(begins, np.int64)
        _, places = join_ranges(firsts, np.array([len(one) for one in token_ids], np.int64))
        at, tokens = upload([places, np.concatenate(token_ids)], self.device)
        self.flat_tokens.index_copy_(0, at, tokens)
