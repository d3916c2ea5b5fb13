"""Writes one choice of a chat or a plain completion. Must not know envelopes, HTTP or where pieces come from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import UNSET, Raw, UnsetType

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.api.openai.answers import (
    AssistantMessage,
    ChatChoice,
    Choice,
    ChunkChoice,
    Delta,
    FunctionBody,
    ObjectKind,
    TextChoice,
    TimingBody,
    ToolCallBody,
    call_deltas,
    timing_of,
)
from gateway.api.openai.logprobs import ChatLogprobs, TextLogprobs, TokenBytes, prompt_logprob
from gateway.request.types import EncodedPrompt
from gateway.tools.parse import CallEnd

Logprobs = TypeVar("Logprobs", ChatLogprobs, TextLogprobs)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a client requests besides text."""

    token_bytes: TokenBytes
    with_logprobs: bool = False
    with_timing: bool = False
    with_token_ids: bool = False

    def timing(self, piece: OutputDelta) -> TimingBody | UnsetType:
        """The `timing` field of a choice with this last piece."""
        return timing_of(piece.timing) if self.with_timing and piece.timing is not None else UNSET

    def logprobs(self, kind: type[Logprobs], tokens: Sequence[ShownToken]) -> Logprobs | None:
        """The `logprobs` field of a choice with these tokens."""
        if not self.with_logprobs:
            return None
        logprobs = kind()
        logprobs.extend(tokens, self.token_bytes)
        return logprobs

    def token_ids(self, ids: Sequence[int]) -> Sequence[int] | UnsetType:
        """The `token_ids` or `prompt_token_ids` field."""
        return ids if self.with_token_ids else UNSET


class _Writer(Generic[Logprobs]):
    """One choice, written either as chunks or as a whole. The last chunk has the finish reason and no text."""

    kind: type[Logprobs]
    id_prefix: str  # of answers
    chunk_kind: ObjectKind
    whole_kind: ObjectKind

    def __init__(self, index: int, prompt: EncodedPrompt, extras: Extras) -> None:
        self._index = index
        self._prompt = prompt
        self._extras = extras
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs | None = extras.logprobs(self.kind, ())
        self._last = OutputDelta("")

    def add(self, piece: OutputDelta) -> None:
        """Adds a piece of a choice that is not streamed."""
        self._texts.append(piece.text)
        self._last = piece
        if self._extras.with_token_ids:
            self._token_ids += piece.token_ids
        if self._logprobs is not None:
            self._logprobs.extend(piece.shown_tokens, self._extras.token_bytes)

    def _says_more(self, piece: OutputDelta) -> bool:
        """Whether a piece needs a chunk besides those for calls and the finish reason."""
        has_ids = self._extras.with_token_ids and piece.token_ids
        return bool(piece.text or piece.reasoning or piece.shown_tokens or has_ids)


class ChatWriter(_Writer[ChatLogprobs]):
    """Of /v1/chat/completions."""

    kind = ChatLogprobs
    id_prefix, chunk_kind, whole_kind = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, index: int, prompt: EncodedPrompt, extras: Extras) -> None:
        super().__init__(index, prompt, extras)
        self._reasoning: list[str] = []
        self._calls: list[CallEnd] = []

    def begin(self) -> list[Choice]:
        """The chunk with the role."""
        return [ChunkChoice(self._index, Delta(role="assistant", content=""))]

    def chunks(self, piece: OutputDelta) -> list[Choice]:
        chunks: list[Choice] = []
        if self._says_more(piece):
            delta = Delta(content=piece.text) if piece.text or not piece.reasoning else Delta()
            delta.reasoning_content = piece.reasoning or UNSET
            logprobs = self._extras.logprobs(ChatLogprobs, piece.shown_tokens)
            token_ids = self._extras.token_ids(piece.token_ids)
            chunks.append(ChunkChoice(self._index, delta, logprobs=logprobs, token_ids=token_ids))
        chunks += [ChunkChoice(self._index, Delta(tool_calls=[call])) for call in call_deltas(piece.calls)]
        if piece.finish_reason is not None:
            timing = self._extras.timing(piece)
            chunks.append(ChunkChoice(self._index, Delta(), piece.ending, timing=timing, stop_reason=piece.stop))
        return chunks

    def add(self, piece: OutputDelta) -> None:
        super().add(piece)
        self._reasoning.append(piece.reasoning)
        self._calls += [event for event in piece.calls if isinstance(event, CallEnd)]

    def whole(self) -> ChatChoice:
        text = "".join(self._texts)
        calls = [ToolCallBody(call.id, FunctionBody(call.name, call.arguments)) for call in self._calls]
        message = AssistantMessage(text or None, tool_calls=calls) if calls else AssistantMessage(text)
        message.reasoning_content = "".join(self._reasoning) or UNSET
        timing, token_ids = self._extras.timing(self._last), self._extras.token_ids(self._token_ids)
        return ChatChoice(self._index, message, self._last.ending, self._logprobs, timing, self._last.stop, token_ids)


class TextWriter(_Writer[TextLogprobs]):
    """Of /v1/completions."""

    kind = TextLogprobs
    id_prefix, chunk_kind, whole_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, index: int, prompt: EncodedPrompt, extras: Extras) -> None:
        super().__init__(index, prompt, extras)
        self._has_begun = False
        self._prompt_logprobs: list[Raw] = []

    def begin(self) -> list[Choice]:
        """Nothing is known before the first text."""
        return []

    def chunks(self, piece: OutputDelta) -> list[Choice]:
        chunks: list[Choice] = []
        if self._says_more(piece):
            logprobs = self._extras.logprobs(TextLogprobs, piece.shown_tokens)
            choice = TextChoice(self._index, piece.text, logprobs=logprobs)
            choice.token_ids = self._extras.token_ids(piece.token_ids)
            choice.prompt_token_ids = UNSET if self._has_begun else self._extras.token_ids(self._prompt.ids)
            self._has_begun = True
            chunks.append(choice)
        if piece.finish_reason is not None:
            timing = self._extras.timing(piece)
            chunks.append(TextChoice(self._index, "", piece.finish_reason, timing=timing, stop_reason=piece.stop))
        return chunks

    def add(self, piece: OutputDelta) -> None:
        super().add(piece)
        self._prompt_logprobs += [prompt_logprob(token, self._extras.token_bytes) for token in piece.prompt_tokens]

    def whole(self) -> TextChoice:
        return TextChoice(
            self._index,
            "".join(self._texts),
            self._last.finish_reason,
            self._logprobs,
            self._extras.timing(self._last),
            self._last.stop,
            self._extras.token_ids(self._token_ids),
            self._extras.token_ids(self._prompt.ids),
            self._prompt_logprobs or UNSET,
        )


ChoiceWriter = ChatWriter | TextWriter
