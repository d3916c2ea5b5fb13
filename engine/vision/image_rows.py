"""Images in the prompts of rows: which tokens have rows of an encoding, and the positions of models that count rows
and columns (M-RoPE). On the host; `StepImages.add_to` takes the rows on the device.

An image of 2 rows and 3 columns at position 4, and the text after it, by M-RoPE:

    time      0 1 2 3 | 4 4 4 4 4 4 | 7 8 ..
    row       0 1 2 3 | 4 4 4 5 5 5 | 7 8 ..
    column    0 1 2 3 | 4 5 6 4 5 6 | 7 8 ..        3 positions are skipped
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, EmbeddedRows, Layout, StepFeature
from engine.input_batch import RowFeature
from engine.layer_config import ImageAttention
from engine.staging import Ints, upload
from wire.images import ImageSpan

NOT_COUNTED = np.zeros((3, 0), np.int64)  # positions by row and column of a model that does not count them


class Encoding(NamedTuple):
    """An image as the language model takes it."""

    rows: Tensor  # [n, H], one per image token, in order; in the model's dtype, on its device
    deep: Tensor | None  # [L, n, H] to be added after each of the first L layers (Qwen3-VL); None: nothing is

    def to(self, device: torch.device) -> "Encoding":
        return Encoding(self.rows.to(device), self.deep if self.deep is None else self.deep.to(device))


class ImageRules(NamedTuple):
    """A model's rules for images."""

    token: int  # the image token
    attention: ImageAttention
    counts_rows: bool  # positions are counted by rows and columns

    @property
    def sees_whole(self) -> bool:
        """Whether no step may end between two tokens of an image."""
        return self.attention != "causal"


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of one row, in order. N image tokens in all."""

    places: Ints  # [N] their positions
    run_ends: Ints  # [N] the position after the run of image tokens that each is in
    starts: list[int]  # each image's first among the N, then N
    encodings: Sequence[Encoding | None]  # of each image; None: its KV comes from elsewhere
    turns: Ints  # [3, E] positions by time, row and column up to the end of the last image; [3, 0]: not counted so
    num_skipped: int  # how many fewer the positions are after it

    @property
    def end(self) -> int:
        """The position after the last image token."""
        return int(self.places[-1]) + 1

    def turns_of(self, positions: Ints) -> Ints:
        """[T] |-> [3, T]"""
        found = np.tile(positions - self.num_skipped, (3, 1))
        is_before = positions < self.turns.shape[1]
        found[:, is_before] = self.turns[:, positions[is_before]]
        return found


@dataclass(frozen=True, slots=True)
class StepImages(StepFeature):
    """The image tokens of a step, n of its T tokens, and what images do to its positions."""

    at: Ints  # [n] which of the T
    parts: Sequence[tuple[Encoding | None, slice]]  # whose rows they have, in order
    visible_until: Ints | None  # [T], see `EmbeddedRows`
    in_all_layers: bool
    rope_positions: Ints | None = None

    @property
    def is_capturable(self) -> bool:
        return not self.parts

    def add_to(self, batch: Batch) -> Batch:
        """ValueError for an image without an encoding."""
        device = batch.places.device
        if self.rope_positions is not None:
            batch = replace(batch, rope_positions=upload([self.rope_positions], device)[0])
        return replace(batch, embedded=gather(self, device)) if self.parts else batch


class ImageRows(RowFeature):
    """The images of each row that has some."""

    def __init__(self, rules: ImageRules) -> None:
        self.rules = rules
        self.images: dict[int, RowImages] = {}

    def check(self, token_ids: NDArray[np.int32], wanted: Sequence[tuple[ImageSpan, Encoding | None]]) -> None:
        place_images(token_ids, wanted, self.rules)

    def open(
        self, row: int, token_ids: NDArray[np.int32], wanted: Sequence[tuple[ImageSpan, Encoding | None]]
    ) -> None:  # fmt: skip
        self.images[row] = place_images(token_ids, wanted, self.rules)

    def close(self, row: int) -> None:
        self.images.pop(row, None)

    def lay_out(self, rows: Ints, layout: Layout) -> StepImages | None:
        """Forgets encodings that no later step needs. ValueError for a step that ends where it may not."""
        which = rows.tolist()
        if self.images.keys().isdisjoint(which):
            return None
        owners = np.repeat(np.arange(len(which)), layout.query_lens)
        found = find_images(self.images, self.rules, which, layout.seq_lens - layout.query_lens, layout.query_lens)
        turns = find_turns(self.images, which, owners, layout.positions)
        return None if turns is None and not found.parts else replace(found, rope_positions=turns)


def place_images(
    token_ids: NDArray[np.int32], images: Sequence[tuple[ImageSpan, Encoding | None]], rules: ImageRules
) -> RowImages:
    """token_ids: of the row, to the end of the last image at least.

    ValueError for images that disagree with the tokens or the model.
    """
    own = [span.begin + np.flatnonzero(token_ids[span.begin : span.end] == rules.token) for span, _ in images]
    for (span, _), tokens in zip(images, own, strict=True):
        count = span.end - span.begin
        if not len(tokens) or (tokens[0], tokens[-1]) != (span.begin, span.end - 1):
            raise ValueError(f"the image at [{span.begin}, {span.end}) does not begin and end with image tokens")
        if rules.counts_rows and not span.rows * span.columns == count == len(tokens):
            counts = f"{count} positions and {len(tokens)} image tokens"
            raise ValueError(f"an image of {span.rows} x {span.columns} tokens has {counts}")
    places = np.concatenate(own)
    lasts = np.flatnonzero(np.diff(places, append=-1) != 1)  # of each run
    run_ends = np.repeat(places[lasts] + 1, np.diff(lasts, prepend=-1))
    starts = [0, *np.cumsum([len(one) for one in own]).tolist()]
    turns, num_skipped = _find_turns([span for span, _ in images]) if rules.counts_rows else (NOT_COUNTED, 0)
    return RowImages(places, run_ends, starts, [encoding for _, encoding in images], turns, num_skipped)


def _find_turns(spans: Sequence[ImageSpan]) -> tuple[Ints, int]:
    """`turns` and `num_skipped` of `RowImages`."""
    turns = np.empty((3, spans[-1].end), np.int64)
    end = num_skipped = 0
    for begin, next_end, _digest, rows, columns in spans:
        turns[:, end:begin] = np.arange(end, begin) - num_skipped
        turns[:, begin:next_end] = begin - num_skipped
        turns[1:, begin:next_end] += np.stack(np.divmod(np.arange(rows * columns), columns))
        num_skipped += rows * columns - max(rows, columns)
        end = next_end
    return turns, num_skipped


def find_images(
    images: dict[int, RowImages], rules: ImageRules, rows: Sequence[int], begins: NDArray[Any], counts: NDArray[Any]
) -> StepImages:
    """The image tokens of a step's requests: row, first position and number of tokens of each.

    Forgets encodings that no later step needs: those of rows that are past their last image. ValueError for a request
    that ends where it may not, or for an image whose encoding has another size.
    """
    at: list[Ints] = [np.zeros(0, np.int64)]
    parts: list[tuple[Encoding | None, slice]] = []
    visible_until = np.zeros(int(counts.sum()), np.int64)
    first = 0  # of the request's among the T tokens
    for row, begin, count in zip(rows, begins.tolist(), counts.tolist(), strict=True):
        own = images.get(row)
        if own is not None and begin < own.end:
            low, high = np.searchsorted(own.places, (begin, begin + count)).tolist()
            offsets = first + own.places[low:high] - begin
            at.append(offsets)
            parts += _take(own, low, high)
            visible_until[offsets] = own.run_ends[low:high]
            if rules.sees_whole and high > low and own.run_ends[high - 1] > begin + count:
                raise ValueError(f"a step ends at {begin + count}, inside an image that the model sees as a whole")
        elif own is not None and own.encodings:
            images[row] = replace(own, encodings=())
        first += count
    limits = visible_until if rules.sees_whole else None
    return StepImages(np.concatenate(at), parts, limits, rules.attention == "all")


def _take(own: RowImages, low: int, high: int) -> list[tuple[Encoding | None, slice]]:
    """The rows of the image tokens [low, high) of a row."""
    if not own.encodings:
        raise ValueError("a step goes back into an image")
    parts: list[tuple[Encoding | None, slice]] = []
    for encoding, start, end in zip(own.encodings, own.starts, own.starts[1:], strict=False):
        if max(low, start) < min(high, end):
            if encoding is not None and len(encoding.rows) != end - start:
                raise ValueError(f"an encoding of {len(encoding.rows)} rows for an image of {end - start} tokens")
            parts.append((encoding, slice(max(low, start) - start, min(high, end) - start)))
    return parts


def find_turns(images: Mapping[int, RowImages], rows: Sequence[int], owners: Ints, positions: Ints) -> Ints | None:
    """Positions [T] of a step's tokens, of requests of these rows |-> what turns their heads: [T], or [3, T] where some
    are before the end of an image. None: they themselves."""
    if not any(row in images and images[row].turns.size for row in rows):
        return None
    turns = np.tile(positions, (3, 1))
    for index, row in enumerate(rows):
        if row in images:
            own = owners == index
            turns[:, own] = images[row].turns_of(positions[own])
    return turns if (turns[0] != turns[1:]).any() else turns[0]


def gather(images: StepImages, device: torch.device) -> EmbeddedRows:
    """Launches only. ValueError for an image without an encoding."""
    encodings = [(encoding, part) for encoding, part in images.parts if encoding is not None]
    if len(encodings) < len(images.parts):
        raise ValueError("an image is to be computed, and its encoding is not here")
    if device.type == "cuda":
        for encoding, _ in encodings:  # from another stream, whose allocator must not take it back before this step
            for tensor in encoding:
                if tensor is not None:
                    tensor.record_stream(torch.cuda.current_stream(device))
    limits = [] if images.visible_until is None else [images.visible_until]
    at, *visible_until = upload([images.at, *limits], device)
    deep = [encoding.deep[:, part] for encoding, part in encodings if encoding.deep is not None]
    return EmbeddedRows(
        at,
        torch.cat([encoding.rows[part] for encoding, part in encodings]),
        torch.cat(deep, 1) if deep else None,
        visible_until[0] if visible_until else None,
        images.in_all_layers,
    )
