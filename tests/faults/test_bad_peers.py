"""Prefill workers that do not match, or hand over other pages than they promised. Rows 8, 9 and 22 of the fault list.

The decode worker is a real process; the test plays the prefill worker, down to the bytes of its pages.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvtransfer.grpc_bytes import METHOD, encode_data
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2, prefill_pb2_grpc
from runtime.rpc import new_incarnation
from tests.support.fault_answers import Truth, prompt_of
from tests.support.fleet import HOST, ProcessFleet
from tests.support.real_workers import packed

GATEWAY, HANDLE, NUM_PAGES, GENERATION = "played", 1, 4, 7
CALL_S = 60.0

Serve = Callable[[kv_pb2.ReadPagesRequest], Iterator[bytes]]


def whole(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    for _ in request.pages:
        yield encode_data(memoryview(bytes(request.num_bytes)))
    yield generations(*[GENERATION for _ in request.pages])


def generations(*numbers: int) -> bytes:
    return kv_pb2.ReadPagesResponse(generations=numbers).SerializeToString()


def truncated(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    yield encode_data(memoryview(bytes(request.num_bytes // 2)))
    yield generations(*[GENERATION for _ in request.pages])


def too_much(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    for _ in range(len(request.pages) + 1):
        yield encode_data(memoryview(bytes(request.num_bytes)))
    yield generations(*[GENERATION for _ in request.pages])


def recycled(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    *pages, _last = whole(request)
    yield from pages
    yield generations(*[GENERATION + index // 2 for index in range(len(request.pages))])


def without_end(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    *pages, _last = whole(request)
    yield from pages


def garbage(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    yield b"\xff" * 1000


@dataclass
class Played:
    """A gateway and a prefill worker in one, which talk to a decode worker."""

    decode: decode_pb2_grpc.DecodeStub
    address: str  # serves the pages
    serve: Serve = whole
    incarnation: str = field(default_factory=new_incarnation)

    def peer(self, **layout: Any) -> kv_pb2.Peer:
        real = self.decode.Status(decode_pb2.StatusRequest(), timeout=CALL_S).peer
        peer = kv_pb2.Peer(
            role="prefill", address=self.address, incarnation=self.incarnation, pid=1, host="elsewhere", num_pages=64
        )
        peer.layout.CopyFrom(real.layout)
        peer.ranks.add(address=self.address, pid=1)
        for name, value in layout.items():
            setattr(peer.layout, name, value)
        return peer

    def offer(self, ticket: kv_pb2.Ticket, serve: Serve) -> kv_pb2.OfferResponse:
        self.serve = serve
        refs = [kv_pb2.PageRef(page=page, generation=GENERATION) for page in range(NUM_PAGES)]
        offer = kv_pb2.OfferRequest(
            ticket=ticket, incarnation=self.incarnation, begin=0, end=16 * NUM_PAGES, pages=refs
        )
        response: kv_pb2.OfferResponse = self.decode.Offer(offer, timeout=CALL_S)
        return response


@pytest.fixture
def played(quad: ProcessFleet) -> Iterator[Played]:
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(quad["decode-0"].address))
        result = Played(decode_pb2_grpc.DecodeStub(channel), "")
        result.address = stack.enter_context(_page_server(result))
        yield result


@contextmanager
def _page_server(played: Played) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    handler: Any = grpc.unary_stream_rpc_method_handler(
        lambda request, context: played.serve(request) if len(request.pages) == NUM_PAGES else _probe(request),
        request_deserializer=kv_pb2.ReadPagesRequest.FromString,
        response_serializer=None,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(METHOD.split("/")[1], {"Read": handler}),))
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()
    try:
        yield f"{HOST}:{port}"
    finally:
        server.stop(None).wait(10)


def _probe(request: kv_pb2.ReadPagesRequest) -> Iterator[bytes]:
    return whole(request)


@contextmanager
def _session(played: Played) -> Iterator[kv_pb2.Ticket]:
    """A session, with its gateway listening. Its own salt keeps other sessions from its pages."""
    steps = played.decode.Steps(decode_pb2.StepsRequest(gateway=GATEWAY))
    next(steps)
    sampling = decode_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0)
    request = decode_pb2.ReserveRequest(
        request_id="played", attempt=2, gateway=GATEWAY, handle=HANDLE, max_tokens=5, sampling=sampling,
        prompt=packed(prompt_of(16 * NUM_PAGES + 1)), cache_salt=new_incarnation(),
    )  # fmt: skip
    try:
        yield played.decode.Reserve(request, timeout=CALL_S).ticket
    finally:
        steps.cancel()


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (truncated, "transport"),
        (too_much, "transport"),
        (recycled, "generation"),
        (without_end, "transport"),
        (garbage, "transport"),
    ],
)
def test_row_08_pages_that_are_not_what_was_offered(
    quad: ProcessFleet, played: Played, truth: Truth, serve: Serve, reason: str
) -> None:
    """Bad pages are refused and counted; the session waits for good ones and then works."""
    decode = quad["decode-0"]
    played.decode.Handshake(decode_pb2.HandshakeRequest(peer=played.peer()), timeout=CALL_S)
    before = decode.metric("offers_refused_total", {"reason": reason})
    generated = decode.metric("generation_tokens_total")
    with _session(played) as ticket:
        answer = played.offer(ticket, serve)
        assert not answer.accepted and answer.reason == reason, answer
        assert decode.metric("offers_refused_total", {"reason": reason}) == before + 1
        assert decode.metric("generation_tokens_total") == generated, "decode ran on pages that it had refused"
        assert played.offer(ticket, whole).accepted
    quad.wait_until_unused()
    truth.check_canary(quad)


def test_row_08_offers_of_another_attempt_session_or_incarnation(quad: ProcessFleet, played: Played) -> None:
    played.decode.Handshake(decode_pb2.HandshakeRequest(peer=played.peer()), timeout=CALL_S)
    with _session(played) as ticket:
        for name, value, reason in (("attempt", 1, "attempt"), ("session", 10**6, "session")):
            wrong = kv_pb2.Ticket()
            wrong.CopyFrom(ticket)
            setattr(wrong, name, value)
            assert played.offer(wrong, whole).reason == reason
        wrong.CopyFrom(ticket)
        wrong.incarnation = "long dead"
        answer = played.offer(wrong, whole)
        assert answer.reason == "incarnation" and "long dead" in answer.detail and ticket.incarnation in answer.detail
        assert played.offer(ticket, whole).accepted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "bfloat16"),
        ("page_tokens", 32),
        ("weights", "another model"),
        ("num_layers", 7),
        ("draft_weights", "a draft"),
    ],
)
def test_row_09_mismatched_pair_is_refused_naming_both_values(played: Played, name: str, value: Any) -> None:
    real = getattr(played.peer().layout, name)
    with pytest.raises(grpc.RpcError) as refused:
        played.decode.Handshake(decode_pb2.HandshakeRequest(peer=played.peer(**{name: value})), timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    detail = refused.value.details() or ""
    assert all(part in detail for part in (name, repr(real), repr(value))), detail


def test_row_09_versions_that_do_not_overlap(played: Played) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        peer = played.peer(protocol_min=8, protocol_max=9)
        played.decode.Handshake(decode_pb2.HandshakeRequest(peer=peer), timeout=CALL_S)
    detail = refused.value.details() or ""
    assert "8-9" in detail and "3-3" in detail


@pytest.mark.parametrize(
    ("num_ranks", "words"),
    [
        (3, "3 ranks cannot share 2 KV heads"),
        (0, "0 ranks: a worker has 1 to 1024"),
        (1026, "1026 ranks: a worker has 1 to 1024"),
    ],
)
def test_row_09_ranks_that_cannot_share_the_heads(played: Played, num_ranks: int, words: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        peer = played.peer()
        rank = peer.ranks.pop()
        peer.ranks.extend([rank] * num_ranks)
        played.decode.Handshake(decode_pb2.HandshakeRequest(peer=peer), timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert words in (refused.value.details() or "")


def test_row_09_what_differs_may_be_long(played: Played) -> None:
    """The detail travels as a header: one too long for it would arrive as another error or not at all."""
    with pytest.raises(grpc.RpcError) as refused:
        peer = played.peer(weights="\N{SNOWMAN}" * 50_000)
        played.decode.Handshake(decode_pb2.HandshakeRequest(peer=peer), timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "weights differs" in (refused.value.details() or "")


def test_row_22_long_names_come_back_shortened(quad: ProcessFleet, played: Played) -> None:
    ticket = kv_pb2.Ticket(incarnation="x" * 100_000)
    with pytest.raises(grpc.RpcError) as refused:
        played.decode.Renew(decode_pb2.RenewRequest(ticket=ticket), timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND and "ticket of incarnation x" in (
        refused.value.details() or ""
    )
    with grpc.insecure_channel(quad["prefill-0"].address) as channel:
        call: Any = channel.unary_unary(METHOD, kv_pb2.ReadPagesRequest.SerializeToString)
        with pytest.raises(grpc.RpcError) as refused:
            call(kv_pb2.ReadPagesRequest(incarnation="x" * 100_000), timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("token", [10**5, -1])
def test_row_22_tokens_that_the_model_does_not_have(
    quad: ProcessFleet, played: Played, truth: Truth, token: int
) -> None:
    """Both workers refuse them before a step sees them."""
    prompt = [*prompt_of(40), token, 7]
    with _session(played) as ticket, grpc.insecure_channel(quad["prefill-0"].address) as channel:
        reserve = decode_pb2.ReserveRequest(gateway=GATEWAY, handle=2, attempt=1, max_tokens=5, prompt=packed(prompt))
        run = prefill_pb2.RunRequest(ticket=ticket, prompt=packed(prompt))
        run.ticket.end = len(prompt) - 1
        for call, request in (
            (played.decode.Reserve, reserve),
            (prefill_pb2_grpc.PrefillStub(channel).Run, run),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=CALL_S)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert f"prompt holds {token}" in (refused.value.details() or "")
    quad.wait_until_unused()
    truth.check_canary(quad)
