"""Writes the choices of one request as an answer for OpenAI's clients, as a stream of chunks or as a whole."""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals, timing_fields
from gateway.api.http.answer import COMMENT_PING, Stored, data_event, encode
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


class _EndedChoice(msgspec.Struct):
    timing: answers.TimingBody | UnsetType = UNSET


class _Ended(msgspec.Struct):
    """The fields of a whole answer that do not follow from its tokens."""

    usage: answers.Usage
    choices: list[_EndedChoice]


class AnswerWriter:
    """Writes the answer of /v1/chat/completions or /v1/completions to one request.

    A choice's last chunk has its finish reason and no text. Token ids of prompts, if requested, come with the first
    chunk of a chat, and of each choice of a completion.
    """

    end = b"data: [DONE]\n\n"
    ping = COMMENT_PING

    def __init__(
        self,
        totals: Totals,
        raw: GenerateRequest,
        streamed_usage: StreamedUsage,
        token_bytes: answers.TokenBytes,
        stored: Stored | None = None,
    ) -> None:
        """`stored`: None if nothing is."""
        self._is_chat = raw.is_chat
        self.id = stored.id if stored else new_completion_id(is_chat=self._is_chat)
        self._created_s = stored.created_s if stored else int(time.time())
        self._find_result = stored.find_result if stored else lambda: None
        self._ended: _Ended | None = None
        self._totals, self._job = totals, totals.job
        self._raw = raw
        self._streamed_usage = streamed_usage
        self._token_bytes = token_bytes
        self._choices = [_Choice(self._logprobs(())) for _ in self._job.generations]
        num_prompts_sent = 1 if self._is_chat else len(self._choices)
        prompts = [self._job.prompts[self._job.prompt_of(index)].ids for index in range(num_prompts_sent)]
        self._prompt_ids = dict(enumerate(prompts)) if raw.with_token_ids else {}
        self._unsent = set(self._prompt_ids)  # in chunks

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
            chunk.finish_reason, chunk.stop_reason, chunk.timing = piece.ending, piece.stop, self._timing(index, piece)
            events.append(self._chunk(chunk))
        return events

    @property
    def done(self) -> bytes:
        return self.usage() + self.end

    def usage(self) -> bytes:
        """A stream's last chunk, which has the token counts; empty if it is to have none."""
        return b"" if self._streamed_usage == "none" else self._chunk(None)

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
            choices.append(self.whole_choice(index))
            await asyncio.sleep(0)  # lets other requests run: with log-probabilities a choice has many megabytes
        return self.join(choices)

    def join(self, choices: Sequence[Raw]) -> bytes:
        """The whole answer, which has these choices."""
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
            return answers.TextChoice(index, piece.text, prompt_token_ids=self._take_prompt_ids(index))
        delta: dict[str, object] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text or not piece.reasoning:
            delta["content"] = piece.text
        return answers.ChunkChoice(index, delta)

    def whole_choice(self, index: int) -> Raw:
        """A choice that has ended."""
        given = self._choices[index]
        text, last = "".join(given.texts), given.last
        shared = (last.ending, given.logprobs, self._timing(index, last), last.stop, self._ids(given.token_ids))
        if not self._is_chat:
            prompt_ids = self._prompt_ids.get(index, UNSET)
            return Raw(encode(answers.TextChoice(index, text, *shared, prompt_ids, given.prompt_logprobs or UNSET)))
        message = answers.AssistantMessage(text if text or not given.calls else None)
        message.tool_calls = given.calls or UNSET
        message.reasoning_content = "".join(given.reasoning) or UNSET
        return Raw(encode(answers.ChatChoice(index, message, *shared)))

    def _chunk(self, choice: answers.ChunkChoice | answers.TextChoice | None) -> bytes:
        """A chunk with the choice; None: the last chunk, which has the token counts."""
        kind: answers.ObjectKind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = self._envelope(kind, [] if choice is None else [choice])
        if self._is_chat:
            chunk.prompt_token_ids = self._take_prompt_ids(0)
        if self._streamed_usage != "none":
            is_counted = choice is None or self._streamed_usage == "continuous"
            chunk.usage = self._usage() if is_counted else None
        return data_event(encode(chunk))

    def _envelope(self, kind: answers.ObjectKind, choices: Sequence[answers.Choice | Raw]) -> answers.Envelope:
        return answers.Envelope(self.id, kind, self._created_s, self._job.model, choices)

    def _take_prompt_ids(self, index: int) -> Sequence[int] | UnsetType:
        """The ids of a prompt's tokens for a chunk, once."""
        if index not in self._unsent:
            return UNSET
        self._unsent.remove(index)
        return self._prompt_ids[index]

    def _ids(self, ids: Sequence[int]) -> Sequence[int] | UnsetType:
        return ids if self._raw.with_token_ids else UNSET

    def _usage(self) -> answers.Usage:
        return ended.usage if (ended := self._find_ended()) else answers.usage_of(self._totals)

    def _find_ended(self) -> _Ended | None:
        """The whole answer, if that is known already."""
        if self._ended is None and (result := self._find_result()) is not None:
            self._ended = msgspec.json.decode(result, type=_Ended)
        return self._ended

    def _timing(self, index: int, piece: OutputDelta) -> answers.TimingBody | UnsetType:
        if ended := self._find_ended():
            return ended.choices[index].timing
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


def new_completion_id(*, is_chat: bool) -> str:
    return f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
