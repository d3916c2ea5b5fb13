"""How one answer is written for OpenAI's clients: the form and the order of its chunks.

Must not know HTTP or where the text comes from.
"""

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from msgspec import UNSET

from gateway.answer import Answer, Piece
from gateway.generation import FinishReason
from gateway.rest.openai_answers import (
    AssistantMessage,
    ChatChoice,
    Choices,
    ChunkChoice,
    Delta,
    Envelope,
    ObjectKind,
    TextChoice,
    Usage,
    count_usage,
    encode,
)


class ChoiceForms(Protocol):
    """What chat and plain completions write differently."""

    id_prefix: str
    chunk_kind: ObjectKind
    whole_kind: ObjectKind

    def opening(self) -> list[Choices]:
        """Chunks before any text."""
        ...

    def text(self, text: str) -> Choices:
        """A chunk's new text."""
        ...

    def finish(self, reason: FinishReason) -> Choices:
        """The one chunk with a finish reason; it has no text."""
        ...

    def whole(self, answer: Answer) -> Choices:
        """An answer that is not streamed."""
        ...


class ChatForms:
    """Answers of /v1/chat/completions."""

    id_prefix = "chatcmpl"
    chunk_kind: ObjectKind = "chat.completion.chunk"
    whole_kind: ObjectKind = "chat.completion"

    def opening(self) -> list[Choices]:
        return [[ChunkChoice(Delta(role="assistant", content=""))]]

    def text(self, text: str) -> Choices:
        return [ChunkChoice(Delta(content=text))]

    def finish(self, reason: FinishReason) -> Choices:
        return [ChunkChoice(Delta(), reason)]

    def whole(self, answer: Answer) -> Choices:
        return [ChatChoice(AssistantMessage(answer.text), answer.finish_reason)]


class TextForms:
    """Answers of /v1/completions."""

    id_prefix = "cmpl"
    chunk_kind: ObjectKind = "text_completion"
    whole_kind: ObjectKind = "text_completion"

    def opening(self) -> list[Choices]:
        return []

    def text(self, text: str) -> Choices:
        return [TextChoice(text)]

    def finish(self, reason: FinishReason) -> Choices:
        return [TextChoice("", reason)]

    def whole(self, answer: Answer) -> Choices:
        return [TextChoice(answer.text, answer.finish_reason)]


class AnswerWriter:
    """Writes one answer, as a stream of chunks or as a whole."""

    def __init__(self, forms: ChoiceForms, model: str, num_prompt: int, *, is_usage_streamed: bool) -> None:
        self._forms = forms
        self._id = f"{forms.id_prefix}-{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._model = model
        self._num_prompt = num_prompt
        self._is_usage_streamed = is_usage_streamed

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[list[bytes], None]:
        """Chunks, in batches to send together. Closing this iterator closes `pieces`."""
        batch = [self._chunk(choices) for choices in self._forms.opening()]
        num_tokens = 0
        async with aclosing(pieces):
            async for piece in pieces:
                num_tokens += len(piece.token_ids)
                if piece.text:
                    batch.append(self._chunk(self._forms.text(piece.text)))
                if piece.finish_reason is not None:
                    batch += self._ending(piece.finish_reason, num_tokens)
                if batch:
                    yield batch
                    batch = []

    def whole(self, answer: Answer) -> bytes:
        """The answer to a request that does not stream."""
        usage = count_usage(self._num_prompt, answer.num_tokens)
        choices = self._forms.whole(answer)
        return encode(Envelope(self._id, self._forms.whole_kind, self._created_s, self._model, choices, usage))

    def _ending(self, reason: FinishReason, num_tokens: int) -> list[bytes]:
        finish = self._chunk(self._forms.finish(reason))
        if not self._is_usage_streamed:
            return [finish]
        return [finish, self._chunk([], count_usage(self._num_prompt, num_tokens))]

    def _chunk(self, choices: Choices, usage: Usage | None = None) -> bytes:
        kind = self._forms.chunk_kind
        shown_usage = usage if self._is_usage_streamed else UNSET
        return encode(Envelope(self._id, kind, self._created_s, self._model, choices, shown_usage))
