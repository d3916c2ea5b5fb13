"""What a trace says of one request: collected while it is served, written when it is over. Never its texts.

Must not know how traces are written, nor REST or gRPC.
"""

import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from gateway.errors import ApiError
from gateway.request.raw import Chat, RawRequest
from gateway.router.attempt_record import AttemptRecord

_log = structlog.get_logger()

Attribute = str | int | float | Sequence[str] | None  # None: unknown
ReadHeaders = Callable[[], Iterable[tuple[str, str | bytes]] | None]  # of HTTP, or metadata of gRPC

_CONTEXT = ("traceparent", "tracestate")  # of the W3C
_SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
_MAX_MODEL_CHARS = 200


@dataclass(slots=True)
class RequestRecord:
    """One request. Its attributes have the names of OpenTelemetry's conventions for generative AI."""

    write: "WriteRecord"
    name: str
    arrived_s: float  # by time.perf_counter
    context: Mapping[str, str]  # the client's headers of the trace that it belongs to, unchecked
    attributes: dict[str, Attribute]
    choices: list[list[AttemptRecord]] = field(default_factory=list)  # attempts of each choice, oldest first
    endings: dict[int, str] = field(default_factory=dict)  # choice |-> its finish reason
    is_failed: bool = False  # by the service's fault

    def add_choice(self) -> list[AttemptRecord]:
        """The list for the attempts of the next choice."""
        self.choices.append([])
        return self.choices[-1]

    def close(self, error: BaseException | None) -> None:
        """Write it. `error`: what ended the request, if not its whole answer."""
        if isinstance(error, ApiError):
            self.is_failed = error.status >= 500
            self.attributes["error.type"] = error.code or str(error.status)
        elif isinstance(error, CancelledError | GeneratorExit):  # the client left
            self.attributes["error.type"] = "cancelled"
        elif error is not None:
            self.is_failed = True
            self.attributes["error.type"] = type(error).__name__
        try:
            self.write(self)
        except Exception:  # a trace that cannot be written must not cost the request
            _log.exception("no trace was written", request_id=self.attributes["baton.request_id"])

    def note_usage(self, num_prompt: int, num_cached: int, num_completion: int) -> None:
        firsts = [one.first_token_s for attempts in self.choices for one in attempts if one.first_token_s is not None]
        since_arrival_s = time.perf_counter() - self.arrived_s
        self.attributes |= {
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.cache_read.input_tokens": num_cached,
            "gen_ai.usage.output_tokens": num_completion,
            "gen_ai.response.finish_reasons": [reason for _, reason in sorted(self.endings.items())] or None,
            "gen_ai.response.time_to_first_chunk": since_arrival_s - (time.monotonic() - min(firsts))
            if firsts
            else None,
        }


WriteRecord = Callable[[RequestRecord], None]  # once, at the request's end; does not wait


def open_record(
    write: WriteRecord | None, raw: RawRequest, served: str, request_id: str, arrived_s: float, headers: ReadHeaders
) -> RequestRecord | None:
    """None without `write`. `served`: the model's name."""
    if write is None:
        return None
    operation = "chat" if any(isinstance(prompt.content, Chat) for prompt in raw.prompts) else "text_completion"
    context: dict[str, str] = {}
    for name, value in headers() or ():
        if name in _CONTEXT and isinstance(value, str):
            context[name] = f"{context[name]},{value}" if name in context else value
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": (raw.model or served)[:_MAX_MODEL_CHARS],
        "gen_ai.response.model": served,
        "gen_ai.request.max_tokens": raw.max_tokens,
        "gen_ai.request.choice.count": raw.n,
        "baton.request_id": request_id,
        **{f"gen_ai.request.{name}": raw.sampling.get(name) for name in _SAMPLING},
    }
    return RequestRecord(write, f"{operation} {served}", arrived_s, context, attributes)
