"""Writes a choice as an answer for Ollama's clients: lines of JSON, or one object."""

import time
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.answer.choice_text import OutputDelta
from gateway.answer.choices import Totals
from gateway.api.http.answer import encode
from gateway.api.http.errors import build_error_text
from gateway.api.openai.answers import ChatLogprobs, TokenBytes
from gateway.errors import ApiError
from gateway.tools.parse import CallEnd
from wire.timing import Timing

# Line ends of Unicode, which JSON leaves as they are, and at which Python's splitlines cuts.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\x85\u2028\u2029"}


class OllamaMessage(msgspec.Struct):
    """The model's message in an answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class OllamaAnswer(msgspec.Struct):
    """An answer, or a line of it. Figures come with the last line; durations are in nanoseconds."""

    model: str
    created_at: datetime
    message: OllamaMessage | UnsetType = UNSET  # of a chat
    response: str | UnsetType = UNSET  # to a plain prompt; so is what it thinks
    thinking: str | UnsetType = UNSET
    logprobs: list[Raw] | UnsetType = UNSET  # TokenLogprob of OpenAI's chats
    done: bool = False
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # until the model was awake
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET  # until the prompt's KV was computed
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET  # from there to the last token
    context: list[int] | UnsetType = UNSET  # tokens of prompt and answer


def build_answer(model: str, *, is_chat: bool, text: str = "", thinking: str = "", calls: Any = ()) -> OllamaAnswer:
    """An answer without figures, as of now."""
    answer, thought = OllamaAnswer(model, datetime.now(UTC)), thinking or UNSET
    if is_chat:
        answer.message = OllamaMessage(text, thinking=thought, tool_calls=calls or UNSET)
    else:
        answer.response, answer.thinking = text, thought
    return answer


class OllamaWriter:
    """Writes the answer to one request, which has one choice."""

    done = b""

    def __init__(
        self, totals: Totals, model: str, token_bytes: TokenBytes, *, is_chat: bool, with_context: bool
    ) -> None:
        """`model`: its name, as the client has it. `with_context`: the answer ends with its tokens."""
        self.id = totals.job.call_seed
        self._totals, self._model, self._token_bytes = totals, model, token_bytes
        self._is_chat, self._with_context = is_chat, with_context
        self._token_ids: list[int] = []
        self._clear()
        self.ping = self._line()

    def _clear(self) -> None:
        """Forgets what was taken, which is written."""
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs = ChatLogprobs()

    def begin(self) -> list[bytes]:
        return []

    def events(self, index: int, piece: OutputDelta) -> list[bytes]:
        self.add(index, piece)
        has_more = any([*self._texts, *self._thoughts, *self._calls, *self._logprobs.content])
        lines = [self._line()] if has_more else []
        self._clear()
        return lines if piece.finish_reason is None else [*lines, self._line(piece)]

    def add(self, index: int, piece: OutputDelta) -> None:
        self._last = piece
        self._texts.append(piece.text)
        self._thoughts.append(piece.reasoning)
        self._token_ids += piece.token_ids if self._with_context else ()
        for call in piece.calls:
            if not isinstance(call, CallEnd):
                continue
            if call.is_whole:
                arguments = Raw(msgspec.json.format(call.arguments.encode() or b"{}", indent=-1))  # in one line
                function = {"index": call.index, "name": call.name, "arguments": arguments}
                self._calls.append({"id": call.id, "function": function})
            else:  # clients would run it
                self._texts.append(f'{{"name": "{call.name}", "arguments": {call.arguments}')
        if self._totals.job.generations[0].num_logprobs is not None:
            self._logprobs.extend(piece.shown_tokens, self._token_bytes)

    async def whole(self) -> bytes:
        return self._line(self._last)

    def failure(self, error: ApiError) -> bytes:
        return write_line(build_error_text(error))

    def _line(self, last: OutputDelta | None = None) -> bytes:
        """A line with what was taken since the last one. `last`: the last piece."""
        text, thinking = "".join(self._texts), "".join(self._thoughts)
        line = build_answer(self._model, is_chat=self._is_chat, text=text, thinking=thinking, calls=self._calls)
        line.logprobs = self._logprobs.content or UNSET
        if last is not None:
            totals, timing = self._totals, last.timing or Timing()
            line.done, line.done_reason = True, last.finish_reason or UNSET
            line.total_duration = _nanoseconds(time.perf_counter() - totals.arrived_s)
            line.load_duration = _nanoseconds(timing.wake_s)
            line.prompt_eval_count, line.eval_count = totals.num_prompt, totals.num_completion
            line.prompt_eval_duration = _nanoseconds(timing.prefill_s)
            line.eval_duration = _nanoseconds(timing.first_step_s + timing.decode_s)
            if self._with_context:
                line.context = [*totals.job.prompts[0].ids, *self._token_ids]
        return write_line(line)


def write_line(value: object) -> bytes:
    """JSON in one line, also for those who cut lines as Python does."""
    line = encode(value)
    for end, escape in _LINE_ENDS.items():
        line = line.replace(end, escape)
    return line + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(round(seconds * 1e9), 1)  # clients divide by it
