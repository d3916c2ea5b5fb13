"""References to KV that a broken or hostile peer uses: unknown, out of range, consumed, reused, expired.

The five cases of https://github.com/vllm-project/vllm/issues/52234, made of real offers: a prefill worker is given the
address of a `Wire` in place of its decode worker's, so that its offers can be changed, held back and sent again.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

import grpc
import torch

from kvtransfer.nixl_agent import is_installed
from protos import decode_pb2, decode_pb2_grpc, kv_pb2, kv_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from runtime.rpc import bind, build_server, new_incarnation, open_channel
from tests.prove.report import Report
from tests.support.asking import Asking
from tests.support.fake_workers import PATIENCE_S, Context, Signal
from tests.support.fault_answers import Truth, prompt_of
from tests.support.fleet import ProcessFleet, run_fleet
from tests.support.real_workers import Gateway, gateway, packed

TITLE = "reference to KV"
UNKNOWN, RANGE, CONSUMED, REUSED, EXPIRED = (
    "unknown id",
    "out of range",
    "consumed",
    "its pages reused",
    "lease expired",
)
READS, ANY = "page read without an offer", "any"
NUM_PROMPT, NUM_TOKENS = 100, 24
LEASE_S = 4.0
PREFILL_MIB = 32  # of KV: about one context, so a few long prompts recycle each page
FILLER_TOKENS = 1500
MANY = 2**40
# What is changed in an offer, by case, and the reason for which it must be refused.
ALTERED: Mapping[str, tuple[tuple[str, Callable[[kv_pb2.OfferRequest, int], object]], ...]] = {
    UNKNOWN: (
        ("session", lambda offer, pages: setattr(offer.ticket, "session", MANY)),
        ("incarnation", lambda offer, pages: setattr(offer.ticket, "incarnation", "gone")),
        ("attempt", lambda offer, pages: setattr(offer.ticket, "attempt", 2)),
        ("adapter", lambda offer, pages: setattr(offer.ticket, "adapter", "none")),
        ("handshake", lambda offer, pages: setattr(offer, "incarnation", "gone")),
    ),
    RANGE: (
        ("bounds", lambda offer, pages: setattr(offer.pages[0], "page", pages)),
        ("bounds", lambda offer, pages: setattr(offer.pages[-1], "page", 2**32 - 1)),
        ("bounds", lambda offer, pages: setattr(offer, "end", offer.end + 1)),
        ("bounds", lambda offer, pages: offer.pages.add(page=0)),
        ("bounds", lambda offer, pages: offer.pages.pop()),
        ("generation", lambda offer, pages: setattr(offer.pages[0], "generation", MANY)),
    ),
}


@dataclass(frozen=True)
class Way:
    """A transport that pages travel by."""

    transport: str  # its name in metrics
    flags: Sequence[str] = ()  # of both workers
    reader_flags: Sequence[str] = ()  # of the decode worker
    env: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""  # why it cannot be used on this machine


WAYS = {
    "shm": Way("shm"),
    "grpc": Way("grpc"),
    "nixl": Way(
        "nixl:tcp",
        (),
        ("--nixl-allow-tcp",),
        {"UCX_TLS": "tcp,self"},
        "" if is_installed() else "NIXL is not installed",
    ),
    "cuda_ipc": Way("cuda_ipc", ("--device=cuda",), missing="" if torch.cuda.is_available() else "no card here"),
}


@dataclass
class Held:
    """An offer that the decode worker has not got, and the Run call that waits for its reply."""

    handle: int
    ticket: kv_pb2.Ticket  # the decode worker's own
    prompt: list[int]
    offer: kv_pb2.OfferRequest
    reply: "asyncio.Future[kv_pb2.OfferResponse]"
    run: "grpc.aio.UnaryUnaryCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]"


class Wire(decode_pb2_grpc.DecodeServicer):
    """In the place of a decode worker: passes handshakes and, unless `is_cut`, renewals on, and holds offers back."""

    def __init__(self, decode: decode_pb2_grpc.DecodeStub) -> None:
        self._decode = decode
        self.is_cut = False
        self.offers: asyncio.Queue[tuple[kv_pb2.OfferRequest, asyncio.Future[kv_pb2.OfferResponse]]] = asyncio.Queue()

    async def Handshake(self, request: decode_pb2.HandshakeRequest, context: Context) -> decode_pb2.HandshakeResponse:
        response: decode_pb2.HandshakeResponse = await self._decode.Handshake(request, timeout=PATIENCE_S)
        return response

    async def Renew(self, request: decode_pb2.RenewRequest, context: Context) -> decode_pb2.RenewResponse:
        if self.is_cut:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut off")
        return await renew(self._decode, request.ticket)

    async def Offer(self, request: kv_pb2.OfferRequest, context: Context) -> kv_pb2.OfferResponse:
        reply: asyncio.Future[kv_pb2.OfferResponse] = asyncio.get_running_loop().create_future()
        self.offers.put_nowait((request, reply))
        return await reply


async def renew(decode: decode_pb2_grpc.DecodeStub, ticket: kv_pb2.Ticket) -> decode_pb2.RenewResponse:
    response: decode_pb2.RenewResponse = await decode.Renew(decode_pb2.RenewRequest(ticket=ticket), timeout=PATIENCE_S)
    return response


class Attacker:
    """Plays the gateway of its victims and what lies between the workers."""

    def __init__(self, fleet: ProcessFleet, way: str, report: Report, truth: Truth, opened: Gateway) -> None:
        self._fleet, self._way, self._report, self._truth, self._gateway = fleet, way, report, truth, opened
        self._channels = [open_channel(fleet[name].address) for name in ("prefill-0", "decode-0")]
        self._prefill = prefill_pb2_grpc.PrefillStub(self._channels[0])
        self._pages = kv_pb2_grpc.KvPagesStub(self._channels[0])
        self._decode = decode_pb2_grpc.DecodeStub(self._channels[1])
        self._wire, self._server = Wire(self._decode), build_server()
        self._address = f"127.0.0.1:{bind(self._server, '127.0.0.1', 0)}"
        self._num_victims = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Attacker"]:
        decode_pb2_grpc.add_DecodeServicer_to_server(self._wire, self._server)
        await self._server.start()
        try:
            yield self
        finally:
            await self._server.stop(None)
            for channel in self._channels:
                await channel.close()

    async def attack(self) -> None:
        """All cases, one victim after the other."""
        peer = (await self._prefill.Status(decode_pb2.StatusRequest(), timeout=PATIENCE_S)).peer
        for case, changes in ALTERED.items():
            held = await self._hold()
            for wanted, change in changes:
                offer = kv_pb2.OfferRequest()
                offer.CopyFrom(held.offer)
                change(offer, peer.num_pages)
                await self._offer(case, offer, wanted)
            await self._let_pass(held)
            await self._expect_answer(case, held)
        await self._use_again()
        await self._use_recycled(peer.num_pages)
        await self._use_expired()
        await self._read(peer)

    async def _use_again(self) -> None:
        held = await self._hold(num_tokens=8 * NUM_TOKENS)
        await self._let_pass(held)
        await self._offer(CONSUMED, held.offer, "session")  # its session runs
        await self._expect_answer(CONSUMED, held, 8 * NUM_TOKENS)
        await self._offer(CONSUMED, held.offer, "session")  # it has ended
        await self._move(CONSUMED, held, "")  # the pages are cached: they still have what was promised

    async def _use_recycled(self, num_pages: int) -> None:
        """The prefill worker is told that its pages were read, so it gives them to other prompts."""
        held = await self._hold()
        held.reply.set_result(kv_pb2.OfferResponse(accepted=True))
        await held.run
        for number in range(2 + num_pages * 16 // FILLER_TOKENS):
            filler = Asking(self._fleet.grpc_address, prompt_of(FILLER_TOKENS, number), 1, cache_salt=new_incarnation())
            while not filler.is_over:
                await asyncio.sleep(LEASE_S / 10)
                await renew(self._decode, held.ticket)
            filler.answer()
        await self._offer(REUSED, held.offer, "generation")
        await self._move(REUSED, held, "generation")
        await self._prefill.Run(self._build_run(held.prompt, held.ticket), timeout=PATIENCE_S)
        await self._expect_answer(REUSED, held)

    async def _use_expired(self) -> None:
        """No renewal comes through: the session ends, and its late reference with it; the next attempt is answered."""
        held = await self._hold()
        self._wire.is_cut = True
        end, _ = await self._gateway.end_of(held.handle)
        self._report.require(end == "expired", f"{EXPIRED} ({self._way}): the session ended with {end}")
        await self._offer(EXPIRED, held.offer, "session")
        with suppress(grpc.aio.AioRpcError):  # the prefill worker has given up
            await held.run
        held.reply.cancel()
        self._wire.is_cut = False
        await self._move(EXPIRED, held, "")

    async def _move(self, case: str, held: Held, wanted: str) -> None:
        """The reference in another session of the same prompt, which is answered right, with these pages or others."""
        other = replace(held, handle=held.handle + MANY)
        ticket = await self._gateway.reserve(other.handle, held.prompt, NUM_TOKENS, cache_salt=new_incarnation())
        offer = kv_pb2.OfferRequest()
        offer.CopyFrom(held.offer)
        offer.ticket.CopyFrom(ticket)
        await self._offer(case, offer, wanted)
        if wanted:
            await self._prefill.Run(self._build_run(held.prompt, ticket), timeout=PATIENCE_S)
        await self._expect_answer(case, other)

    async def _read(self, peer: kv_pb2.Peer) -> None:
        """Pages of the prefill worker, without an offer."""
        wrong = (
            ("FAILED_PRECONDITION", kv_pb2.ReadPagesRequest(incarnation="gone", pages=[0], num_bytes=1)),
            (
                "OUT_OF_RANGE",
                kv_pb2.ReadPagesRequest(incarnation=peer.incarnation, pages=[peer.num_pages], num_bytes=1),
            ),
            ("OUT_OF_RANGE", kv_pb2.ReadPagesRequest(incarnation=peer.incarnation, pages=[0], num_bytes=MANY)),
        )
        for wanted, request in wrong:
            code = ""
            try:
                async for _ in self._pages.Read(request, timeout=PATIENCE_S):
                    pass
            except grpc.aio.AioRpcError as error:
                code = error.code().name
            self._report.refused(TITLE, READS, self._way, code, wanted)

    def _build_run(self, prompt: list[int], ticket: kv_pb2.Ticket) -> prefill_pb2.RunRequest:
        return prefill_pb2.RunRequest(request_id="proof", prompt=packed(prompt), ticket=ticket)

    async def _hold(self, num_tokens: int = NUM_TOKENS) -> Held:
        """A new victim; all its pages are computed and on offer."""
        self._num_victims += 1
        handle, prompt = self._num_victims, list(prompt_of(NUM_PROMPT, 1000 + self._num_victims))
        ticket = await self._gateway.reserve(handle, prompt, num_tokens)
        there = kv_pb2.Ticket()
        there.CopyFrom(ticket)
        there.address = self._address
        run = self._prefill.Run(self._build_run(prompt, there), timeout=PATIENCE_S)
        offer, reply = await asyncio.wait_for(self._wire.offers.get(), PATIENCE_S)
        offer.ticket.address = ticket.address
        return Held(handle, ticket, prompt, offer, reply, run)

    async def _offer(self, case: str, offer: kv_pb2.OfferRequest, wanted: str) -> None:
        response: kv_pb2.OfferResponse = await self._decode.Offer(offer, timeout=PATIENCE_S)
        self._report.refused(TITLE, case, self._way, "" if response.accepted else response.reason, wanted)
        self._report.require(response.accepted or bool(response.detail), f"{case} ({self._way}): refused without words")

    async def _let_pass(self, held: Held) -> None:
        """The offer as the prefill worker made it."""
        held.reply.set_result(await self._decode.Offer(held.offer, timeout=PATIENCE_S))
        await held.run

    async def _expect_answer(self, case: str, held: Held, num_tokens: int = NUM_TOKENS) -> None:
        end, error = await self._gateway.end_of(held.handle)
        tokens = self._gateway.tokens[held.handle]
        wanted = await asyncio.to_thread(self._truth.oracle.answer, held.prompt, num_tokens, tokens)
        self._report.answered(tokens == wanted, f"{case} ({self._way}): {end} {error}, tokens {tokens}, not {wanted}")


def prove_references(report: Report, truth: Truth, way: Way) -> None:
    """All cases over one transport, then an ordinary request; every process lives and no page stays used."""
    common = [f"--transport={way.transport.partition(':')[0]}", *way.flags]
    flags = {"prefill": common, "decode": [*common, "--require-transport", *way.reader_flags]}
    with run_fleet(1, 1, flags, lease_s=LEASE_S, kv_memory_mib={"prefill": PREFILL_MIB}, starts=False) as fleet:
        for process in fleet.processes.values():
            process.env = way.env
        fleet.start()
        Asking(fleet.grpc_address, prompt_of(FILLER_TOKENS), 1).answer()  # chunks grow: a victim's prompt is one offer

        async def run() -> None:
            signal = Signal()
            async with (
                gateway(fleet["decode-0"], signal, "proof") as opened,
                Attacker(fleet, way.transport, report, truth, opened).opened() as attacker,
            ):
                await attacker.attack()

        asyncio.run(run())
        prompt = prompt_of(NUM_PROMPT, 1)
        tokens = Asking(fleet.grpc_address, prompt, NUM_TOKENS).answer()
        is_right = tokens == truth.oracle.answer(prompt, NUM_TOKENS, tokens)
        report.answered(is_right, f"an ordinary request after the attacks ({way.transport}) has other tokens")
        fleet.wait_until_unused()
        read = fleet.count("decode", "kv_transfer_bytes_total", {"transport": way.transport})
        report.require(read > 0, f"no page was read over {way.transport}")
        for process in fleet.processes.values():
            report.require(process.is_running and process.num_starts == 1, f"{process.name} died ({way.transport})")
