"""Batches without a worker, to check and measure attention, models and sampling."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, ForwardRow
from engine.input_batch import InputBatch
from engine.prepared import build_batch, lay_out
from engine.sampling.batch import SamplingBatch
from engine.sampling.fields import PARAMS, to_row
from wire.sampling import SamplingParams

SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(0.7, seed=2, top_k=5),
    SamplingParams(1.3, seed=3, top_p=0.8),
    SamplingParams(seed=4, min_p=0.1),
    SamplingParams(0.9, seed=5, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(0.0, frequency_penalty=2.0),
    SamplingParams(0.8, seed=6, presence_penalty=3.0),
    SamplingParams(0.0, repetition_penalty=1.5),
    SamplingParams(seed=7, frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(0.0, logit_bias=((5, 3.0), (9, -50.0))),
    SamplingParams(seed=(1 << 64) - 1, logit_bias=((5, 8.0),), repetition_penalty=1.4),
]
"""All kinds of sampling, alone and combined."""


class Part(NamedTuple):
    """One sequence's new tokens, at positions [begin, begin + len(token_ids))."""

    token_ids: Sequence[int]
    begin: int
    pages: Sequence[int]  # for positions from 0 on
    num_logits: int  # logits of this many last tokens


def pack(parts: Sequence[Part], page_tokens: int, device: torch.device) -> Batch:
    """A batch with one row per part."""
    longest = max(part.begin + len(part.token_ids) for part in parts)
    rows = InputBatch(len(parts), longest, page_tokens, 1, device)
    for row, part in enumerate(parts):
        rows.open(row, np.zeros(0, np.int32), SamplingParams(), 0)
        rows.write_tokens([(row, part.begin, np.array(part.token_ids, np.int32))])
        rows.write_pages(row, 0, part.pages[: rows.page_table.shape[1]])
    requests = [ForwardRow(row, part.begin, len(part.token_ids), part.num_logits) for row, part in enumerate(parts)]
    return build_batch(lay_out(rows, requests), rows)


def build_sampling_batch(
    sampling: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    counts: Tensor | None = None,
    counts_line: NDArray[np.int32] | None = None,
    masks: NDArray[np.int32] | None = None,
    mask_line: NDArray[np.int32] | None = None,
) -> SamplingBatch:
    """A batch without an InputBatch. Biases beyond float32 become inf."""
    biases = [one.logit_bias for one in sampling]
    with np.errstate(over="ignore"):
        return SamplingBatch(
            params=np.array([to_row(one) for one in sampling], PARAMS),
            positions=np.array(positions, np.int64),
            counts=counts,
            counts_line=counts_line,
            bias_starts=np.cumsum([0, *map(len, biases)], dtype=np.int32) if any(biases) else None,
            bias_ids=np.array([token for bias in biases for token, _ in bias], np.int32),
            bias_values=np.array([value for bias in biases for _, value in bias]).astype(np.float32),
            masks=masks,
            mask_line=mask_line,
        )
