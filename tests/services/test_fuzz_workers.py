"""Any bytes sent to a worker's gRPC port: it answers with a known status and still serves afterwards."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos import decode_pb2, kv_pb2, prefill_pb2, worker_pb2
from tests.support.combinations import examples
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.messages import mutate
from tests.support.real_workers import (
    IMAGE_TOKEN,
    DecodeWorker,
    Gateway,
    PrefillWorker,
    decode_worker,
    expected_answer,
    gateway,
    packed,
)
from tests.support.real_workers import prefill_worker as start_prefill

LEASE_S = 1.0
HEARTBEAT_S = 0.2  # leases are renewed this often
OFFER_S = 3.0  # limit for resolving an address
CALL_S = 60.0
MOST_TRIES = 10
PROMPT = [5, 6, 7, 8, 9, 10]
Code = grpc.StatusCode
KNOWN = {
    Code.OK, Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.ALREADY_EXISTS, Code.OUT_OF_RANGE,
    Code.RESOURCE_EXHAUSTED, Code.ABORTED, Code.UNAVAILABLE,
}  # fmt: skip


@dataclass
class Ring:
    """Both workers, and a gateway played here, on an event loop in a thread."""

    loop: asyncio.AbstractEventLoop
    signal: Signal
    prefill: PrefillWorker
    decode: DecodeWorker
    gateway: Gateway

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    stack = AsyncExitStack()

    async def start() -> Ring:
        signal = Signal()
        prefill = await stack.enter_async_context(start_prefill(signal, heartbeat_s=HEARTBEAT_S, offer_s=OFFER_S))
        decode = await stack.enter_async_context(decode_worker(signal, lease_s=LEASE_S))
        opened = await stack.enter_async_context(gateway(decode, signal))
        return Ring(loop, signal, prefill, decode, opened)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        running: Ring = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
        yield running
        running.do(stack.aclose())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)


def still_serves(ring: Ring, handle: int) -> None:
    """A request made by hand, whose answer depends on every position's KV; afterwards no page is held anywhere."""

    async def request(handle: int) -> str:
        await ring.signal.until(
            lambda: ring.decode.scheduler.kv.cache.num_held == 0
        )  # the fuzzed calls' leases have ended
        ticket = await ring.gateway.reserve(handle, PROMPT)
        with suppress(grpc.aio.AioRpcError):  # the answer shows it, too
            await ring.prefill.run(ticket, PROMPT)
        finish, _ = await ring.gateway.end_of(handle)
        await ring.signal.until(lambda: ring.prefill.scheduler.kv.cache.num_held == 0)
        await ring.signal.until(lambda: ring.decode.scheduler.kv.cache.num_held == 0)
        return finish

    handles = range(handle, handle + 1000 * MOST_TRIES, 1000)
    served = next(handle for handle in handles if ring.do(request(handle)) != "expired")
    assert ring.gateway.ends[served] == ("length", "")
    assert ring.gateway.tokens[served] == expected_answer(PROMPT, 4)


def answer_of(address: str, method: str, payload: bytes) -> tuple[Code, str]:
    """Call any method with any bytes. Reads a stream to its end, except Steps, which has none."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/baton.v1.{method}")
        call = ask(payload, timeout=CALL_S)
        try:
            for _ in call:
                if method.endswith("Steps"):
                    call.cancel()
                    return Code.OK, ""
        except grpc.RpcError:
            pass
        code: Code = call.code()
        return code, call.details() or ""


def starting_points(ring: Ring) -> dict[str, tuple[str, Message]]:
    """Method |-> the worker's address and a request that it would accept."""
    ticket = kv_pb2.Ticket(
        address=ring.decode.peer.address, incarnation=ring.decode.peer.incarnation, session=1, attempt=1, end=5
    )
    reserve = decode_pb2.ReserveRequest(
        gateway=ring.gateway.name, handle=10**6, prompt=packed(PROMPT), max_tokens=4, attempt=1,
        sampling=decode_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0),
    )  # fmt: skip
    offer = kv_pb2.OfferRequest(
        ticket=ticket, incarnation=ring.prefill.peer.incarnation, begin=0, end=4, pages=[kv_pb2.PageRef(page=1)]
    )
    here, there = ring.decode.peer.address, ring.prefill.peer.address
    return {
        "Decode/Reserve": (here, reserve),
        "Decode/Steps": (here, decode_pb2.StepsRequest(gateway="other")),
        "Decode/Abort": (here, decode_pb2.AbortRequest(gateway="other", handles=[1])),
        "Decode/Handshake": (here, decode_pb2.HandshakeRequest(peer=ring.prefill.peer)),
        "Decode/Renew": (here, decode_pb2.RenewRequest(ticket=ticket)),
        "Decode/Offer": (here, offer),
        "Worker/Status": (here, worker_pb2.StatusRequest()),
        "Prefill/Run": (there, prefill_pb2.RunRequest(prompt=packed(PROMPT), ticket=ticket)),
        "Worker/Lend": (
            there,
            worker_pb2.LendRequest(
                incarnation=ring.prefill.peer.incarnation, keys=[b"k" * 16], reader=ring.decode.peer
            ),
        ),
        "KvPages/Read": (there, kv_pb2.ReadPagesRequest(incarnation=ring.prefill.peer.incarnation, pages=[0, 1])),
    }


PIXELS = [5, 6, *[IMAGE_TOKEN] * 6, 7, 8]
IMAGE = kv_pb2.Image(begin=2, end=8, digest=bytes(32), rows=2, columns=3)


def images(*changes: dict[str, Any]) -> list[kv_pb2.Image]:
    """One for each, which has the values of IMAGE besides."""
    fields = {field.name: value for field, value in IMAGE.ListFields()}
    return [kv_pb2.Image(**fields | change) for change in changes]


def test_images_that_disagree_with_their_prompt_are_refused(ring: Ring) -> None:
    """Else the engine's thread would notice, between two steps: the worker's end."""
    refused = [
        (images({"end": 11}), "must be apart, in 10 tokens"),
        (images({"begin": 8}), "must be apart"),
        (images({}, {}), "must be apart"),
        (images(*[{}] * 65), "65 images"),
        (images({"digest": b"x"}), "has 1 bytes, expected 32"),
        (images({"begin": 1}), "does not begin and end with image tokens"),
        (images({"end": 9}), "does not begin and end with image tokens"),
        (images({"rows": 0, "columns": 0}), "an image of 0 x 0 tokens has 6 positions"),
        (images({"rows": 2**32 - 1, "columns": 2**32 - 1}), "tokens has 6 positions"),
        (images({"end": 5}), "an image of 2 x 3 tokens has 3 positions"),
        (images({"data": b"no image"}), "takes no images: its model"),
    ]

    async def ask() -> None:
        ticket = kv_pb2.Ticket(
            address=ring.decode.address, incarnation=ring.decode.peer.incarnation, session=1, end=9, attempt=1
        )
        for some, why in refused:
            for call in (ring.gateway.ask(10**7, PIXELS, images=some), ring.prefill.run(ticket, PIXELS, images=some)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is Code.INVALID_ARGUMENT and why in (caught.value.details() or "")

    ring.do(ask())
    still_serves(ring, 2 * 10**9)


METHODS = (
    "Decode/Reserve", "Decode/Steps", "Decode/Abort", "Decode/Handshake", "Decode/Renew", "Decode/Offer",
    "Worker/Status", "Prefill/Run", "Worker/Lend", "KvPages/Read",
)  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_any_message_and_any_bytes_get_a_known_answer(ring: Ring, method: str) -> None:
    address, start = starting_points(ring)[method]
    valid = start.SerializeToString()
    cut = st.integers(0, len(valid)).map(lambda at: valid[:at] + b"\xff" * 3 + valid[at:])
    messages = mutate(start).map(lambda message: message.SerializeToString())

    @settings(max_examples=examples(80), suppress_health_check=list(HealthCheck))
    @given(messages | messages | st.binary(max_size=60) | cut)
    def ask(payload: bytes) -> None:
        code, details = answer_of(address, method, payload)
        assert code in KNOWN and len(details) < 2000, (code, details)

    ask()
    still_serves(ring, 10**9 + METHODS.index(method))


def test_methods_that_do_not_exist_are_unimplemented(ring: Ring) -> None:
    for method in ("Decode/Nothing", "Inference/Generate", "Prefill/../x"):
        assert answer_of(ring.decode.peer.address, method, b"x")[0] is Code.UNIMPLEMENTED
