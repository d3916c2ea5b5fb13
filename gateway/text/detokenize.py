"""Tokens to text as they arrive, in whole UTF-8 characters.

Knows two kinds of token: those that are bytes wherever they stand (all of a byte-level vocabulary, the `<0xE2>` pieces
of a sentencepiece one) and those whose text depends on what stands before them. Must not know stop strings or requests.
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Protocol


class Pieces(Protocol):
    """The vocabulary as the detokenizer sees it."""

    def is_silent(self, token_id: int) -> bool:
        """True for tokens without text: control tokens and ids no token has."""
        ...

    def raw_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token always stands for; None when its text depends on the token before."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the tokens taken as a whole answer."""
        ...


def last_with_text(pieces: Pieces, token_ids: Sequence[int]) -> tuple[int, ...]:
    """The tokens that text after these depends on: the last two that have text, as one may need the other beside it."""
    backwards = (token_id for token_id in reversed(token_ids) if not pieces.is_silent(token_id))
    return tuple(islice(backwards, 2))[::-1]


class ShownTokens:
    """A vocabulary in which some control tokens have text: that by which they are written."""

    def __init__(self, pieces: Pieces, texts: Mapping[int, str]) -> None:
        self._pieces = pieces
        self._texts = {token_id: text.encode() for token_id, text in texts.items()}

    def is_silent(self, token_id: int) -> bool:
        return token_id not in self._texts and self._pieces.is_silent(token_id)

    def raw_bytes(self, token_id: int) -> bytes | None:
        return self._texts.get(token_id) or self._pieces.raw_bytes(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Without the shown tokens: they are bytes, and never the text after a context."""
        return self._pieces.decode(token_ids)


class IncrementalDetokenizer:
    """Concatenated results of `push` and one last `flush` are the full text; each holds whole characters only.

    Bytes go through an incremental UTF-8 decoder, which holds back at most 3 of them. A token of the other kind is
    decoded beside its context, the last token(s) with visible text, and the context's text is cut off: O(1) per token.
    Ill-formed bytes become U+FFFD one maximal subpart at a time. (A sentencepiece decoder spoils the well-formed bytes
    around them too, which an answer already sent could not follow.)
    """

    def __init__(self, pieces: Pieces, before: Iterable[int] = ()) -> None:
        """`before`: `last_with_text` of the tokens that the pushed ones go on from; else these begin a text.

        A character that `before` leaves unfinished stays so: none of its bytes come out here.
        """
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # decodes to text that is not empty, or holds all tokens so far
        self.push(before)
        self._utf8.reset()

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that became complete with these tokens."""
        return "".join([text for token_id in token_ids for text in self.push_token(token_id)])

    def push_token(self, token_id: int) -> tuple[str, str]:
        """The same in two: what bytes before this token came to without it, and the text it has a part in."""
        if self._pieces.is_silent(token_id):
            return "", ""
        raw = self._pieces.raw_bytes(token_id)
        if raw is None:
            return self.flush(), self._text_after_context(token_id)
        self._context = [token_id]
        held, _flags = self._utf8.getstate()
        is_cut_off = held and len((held + raw[:1]).decode(errors="replace")) > 1
        return self.flush() if is_cut_off else "", self._utf8.decode(raw)

    def flush(self) -> str:
        """What an unfinished character at the end comes to."""
        return self._utf8.decode(b"", final=True)

    def _text_after_context(self, token_id: int) -> str:
        before = self._pieces.decode(self._context)
        text = self._pieces.decode([*self._context, token_id])
        can_stand_alone = bool(self._pieces.decode([token_id]))
        self._context = [token_id] if can_stand_alone else [*self._context[-1:], token_id]
        return text[len(before) :]
