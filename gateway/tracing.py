"""Records of requests as OpenTelemetry spans, built when a request is over and sent by a thread of the SDK's.

The only file that imports OpenTelemetry, and imported only when --otlp-endpoint is set.
"""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from gateway.request.record import Attribute, RequestRecord, WriteRecord
from gateway.router.attempt_record import AttemptRecord, Part, WorkerName
from runtime.hardware import OWN_VERSION
from runtime.peer_input import shorten

_log = structlog.get_logger()

FLUSH_S = 3.0  # for the last spans when the gateway stops
WARN_S = 60.0  # at most one line of log in so many seconds
MAX_WRITTEN = 40  # attempts of a request, each choice's last ones: a request for a large grammar makes two a second
_MAX_INT64 = 2**63 - 1  # what the protocol can say


class Tracing:
    """Writes a trace for each request, on the asyncio thread; the SDK sends it on a thread of its own."""

    def __init__(self, processor: SpanProcessor) -> None:
        """`processor`: takes the spans, and is owned from now on."""
        defaults = {"service.name": "baton", "service.version": OWN_VERSION}
        resource = Resource.create({**defaults, **OTELResourceDetector().detect().attributes})  # OTEL_SERVICE_NAME, ...
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # the sampler is the environment's
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("baton.gateway", OWN_VERSION)
        self._propagator = TraceContextTextMapPropagator()

    def write(self, record: RequestRecord) -> None:
        """As record.WriteRecord: one span for the request, and below it one for each part of each attempt."""
        now_ns, now_s = time.time_ns(), time.monotonic()
        arrived_ns = now_ns - _nanoseconds(time.perf_counter() - record.arrived_s)
        parent = self._propagator.extract(record.context)
        attributes = _valid(record.attributes)
        root = self._tracer.start_span(record.name, parent, SpanKind.SERVER, attributes, start_time=arrived_ns)
        if root.is_recording():
            num_attempts = max(1, MAX_WRITTEN // max(len(record.choices), 1))
            for choice, attempts in enumerate(record.choices[:MAX_WRITTEN]):
                self._write_choice(root, choice, attempts[-num_attempts:], now_ns - _nanoseconds(now_s))
        if record.is_failed:
            root.set_status(Status(StatusCode.ERROR))
        root.end(now_ns)

    def _write_choice(self, root: Span, choice: int, attempts: list[AttemptRecord], epoch_ns: int) -> None:
        """`epoch_ns`: what time.time_ns was when time.monotonic was 0."""
        context = set_span_in_context(root)
        links: list[Link] = []  # to where the attempt before ended
        for attempt in attempts:
            parts = attempt.parts()
            for number, (part, start_s, end_s) in enumerate(parts, 1):
                attributes = {"baton.choice": choice, "baton.attempt": attempt.number, **_describe(attempt, part)}
                start_ns, end_ns = epoch_ns + _nanoseconds(start_s), epoch_ns + _nanoseconds(end_s)
                span = self._tracer.start_span(
                    f"baton.{part}", context, attributes=_valid(attributes), links=links, start_time=start_ns
                )
                if number == len(parts) and attempt.reason:
                    _explain(span, attempt)
                span.end(end_ns)
            links = [Link(span.get_span_context())]

    def close(self) -> None:
        """Send what is left, within FLUSH_S."""
        flushing = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)


@contextmanager
def open_traces(endpoint: str) -> Iterator[WriteRecord]:
    """`endpoint`: where OTLP is taken over HTTP; without a path, at /v1/traces."""
    complaints = logging.getLogger("opentelemetry")
    complaints.handlers, complaints.propagate = [_SdkWarnings()], False
    url = urlsplit(endpoint)
    exporter = OTLPSpanExporter(urlunsplit(url._replace(path="/v1/traces")) if url.path in ("", "/") else endpoint)
    tracing = Tracing(BatchSpanProcessor(exporter))
    try:
        yield tracing.write
    finally:
        tracing.close()


class _SdkWarnings(logging.Handler):
    """Logs the SDK's warnings, at most one in WARN_S: an unreachable collector, malformed headers."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._next_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if record.created >= self._next_s:
            self._next_s = record.created + WARN_S
            _log.warning("trouble with traces", reason=shorten(record.getMessage()))


def _describe(attempt: AttemptRecord, part: Part) -> Mapping[str, Attribute]:
    """What is known of a part. Seconds are as measured by workers: there the parts may overlap."""
    if part == "queue":
        return {}
    prefilled, decoded = attempt.prefilled, attempt.decoded
    if part == "prefill":
        timing = prefilled if attempt.is_handed_off else decoded
        return _name(attempt.prefill if attempt.is_handed_off else attempt.decode) | {
            "baton.cached_tokens": attempt.num_cached,
            "baton.prefill_seconds": timing.prefill_s if timing else None,
            "baton.grammar_seconds": decoded.grammar_s if decoded else None,
        }
    worker = _name(attempt.decode)
    if part == "transfer" and prefilled is not None:
        return worker | {
            "baton.transport": prefilled.transport,
            "baton.transfer_bytes": prefilled.transfer_bytes,
            "baton.transfer_seconds": prefilled.transfer_s,
        }
    worker["baton.output_tokens"] = attempt.num_tokens
    if decoded is None:
        return worker
    return worker | {
        "baton.first_step_seconds": decoded.first_step_s,
        "baton.decode_seconds": decoded.decode_s,
        "baton.steps": decoded.steps,
        "baton.draft_tokens": decoded.draft_tokens,
        "baton.accepted_tokens": decoded.accepted_tokens,
        "baton.preemptions": decoded.preemptions,
    }


def _name(worker: WorkerName | None) -> dict[str, Attribute]:
    return {} if worker is None else {f"baton.worker.{field}": value for field, value in worker._asdict().items()}


def _explain(span: Span, attempt: AttemptRecord) -> None:
    reason = str(_encodable(shorten(attempt.reason)))
    span.set_attribute("baton.reason", reason)
    if attempt.is_failure:
        span.set_status(Status(StatusCode.ERROR, reason))


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
