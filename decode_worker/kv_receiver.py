"""Offers of prefill workers: checked, read into our pools and acknowledged. Runs on the asyncio thread."""

import asyncio
import time

import structlog

from decode_worker.metrics import DecodeMetrics
from kvtransfer.reader import ReadError
from protos import kv_pb2
from runtime.tasks import run_to_end
from worker import receiving
from worker.peers.kv_peers import KnownPeer, KVPeers, Targets
from worker.receiving import OfferRefusedError
from worker.role import Worker
from worker.thread import EngineThread

log = structlog.get_logger()


class KVReceiver:
    """Reads what is offered to sessions; `peers` has the readers."""

    def __init__(self, worker: Worker, peers: KVPeers, thread: EngineThread, metrics: DecodeMetrics) -> None:
        self.peers = peers
        self._me = worker.me
        self._scheduler = worker.scheduler
        self._thread = thread
        self._metrics = metrics

    async def take(self, offer: kv_pb2.OfferRequest) -> kv_pb2.OfferResponse:
        """Read offered pages into their session. The response acknowledges them or gives the reason against it."""
        try:
            known, targets = self._begin(offer)
        except OfferRefusedError as error:
            return self._refuse(offer, error.reason, error.detail)
        # not cancelled with the call: the session's pages are leased until the copy ends
        return await asyncio.shield(run_to_end(self._read(offer, known, targets)))

    def renew(self, ticket: kv_pb2.Ticket) -> None:
        """Extend the lease of the ticket's session. Raises OfferRefusedError."""
        self._check_ticket(ticket)
        with self._thread.lock:
            receiving.renew(self._scheduler, ticket.session, ticket.attempt, time.monotonic(), ticket.adapter)

    def _check_ticket(self, ticket: kv_pb2.Ticket) -> None:
        if ticket.incarnation != self._me.incarnation:
            raise OfferRefusedError(
                "incarnation", f"ticket of incarnation {ticket.incarnation}; this worker is {self._me.incarnation}"
            )

    def _begin(self, offer: kv_pb2.OfferRequest) -> tuple[KnownPeer, Targets]:
        """Check the offer against peer and session. Returns the peer, and what to read into (`begin_read`)."""
        ticket = offer.ticket
        self._check_ticket(ticket)
        known = self.peers.find(offer.incarnation)
        if known is None:
            raise OfferRefusedError("handshake", f"incarnation {offer.incarnation} has not shaken hands here")
        with self._thread.lock:
            targets = receiving.begin_read(
                self._scheduler,
                ticket.session,
                ticket.attempt,
                offer.begin,
                offer.end,
                len(offer.pages),
                len(offer.slots),
                ticket.adapter,
            )
        return known, targets

    async def _read(self, offer: kv_pb2.OfferRequest, known: KnownPeer, targets: Targets) -> kv_pb2.OfferResponse:
        session = offer.ticket.session
        try:
            landed = await self.peers.read(offer, known, targets)
        except Exception as error:
            with self._thread.lock:
                receiving.fail_read(self._scheduler, session)
                self._thread.wake()
            if isinstance(error, ReadError):
                return self._refuse(offer, error.reason, error.detail)
            log.exception("reading offered pages failed", request_id=offer.request_id)
            return self._refuse(offer, "transport", str(error))
        with self._thread.lock:
            receiving.finish_read(self._scheduler, session, offer.end, time.monotonic(), len(offer.slots))
            self._thread.wake()
        self._metrics.offers_accepted.inc()
        return kv_pb2.OfferResponse(accepted=True, bytes=landed.num_bytes, seconds=landed.seconds)

    def _refuse(self, offer: kv_pb2.OfferRequest, reason: str, detail: str) -> kv_pb2.OfferResponse:
        self._metrics.offers_refused.labels(reason).inc()
        report = log.error if reason == "checksum" else log.warning
        report("offer refused", request_id=offer.request_id, reason=reason, detail=detail)
        return kv_pb2.OfferResponse(accepted=False, reason=reason, detail=detail)
