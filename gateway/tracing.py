"""Requests as OpenTelemetry spans: one for each, and below it one for each attempt. Never their texts.

OpenTelemetry's interface is always there. Its SDK is an extra, needed only where traces are opened.
"""

import logging
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import structlog
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from gateway.errors import ApiError
from gateway.router.attempt_record import AttemptRecord
from runtime.hardware import OWN_VERSION
from runtime.peer_input import shorten
from wire.timing import Timing

_log = structlog.get_logger()

Attribute = str | int | float | Sequence[str] | None  # None: unknown
ReadHeaders = Callable[[], Iterable[tuple[str, str | bytes]] | None]  # of HTTP, or metadata of gRPC

FLUSH_S = 3.0  # for the last spans when the gateway stops
WARN_S = 60.0  # at most one line of log in so many seconds
MAX_WRITTEN = 40  # attempts of a request, each choice's last ones: a request for a large grammar makes two a second
_MAX_INT64 = 2**63 - 1  # what the protocol can say
_CONTEXT = ("traceparent", "tracestate")  # of the W3C


class Tracing:
    """Begins traces, on the asyncio thread; the provider's processors send them on threads of their own."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("baton.gateway", OWN_VERSION)

    def begin(
        self, name: str, arrived_s: float, headers: ReadHeaders, attributes: Mapping[str, Attribute]
    ) -> "RequestTrace | None":
        """A request's trace, part of the one that its `headers` name; None if that is not sampled.

        `arrived_s`: by time.perf_counter.
        """
        context: dict[str, str] = {}
        for header, value in headers() or ():
            if header in _CONTEXT and isinstance(value, str):
                context[header] = f"{context[header]},{value}" if header in context else value
        parent = TraceContextTextMapPropagator().extract(context)
        begun_ns = time.time_ns() - _nanoseconds(time.perf_counter() - arrived_s)
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, _valid(attributes), start_time=begun_ns)
        return RequestTrace(self._tracer, span, arrived_s) if span.is_recording() else None


class RequestTrace:
    """The trace of one request. Attributes have the names of OpenTelemetry's conventions for generative AI."""

    def __init__(self, tracer: Tracer, span: Span, arrived_s: float) -> None:
        self._tracer = tracer
        self._span = span
        self._arrived_s = arrived_s
        self.choices: list[list[AttemptRecord]] = []  # attempts of each choice, oldest first
        self.endings: dict[int, str] = {}  # choice |-> its finish reason

    def add_choice(self) -> list[AttemptRecord]:
        """The list for the attempts of the next choice."""
        self.choices.append([])
        return self.choices[-1]

    def note(self, attributes: Mapping[str, Attribute]) -> None:
        self._span.set_attributes(_valid(attributes))

    def note_usage(self, num_prompt: int, num_cached: int, num_completion: int) -> None:
        events = [attempt.events for attempts in self.choices for attempt in attempts]
        firsts = [happened["first_token"] for happened in events if "first_token" in happened]
        first_s = time.perf_counter() - self._arrived_s - (time.monotonic() - min(firsts)) if firsts else None
        self.note(
            {
                "gen_ai.usage.input_tokens": num_prompt,
                "gen_ai.usage.cache_read.input_tokens": num_cached,
                "gen_ai.usage.output_tokens": num_completion,
                "gen_ai.response.finish_reasons": [reason for _, reason in sorted(self.endings.items())] or None,
                "gen_ai.response.time_to_first_chunk": first_s,
            }
        )

    def close(self, error: BaseException | None) -> None:
        """The request is over. `error`: what ended it, if not its whole answer."""
        try:
            self._write(error)
        except Exception:  # a trace that cannot be written must not cost the request
            _log.exception("no trace was written")

    def _write(self, error: BaseException | None) -> None:
        now_ns, now_s = time.time_ns(), time.monotonic()
        num_attempts = max(1, MAX_WRITTEN // max(len(self.choices), 1))
        for choice, attempts in enumerate(self.choices[:MAX_WRITTEN]):
            self._write_choice(choice, attempts[-num_attempts:], now_ns - _nanoseconds(now_s))
        if error is not None:
            kind, is_our_fault = _classify(error)
            self._span.set_attribute("error.type", kind)
            if is_our_fault:
                self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(now_ns)

    def _write_choice(self, choice: int, attempts: list[AttemptRecord], epoch_ns: int) -> None:
        """`epoch_ns`: what time.time_ns was when time.monotonic was 0."""
        context = set_span_in_context(self._span)
        links: list[Link] = []  # to the attempt before
        for attempt in attempts:
            assert attempt.ended_s is not None, "it still runs"
            known = _valid({"baton.choice": choice, **_describe(attempt)})
            start_ns = epoch_ns + _nanoseconds(attempt.queued_s)
            span = self._tracer.start_span("baton.attempt", context, SpanKind.INTERNAL, known, links, start_ns)
            for event, happened_s in attempt.events.items():
                span.add_event(event, timestamp=epoch_ns + _nanoseconds(happened_s))
            if attempt.reason:
                reason = str(_encodable(shorten(attempt.reason)))
                span.set_attribute("baton.reason", reason)
                if attempt.is_failure:
                    span.set_status(Status(StatusCode.ERROR, reason))
            span.end(epoch_ns + _nanoseconds(attempt.ended_s))
            links = [Link(span.get_span_context())]


@contextmanager
def open_traces(endpoint: str) -> Iterator[Tracing | None]:
    """`endpoint`: where OTLP is taken over HTTP; without a path, at /v1/traces; empty: no traces."""
    if not endpoint:
        yield None
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    complaints = logging.getLogger("opentelemetry")
    complaints.handlers, complaints.propagate = [_SdkWarnings()], False
    url = urlsplit(endpoint)
    exporter = OTLPSpanExporter(urlunsplit(url._replace(path="/v1/traces")) if url.path in ("", "/") else endpoint)
    provider = build_provider(BatchSpanProcessor(exporter))
    try:
        yield Tracing(provider)
    finally:
        flushing = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


def build_provider(processor: Any) -> Any:
    """The SDK's provider of tracers for this processor of spans. The environment sets its sampler."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider

    defaults = {"service.name": "baton", "service.version": OWN_VERSION}
    resource = Resource.create({**defaults, **OTELResourceDetector().detect().attributes})  # OTEL_SERVICE_NAME, ...
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


class _SdkWarnings(logging.Handler):
    """Logs the SDK's warnings, at most one in WARN_S: an unreachable collector, malformed headers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._next_s:
            self._next_s = record.created + WARN_S
            _log.warning("trouble with traces", reason=shorten(record.getMessage()))


def _classify(error: BaseException) -> tuple[str, bool]:
    """(the name of what ended a request, whether it is the service's fault)."""
    if isinstance(error, ApiError):
        return error.code or str(error.status), error.status >= 500
    if isinstance(error, CancelledError | GeneratorExit):  # the client left
        return "cancelled", False
    return type(error).__name__, True


def _describe(attempt: AttemptRecord) -> dict[str, Attribute]:
    """An attempt's number, its workers, and what they report. Seconds are as measured there: phases may overlap."""
    known: dict[str, Attribute] = {"baton.attempt": attempt.number}
    for role, worker in (("decode", attempt.decode), ("prefill", attempt.prefill)):
        if worker is not None:
            known |= {f"baton.{role}.{field}": value for field, value in worker._asdict().items()}
    if attempt.decode is not None:
        known |= {"baton.cached_tokens": attempt.num_cached, "baton.output_tokens": attempt.num_tokens}
    known |= _measured(attempt.prefilled or attempt.decoded, "prefill_seconds")
    if attempt.prefilled and attempt.prefilled.transport:
        known |= _measured(attempt.prefilled, "transport", "transfer_bytes", "transfer_seconds")
    names = ("first_step_seconds", "decode_seconds", "steps", "draft_tokens", "accepted_tokens", "preemptions")
    return known | _measured(attempt.decoded, "grammar_seconds", *names)


def _measured(timing: Timing | None, *names: str) -> dict[str, Attribute]:
    """Parts of a worker's timing, by their names in traces."""
    return {f"baton.{name}": getattr(timing, name.replace("_seconds", "_s")) for name in names if timing is not None}


def _valid(attributes: Mapping[str, Attribute]) -> dict[str, AttributeValue]:
    """Makes values encodable: one that is not would lose the whole batch of spans."""
    return {name: _encodable(value) for name, value in attributes.items() if value is not None}


def _encodable(value: str | int | float | Sequence[str]) -> AttributeValue:
    match value:
        case str():
            return value.encode(errors="replace").decode()  # clients' texts may hold lone surrogates
        case int():
            return max(-_MAX_INT64, min(value, _MAX_INT64))
        case _:
            return value


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
