"""A request's trace: its spans, what they say, and that neither clients nor collectors can disturb it.

Through real processes: tests/faults/test_traces.py.
"""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from gateway import tracing
from gateway.errors import ApiError, not_ready, overloaded
from gateway.router.attempt_record import AttemptRecord
from gateway.tracing import MAX_WRITTEN, Tracing, build_provider, open_traces
from protos import decode_pb2, prefill_pb2
from tests.gateway.router.test_requests import NO_ROOM
from tests.support.adapters import APIS
from tests.support.api_server import ANSWER, PLAIN, SERVED, Served, run_api
from tests.support.fake_engine_client import Script
from tests.support.traces import EVENTS, WAIT_S, Trace, read_traces, run_collector, said
from tests.support.virtual_fleet import virtual_fleet, wanted
from tests.support.words import Api, named

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
ENDLESS_MS = str(10**9)  # between two batches


class Book:
    """Traces in memory, as a collector gets them."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing(build_provider(SimpleSpanProcessor(self._exporter)))

    def take(self) -> list[Trace]:
        """Those written since the last call."""
        spans = self._exporter.get_finished_spans()
        self._exporter.clear()
        return read_traces([encode_spans(spans)])

    def take_one(self) -> Trace:
        """Wait for it."""
        deadline = time.monotonic() + WAIT_S
        while not (found := self.take()):
            assert time.monotonic() < deadline, "nothing was written"
            time.sleep(0.005)
        (only,) = found
        only.check()
        return only


def write(tracing: Tracing | None, *choices: list[AttemptRecord], error: ApiError | None = None) -> None:
    """A request of these attempts, which arrived long ago."""
    assert tracing is not None
    trace = tracing.begin("chat m", time.perf_counter() - 1000, tuple, {})
    assert trace is not None
    trace.choices.extend(choices)
    trace.close(error)


# -- attempts --------------------------------------------------------------------------------------------------------


def now() -> dict[str, float]:
    """Virtual time that stays behind the real one."""
    return {"now": time.monotonic() - 100}


def test_an_attempt_says_when_it_got_on_and_what_workers_report() -> None:
    book = Book()
    with virtual_fleet(prefill=1, **now()) as fleet:
        fleet.prefills[0].response = prefill_pb2.RunResponse(
            prefill_seconds=1e-6, transfer_seconds=0.25, transfer_bytes=4096, transport="shm", cached_tokens=1
        )
        client = fleet.ask()
        timing = decode_pb2.SessionTiming(
            first_step_seconds=0.5, decode_seconds=0.75, draft_tokens=3, accepted_tokens=2
        )
        fleet.run(0.1)
        fleet.decodes[0].sessions[0].say([7, 8, 9, 10], "length", timing=timing)
    write(book.tracing, client.attempts)
    trace = book.take_one()
    (attempt,) = trace.attempts
    assert {event.name for event in attempt.events} == EVENTS
    assert not attempt.links and not attempt.status.code
    assert said(attempt).items() >= {
        "baton.attempt": 1, "baton.choice": 0, "baton.prefill.address": "P1", "baton.prefill.incarnation": "P1",
        "baton.decode.address": "D1", "baton.decode.incarnation": "D1", "baton.cached_tokens": 1,
        "baton.prefill_seconds": 1e-6, "baton.transport": "shm", "baton.transfer_bytes": 4096,
        "baton.transfer_seconds": 0.25, "baton.output_tokens": 4, "baton.first_step_seconds": 0.5,
        "baton.decode_seconds": 0.75, "baton.draft_tokens": 3, "baton.accepted_tokens": 2,
    }.items()  # fmt: skip
    assert "secret" not in str(trace)


def test_a_prompt_that_decode_computes_has_its_seconds_and_no_worker_for_it() -> None:
    for has_prefill in (False, True):  # there is one, but the decode worker has the prompt's KV
        book = Book()
        with virtual_fleet(prefill=int(has_prefill), **now()) as fleet:
            fleet.decodes[0].needs_prefill = not has_prefill
            client = fleet.ask()
            fleet.decodes[0].sessions[0].say([7], "length", timing=decode_pb2.SessionTiming(kv_seconds=0.5))
        write(book.tracing, client.attempts)
        (attempt,) = book.take_one().attempts
        assert [event.name for event in attempt.events] == ["placed", "first_token"]
        assert said(attempt)["baton.prefill_seconds"] == 0.5 and "baton.prefill.address" not in said(attempt)


def test_attempts_of_an_answer_that_moves_are_siblings_and_linked() -> None:
    book = Book()
    with virtual_fleet(decode=2, **now()) as fleet:
        client = fleet.ask(wanted(max_tokens=6))
        one, other = fleet.decodes
        one.sessions[0].emit(2)
        fleet.run()
        one.break_streams()
        fleet.run()
        other.sessions[0].emit(4, "length")
    write(book.tracing, client.attempts)
    cut, whole = book.take_one().attempts
    assert [said(span)["baton.attempt"] for span in (cut, whole)] == [1, 2]
    assert cut.status.code == Status.STATUS_CODE_ERROR and cut.status.message == said(cut)["baton.reason"] != ""
    assert whole.status.code == Status.STATUS_CODE_UNSET
    assert [[link.span_id for link in span.links] for span in (cut, whole)] == [[], [cut.span_id]]
    assert (said(cut)["baton.output_tokens"], said(whole)["baton.output_tokens"]) == (2, 4)
    assert (said(cut)["baton.decode.incarnation"], said(whole)["baton.decode.incarnation"]) == ("D1", "D2")


def test_an_attempt_that_fails_says_why() -> None:
    book = Book()
    with virtual_fleet(**now()) as fleet:
        too_large = (grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max")
        fleet.decodes[0].refusals.extend([NO_ROOM, *[too_large] * 9])
        client = fleet.ask()
        fleet.run(1.0)
    assert client.error is not None
    write(book.tracing, client.attempts, error=client.error)
    trace = book.take_one()
    first, *others = trace.attempts
    assert first.status.code == Status.STATUS_CODE_UNSET, "no room is not a failure"
    assert "no pages" in said(first)["baton.reason"]
    assert len(others) == 3 and all(span.status.code == Status.STATUS_CODE_ERROR for span in others)
    assert all("larger than max" in span.status.message for span in others)
    assert trace.root.status.code == Status.STATUS_CODE_ERROR and said(trace.root)["error.type"] == "failed"
    with virtual_fleet(decode=0, **now()) as fleet:
        client = fleet.ask()
    write(book.tracing, client.attempts)
    (only,) = book.take_one().attempts
    assert not only.events and only.status.code == Status.STATUS_CODE_ERROR and only.status.message


def test_only_the_last_of_many_attempts_are_shown() -> None:
    book, begun = Book(), time.monotonic() - 1
    attempts = [AttemptRecord(number, begun + number / 1000) for number in range(1, 1000)]
    for one in attempts:
        one.close(one.queued_s, "no room")
    write(book.tracing, attempts)
    shown = [said(span)["baton.attempt"] for span in book.take_one().attempts]
    assert shown == list(range(1000 - MAX_WRITTEN, 1000))


def test_a_trace_that_cannot_be_written_costs_only_a_line_of_log() -> None:
    with capture_logs() as logs:
        write(Book().tracing, [AttemptRecord(1, 10.0)])  # it has not ended
    assert [one["event"] for one in logs] == ["no trace was written"]


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Book]]:
    book = Book()
    with run_api(tmp_path_factory.mktemp("traced"), PLAIN, tracing=book.tracing) as served:
        yield served, book


@pytest.mark.parametrize("api", APIS.values(), ids=named)
def test_a_request_belongs_to_its_clients_trace(traced: tuple[Served, Book], api: Api) -> None:
    served, book = traced
    served.engine.reset(served.script(ANSWER))
    ask = {"temperature": 0.5, "top_p": 0.25, "max_tokens": 100}
    outcome = api.ask(served, ask, stream=True, headers={**SAMPLED, "tracestate": "vendor=1", "x-request-id": "mine"})
    assert outcome.status == 200
    trace, operation = book.take_one(), "text_completion" if api.name in ("completions", "Generate") else "chat"
    root = trace.root
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "vendor=1")
    assert (root.name, root.status.code) == (f"{operation} {SERVED}", Status.STATUS_CODE_UNSET)
    facts, (asked,) = said(root), served.engine.generations
    assert facts.pop("baton.request_id").startswith("mine.")
    assert facts.pop("gen_ai.response.time_to_first_chunk", 1) > 0
    assert bool(facts.pop("gen_ai.response.id", "")) == api.can_be_whole, "messages of gRPC have no id"
    assert facts == {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": SERVED,
        "gen_ai.response.model": SERVED,
        "gen_ai.request.max_tokens": 100,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.usage.input_tokens": len(asked.prompt_ids),
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.usage.output_tokens": served.engine.num_given,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert "hello" not in str(trace)


@pytest.mark.parametrize("name", ["completions", "Chat"])
def test_each_choice_has_its_own_attempts(traced: tuple[Served, Book], name: str) -> None:
    served, book = traced
    served.engine.reset(Script([5, 6], delay_s=0.01), served.script(ANSWER))
    assert APIS[name].ask(served, {"n": 2, "max_tokens": 2}, stream=True).status == 200
    (trace,) = book.take()
    assert {span.parent_span_id for span in trace.attempts} == {trace.root.span_id}
    assert sorted(said(span)["baton.choice"] for span in trace.attempts) == [0, 1]
    assert said(trace.root)["gen_ai.request.choice.count"] == 2
    assert said(trace.root)["gen_ai.response.finish_reasons"] == ["length", "length"]


@pytest.mark.parametrize("name", ["chat", "Generate"])
def test_a_header_that_names_no_trace_is_ignored(traced: tuple[Served, Book], name: str) -> None:
    """And what the client does not sample is not written."""
    served, book = traced
    served.engine.reset(served.script(ANSWER))
    for header in ("rubbish", f"00-{'0' * 32}-{PARENT}-01", "0" * 5000, f"00-{TRACE}-{PARENT}-00"):
        outcome = APIS[name].ask(served, {}, stream=True, headers={"traceparent": header, "tracestate": "=,;" * 50})
        assert outcome.status == 200
        if header.endswith(f"{PARENT}-00"):
            assert book.take() == []
        else:
            root = book.take_one().root
            assert not root.parent_span_id and not root.trace_state and root.trace_id.hex() != TRACE


@pytest.mark.parametrize("name", ["chat", "Generate"])
@pytest.mark.parametrize(
    ("ask", "script", "error_type", "is_failed"),
    [
        ({"max_tokens": -1}, Script(), "invalid_value", False),
        ({"model": "other"}, Script(), "model_not_found", False),
        ({}, Script(error=overloaded("full")), "overloaded", False),
        ({}, Script([5], error=not_ready("no worker is alive")), "not_ready", True),
        ({}, Script([5], bug=RuntimeError("a bug")), "RuntimeError", True),
        ({}, Script([5], is_hanging=True), "cancelled", False),
    ],
)
def test_what_ends_a_request_without_an_answer(
    traced: tuple[Served, Book], name: str, ask: dict[str, object], script: Script, error_type: str, is_failed: bool
) -> None:
    served, book = traced
    served.engine.reset(script)
    if script.is_hanging:
        APIS[name].leave(served, ask, stream=True, num_choices=1)
    else:
        assert APIS[name].ask(served, ask, stream=True).status >= 400
    trace = book.take_one()
    assert said(trace.root)["error.type"] == error_type
    assert (trace.root.status.code == Status.STATUS_CODE_ERROR) == is_failed


def test_values_that_the_protocol_cannot_say_lose_no_trace() -> None:
    book = Book()
    trace = book.tracing.begin(
        "chat m", time.perf_counter(), tuple, {"count": 10**30, "least": -(10**30), "text": "\ud800"}
    )
    assert trace is not None
    trace.close(None)
    (written,) = book.take()
    assert said(written.root).items() >= {"count": 2**63 - 1, "least": 1 - 2**63, "text": "?"}.items()


# -- collectors ------------------------------------------------------------------------------------------------------


def test_without_an_endpoint_opentelemetry_is_not_loaded() -> None:
    """Its interface is."""
    code = "import sys; sys.modules['torch'] = None  # as in a gateway\n"
    code += "import gateway.main as m; m.open_traces('').__enter__(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "gateway.tracing" in loaded
    assert not {"opentelemetry.sdk", "opentelemetry.exporter"} & set(loaded)


@pytest.mark.parametrize(
    ("path", "wanted", "given", "name"),
    [("", "/v1/traces", "", "baton"), ("/", "/v1/traces", "mine", "mine"), ("/own", "/own", "mine", "mine")],
)
def test_the_last_spans_are_sent_at_the_end(
    path: str, wanted: str, given: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", ENDLESS_MS)
    monkeypatch.setenv("OTEL_SERVICE_NAME", given)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=z")
    with run_collector() as collector:
        with open_traces(collector.url + path) as traces:
            write(traces)
            assert not collector.messages
        (message,) = collector.messages
    assert collector.paths == {wanted}
    facts = {pair.key: pair.value.string_value for pair in message.resource_spans[0].resource.attributes}
    assert facts.items() >= {"service.name": name, "zone": "z"}.items()


def test_a_dead_collector_costs_one_line_of_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is written than the queue holds."""
    for name, value in {"MAX_QUEUE_SIZE": "20", "MAX_EXPORT_BATCH_SIZE": "10", "SCHEDULE_DELAY": "1"}.items():
        monkeypatch.setenv(f"OTEL_BSP_{name}", value)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with capture_logs() as lines, open_traces(f"http://127.0.0.1:{port}") as traces:
        for _ in range(500):
            write(traces)
    assert [line["event"] for line in lines] == ["trouble with traces"]


def test_a_collector_that_hangs_does_not_keep_the_gateway_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with open_traces(f"http://127.0.0.1:{silent.getsockname()[1]}") as traces:
            write(traces)
        (flushing,) = (thread for thread in threading.enumerate() if thread.name == "last-spans")
        assert flushing.daemon, "it ends with the process"
    flushing.join()
