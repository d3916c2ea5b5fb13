"""Writes the choices of one request as an answer for OpenAI's clients, as a stream of chunks or as a whole."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from msgspec import UNSET, Raw, UnsetType

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals
from gateway.api.http.answer import COMMENT_PING, data_event, encode
from gateway.api.http.errors import build_error
from gateway.api.openai import answers
from gateway.api.openai.answers import TokenBytes
from gateway.api.openai.types import StreamedUsage
from gateway.errors import ApiError
from gateway.request.types import GenerateRequest
from gateway.tools.parse import CallEnd

Logprobs = TypeVar("Logprobs", answers.ChatLogprobs, answers.TextLogprobs)


class ChoiceWriter(Generic[Logprobs]):
    """One choice, written either as chunks or as a whole. The last chunk has the finish reason and no text."""

    logprobs_kind: type[Logprobs]
    id_prefix: str  # of answers
    chunk_kind: answers.ObjectKind
    whole_kind: answers.ObjectKind

    def __init__(self, index: int, prompt_ids: Sequence[int], raw: GenerateRequest, token_bytes: TokenBytes) -> None:
        self._index = index
        self._prompt_ids = prompt_ids
        self._raw = raw
        self._token_bytes = token_bytes
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs | None = self._logprobs_of(())
        self._last = OutputDelta("")
        self.prompt_logprobs: list[Raw] = []

    def begin(self) -> list[answers.Choice]:
        """Chunks that need no piece."""
        return []

    def chunks(self, piece: OutputDelta) -> list[answers.Choice]:
        """Chunks of a piece of a choice that is streamed."""
        raise NotImplementedError

    def add(self, piece: OutputDelta) -> None:
        """Adds a piece of a choice that is not streamed."""
        self._texts.append(piece.text)
        self._token_ids += piece.token_ids if self._raw.with_token_ids else ()
        self._last = piece
        if self._logprobs is not None:
            self._logprobs.extend(piece.shown_tokens, self._token_bytes)
        self.prompt_logprobs += [answers.prompt_logprob(token, self._token_bytes) for token in piece.prompt_tokens]

    def whole(self) -> answers.Choice:
        """The choice, after its last piece."""
        raise NotImplementedError

    def _says_more(self, piece: OutputDelta) -> bool:
        """Whether a piece needs a chunk besides those for calls and the finish reason."""
        has_ids = self._raw.with_token_ids and piece.token_ids
        return bool(piece.text or piece.reasoning or piece.shown_tokens or has_ids)

    def _timing(self, piece: OutputDelta) -> answers.TimingBody | UnsetType:
        return answers.timing_of(piece.timing) if self._raw.with_timing and piece.timing is not None else UNSET

    def _ids(self, ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return ids if self._raw.with_token_ids else UNSET

    def _logprobs_of(self, tokens: Sequence[ShownToken]) -> Logprobs | None:
        if self._raw.num_logprobs is None:
            return None
        logprobs = self.logprobs_kind()
        logprobs.extend(tokens, self._token_bytes)
        return logprobs


class ChatWriter(ChoiceWriter[answers.ChatLogprobs]):
    """Of /v1/chat/completions."""

    logprobs_kind = answers.ChatLogprobs
    id_prefix, chunk_kind, whole_kind = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def __init__(self, index: int, prompt_ids: Sequence[int], raw: GenerateRequest, token_bytes: TokenBytes) -> None:
        super().__init__(index, prompt_ids, raw, token_bytes)
        self._reasoning: list[str] = []
        self._calls: list[CallEnd] = []

    def begin(self) -> list[answers.Choice]:
        return [answers.ChunkChoice(self._index, {"role": "assistant", "content": ""})]

    def chunks(self, piece: OutputDelta) -> list[answers.Choice]:
        chunks: list[answers.Choice] = []
        if self._says_more(piece):
            delta: dict[str, object] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
            if piece.text or not piece.reasoning:
                delta["content"] = piece.text
            logprobs, token_ids = self._logprobs_of(piece.shown_tokens), self._ids(piece.token_ids)
            chunks.append(answers.ChunkChoice(self._index, delta, logprobs=logprobs, token_ids=token_ids))
        for call in answers.call_deltas(piece.calls):
            chunks.append(answers.ChunkChoice(self._index, {"tool_calls": [call]}))
        if piece.finish_reason is not None:
            last = answers.ChunkChoice(self._index, {}, piece.ending)
            last.timing, last.stop_reason = self._timing(piece), piece.stop
            chunks.append(last)
        return chunks

    def add(self, piece: OutputDelta) -> None:
        super().add(replace(piece, prompt_tokens=()) if self._index else piece)  # a chat has one prompt
        self._reasoning.append(piece.reasoning)
        self._calls += [event for event in piece.calls if isinstance(event, CallEnd)]

    def whole(self) -> answers.Choice:
        text, last = "".join(self._texts), self._last
        calls = [answers.ToolCallBody(call.id, answers.FunctionBody(call.name, call.arguments)) for call in self._calls]
        message = answers.AssistantMessage(text or None, tool_calls=calls) if calls else answers.AssistantMessage(text)
        message.reasoning_content = "".join(self._reasoning) or UNSET
        timing, token_ids = self._timing(last), self._ids(self._token_ids)
        return answers.ChatChoice(self._index, message, last.ending, self._logprobs, timing, last.stop, token_ids)


class TextWriter(ChoiceWriter[answers.TextLogprobs]):
    """Of /v1/completions. A choice begins with its prompt's token ids, if they are requested."""

    logprobs_kind = answers.TextLogprobs
    id_prefix, chunk_kind, whole_kind = "cmpl", "text_completion", "text_completion"

    def chunks(self, piece: OutputDelta) -> list[answers.Choice]:
        chunks: list[answers.Choice] = []
        if self._says_more(piece):
            choice = answers.TextChoice(self._index, piece.text, logprobs=self._logprobs_of(piece.shown_tokens))
            choice.token_ids = self._ids(piece.token_ids)
            if self._prompt_ids:
                choice.prompt_token_ids, self._prompt_ids = self._ids(self._prompt_ids), ()
            chunks.append(choice)
        if piece.finish_reason is not None:
            timing = self._timing(piece)
            chunks.append(
                answers.TextChoice(self._index, "", piece.finish_reason, timing=timing, stop_reason=piece.stop)
            )
        return chunks

    def whole(self) -> answers.Choice:
        return answers.TextChoice(
            self._index,
            "".join(self._texts),
            self._last.finish_reason,
            self._logprobs,
            self._timing(self._last),
            self._last.stop,
            self._ids(self._token_ids),
            self._ids(self._prompt_ids),
            self.prompt_logprobs or UNSET,
        )


class AnswerWriter:
    """Writes the answer to one request."""

    done = b"data: [DONE]\n\n"
    ping = COMMENT_PING

    def __init__(
        self,
        kind: type[ChatWriter | TextWriter],
        totals: Totals,
        raw: GenerateRequest,
        streamed_usage: StreamedUsage,
        token_bytes: TokenBytes,
    ) -> None:
        self.id = f"{kind.id_prefix}-{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._kind = kind
        self._totals = totals
        self._streamed_usage = streamed_usage
        job = totals.job
        self._choices = [
            kind(index, job.prompts[job.prompt_of(index)].ids, raw, token_bytes)
            for index in range(len(job.generations))
        ]
        is_told = kind is ChatWriter and raw.with_token_ids
        self._prompt_ids: Sequence[int] | UnsetType = job.prompts[0].ids if is_told else UNSET  # of a chat, until sent

    def begin(self) -> list[bytes]:
        return [self._chunk([first]) for choice in self._choices for first in choice.begin()]

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        chunks = [self._chunk([choice]) for choice in self._choices[index].chunks(piece)]
        if self._streamed_usage != "none" and not self._totals.num_open:
            chunks.append(self._chunk([], is_last=True))
        return chunks

    def add(self, index: int, piece: OutputDelta) -> None:
        self._choices[index].add(piece)

    async def whole(self) -> bytes:
        choices = []
        for choice in self._choices:
            choices.append(Raw(encode(choice.whole())))
            await asyncio.sleep(0)  # lets other requests run: with log-probabilities a choice has many megabytes
        whole = self._envelope(self._kind.whole_kind, choices)
        whole.usage = answers.usage_of(self._totals)
        if self._kind is ChatWriter:
            whole.prompt_logprobs = self._choices[0].prompt_logprobs or UNSET
        return encode(whole)

    def failure(self, error: ApiError) -> bytes:
        return data_event(encode(build_error(error)))

    def _chunk(self, choices: Sequence[answers.Choice], *, is_last: bool = False) -> bytes:
        chunk = self._envelope(self._kind.chunk_kind, choices)
        if self._streamed_usage != "none":
            is_counted = is_last or self._streamed_usage == "continuous"
            chunk.usage = answers.usage_of(self._totals) if is_counted else None
        return data_event(encode(chunk))

    def _envelope(self, kind: answers.ObjectKind, choices: Sequence[answers.Choice | Raw]) -> answers.Envelope:
        envelope = answers.Envelope(self.id, kind, self._created_s, self._totals.job.model, choices)
        envelope.prompt_token_ids, self._prompt_ids = self._prompt_ids, UNSET
        return envelope
