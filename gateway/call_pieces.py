"""Calls of functions taken out of a choice's pieces. Must not know REST or gRPC."""

import secrets
import string
from dataclasses import replace

from gateway.pieces import Piece
from gateway.tools.formats import Format
from gateway.tools.parse import CallParser, Content
from gateway.tools.request import ToolUse

_ID_CHARS = string.ascii_letters + string.digits
_NUM_ID_CHARS = 24  # as many as OpenAI's


class CallReader:
    """Reads one choice. `is_trusted`: a grammar sees to it that calls are well-formed."""

    def __init__(self, use: ToolUse, *, is_trusted: bool) -> None:
        names = [tool.name for tool in use.callable_tools]
        self._parser = CallParser(use.format, names, lambda: _new_id(use.format), is_trusted=is_trusted)
        self._is_named = use.named is not None

    def read(self, piece: Piece) -> Piece:
        """The piece with its calls beside its text, which lags behind while it may be part of a call."""
        events = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            events += self._parser.flush()
        # A named call ends with "stop", as OpenAI has it.
        is_calling = piece.finish_reason == "stop" and bool(self._parser.num_calls) and not self._is_named
        text = "".join(event.text for event in events if isinstance(event, Content))
        calls = tuple(event for event in events if not isinstance(event, Content))
        return replace(piece, text=text, calls=calls, is_calling=is_calling)


def _new_id(format: Format) -> str:
    size = format.num_id_chars
    text = "".join(secrets.choice(_ID_CHARS) for _ in range(size or _NUM_ID_CHARS))
    return text if size else f"call_{text}"
