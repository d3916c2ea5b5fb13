"""Tokens of rows on the device, counted where penalties need that."""

import numpy as np
import torch
from numpy.typing import NDArray

from engine.sampling.fields import SEEN_BIT
from engine.staging import Ints, join_ranges, upload

FIRST_LINES = 4  # of counts; doubled when more rows have penalties


class CountedTokens:
    """Owns the tokens of rows, and counts those of rows that have penalties."""

    def __init__(self, num_rows: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.num_rows, self.width, self.vocab_size, self.device = num_rows, width, vocab_size, device
        # Prompt, answer and drafts. Steps read inputs and write sampled tokens here, in launch order.
        # The last row has no sequence: captured steps use it for surplus rows.
        self.tokens = torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [k, V], see SEEN_BIT
        self.counts_line = np.full(num_rows, -1, np.int32)  # row |-> line of `counts`; -1 without penalties
        self.num_counted = np.zeros(num_rows, np.int64)  # tokens[row, :num_counted] are counted
        self._answer_begin = np.zeros(num_rows, np.int64)
        self._free_lines: list[int] = []

    def open_counts(self, row: int, answer_begin: int) -> None:
        """A sequence with penalties begins in a row."""
        self._answer_begin[row], self.num_counted[row] = answer_begin, 0
        self.counts_line[row] = self._take_line()

    def close_counts(self, row: int) -> None:
        """Idempotent."""
        if self.counts_line[row] >= 0:
            self._free_lines.append(int(self.counts_line[row]))
            self.counts_line[row] = -1

    def count_tokens(self, rows: Ints, ends: Ints) -> None:
        """[N], [N]: count tokens[row, :end] of rows, which have penalties. `ends` never shrink."""
        lines, begins = self.counts_line[rows], self.num_counted[rows]
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

    def _clear(self, line: int) -> None:
        self.counts[line].zero_()

    def _count(self, places: Ints, lines: NDArray[np.int32], is_answer: NDArray[np.int32]) -> None:
        """[n] places in the flat tokens, the line of each, 1 for tokens of an answer."""
        at, begins, added = upload([places, lines * np.int64(self.vocab_size), is_answer], self.device)
        cells = begins + self.flat_tokens[at]
        flat = self.counts.view(-1)
        flat.index_add_(0, cells, added)
        flat.index_copy_(0, cells, flat[cells] | SEEN_BIT)  # equal cells get equal values
