"""The value one forward pass works on.

A batch is ragged: the new tokens of all its sequences lie one after the other. It knows ids, positions and pages,
nothing of requests, sampling or time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The part of one sequence that a step works on: positions [begin, begin + len(token_ids)).

    KV of [0, begin) is in `pages` already; KV of the new positions is written by the step.
    """

    token_ids: Sequence[int]  # the new tokens
    begin: int  # position of token_ids[0]
    pages: Sequence[int]  # page ids of the sequence, covering at least [0, begin + len(token_ids))
    num_logits: int  # logits after so many of the last new tokens are wanted; 0: none, 1: those of a plain step


@dataclass(frozen=True, slots=True)
class Batch:
    """T new tokens of B sequences. Built by `build_batch`, changed by nobody."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    query_starts: Tensor  # [B + 1] int32, row of each sequence's first new token; ends with T
    context_lens: Tensor  # [B] int32, tokens in KV after this step, the new ones included
    page_table: Tensor  # [B, P] int32, page ids, padded with 0
    write_pages: Tensor  # [T] int64, page that takes the KV of each new token
    write_offsets: Tensor  # [T] int64, row within that page
    logits_rows: Tensor  # [S] int64, rows of T whose logits are wanted, ascending: each slice's last num_logits
    query_lens_host: tuple[int, ...]  # B values, the same on the host
    context_lens_host: tuple[int, ...]  # B values, the same on the host


def build_batch(slices: Sequence[SequenceSlice], page_tokens: int, device: torch.device) -> Batch:
    """Lay out `slices` as one ragged batch on `device`."""
    token_ids: list[int] = []
    positions: list[int] = []
    write_pages: list[int] = []
    write_offsets: list[int] = []
    logits_rows: list[int] = []
    query_starts = [0]
    for part in slices:
        token_ids.extend(part.token_ids)
        span = range(part.begin, part.begin + len(part.token_ids))
        positions.extend(span)
        write_pages.extend(part.pages[position // page_tokens] for position in span)
        write_offsets.extend(position % page_tokens for position in span)
        query_starts.append(len(token_ids))
        logits_rows.extend(range(len(token_ids) - part.num_logits, len(token_ids)))
    context_lens = tuple(part.begin + len(part.token_ids) for part in slices)
    widths = [-(-length // page_tokens) for length in context_lens]
    width = max(widths, default=0)
    page_table = [[*part.pages[:used], *([0] * (width - used))] for part, used in zip(slices, widths, strict=True)]

    def long(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def int32(values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Batch(
        token_ids=long(token_ids),
        positions=long(positions),
        query_starts=int32(query_starts),
        context_lens=int32(context_lens),
        page_table=int32(page_table),
        write_pages=long(write_pages),
        write_offsets=long(write_offsets),
        logits_rows=long(logits_rows),
        query_lens_host=tuple(len(part.token_ids) for part in slices),
        context_lens_host=context_lens,
    )
