"""Writes the choices of one request as an answer for OpenAI's clients, as a stream of chunks or as a whole."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Raw, UnsetType

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals, timing_fields
from gateway.api.http.answer import COMMENT_PING, data_event, encode
from gateway.api.http.errors import build_error
from gateway.api.openai import answers
from gateway.api.openai.types import StreamedUsage
from gateway.errors import ApiError
from gateway.request.types import GenerateRequest
from gateway.tools.parse import Arguments, CallBegin, CallEnd


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice that is not streamed, so far."""

    logprobs: Any  # ChatLogprobs or TextLogprobs; None if not requested
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[answers.ToolCallBody] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Raw] = field(default_factory=list)
    last: OutputDelta = field(default_factory=lambda: OutputDelta(""))


class AnswerWriter:
    """Writes the answer of /v1/chat/completions or /v1/completions to one request.

    A choice's last chunk has its finish reason and no text. Token ids of prompts, if requested, come with the first
    chunk of a chat, and of each choice of a completion.
    """

    done = b"data: [DONE]\n\n"
    ping = COMMENT_PING

    def __init__(
        self, totals: Totals, raw: GenerateRequest, streamed_usage: StreamedUsage, token_bytes: answers.TokenBytes
    ) -> None:
        self._is_chat = raw.is_chat
        self.id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._totals, self._job = totals, totals.job
        self._raw = raw
        self._streamed_usage = streamed_usage
        self._token_bytes = token_bytes
        self._choices = [_Choice(self._logprobs(())) for _ in self._job.generations]
        num_prompts_sent = 1 if self._is_chat else len(self._choices)
        prompts = [self._job.prompts[self._job.prompt_of(index)].ids for index in range(num_prompts_sent)]
        self._prompt_ids = dict(enumerate(prompts)) if raw.with_token_ids else {}  # not sent yet

    def begin(self) -> list[bytes]:
        delta: dict[str, object] = {"role": "assistant", "content": ""}
        return [self._chunk(answers.ChunkChoice(index, delta)) for index in range(len(self._choices)) if self._is_chat]

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        events: list[bytes] = []
        has_ids = self._raw.with_token_ids and piece.token_ids
        if piece.text or piece.reasoning or piece.shown_tokens or has_ids:
            chunk = self._text_chunk(index, piece)
            chunk.logprobs, chunk.token_ids = self._logprobs(piece.shown_tokens), self._ids(piece.token_ids)
            events.append(self._chunk(chunk))
        for event in piece.calls:
            call: dict[str, object] = {"index": event.index}
            if isinstance(event, CallBegin):
                call |= {"function": {"arguments": "", "name": event.name}, "id": event.id, "type": "function"}
            elif isinstance(event, Arguments):
                call |= {"function": {"arguments": event.text}}
            else:
                continue
            events.append(self._chunk(answers.ChunkChoice(index, {"tool_calls": [call]})))
        if piece.finish_reason is not None:
            chunk = answers.ChunkChoice(index, {}) if self._is_chat else answers.TextChoice(index, "")
            chunk.finish_reason, chunk.stop_reason, chunk.timing = piece.ending, piece.stop, self._timing(piece)
            events.append(self._chunk(chunk))
        if self._streamed_usage != "none" and not self._totals.num_open:
            events.append(self._chunk(None))
        return events

    def add(self, index: int, piece: OutputDelta) -> None:
        choice = self._choices[index]
        choice.texts.append(piece.text)
        choice.reasoning.append(piece.reasoning)
        for call in piece.calls:
            if isinstance(call, CallEnd):
                choice.calls.append(answers.ToolCallBody(call.id, answers.FunctionBody(call.name, call.arguments)))
        choice.token_ids += piece.token_ids
        if choice.logprobs is not None:
            choice.logprobs.extend(piece.shown_tokens, self._token_bytes)
        if index == 0 or not self._is_chat:  # a chat has one prompt
            tokens = piece.prompt_tokens
            choice.prompt_logprobs += [answers.prompt_logprob(token, self._token_bytes) for token in tokens]
        choice.last = piece

    async def whole(self) -> bytes:
        choices = []
        for index in range(len(self._choices)):
            choices.append(Raw(encode(self._whole_choice(index))))
            await asyncio.sleep(0)  # lets other requests run: with log-probabilities a choice has many megabytes
        whole = self._envelope("chat.completion" if self._is_chat else "text_completion", choices)
        whole.usage = answers.usage_of(self._totals)
        if self._is_chat:
            whole.prompt_token_ids = self._prompt_ids.get(0, UNSET)
            whole.prompt_logprobs = self._choices[0].prompt_logprobs or UNSET
        return encode(whole)

    def failure(self, error: ApiError) -> bytes:
        return data_event(encode(build_error(error)))

    def _text_chunk(self, index: int, piece: OutputDelta) -> answers.ChunkChoice | answers.TextChoice:
        if not self._is_chat:
            ids = self._prompt_ids.pop(index, UNSET)
            return answers.TextChoice(index, piece.text, prompt_token_ids=ids)
        delta: dict[str, object] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text or not piece.reasoning:
            delta["content"] = piece.text
        return answers.ChunkChoice(index, delta)

    def _whole_choice(self, index: int) -> answers.ChatChoice | answers.TextChoice:
        given = self._choices[index]
        text, last = "".join(given.texts), given.last
        shared = (last.ending, given.logprobs, self._timing(last), last.stop, self._ids(given.token_ids))
        if not self._is_chat:
            prompt_ids = self._prompt_ids.get(index, UNSET)
            return answers.TextChoice(index, text, *shared, prompt_ids, given.prompt_logprobs or UNSET)
        message = answers.AssistantMessage(text if text or not given.calls else None)
        message.tool_calls = given.calls or UNSET
        message.reasoning_content = "".join(given.reasoning) or UNSET
        return answers.ChatChoice(index, message, *shared)

    def _chunk(self, choice: answers.ChunkChoice | answers.TextChoice | None) -> bytes:
        """None: the last chunk, which has the token counts."""
        kind: answers.ObjectKind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = self._envelope(kind, [] if choice is None else [choice])
        if self._is_chat:
            chunk.prompt_token_ids = self._prompt_ids.pop(0, UNSET)
        if self._streamed_usage != "none":
            is_counted = choice is None or self._streamed_usage == "continuous"
            chunk.usage = answers.usage_of(self._totals) if is_counted else None
        return data_event(encode(chunk))

    def _envelope(self, kind: answers.ObjectKind, choices: Sequence[answers.Choice | Raw]) -> answers.Envelope:
        return answers.Envelope(self.id, kind, self._created_s, self._job.model, choices)

    def _ids(self, ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return ids if self._raw.with_token_ids else UNSET

    def _timing(self, piece: OutputDelta) -> answers.TimingBody | UnsetType:
        if piece.timing is None or not self._raw.with_timing:
            return UNSET
        timing = answers.TimingBody(**timing_fields(piece.timing, answers.TimingBody.__struct_fields__))
        timing.wake_seconds = timing.wake_seconds or UNSET
        return timing

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Any:
        if self._raw.num_logprobs is None:
            return None
        logprobs: answers.ChatLogprobs | answers.TextLogprobs
        logprobs = answers.ChatLogprobs() if self._is_chat else answers.TextLogprobs()
        logprobs.extend(tokens, self._token_bytes)
        return logprobs
