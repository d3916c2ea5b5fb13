"""Turns tokens into text as they arrive, in whole UTF-8 characters. Pure.

A token has fixed bytes (all of a byte-level vocabulary, sentencepiece's `<0xE2>`), or its text depends on its context.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol


class Pieces(Protocol):
    """What the detokenizer needs of a vocabulary."""

    def is_silent(self, token_id: int) -> bool:
        """True for ids without text: control tokens and ids without a token."""

    def raw_bytes(self, token_id: int) -> bytes | None:
        """A token's fixed bytes; None if its text depends on the token before."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens as a whole answer."""


def last_with_text(pieces: Pieces, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The last two tokens with text, the context of the next token. Two, as the last one alone may have no text."""
    backwards = (token_id for token_id in reversed(token_ids) if not pieces.is_silent(token_id))
    return tuple(islice(backwards, 2))[::-1]


class IncrementalDetokenizer:
    """All results of `push` and of a last `flush` form the full text; each has whole characters only.

    Fixed bytes go through an incremental UTF-8 decoder, which holds back at most 3. Other tokens are decoded after
    their context, the last one or two tokens with text, whose text is then removed: O(1) per token. Each maximal
    subpart of ill-formed bytes becomes one U+FFFD. (A sentencepiece decoder also replaces the well-formed bytes around
    them; these may already be sent.)
    """

    def __init__(self, pieces: Pieces, before: Iterable[int] = (), shown: Mapping[int, bytes] = {}) -> None:
        """`before`: `last_with_text` of the tokens before the pushed ones; empty at the start of a text.

        If `before` ends with an incomplete character, its bytes are dropped. `shown`: control tokens |-> their text.
        """
        self._pieces = pieces
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # decodes to text that is not empty, or holds all tokens so far
        self.push(before)
        self._utf8.reset()

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete."""
        return "".join([text for token_id in token_ids for text in self.push_token(token_id)])

    def push_token(self, token_id: int) -> tuple[str, str]:
        """Returns (U+FFFD if this token breaks off a character before it, the text that this token completes)."""
        raw = self._shown.get(token_id)
        if raw is None and self._pieces.is_silent(token_id):
            return "", ""
        raw = raw or self._pieces.raw_bytes(token_id)
        if raw is None:
            return self.flush(), self._text_after_context(token_id)
        self._context = [token_id]
        held, _flags = self._utf8.getstate()
        is_cut_off = held and len((held + raw[:1]).decode(errors="replace")) > 1
        return self.flush() if is_cut_off else "", self._utf8.decode(raw)

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete last character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _text_after_context(self, token_id: int) -> str:
        before = self._pieces.decode(self._context)
        text = self._pieces.decode([*self._context, token_id])
        can_stand_alone = bool(self._pieces.decode([token_id]))
        self._context = [token_id] if can_stand_alone else [*self._context[-1:], token_id]
        return text[len(before) :]
