"""Traces of requests to real processes, as a collector gets them."""

from itertools import pairwise

from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.support.fault_answers import Truth, ask, find_busy
from tests.support.fleet import ProcessFleet
from tests.support.traces import EVENTS, Collector, said


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
    first, second = trace.attempts[0], trace.attempts[-1]
    assert first is not second
    assert first.status.code == Status.STATUS_CODE_ERROR and first.status.message
    assert second.status.code == Status.STATUS_CODE_UNSET
    assert said(first)["baton.decode.incarnation"] != said(second)["baton.decode.incarnation"]
    assert said(first)["baton.output_tokens"] + said(second)["baton.output_tokens"] == 250
    for before, span in pairwise(trace.attempts):
        assert [link.span_id for link in span.links] == [before.span_id]
    assert {event.name for event in second.events} == EVENTS, "decode lacked the prompt's KV"
