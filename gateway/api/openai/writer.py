"""Writes the choices of one request as an answer for OpenAI's clients, as a stream of chunks or as a whole."""

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from msgspec import Raw

from gateway.answer.choice_text import OutputDelta, ShownToken
from gateway.answer.choices import Totals, timing_fields
from gateway.api.http.answer import COMMENT_PING, data_event, encode
from gateway.api.http.errors import build_error
from gateway.api.openai.logprobs import ChatLogprobs, TextLogprobs, TokenBytes, prompt_logprob
from gateway.api.openai.types import StreamedUsage
from gateway.errors import ApiError
from gateway.request.types import GenerateRequest
from gateway.tools.parse import Arguments, CallBegin, CallEnd, CallEvent
from runtime.hardware import OWN_VERSION

_SYSTEM_FINGERPRINT = f"baton-{OWN_VERSION}"
_TIMING = (
    "queue_seconds", "grammar_seconds", "prefill_seconds", "transfer_seconds", "transfer_bytes", "transport",
    "first_step_seconds", "decode_seconds", "cached_tokens", "draft_tokens", "accepted_tokens", "attempts",
    "prefill_reason",
)  # fmt: skip

Body = dict[str, object]


class ChoiceWriter:
    """One choice, written either as chunks or as a whole. The last chunk has the finish reason and no text."""

    logprobs_kind: type[ChatLogprobs | TextLogprobs]
    id_prefix: str  # of answers
    chunk_kind: str
    whole_kind: str

    def __init__(self, index: int, prompt_ids: Sequence[int], raw: GenerateRequest, token_bytes: TokenBytes) -> None:
        self._index = index
        self._prompt_ids = prompt_ids
        self._raw = raw
        self._token_bytes = token_bytes
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallEnd] = []
        self._token_ids: list[int] = []
        self._logprobs = self._logprobs_of(())
        self._last = OutputDelta("")
        self.prompt_logprobs: list[Raw] = []

    def begin(self) -> list[Body]:
        """Chunks that need no piece."""
        return []

    def chunks(self, piece: OutputDelta) -> list[Body]:
        """Chunks of a piece of a choice that is streamed."""
        chunks = []
        has_ids = self._raw.with_token_ids and piece.token_ids
        if piece.text or piece.reasoning or piece.shown_tokens or has_ids:
            chunks.append(self._choice(self._added(piece), self._logprobs_of(piece.shown_tokens), piece.token_ids))
            chunks[0] |= self._own_prompt_ids()
            self._prompt_ids = ()
        chunks += [self._choice({"delta": {"tool_calls": [call]}}) for call in _call_deltas(piece.calls)]
        if piece.finish_reason is not None:
            chunks.append(self._choice(self._added(None), last=piece))
        return chunks

    def add(self, piece: OutputDelta) -> None:
        """Adds a piece of a choice that is not streamed."""
        self._texts.append(piece.text)
        self._reasoning.append(piece.reasoning)
        self._calls += [event for event in piece.calls if isinstance(event, CallEnd)]
        self._token_ids += piece.token_ids if self._raw.with_token_ids else ()
        self._last = piece
        if self._logprobs is not None:
            self._logprobs.extend(piece.shown_tokens, self._token_bytes)
        self.prompt_logprobs += [prompt_logprob(token, self._token_bytes) for token in piece.prompt_tokens]

    def whole(self) -> Body:
        """The choice, after its last piece."""
        return self._choice(self._said(), self._logprobs, self._token_ids, self._last)

    def _added(self, piece: OutputDelta | None) -> Body:
        """What a chunk adds: text and reasoning of the piece, or nothing."""
        raise NotImplementedError

    def _said(self) -> Body:
        """What the whole choice says."""
        raise NotImplementedError

    def _own_prompt_ids(self) -> Body:
        """The prompt's token ids, where choices have them and they are requested."""
        return {}

    def _choice(
        self,
        said: Body,
        logprobs: ChatLogprobs | TextLogprobs | None = None,
        token_ids: Sequence[int] | None = None,
        last: OutputDelta | None = None,
    ) -> Body:
        body = {"index": self._index, **said, "finish_reason": last and last.ending, "logprobs": logprobs}
        if last is not None:
            if self._raw.with_timing and last.timing is not None:
                body["timing"] = timing_fields(last.timing, _TIMING)
            body["stop_reason"] = last.stop  # the request's stop string or token id that ended it
        if self._raw.with_token_ids and token_ids is not None:
            body["token_ids"] = token_ids
        return body

    def _logprobs_of(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | TextLogprobs | None:
        if self._raw.num_logprobs is None:
            return None
        logprobs = self.logprobs_kind()
        logprobs.extend(tokens, self._token_bytes)
        return logprobs


class ChatWriter(ChoiceWriter):
    """Of /v1/chat/completions."""

    logprobs_kind = ChatLogprobs
    id_prefix, chunk_kind, whole_kind = "chatcmpl", "chat.completion.chunk", "chat.completion"

    def begin(self) -> list[Body]:
        return [self._choice({"delta": {"role": "assistant", "content": ""}})]

    def add(self, piece: OutputDelta) -> None:
        super().add(replace(piece, prompt_tokens=()) if self._index else piece)  # a chat has one prompt

    def _added(self, piece: OutputDelta | None) -> Body:
        delta: Body = {"reasoning_content": piece.reasoning} if piece and piece.reasoning else {}
        if piece and (piece.text or not piece.reasoning):
            delta["content"] = piece.text
        return {"delta": delta}

    def _said(self) -> Body:
        calls = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}, "type": "function"}
            for call in self._calls
        ]
        text, reasoning = "".join(self._texts), "".join(self._reasoning)
        message: Body = {"content": (text or None) if calls else text, "role": "assistant", "refusal": None}
        message |= {"tool_calls": calls} if calls else {}
        return {"message": message | ({"reasoning_content": reasoning} if reasoning else {})}


class TextWriter(ChoiceWriter):
    """Of /v1/completions. A choice begins with its prompt's token ids, if they are requested."""

    logprobs_kind = TextLogprobs
    id_prefix, chunk_kind, whole_kind = "cmpl", "text_completion", "text_completion"

    def whole(self) -> Body:
        asked = {"prompt_logprobs": self.prompt_logprobs} if self.prompt_logprobs else {}
        return super().whole() | self._own_prompt_ids() | asked

    def _added(self, piece: OutputDelta | None) -> Body:
        return {"text": piece.text if piece else ""}

    def _said(self) -> Body:
        return {"text": "".join(self._texts)}

    def _own_prompt_ids(self) -> Body:
        return {"prompt_token_ids": self._prompt_ids} if self._raw.with_token_ids and self._prompt_ids else {}


class AnswerWriter:
    """Writes the answer to one request."""

    done = b"data: [DONE]\n\n"
    ping = COMMENT_PING

    def __init__(
        self,
        kind: type[ChoiceWriter],
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
        self._prompt_ids = job.prompts[0].ids if is_told else None  # of a chat, until sent

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
        whole = self._envelope(self._kind.whole_kind, choices, {"usage": self._usage()})
        if self._kind is ChatWriter and (logprobs := self._choices[0].prompt_logprobs):
            whole["prompt_logprobs"] = logprobs
        return encode(whole)

    def failure(self, error: ApiError) -> bytes:
        return data_event(encode({"error": build_error(error)}))

    def _chunk(self, choices: Sequence[Body], *, is_last: bool = False) -> bytes:
        usage: Body = {}
        if self._streamed_usage != "none":
            usage["usage"] = self._usage() if is_last or self._streamed_usage == "continuous" else None
        return data_event(encode(self._envelope(self._kind.chunk_kind, choices, usage)))

    def _envelope(self, kind: str, choices: Sequence[Body | Raw], usage: Body) -> Body:
        head = {"id": self.id, "object": kind, "created": self._created_s, "model": self._totals.job.model}
        envelope = {**head, "choices": choices, **usage, "system_fingerprint": _SYSTEM_FINGERPRINT}
        if self._prompt_ids is not None:
            envelope["prompt_token_ids"], self._prompt_ids = self._prompt_ids, None
        return envelope

    def _usage(self) -> Body:
        totals = self._totals
        usage: Body = {
            "prompt_tokens": totals.num_prompt,
            "completion_tokens": totals.num_completion,
            "total_tokens": totals.num_prompt + totals.num_completion,
            "prompt_tokens_details": {"cached_tokens": totals.num_cached},
        }
        if totals.job.reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": totals.num_reasoning}
        return usage


def _call_deltas(events: Iterable[CallEvent]) -> Iterator[Body]:
    """What chunks add to calls. The first of each call has its id, type and function's name."""
    for event in events:
        if isinstance(event, CallBegin):
            function = {"arguments": "", "name": event.name}
            yield {"index": event.index, "function": function, "id": event.id, "type": "function"}
        elif isinstance(event, Arguments):
            yield {"index": event.index, "function": {"arguments": event.text}}
