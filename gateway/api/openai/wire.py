"""Writes the choices of one request as an answer for OpenAI's clients. Must not know HTTP or where text comes from."""

import asyncio
import secrets
import time
from collections.abc import Sequence

from msgspec import UNSET, Raw, UnsetType

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.api.http.errors import build_error
from gateway.api.http.json_answer import encode
from gateway.api.http.sse import COMMENT_PING, data_event
from gateway.api.openai.answers import Choice, Envelope, ObjectKind, Usage, usage_of
from gateway.api.openai.choices import ChatWriter, ChoiceWriter, Extras
from gateway.api.openai.logprobs import prompt_logprob
from gateway.api.openai.types import StreamedUsage
from gateway.errors import ApiError


class AnswerWriter:
    """Writes the answer to one request, as a stream of chunks or as a whole."""

    done = b"data: [DONE]\n\n"
    ping = COMMENT_PING

    def __init__(self, kind: type[ChoiceWriter], totals: Totals, extras: Extras, streamed_usage: StreamedUsage) -> None:
        self._kind = kind
        self.id = f"{kind.id_prefix}-{secrets.token_hex(12)}"
        self._created_s = int(time.time())
        self._streamed_usage = streamed_usage
        job = totals.job
        self._choices = [
            kind(index, job.prompts[job.prompt_of(index)], extras) for index in range(len(job.generations))
        ]
        self._extras = extras
        self._totals = totals
        self._has_begun = False
        self._prompt_logprobs: list[Raw] = []  # of a chat

    def begin(self) -> list[bytes]:
        return [self._chunk([first]) for choice in self._choices for first in choice.begin()]

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        chunks = [self._chunk([choice]) for choice in self._choices[index].chunks(piece)]
        if self._streamed_usage != "none" and not self._totals.num_open:
            chunks.append(self._chunk([], is_last=True))
        return chunks

    def add(self, index: int, piece: OutputDelta) -> None:
        self._choices[index].add(piece)
        if self._kind is ChatWriter and not index:
            self._prompt_logprobs += [prompt_logprob(token, self._extras.token_bytes) for token in piece.prompt_tokens]

    async def whole(self) -> bytes:
        choices = []
        for choice in self._choices:
            choices.append(Raw(encode(choice.whole())))
            await asyncio.sleep(0)  # lets other requests run: with log-probabilities a choice has many megabytes
        whole = self._envelope(self._kind.whole_kind, choices, usage_of(self._totals))
        whole.prompt_logprobs = self._prompt_logprobs or UNSET
        return encode(whole)

    def failure(self, error: ApiError) -> bytes:
        return data_event(encode(build_error(error)))

    def _chunk(self, choices: Sequence[Choice], *, is_last: bool = False) -> bytes:
        usage: Usage | UnsetType | None = UNSET if self._streamed_usage == "none" else None
        if is_last or self._streamed_usage == "continuous":
            usage = usage_of(self._totals)
        return data_event(encode(self._envelope(self._kind.chunk_kind, choices, usage)))

    def _envelope(self, kind: ObjectKind, choices: Sequence[Choice | Raw], usage: Usage | UnsetType | None) -> Envelope:
        envelope = Envelope(self.id, kind, self._created_s, self._totals.job.model, choices, usage)
        if self._kind is ChatWriter and not self._has_begun:
            envelope.prompt_token_ids = self._extras.token_ids(self._totals.job.prompts[0].ids)
        self._has_begun = True
        return envelope
