"""Peers that are invented, gone or too many: what is kept of them is bounded."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import kv_pb2
from runtime import rpc
from runtime.rpc import MAX_WATCHES, bind, build_server, open_channel
from tests.support.fake_workers import PATIENCE_S
from tests.support.handover import OTHER, PROMPT, answer, workers
from tests.support.real_workers import expected_answer
from worker.peers import kv_peers
from worker.peers import links as peer_links
from worker.peers.kv_peers import HandshakeRefusedError
from worker.peers.links import PeerLinks


def invented(peer: kv_pb2.Peer, number: int, incarnation: str = "") -> kv_pb2.Peer:
    """Whose pages can be read, as they are another's."""
    other = kv_pb2.Peer()
    other.CopyFrom(peer)
    other.address = other.ranks[0].address = f"127.0.0.1:{number + 1}"
    other.incarnation = incarnation or f"invented {number}"
    return other


async def test_of_many_peers_the_one_idle_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "MAX_PEERS", 4)
    monkeypatch.setattr(kv_peers, "PROBE_BYTES", 1)
    async with workers("shm") as (opened, prefill, decode):
        assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)
        closed: list[str] = []
        for number in range(20):
            known = await decode.peers.shake_hands(invented(prefill.peer, number))
            monkeypatch.setattr(known.readers[0], "close", _note(closed, known.peer.address))
            assert len(decode.peers.transports()) <= 4
            if number == 10:
                await decode.peers.shake_hands(prefill.peer)  # it is in use
        assert len(closed) >= 15 and len(set(closed)) == len(closed)
        assert await answer(opened, prefill, 2, OTHER) == expected_answer(OTHER, 4)


def _note(closed: list[str], address: str) -> Any:
    async def close() -> None:
        closed.append(address)

    return close


async def test_an_incarnation_has_one_address() -> None:
    async with workers("shm") as (opened, prefill, decode):
        found = await asyncio.gather(
            *(decode.peers.shake_hands(invented(prefill.peer, number, "the same")) for number in range(30)),
            return_exceptions=True,
        )
        refused = [str(one) for one in found if isinstance(one, HandshakeRefusedError)]
        assert len(refused) == 29 and len(decode.peers.transports()) == 1
        assert all("incarnation the same has shaken hands from 127.0.0.1:" in one for one in refused)
        assert await answer(opened, prefill, 1) == expected_answer(PROMPT, 4)


async def test_handshakes_that_run_at_once_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_peers, "MAX_GREETINGS", 3)
    async with workers("shm") as (_, prefill, decode):
        found = await asyncio.gather(
            *(decode.peers.shake_hands(invented(prefill.peer, number)) for number in range(10)), return_exceptions=True
        )
        refused = [str(one) for one in found if isinstance(one, HandshakeRefusedError)]
        assert len(refused) == 7 and all("3 handshakes are running" in one for one in refused)


async def test_links_that_failed_are_closed_and_others_while_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "MOST_IDLE", 2)
    servers, addresses, opened = [], [], {}
    for _ in range(4):
        servers.append(build_server())
        addresses.append(f"127.0.0.1:{bind(servers[-1], '127.0.0.1', 0)}")
        await rpc.start(servers[-1])

    def open_one(address: str, server_name: str = "") -> grpc.aio.Channel:
        opened[address] = open_channel(address, server_name)
        return opened[address]

    async def ask(address: str) -> bool:
        async with links.use(address) as stub:
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            except grpc.aio.AioRpcError:
                return False
            return True

    links = PeerLinks(open_one, health_pb2_grpc.HealthStub)
    try:
        assert not any([await ask(f"127.0.0.1:{port}") for port in range(1, 20)])
        assert not list(links.items())
        assert all(channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN for channel in opened.values())
        assert all([await ask(address) for address in addresses])
        assert [address for address, _ in links.items()] == addresses[-2:]
        async with links.use(addresses[2]):
            assert await ask(addresses[0]) and await ask(addresses[1])
            assert [address for address, _ in links.items()] == [addresses[2], *addresses[:2]]
        assert all(await asyncio.gather(*(ask(address) for address in addresses)))
    finally:
        await links.close()
        for server in servers:
            await server.stop(None)


async def test_a_connection_has_a_hundred_watches_of_health_at_most() -> None:
    server = build_server()
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"
    await rpc.start(server)
    try:
        async with open_channel(address) as first, open_channel(address) as second:
            stub, other = health_pb2_grpc.HealthStub(first), health_pb2_grpc.HealthStub(second)
            calls = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S) for _ in range(MAX_WATCHES + 20)]
            told = await asyncio.gather(*(call.read() for call in calls), return_exceptions=True)
            refused = [one for one in told if isinstance(one, grpc.aio.AioRpcError)]
            assert [one.code() for one in refused] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 20
            assert (await other.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).read()).status == 1
            for call in calls:
                call.cancel()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        assert (await stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S).read()).status
                        break
                    except grpc.aio.AioRpcError:
                        await asyncio.sleep(0.01)
    finally:
        await server.stop(None)
