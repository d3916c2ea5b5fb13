"""Offers to decode workers: handshakes, and a run's pages, offered as they are computed.

Runs on the asyncio thread.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import structlog

from kvtransfer.checksums import parts_of
from kvtransfer.layout import find_bad_ranks
from kvtransfer.nixl_agent import is_fast
from prefill_worker.metrics import PrefillMetrics
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, prefill_pb2
from worker.peers.links import PeerLinks
from worker.role import Worker

log = structlog.get_logger()

FAST_FACTOR = 8  # 512 MiB take 10 to 50 ms between GPUs and by RDMA, beside which a round for each 64 MiB would count
STRANGE_S = 60.0  # for which Status names such an address: after a restart no ticket of the old one comes

ResponseT = TypeVar("ResponseT")


class OfferFailedError(Exception):
    """The decode worker refused, or could not be reached. `code` is the status of the Run call."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


@dataclass(slots=True)
class _Target:
    """A decode worker."""

    stub: decode_pb2_grpc.DecodeStub
    incarnation: str = ""  # of the last handshake
    transport: str = ""
    summed: kv_pb2.Peer = field(default_factory=kv_pb2.Peer)  # it, if it wants checksums; else a peer without ranks
    greeting: asyncio.Lock = field(default_factory=asyncio.Lock)  # one handshake at a time


class KVSender:
    """Knows the decode workers that it is connected to."""

    def __init__(self, worker: Worker, timeout_s: float, metrics: PrefillMetrics) -> None:
        """`timeout_s`: the lease: how long pages stay held while a decode worker reads them."""
        self._me = worker.me
        self._pools = worker.pools
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._strangers: dict[str, float] = {}  # address |-> when another worker answered there than was meant
        self._targets = PeerLinks(
            worker.trust.open_channel, lambda channel: _Target(decode_pb2_grpc.DecodeStub(channel))
        )

    def transports(self) -> dict[str, str]:
        """Address |-> transport, for every decode worker after its handshake."""
        return {address: target.transport for address, target in self._targets.items() if target.transport}

    def offer_factor(self, address: str) -> int:
        """How many times MAX_OFFER_BYTES an offer to a decode worker may have: 1 before the handshake."""
        name, _, link = self.transports().get(address, "").partition(":")
        return FAST_FACTOR if name == "cuda_ipc" or (name == "nixl" and is_fast(link)) else 1

    def find_weaknesses(self) -> dict[str, str]:
        """Addresses at which other workers answer than those that gave them."""
        now = time.monotonic()
        self._strangers = {address: at for address, at in self._strangers.items() if now - at < STRANGE_S}
        reason = "it has restarted, or two workers have this --advertise-host: give each its own, or auto"
        return {f"another worker than was meant answers at {address}": reason for address in self._strangers}

    async def send(
        self, request: prefill_pb2.RunRequest, positions: range, pages: list[int], slots: list[int],
        result: prefill_pb2.RunResponse,
    ) -> None:  # fmt: skip
        """Offer `pages`, which hold `positions`, and `slots` with the states after them; returns when they are read.

        The caller holds both until this returns or raises; the decode worker rejects later reads. Adds the transfer's
        time and bytes to `result`. Raises OfferFailedError.
        """
        ticket = request.ticket
        offer = kv_pb2.OfferRequest(
            ticket=ticket, incarnation=self._me.incarnation, begin=positions.start, end=positions.stop,
            request_id=request.request_id,
        )  # fmt: skip
        async with self._greeted(ticket) as target:
            for pool, part, held in zip(self._pools, parts_of(offer), (pages, slots), strict=False):
                pool.name(part, held)
                await pool.add_checksums(part, target.summed)
            answer = await self._offer(target, offer)
            if answer.reason == "handshake":  # others came, and it has forgotten us
                target.incarnation = ""
                await self._greet(target, ticket)
                answer = await self._offer(target, offer)
        if not answer.accepted:
            raise OfferFailedError(
                grpc.StatusCode.ABORTED, f"{ticket.address} refused the offer ({answer.reason}): {answer.detail}"
            )
        result.transfer_seconds += answer.seconds
        result.transfer_bytes += answer.bytes
        result.transport = target.transport

    async def _offer(self, target: _Target, offer: kv_pb2.OfferRequest) -> kv_pb2.OfferResponse:
        self._metrics.offers_sent.inc()
        answer: kv_pb2.OfferResponse = await self._ask(offer.ticket, target.stub.Offer(offer, timeout=self._timeout_s))
        if answer.accepted:
            self._metrics.offers_accepted.inc()
        else:
            self._metrics.offers_refused.labels(answer.reason).inc()
            if answer.reason == "incarnation":
                self._strangers[offer.ticket.address] = time.monotonic()
        return answer

    async def renew(self, ticket: kv_pb2.Ticket) -> None:
        """Restart the lease of the ticket's session. Raises OfferFailedError if the session is gone."""
        async with self._greeted(ticket) as target:
            call = target.stub.Renew(decode_pb2.RenewRequest(ticket=ticket), timeout=self._timeout_s)
            await self._ask(ticket, call)

    @asynccontextmanager
    async def _greeted(self, ticket: kv_pb2.Ticket) -> AsyncIterator[_Target]:
        """The ticket's decode worker, after a handshake with the incarnation in the ticket."""
        async with self._targets.use(ticket.address) as target:
            await self._greet(target, ticket)
            yield target

    async def _greet(self, target: _Target, ticket: kv_pb2.Ticket) -> None:
        async with target.greeting:
            if target.incarnation != ticket.incarnation:
                request = decode_pb2.HandshakeRequest(peer=self._me)
                call = target.stub.Handshake(request, timeout=self._timeout_s)
                answer: decode_pb2.HandshakeResponse = await self._ask(ticket, call)
                if answer.wants_checksums:
                    self._check_ranks(answer.peer)
                target.summed = answer.peer if answer.wants_checksums else kv_pb2.Peer()
                target.incarnation, target.transport = answer.peer.incarnation, answer.transport
                log.info("handshake done", peer=ticket.address, transport=target.transport)
                if target.incarnation != ticket.incarnation:
                    self._strangers[ticket.address] = time.monotonic()

    def _check_ranks(self, peer: kv_pb2.Peer) -> None:
        for pool in self._pools:
            if (problem := find_bad_ranks(pool.own.parts, peer)) is not None:
                raise OfferFailedError(grpc.StatusCode.ABORTED, f"decode worker {peer.address}: {problem}")

    async def _ask(self, ticket: kv_pb2.Ticket, call: Awaitable[ResponseT]) -> ResponseT:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            detail = f"decode worker {ticket.address}: {error.code().name}: {error.details()}"
            log.warning("decode worker failed", detail=detail)
            raise OfferFailedError(grpc.StatusCode.ABORTED, detail) from error  # UNAVAILABLE would blame this worker

    async def close(self) -> None:
        await self._targets.close()
