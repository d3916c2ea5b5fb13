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
PARTS = ["baton.queue", "baton.prefill", "baton.transfer", "baton.decode"]


@dataclass(frozen=True)
class Trace:
    """One request."""

    root: Span
    parts: list[Span]  # its children, in order

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.parts]

    def check(self) -> None:
        """All parts are siblings, one after the other within the request: their sum is at most its duration."""
        assert self.root.kind == Span.SPAN_KIND_SERVER
        assert {span.parent_span_id for span in self.parts} <= {self.root.span_id}
        ends = [self.root.start_time_unix_nano, *(span.end_time_unix_nano for span in self.parts)]
        for earlier, span in zip(ends, self.parts, strict=False):
            assert earlier <= span.start_time_unix_nano <= span.end_time_unix_nano <= self.root.end_time_unix_nano
        total = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in self.parts)
        assert total <= self.root.end_time_unix_nano - self.root.start_time_unix_nano


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
