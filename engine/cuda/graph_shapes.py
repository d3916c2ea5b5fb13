"""Sizes of the steps that are captured as graphs. Pure: ints in, sizes out."""

from typing import NamedTuple

DRAFT_LENGTHS = (2, 4)  # new tokens per sequence, besides 1 and the maximum
MAX_DRAFT_ROWS = 256  # of a graph with drafts: with more, a step is bound by arithmetic and drafts seldom pay
# Of steps with prompts (engine/cuda/pieces.py). Larger ones keep the device busy longer than the host needs for their
# launches: 32 layers x 150 us, against 9 ms for 1,024 tokens of an 8B model on an H100.
PIECE_TOKENS = (128, 256, 384, 512, 768, 1024)


class Shape(NamedTuple):
    """The size of a decode step's graph."""

    num_sequences: int
    num_tokens: int = 1  # per sequence; more than 1 with drafts, or when a draft model catches up

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.num_tokens


def choose_shapes(max_sequences: int, max_drafts: int, max_rows: int) -> list[Shape]:
    """1, 2, 4, ... sequences with one token, and as many as have MAX_DRAFT_ROWS rows with up to 1 + max_drafts.

    max_sequences: 0: no graphs. max_rows: of any graph. Logits of a step with more are computed in parts, which no
    graph does.
    """
    if not max_sequences:
        return []
    shapes = [Shape(size) for size in powers_to(min(max_sequences, max_rows))]
    for length in sorted({min(length, 1 + max_drafts) for length in DRAFT_LENGTHS} | {1 + max_drafts}):
        most = min(max_sequences, min(MAX_DRAFT_ROWS, max_rows) // length)
        if length > 1 and most:
            shapes += [Shape(size, length) for size in powers_to(most)]
    return shapes


def powers_to(most: int) -> list[int]:
    """1, 2, 4, ... below `most`, then `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
