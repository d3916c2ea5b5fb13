"""State of running sequences between steps: tokens on the device, pages and sampling parameters on the host.

A sequence has a row from `open` to `close`. Changes arrive as deltas, so a step copies only what is new. The host knows
the length of each sequence; its latest tokens may exist only on the device.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.batch import Layout, StepFeature
from engine.layer_config import MAX_LOGITS_AT_ONCE
from engine.ranges import Ints, join_ranges
from engine.sampling.fields import PARAMS, SEEN_BIT, to_row
from engine.staging import upload
from wire.images import ImageSpan
from wire.sampling import MAX_DRAFT_TOKENS, SamplingParams

FIRST_LINES = 4  # of counts; doubled when more rows have penalties
NO_SLOT = -1  # of a sequence without an adapter


def to_float32(values: Sequence[float]) -> NDArray[np.float32]:
    """Finite numbers; values beyond float32 become its largest."""
    most = np.finfo(np.float32).max
    return np.clip(np.array(values, np.float64), -most, most).astype(np.float32)


class RowFeature:
    """What sequences may have beside tokens, by row, and what it adds to their steps. With this class they have none.

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


class InputBatch:
    """Owns the rows. One caller at a time."""

    def __init__(
        self, num_rows: int, context_tokens: int, page_tokens: int, vocab_size: int, device: torch.device
    ) -> None:
        """context_tokens: the longest sequence."""
        self.num_rows, self.page_tokens, self.vocab_size, self.device = num_rows, page_tokens, vocab_size, device
        self.max_logits = MAX_LOGITS_AT_ONCE  # of a step, computed at once
        self.context_tokens = context_tokens
        self.width = context_tokens + MAX_DRAFT_TOKENS  # drafts may follow a sequence at its limit
        # Prompt, answer and drafts. Steps read inputs and write sampled tokens here, in launch order.
        # The last row has no sequence: captured steps use it for surplus rows.
        self.tokens = torch.zeros(num_rows + 1, self.width, dtype=torch.int32, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self.states: tuple[torch.Tensor, ...] = ()  # see `batch.States`; the engine sets it once
        self.page_table = np.zeros((num_rows, -(-self.width // page_tokens)), np.int32)
        self.params = np.zeros(num_rows, PARAMS)
        self.has_bias = np.zeros(num_rows, np.bool_)
        self.bias: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}  # row |-> token ids, biases
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [k, V], see SEEN_BIT
        self.counts_line = np.full(num_rows, -1, np.int32)  # row |-> line of `counts`; -1 without penalties
        self.num_counted = np.zeros(num_rows, np.int64)  # tokens[row, :num_counted] are counted
        # Set by an engine whose model has them.
        self.adapters = RowFeature("no slots for adapters: set --max-loras")
        self.images = RowFeature("images for a model that takes none")
        self._answer_begin = np.zeros(num_rows, np.int64)
        self._free_lines: list[int] = []

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
        self._answer_begin[row], self.num_counted[row] = answer_begin, 0
        if sampling.logit_bias:
            kept = [pair for pair in sampling.logit_bias if pair[0] < self.vocab_size]
            self.bias[row] = np.array([token for token, _ in kept], np.int32), to_float32([bias for _, bias in kept])
            self.has_bias[row] = True
        if sampling.has_penalties:
            self.counts_line[row] = self._take_line()
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
        if self.counts_line[row] >= 0:
            self._free_lines.append(int(self.counts_line[row]))
            self.counts_line[row] = -1

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

    def count_tokens(self, rows: Ints, ends: Ints) -> None:
        """[N], [N]: count tokens[row, :end] of rows that have penalties. `ends` never shrink."""
        lines = self.counts_line[rows]
        has_line = lines >= 0
        if not np.count_nonzero(has_line):
            return
        rows, ends, lines = rows[has_line], ends[has_line], lines[has_line]
        begins = self.num_counted[rows]
        if (ends < begins).any():
            raise ValueError(f"{begins.tolist()} tokens were counted in rows {rows.tolist()}, now {ends.tolist()}")
        owners, positions = join_ranges(begins, ends - begins)
        self.num_counted[rows] = ends
        is_answer = positions >= self._answer_begin[rows][owners]
        self._count(rows[owners] * self.width + positions, lines[owners], is_answer.astype(np.int32))

    def reserve_counts(self) -> None:
        """Allocate lines for all rows, so that `counts` never moves again. Idempotent."""
        if len(self.counts) < self.num_rows:
            self._grow_counts(self.num_rows)

    def _grow_counts(self, new: int) -> None:
        old = len(self.counts)
        grown = torch.zeros(new, self.vocab_size, dtype=torch.int32, device=self.device)
        grown[:old] = self.counts
        self.counts = grown
        self._free_lines += range(old, new)

    def _take_line(self) -> int:
        if not self._free_lines:
            self._grow_counts(max(FIRST_LINES, 2 * len(self.counts)))
        line = self._free_lines.pop()
        self._clear(line)
        return line

    # The methods below run on the device, after everything launched before.

    def _put(self, parts: Sequence[tuple[int, int, NDArray[np.int32]]]) -> None:
        """In one copy."""
        rows, begins, token_ids = zip(*parts, strict=True)
        firsts = np.array(rows, np.int64) * self.width + np.array(begins, np.int64)
        _, places = join_ranges(firsts, np.array([len(one) for one in token_ids], np.int64))
        at, tokens = upload([places, np.concatenate(token_ids)], self.device)
        self.flat_tokens.index_copy_(0, at, tokens)

    def _clear(self, line: int) -> None:
        self.counts[line].zero_()

    def _count(self, places: Ints, lines: NDArray[np.int32], is_answer: NDArray[np.int32]) -> None:
        """[n] places in the flat tokens, the line of each, 1 for tokens of an answer."""
        at, begins, added = upload([places, lines * np.int64(self.vocab_size), is_answer], self.device)
        cells = begins + self.flat_tokens[at]
        flat = self.counts.view(-1)
        flat.index_add_(0, cells, added)
        flat.index_copy_(0, cells, flat[cells] | SEEN_BIT)  # equal cells get equal values
