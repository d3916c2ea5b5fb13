"""From the ring's tokens to an answer's text, piece by piece.

Knows text, stop strings and when an answer is over; must not know REST or gRPC.
"""

from asyncio import CancelledError
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import structlog

from gateway.errors import ApiError
from gateway.front import Front, Order
from gateway.generation import FinishReason, Tokens
from gateway.metrics import RequestMeter
from gateway.text.detokenize import IncrementalDetokenizer
from gateway.text.stops import StopStrings

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of an answer."""

    text: str  # whole characters; lags behind the tokens while it may be the start of a stop string
    token_ids: tuple[int, ...]  # up to and with the one that completed a stop string
    finish_reason: FinishReason | None  # set on the last piece only


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    num_tokens: int
    finish_reason: FinishReason


async def stream_answer(front: Front, order: Order, meter: RequestMeter) -> AsyncGenerator[Piece, None]:
    """The pieces of one answer. Closing this iterator closes the ring's. Raises ApiError as the ring does."""
    reader = _TokenReader(front.tokenizer.detokenizer(), StopStrings(order.stop_strings))
    num_prompt, num_tokens = len(order.generation.prompt_ids), 0
    meter.start(num_prompt)
    try:
        async with aclosing(cast(AsyncGenerator[Tokens, None], front.ring.generate(order.generation))) as news:
            async for tokens in news:
                piece = reader.read(tokens)
                num_tokens += len(piece.token_ids)
                meter.add_tokens(len(piece.token_ids))
                if piece.finish_reason is not None:
                    break  # closes the ring's iterator before the client hears of the end
                yield piece
            else:
                raise ApiError(500, "the answer ended before it was complete; try again", None, "incomplete_answer")
    except (CancelledError, GeneratorExit):
        meter.cancel()
        _log.info("cancelled", prompt_tokens=num_prompt, tokens=num_tokens)
        raise
    meter.finish(piece.finish_reason)
    _log.info("answered", prompt_tokens=num_prompt, tokens=num_tokens, reason=piece.finish_reason)
    yield piece


async def collect_answer(pieces: AsyncGenerator[Piece, None]) -> Answer:
    """Waits for the whole answer."""
    texts: list[str] = []
    num_tokens = 0
    async with aclosing(pieces):
        async for piece in pieces:
            texts.append(piece.text)
            num_tokens += len(piece.token_ids)
            if piece.finish_reason is not None:
                return Answer("".join(texts), num_tokens, piece.finish_reason)
    raise AssertionError("stream_answer raises rather than end without a finish reason")


class _TokenReader:
    """Text of the tokens so far: stop tokens have none, and nothing follows a stop string."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: StopStrings) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    def read(self, tokens: Tokens) -> Piece:
        texts: list[str] = []
        num_with_text = len(tokens.token_ids) - (tokens.finish_reason == "stop")
        for count, token_id in enumerate(tokens.token_ids[:num_with_text], start=1):
            text, is_stopped = self._stops.push(self._detokenizer.push([token_id]))
            texts.append(text)
            if is_stopped:
                return Piece("".join(texts), tokens.token_ids[:count], "stop")
        if tokens.finish_reason is None:
            return Piece("".join(texts), tokens.token_ids, None)
        text, is_stopped = self._stops.push(self._detokenizer.flush())
        texts += [text] if is_stopped else [text, self._stops.flush()]
        return Piece("".join(texts), tokens.token_ids, "stop" if is_stopped else tokens.finish_reason)
