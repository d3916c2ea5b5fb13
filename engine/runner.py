"""One forward and its chosen tokens: the engine as the worker loops see it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.batch import SequenceSlice, build_batch
from engine.choice import Choice, Chosen
from engine.logits import adjust_logits_
from engine.logprobs import tell_logprobs
from engine.model.decoder import Decoder
from engine.sampling import sample

PIECE_ROWS = 128  # rows of logits held at once: 64 MiB of float32 at V = 128k, however many a prompt wants


class Runner:
    """Owns a model and the attention backend; writes KV into the pages that slices name."""

    def __init__(self, model: Decoder, attention: AttentionBackend, pages: Tensor) -> None:
        """pages: [num_pages, L, 2, Hkv, page_tokens, D], a pool's part for this model."""
        self._model = model
        self._attention = attention
        self._pages = pages

    @torch.inference_mode()
    def run(self, slices: Sequence[SequenceSlice], choices: Sequence[Choice]) -> list[Chosen]:
        """Compute the slices' KV; answer `choices`: one for each row of logits that the slices want, in order.

        No answer depends on other slices or choices. ValueError, as from `adjust_logits_`, is about some row; KV is
        written then, and the step may be repeated without that row.
        """
        batch = build_batch(slices, self._pages.shape[4], self._pages.device)
        if len(choices) != batch.logits_rows.numel():
            raise ValueError(f"{batch.logits_rows.numel()} rows of logits are wanted, {len(choices)} choices given")
        hidden = self._model.forward(batch, self._pages, self._attention)  # [S, H]
        if not choices and self._pages.is_cuda:
            torch.cuda.synchronize()  # the caller offers these pages to another process next
        pieces = [slice(begin, begin + PIECE_ROWS) for begin in range(0, len(choices), PIECE_ROWS)]
        return [
            chosen for piece in pieces for chosen in choose_tokens(self._model.logits(hidden[piece]), choices[piece])
        ]


def choose_tokens(logits: Tensor, choices: Sequence[Choice]) -> list[Chosen]:
    """[S, V] float32, S choices -> S answers. Modifies `logits`. ValueError as from `adjust_logits_`."""
    told = [row for row, choice in enumerate(choices) if choice.num_logprobs is not None]
    logprobs = torch.log_softmax(_take_rows(logits, told), -1)  # before the logits change
    adjust_logits_(logits, choices)
    tokens = [choice.tokens[choice.position] if choice.is_given else -1 for choice in choices]
    open_rows = [row for row, choice in enumerate(choices) if not choice.is_given]
    for row, token in zip(open_rows, _sample_rows(logits, choices, open_rows), strict=True):
        tokens[row] = token
    counts = [choices[row].num_logprobs or 0 for row in told]
    told_logprobs = dict(zip(told, tell_logprobs(logprobs, [tokens[row] for row in told], counts), strict=True))
    return [Chosen(token, told_logprobs.get(row)) for row, token in enumerate(tokens)]


def _sample_rows(logits: Tensor, choices: Sequence[Choice], rows: list[int]) -> list[int]:
    """[S, V] -> a token for each of some rows."""
    sampling = [choices[row].sampling for row in rows]
    tokens: list[int] = sample(_take_rows(logits, rows), sampling, [choices[row].position for row in rows]).tolist()
    return tokens


def _take_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """[S, V] -> those rows; `logits` itself if all."""
    return logits if len(rows) == len(logits) else logits[rows]
