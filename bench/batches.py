"""Batches without a worker: for checks and measurements of attention and models."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.batch import Batch, Slice, build_batch, lay_out
from engine.rows import Rows
from engine.staging import Stager
from wire.sampling import SamplingParams


class Part(NamedTuple):
    """One sequence's new tokens, at positions [begin, begin + len(token_ids))."""

    token_ids: Sequence[int]
    begin: int
    pages: Sequence[int]  # of positions from 0 on
    num_logits: int  # logits after so many of the last tokens


def pack(parts: Sequence[Part], page_tokens: int, device: torch.device) -> Batch:
    """A row for each."""
    longest = max(part.begin + len(part.token_ids) for part in parts)
    rows = Rows(len(parts), longest, page_tokens, 1, device)
    for row, part in enumerate(parts):
        rows.open(row, np.zeros(0, np.int32), SamplingParams(), 0)
        rows.write_tokens(row, part.begin, np.array(part.token_ids, np.int32))
        rows.write_pages(row, 0, part.pages[: rows.page_table.shape[1]])
    slices = [Slice(row, part.begin, len(part.token_ids), part.num_logits) for row, part in enumerate(parts)]
    return build_batch(lay_out(rows, slices), rows, Stager(device))
