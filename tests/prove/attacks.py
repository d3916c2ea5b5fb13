"""References to KV that a broken or hostile peer uses: unknown, out of range, consumed, reused, expired.

The five cases of https://github.com/vllm-project/vllm/issues/52234, made of real offers: a prefill worker is given the
address of a `Wire` in place of its decode worker's, so that its offers can be changed, held back and sent again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import grpc
import torch

from kvtransfer.nixl_agent import is_installed
from protos import (
    decode_pb2,
    decode_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from runtime.rpc import bind, build_server, new_incarnation, open_channel
from tests.prove.report import Report
from tests.support.asking import Asking
from tests.support.fake_workers import PATIENCE_S, Context, Signal
from tests.support.fault_answers import Truth, prompt_of
from tests.support.fleet import HOST, ProcessFleet, run_fleet
from tests.support.real_workers import Gateway, gateway, packed

TITLE = "reference to KV"
CASES = UNKNOWN, RANGE, CONSUMED, REUSED, EXPIRED, READ = (
    "unknown id", "out of range", "consumed", "its pages reused", "lease expired", "page read without an offer",
)  # fmt: skip
NUM_PROMPT, NUM_TOKENS, MORE_TOKENS = 100, 24, 200
LEASE_S = 4.0
PREFILL_MIB = 32  # of KV: about one context, so a few long prompts recycle each page
FILLER_TOKENS = 1500
MANY = 2**40
RunCall: TypeAlias = "grpc.aio.UnaryUnaryCall[prefill_pb2.RunRequest, prefill_pb2.RunResponse]"
Change = Callable[[kv_pb2.OfferRequest, int], object]  # of an offer of a worker with this many pages
ALTERED: Mapping[str, Sequence[tuple[str, Change]]] = {  # case |-> changes, and the reason for which each is refused
    UNKNOWN: (
        ("session", lambda offer, _: setattr(offer.ticket, "session", MANY)),
        ("incarnation", lambda offer, _: setattr(offer.ticket, "incarnation", "gone")),
        ("attempt", lambda offer, _: setattr(offer.ticket, "attempt", 2)),
        ("adapter", lambda offer, _: setattr(offer.ticket, "adapter", "none")),
        ("handshake", lambda offer, _: setattr(offer, "incarnation", "gone")),
    ),
    RANGE: (
        ("bounds", lambda offer, num_pages: setattr(offer.pages[0], "page", num_pages)),
        ("bounds", lambda offer, _: setattr(offer.pages[-1], "page", 2**32 - 1)),
        ("bounds", lambda offer, _: setattr(offer, "end", offer.end + 1)),
        ("bounds", lambda offer, _: offer.pages.add(page=0)),
        ("bounds", lambda offer, _: offer.pages.pop()),
        ("generation", lambda offer, _: setattr(offer.pages[0], "generation", MANY)),
    ),
}


@dataclass(frozen=True)
class Way:
    """A transport that pages travel by."""

    name: str  # in metrics
    flags: Sequence[str] = ()  # of both workers
    reader_flags: Sequence[str] = ()  # of the decode worker
    env: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""  # why it cannot be used on this machine


NO_NIXL, NO_GPU = "" if is_installed() else "NIXL is not installed", "" if torch.cuda.is_available() else "no GPU"
WAYS = {
    "shm": Way("shm"),
    "grpc": Way("grpc"),
    "nixl": Way("nixl:tcp", (), ("--nixl-allow-tcp",), {"UCX_TLS": "tcp,self"}, NO_NIXL),
    "cuda_ipc": Way("cuda_ipc", ("--device=cuda",), missing=NO_GPU),
}


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
        response: decode_pb2.RenewResponse = await self._decode.Renew(request, timeout=PATIENCE_S)
        return response

    async def Offer(self, request: kv_pb2.OfferRequest, context: Context) -> kv_pb2.OfferResponse:
        reply: asyncio.Future[kv_pb2.OfferResponse] = asyncio.get_running_loop().create_future()
        self.offers.put_nowait((request, reply))
        return await reply


@dataclass
class Held:
    """A victim: a session whose offer the decode worker has not got, and the Run call that waits for its reply."""

    handle: int
    prompt: list[int]
    offer: kv_pb2.OfferRequest
    reply: "asyncio.Future[kv_pb2.OfferResponse]"
    run: RunCall


@dataclass
class Attacker:
    """Plays the gateway of its victims and, at `address`, what lies between the workers."""

    report: Report
    truth: Truth
    way: str
    fleet: ProcessFleet
    gateway: Gateway
    prefill: prefill_pb2_grpc.PrefillStub
    worker: worker_pb2_grpc.WorkerStub  # the prefill worker
    decode: decode_pb2_grpc.DecodeStub
    wire: Wire
    address: str
    num_victims: int = 0

    async def attack(self) -> kv_pb2.Peer:
        """All cases, each on a victim of its own, which is answered right in the end. Returns the prefill worker."""
        status: worker_pb2.WorkerStatus = await self.worker.Status(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
        for case, changes in ALTERED.items():
            held = await self.hold()
            for wanted, change in changes:
                altered = kv_pb2.OfferRequest()
                altered.CopyFrom(held.offer)
                change(altered, status.peer.num_pages)
                await self.offer(case, altered, wanted)
            await self.let_pass(held)
            await self.expect_answer(case, held)
        await self.use_again()
        await self.use_recycled(status.peer.num_pages)
        await self.use_expired()
        return status.peer

    async def use_again(self) -> None:
        held = await self.hold(MORE_TOKENS)
        await self.let_pass(held)
        await self.offer(CONSUMED, held.offer, "session")  # its session runs
        await self.expect_answer(CONSUMED, held, MORE_TOKENS)
        await self.offer(CONSUMED, held.offer, "session")  # it has ended
        await self.move(CONSUMED, held, "")  # the pages are cached: they still have what was promised

    async def use_recycled(self, num_pages: int) -> None:
        """The prefill worker is told that its pages were read, so it gives them to other prompts."""
        held = await self.hold()
        held.reply.set_result(kv_pb2.OfferResponse(accepted=True))
        await held.run
        for number in range(2 + num_pages * 16 // FILLER_TOKENS):
            filler = Asking(self.fleet.grpc_address, prompt_of(FILLER_TOKENS, number), 1, cache_salt=new_incarnation())
            while not filler.is_over:
                await asyncio.sleep(LEASE_S / 10)
                await self.decode.Renew(decode_pb2.RenewRequest(ticket=held.offer.ticket), timeout=PATIENCE_S)
            filler.answer()
        await self.offer(REUSED, held.offer, "generation")
        await self.move(REUSED, held, "generation")
        await self.wait(self.run(held.prompt, held.offer.ticket))
        await self.expect_answer(REUSED, held)

    async def use_expired(self) -> None:
        """No renewal comes through: the session ends, and its late reference with it."""
        held = await self.hold()
        self.wire.is_cut = True
        end, _ = await self.gateway.end_of(held.handle)
        self.report.require(end == "expired", f"{EXPIRED} ({self.way}): the session ended with {end}")
        await self.offer(EXPIRED, held.offer, "session")
        await self.wait(held.run)  # the prefill worker gives up
        self.wire.is_cut = False
        await self.move(EXPIRED, held, "")

    async def move(self, case: str, held: Held, wanted: str) -> None:
        """The reference in another session of the same prompt, which is answered right, with these pages or others."""
        other = replace(held, handle=held.handle + MANY)
        ticket = await self.gateway.reserve(other.handle, held.prompt, NUM_TOKENS, cache_salt=new_incarnation())
        moved = kv_pb2.OfferRequest()
        moved.CopyFrom(held.offer)
        moved.ticket.CopyFrom(ticket)
        await self.offer(case, moved, wanted)
        if wanted:
            await self.wait(self.run(held.prompt, ticket))
        await self.expect_answer(case, other)

    def run(self, prompt: list[int], ticket: kv_pb2.Ticket) -> RunCall:
        request = prefill_pb2.RunRequest(request_id="proof", prompt=packed(prompt), ticket=ticket)
        call: RunCall = self.prefill.Run(request, timeout=PATIENCE_S)
        return call

    async def wait(self, run: RunCall) -> None:
        with suppress(grpc.aio.AioRpcError):  # the answer shows it
            await run

    async def hold(self, num_tokens: int = NUM_TOKENS) -> Held:
        self.num_victims += 1
        prompt = list(prompt_of(NUM_PROMPT, 1000 + self.num_victims))
        ticket = await self.gateway.reserve(self.num_victims, prompt, num_tokens)
        address, ticket.address = ticket.address, self.address
        run = self.run(prompt, ticket)
        offer, reply = await asyncio.wait_for(self.wire.offers.get(), PATIENCE_S)
        offer.ticket.address = address
        return Held(self.num_victims, prompt, offer, reply, run)

    async def offer(self, case: str, offer: kv_pb2.OfferRequest, wanted: str) -> None:
        response: kv_pb2.OfferResponse = await self.decode.Offer(offer, timeout=PATIENCE_S)
        self.report.refused(TITLE, case, self.way, response.reason, wanted)
        self.report.require(response.accepted or response.detail != "", f"{case} ({self.way}): refused without words")

    async def let_pass(self, held: Held) -> None:
        """The offer as the prefill worker made it."""
        held.reply.set_result(await self.decode.Offer(held.offer, timeout=PATIENCE_S))
        await self.wait(held.run)

    async def expect_answer(self, case: str, held: Held, num_tokens: int = NUM_TOKENS) -> None:
        end = await self.gateway.end_of(held.handle)
        tokens = self.gateway.tokens.get(held.handle, [])
        wanted = await asyncio.to_thread(self.truth.oracle.answer, held.prompt, num_tokens, tokens)
        self.report.answered(tokens == wanted, f"{case} ({self.way}): {end}, tokens {tokens}, not {wanted}")


async def attack(report: Report, truth: Truth, way: str, fleet: ProcessFleet) -> None:
    server, signal = build_server(), Signal()
    address = f"{HOST}:{bind(server, HOST, 0)}"
    async with (
        gateway(fleet["decode-0"], signal, "proof") as opened,
        open_channel(fleet["decode-0"].address) as decode,
        open_channel(fleet["prefill-0"].address) as prefill,
    ):
        decode_stub = decode_pb2_grpc.DecodeStub(decode)
        stubs = prefill_pb2_grpc.PrefillStub(prefill), worker_pb2_grpc.WorkerStub(prefill), decode_stub
        wire = Wire(decode_stub)
        decode_pb2_grpc.add_DecodeServicer_to_server(wire, server)
        await server.start()
        try:
            peer = await Attacker(report, truth, way, fleet, opened, *stubs, wire, address).attack()
        finally:
            await server.stop(None)
        for wanted, incarnation, page, num_bytes in (
            ("FAILED_PRECONDITION", "gone", 0, 1),
            ("OUT_OF_RANGE", peer.incarnation, peer.num_pages, 1),
            ("OUT_OF_RANGE", peer.incarnation, 0, MANY),
        ):
            request = kv_pb2.ReadPagesRequest(incarnation=incarnation, pages=[page], num_bytes=num_bytes)
            reading = kv_pb2_grpc.KvPagesStub(prefill).Read(request, timeout=PATIENCE_S)
            report.refused(TITLE, READ, way, (await reading.code()).name, wanted)


def prove_references(report: Report, truth: Truth, way: Way) -> None:
    """All cases over one transport, then an ordinary request; every process lives and no page stays used."""
    common = [f"--transport={way.name.partition(':')[0]}", *way.flags]
    flags = {"prefill": common, "decode": [*common, "--require-transport", *way.reader_flags]}
    with run_fleet(1, 1, flags, lease_s=LEASE_S, kv_memory_mib={"prefill": PREFILL_MIB}, starts=False) as fleet:
        for process in fleet.processes.values():
            process.env = way.env
        fleet.start()
        Asking(fleet.grpc_address, prompt_of(FILLER_TOKENS), 1).answer()  # chunks grow: a victim's prompt is one offer
        asyncio.run(attack(report, truth, way.name, fleet))
        tokens = Asking(fleet.grpc_address, prompt_of(NUM_PROMPT), NUM_TOKENS).answer()
        is_right = tokens == truth.oracle.answer(prompt_of(NUM_PROMPT), NUM_TOKENS, tokens)
        report.answered(is_right, f"an ordinary request after the attacks ({way.name}) has other tokens: {tokens}")
        fleet.wait_until_unused()
        read = fleet.count("decode", "kv_transfer_bytes_total", {"transport": way.name})
        report.require(read > 0, f"no page was read over {way.name}")
        dead = [process.name for process in fleet.processes.values() if not process.is_running]
        report.require(not dead, f"{dead} died ({way.name})")
