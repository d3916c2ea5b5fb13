"""Writes what the engine keeps of sequences, its rows, and asks it for their parts of steps. On the engine thread."""

import time
from collections.abc import Iterable
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardRow
from engine.input_batch import InputBatch
from engine.masks import allowed_words
from worker.sequences import ScheduledSequence, Sequence


class RowWriter:
    """Knows which pages are in which row, and which adapter in which slot."""

    def __init__(self, rows: InputBatch) -> None:
        self._rows = rows
        self._filled: dict[int, str] = {}  # slot on the device |-> key of the adapter in it

    def write(self, sequence: Sequence) -> None:
        """Its pages, and the rest where it has a new row."""
        if sequence.num_pages_in_row < 0:
            tokens = np.array(sequence.tokens, np.int32)
            self._rows.close(sequence.row)  # of the row's previous sequence
            slot, key = sequence.adapter
            if self._filled.get(slot, "") != key:
                self._rows.fill_slot(slot, key)
                self._filled[slot] = key
            params = sequence.params
            images = [(image, params.encodings.get(image.digest)) for image in params.images]
            self._rows.open(sequence.row, tokens, params.sampling, sequence.answer_begin, slot, images)
            sequence.num_pages_in_row, sequence.started_at = 0, time.monotonic()
        first = sequence.num_pages_in_row
        self._rows.write_pages(sequence.row, first, sequence.pages[first:])
        sequence.num_pages_in_row = len(sequence.pages)

    def drop_adapters(self, keys: Iterable[str]) -> None:
        """Free the memory of these loads."""
        for key in keys:
            self._rows.drop_adapter(key)

    def requests(self, steps: Iterable[ScheduledSequence]) -> list[ForwardRow]:
        """The engine's work for each sequence. Writes their drafts."""
        drafted = [step for step in steps if step.drafts]
        ends = [(step.sequence.row, step.begin + step.count) for step in drafted]
        self._rows.write_tokens([(*at, np.array(one.drafts, np.int32)) for at, one in zip(ends, drafted, strict=True)])
        return [self._request(step) for step in steps]

    def _request(self, step: ScheduledSequence) -> ForwardRow:
        row, params, num_drafted = step.sequence.row, step.sequence.params, len(step.drafts)
        mask = self.mask(step) if params.min_tokens else step.mask
        num_logits = step.num_scored + num_drafted + 1 if step.wants_token else step.num_scored
        return ForwardRow(
            row, step.begin, step.count + num_drafted, num_logits, step.num_scored,
            params.num_prompt_logprobs or 0, params.num_logprobs, mask, 0, *step.slots, tuple(step.parents) or None,
        )  # fmt: skip

    def mask(self, step: ScheduledSequence) -> NDArray[np.int32] | None:
        """[1 + drafts, ceil(V / 32)]: what the step may choose, as far as it is known."""
        return self._forbid(step) if step.sequence.params.min_tokens and step.wants_token else step.mask

    def _forbid(self, step: ScheduledSequence) -> NDArray[np.int32] | None:
        """[1 + drafts, ceil(V / 32)]: the step's mask without tokens that would end the answer too early."""
        first, vocabulary = step.begin + step.count, self._rows.vocab_size
        rows = [
            allowed_words(own, step.sequence.forbidden_at(first + depth), vocabulary)
            for depth, own in zip(step.depths(), step.mask if step.mask is not None else repeat(None), strict=False)
        ]
        if all(row is None for row in rows):
            return None
        anything = np.full(-(-vocabulary // 32), -1, np.int32)
        return np.stack([anything if row is None else row for row in rows])
