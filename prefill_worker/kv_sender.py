"""Offers to decode workers: handshakes, and a run's pages, offered as they are computed.

Runs on the asyncio thread.
"""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import structlog

from kvtransfer.checksums import parts_of
from kvtransfer.layout import find_bad_ranks
from prefill_worker.metrics import PrefillMetrics
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2
from worker.process import Worker

log = structlog.get_logger()

MAX_OFFER_BYTES = 64 << 20  # half a second at 1 Gbit/s; the next part is offered after this one is read

ResponseT = TypeVar("ResponseT")


class OfferFailedError(Exception):
    """The decode worker refused, or could not be reached. `code` is the status of the Run call."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(slots=True)
class _Target:
    """A decode worker."""

    channel: grpc.aio.Channel
    stub: decode_pb2_grpc.DecodeStub
    incarnation: str = ""  # of the last handshake
    transport: str = ""
    num_summed: int = 0  # its ranks, if it wants checksums
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)  # one handshake at a time


class KVSender:
    """Owns the channels to decode workers, one per address."""

    def __init__(self, worker: Worker, timeout_s: float, metrics: PrefillMetrics) -> None:
        """`timeout_s`: the lease: how long pages stay held while a decode worker reads them."""
        self._me = worker.me
        self._pools = worker.pools
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._open_channel = worker.trust.open_channel
        self._targets: dict[str, _Target] = {}  # address |-> decode worker

    def transports(self) -> dict[str, str]:
        """Address |-> transport, for every decode worker after its handshake."""
        return {address: target.transport for address, target in self._targets.items() if target.transport}

    async def send(
        self, request: prefill_pb2.RunRequest, positions: range, pages: list[int], slots: list[int],
        result: prefill_pb2.RunResponse,
    ) -> None:  # fmt: skip
        """Offer `pages`, which hold `positions`, and `slots` with the states after them; returns when they are read.

        The caller holds both until this returns or raises; the decode worker rejects later reads. Adds the transfer's
        time and bytes to `result`. Raises OfferFailedError.
        """
        ticket = request.ticket
        target = await self._greet(ticket)
        offer = kv_pb2.OfferRequest(
            ticket=ticket, incarnation=self._me.incarnation, begin=positions.start, end=positions.stop,
            request_id=request.request_id,
        )  # fmt: skip
        for pool, part, held in zip(self._pools, parts_of(offer), (pages, slots), strict=False):
            await pool.offer(part, held, target.num_summed)
        self._metrics.offers_sent.inc()
        answer: kv_pb2.OfferResponse = await self._ask(ticket, target.stub.Offer(offer, timeout=self._timeout_s))
        if not answer.accepted:
            self._metrics.offers_refused.labels(answer.reason).inc()
            if answer.reason == "handshake":
                target.incarnation = ""
            raise OfferFailedError(
                grpc.StatusCode.ABORTED, f"{ticket.address} refused the offer ({answer.reason}): {answer.detail}"
            )
        self._metrics.offers_accepted.inc()
        result.transfer_seconds += answer.seconds
        result.transfer_bytes += answer.bytes
        result.transport = target.transport

    async def renew(self, ticket: kv_pb2.Ticket) -> None:
        """Restart the lease of the ticket's session. Raises OfferFailedError if the session is gone."""
        target = await self._greet(ticket)
        call = target.stub.Renew(decode_pb2.RenewRequest(ticket=ticket), timeout=self._timeout_s)
        await self._ask(ticket, call)

    async def _greet(self, ticket: kv_pb2.Ticket) -> _Target:
        """The ticket's decode worker, after a handshake with the incarnation in the ticket."""
        target = self._targets.get(ticket.address)
        if target is None:
            self._forget_lost()
            channel = self._open_channel(ticket.address)
            target = self._targets[ticket.address] = _Target(channel, decode_pb2_grpc.DecodeStub(channel))
        async with target.greeting:
            if target.incarnation != ticket.incarnation:
                request = decode_pb2.HandshakeRequest(peer=self._me)
                call = target.stub.Handshake(request, timeout=self._timeout_s)
                answer: decode_pb2.HandshakeResponse = await self._ask(ticket, call)
                if answer.wants_checksums:
                    self._check_ranks(answer.peer)
                target.num_summed = len(answer.peer.ranks) if answer.wants_checksums else 0
                target.incarnation, target.transport = answer.peer.incarnation, answer.transport
                log.info("handshake done", peer=ticket.address, transport=target.transport)
        return target

    def _check_ranks(self, peer: kv_pb2.Peer) -> None:
        for pool in self._pools:
            if (problem := find_bad_ranks(pool.own.parts, peer)) is not None:
                raise OfferFailedError(grpc.StatusCode.ABORTED, f"decode worker {peer.address}: {problem}")

    def _forget_lost(self) -> None:
        """Drop decode workers without a connection; live ones shake hands again. Channels close after their calls."""
        for address, target in list(self._targets.items()):
            if target.channel.get_state() is not grpc.ChannelConnectivity.READY and not target.greeting.locked():
                del self._targets[address]

    async def _ask(self, ticket: kv_pb2.Ticket, call: Awaitable[ResponseT]) -> ResponseT:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            detail = f"decode worker {ticket.address}: {error.code().name}: {error.details()}"
            log.warning("decode worker failed", detail=detail)
            raise OfferFailedError(grpc.StatusCode.ABORTED, detail) from error  # UNAVAILABLE would blame this worker

    async def close(self) -> None:
        for target in self._targets.values():
            await target.channel.close()
