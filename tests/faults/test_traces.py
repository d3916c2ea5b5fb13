"""Traces of requests to real processes, as a collector gets them."""

from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.support.asking import CLIENT_S
from tests.support.fault_answers import Truth, ask, find_busy, prompt_of
from tests.support.fleet import ProcessFleet
from tests.support.live import HTTP
from tests.support.traces import PARTS, Collector, said

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_requests_over_rest_and_grpc_are_a_trace_of_four_parts_each(quad: ProcessFleet, collector: Collector) -> None:
    body = {"model": "baton-demo", "prompt": prompt_of(300, seed=11), "max_tokens": 20, "ignore_eos": True}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = HTTP.post(f"{quad.url}/v1/completions", json=body, headers=headers, timeout=CLIENT_S).json()
    rest = collector.wait_for(lambda trace: trace.root.trace_id.hex() == TRACE)
    assert rest.root.parent_span_id.hex() == PARENT
    assert said(rest.root)["gen_ai.response.id"] == answer["id"]
    ask(quad, num_prompt=301, num_tokens=20).finish()
    grpc = collector.wait_for(lambda trace: said(trace.root)["gen_ai.usage.input_tokens"] == 301)
    assert not grpc.root.parent_span_id
    for trace in (rest, grpc):
        trace.check()
        assert trace.names == PARTS
        transfer, decode = map(said, trace.parts[2:])
        assert transfer["baton.transfer_bytes"] > 0 and transfer["baton.transport"]
        assert decode["baton.output_tokens"] == said(trace.root)["gen_ai.usage.output_tokens"] == 20
    assert {said(span)["baton.worker.address"] for span in rest.parts[1:]} <= {one.address for one in quad.workers()}


def test_an_answer_that_moves_to_another_worker_is_one_trace(
    quad: ProcessFleet, truth: Truth, collector: Collector
) -> None:
    """Row 3. Its attempts are siblings, and the second is linked to the first."""
    stream = ask(quad, num_prompt=203, num_tokens=250)
    stream.wait_for_tokens(40)
    find_busy(quad, "decode").kill()
    truth.check(stream)
    trace = collector.wait_for(lambda trace: said(trace.root)["gen_ai.usage.input_tokens"] == 203)
    trace.check()
    last = said(trace.parts[-1])["baton.attempt"]
    assert last > 1
    decodes = {said(span)["baton.attempt"]: span for span in trace.parts if span.name == "baton.decode"}
    first, second = decodes[1], decodes[last]
    assert first.status.code == Status.STATUS_CODE_ERROR and first.status.message
    assert second.status.code == Status.STATUS_CODE_UNSET
    assert said(first)["baton.worker.incarnation"] != said(second)["baton.worker.incarnation"]
    assert said(first)["baton.output_tokens"] + said(second)["baton.output_tokens"] == 250
    for span in trace.parts:
        before = [other for other in trace.parts if said(other)["baton.attempt"] == said(span)["baton.attempt"] - 1]
        assert [link.span_id for link in span.links] == [other.span_id for other in before[-1:]]
    assert trace.names[-4:] == PARTS, "decode lacked the prompt's KV"
