"""Spans as a collector gets them, and such a collector."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

WAIT_S = 60.0  # longer than any wait takes; a test that reaches it fails
EVENTS = {"placed", "kv", "first_token"}  # of an attempt whose prompt a prefill worker computes


@dataclass(frozen=True)
class Trace:
    """One request."""

    root: Span
    attempts: list[Span]  # its children, in order

    def check(self) -> None:
        """The attempts are siblings, one after the other within the request, and each one's events lie in it."""
        assert self.root.kind == Span.SPAN_KIND_SERVER
        assert {(span.name, span.parent_span_id) for span in self.attempts} <= {("baton.attempt", self.root.span_id)}
        earlier = self.root.start_time_unix_nano
        for span in self.attempts:
            times = [span.start_time_unix_nano, *(event.time_unix_nano for event in span.events)]
            assert earlier <= times[0] and max(times) <= span.end_time_unix_nano
            earlier = span.end_time_unix_nano
        assert earlier <= self.root.end_time_unix_nano


def read_traces(messages: Iterable[ExportTraceServiceRequest]) -> list[Trace]:
    """Those whose root has come, oldest first."""
    found: dict[bytes, list[Span]] = defaultdict(list)
    for message in messages:
        for resource in message.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    found[span.trace_id].append(span)
    traces = []
    for spans in found.values():
        spans.sort(key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))
        traces += [
            Trace(root, [span for span in spans if span is not root])
            for root in spans
            if root.kind == Span.SPAN_KIND_SERVER
        ]
    return sorted(traces, key=lambda trace: trace.root.end_time_unix_nano)


def said(span: Span) -> dict[str, Any]:
    """Its attributes."""
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value") or ""
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.paths: set[str] = set()
        self.messages: list[ExportTraceServiceRequest] = []

    def wait_for(self, is_wanted: Callable[[Trace], bool]) -> Trace:
        """The first such trace."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for trace in read_traces(list(self.messages)):
                if is_wanted(trace):
                    return trace
            time.sleep(0.02)
        raise AssertionError("no such trace came")


@contextmanager
def run_collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.messages.append(ExportTraceServiceRequest.FromString(body))
            collector.paths.add(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()
