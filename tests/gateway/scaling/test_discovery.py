"""Workers that DNS names: the rule over any course of answers, and links to fake workers behind a real DNS server."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from pathlib import Path

import dns.rrset
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from gateway.router.admission import Admission
from gateway.router.fleet import Fleet
from gateway.router.placer import Placer
from gateway.router.router import Router
from gateway.router.worker_view import Role
from gateway.scaling import discovery
from gateway.scaling.discovery import MISSES, Discovery, is_leaving, reconcile
from runtime import rpc
from runtime.addresses import parse_named
from tests.gateway.router.test_requests import answer
from tests.support.dispatching import Routed, bounded
from tests.support.dns_server import DnsServer, dns_server
from tests.support.fake_workers import PATIENCE_S, FakeDecode, FakeWorker, Signal, serving
from tests.support.virtual_fleet import wanted

PORTS = ("a:1", "b:1", "c:1")
some_addresses = st.sets(st.sampled_from(PORTS))


@given(course=st.lists(st.tuples(some_addresses, some_addresses), max_size=12))
def test_links_follow_the_answers_and_never_leave_running_work(course: list[tuple[set[str], set[str]]]) -> None:
    """Each step: the addresses found, and those where requests would run if there is a link."""
    known: dict[str, int] = {}
    for found, wish in course:
        busy = wish & known.keys()
        after = reconcile(known, found, busy)
        assert busy <= after.keys(), "running work is not cut"
        if not found:
            assert after == known, "an outage of DNS changes nothing"
        else:
            assert found <= after.keys() and not any(after[address] for address in found)
            gone = known.keys() - after.keys()
            assert all(known[address] + 1 >= MISSES for address in gone), "one answer takes no worker away"
            idle_and_missed = {address for address in after.keys() - found - busy if is_leaving(after[address])}
            assert not idle_and_missed, "an idle worker that left is forgotten"
        known = after


@pytest.fixture(autouse=True)
def quick_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_S", 0.1)


@asynccontextmanager
async def named_workers(
    signal: Signal, server: DnsServer, *names: str, static: Sequence[str] = ()
) -> AsyncIterator[Routed]:
    """A gateway whose decode workers have these names."""
    registry = CollectorRegistry()
    fleet = Fleet([], static, 30 * PATIENCE_S, PATIENCE_S, 0)
    router = Router(fleet, Admission(8), PATIENCE_S, PATIENCE_S, registry, False, Placer())
    decode: Role = "decode"
    parsed = [(decode, name) for name in map(parse_named, names) if name]
    looking = Discovery(fleet, parsed, server.address, registry)
    built = Routed(fleet, router, signal)
    counter = "baton:dns_lookups_failed_total", {"name": names[0]}
    built.failed_lookups = lambda: registry.get_sample_value(*counter) or 0.0
    await looking.start()
    fleet.start()
    try:
        yield built
        await built.is_idle()
    finally:
        await looking.close()
        await fleet.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_true():  # noqa: ASYNC110  lookups fire no event
            await asyncio.sleep(0.02)


def alive(built: Routed) -> list[str]:
    return sorted(view.incarnation for view in built.fleet.views() if view.is_alive)


@bounded
async def test_workers_come_go_and_move_while_dns_answers_and_while_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signal = Signal()
    first, second = FakeDecode("D1", signal, is_manual=True), FakeDecode("D2", signal, is_manual=True)
    with dns_server() as server:
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(serving(first, host="127.0.0.2"))
            port = int(address.rpartition(":")[2])
            await stack.enter_async_context(serving(second, port, "127.0.0.3"))
            server.name_hosts("decode.test", "127.0.0.2")
            built = await stack.enter_async_context(named_workers(signal, server, f"dns:decode.test:{port}"))
            await until(lambda: alive(built) == ["D1"])

            stream = await stack.enter_async_context(aclosing(built.generate(wanted(max_tokens=4))))
            beginning = asyncio.ensure_future(anext(stream))
            await first.has_sessions(1)
            first.sessions[0].emit(1)
            assert list((await beginning).token_ids) == answer(1)

            server.name_hosts("decode.test", "127.0.0.3")  # the name moves: new requests go there
            await until(lambda: alive(built) == ["D2"])
            assert built.fleet.decode[address].find_trouble() == f"is no longer in dns:decode.test:{port}"
            moved = built.start(wanted("moved"))
            await second.has_sessions(1)

            failed = built.failed_lookups()
            monkeypatch.setattr(discovery, "ANSWER_S", 0.1)
            server.is_silent = True  # an outage changes nothing
            await until(lambda: built.failed_lookups() >= failed + 3)
            assert alive(built) == ["D2"]
            server.is_silent = False
            server.records.clear()  # nor does a server that has forgotten all
            failed = built.failed_lookups()
            await until(lambda: built.failed_lookups() >= failed + 3)
            assert alive(built) == ["D2"]

            server.name_hosts("decode.test", "127.0.0.3")
            first.sessions[0].emit(3, "length")  # the worker that left DNS keeps its stream to the end
            rest = [token async for part in stream for token in part.token_ids]
            assert rest == answer(4)[1:]
            await until(lambda: address not in built.fleet.decode)
            second.sessions[0].emit(4, "length")
            assert (await moved)[0] == answer(4)

            server.name_hosts("decode.test", "127.0.0.2", "127.0.0.3")
            await until(lambda: alive(built) == ["D1", "D2"])


@bounded
async def test_srv_records_name_ports_and_one_worker_is_used_at_one_of_its_addresses() -> None:
    signal = Signal()
    worker = FakeDecode("D1", signal)
    with dns_server() as server:
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(serving(worker))
            port = int(address.rpartition(":")[2])
            server.name_services("_grpc._tcp.decode.test", port, host="localhost")
            server.name_hosts("decode.test", "127.0.0.1")
            names = "dns:_grpc._tcp.decode.test", f"dns:decode.test:{port}"
            built = await stack.enter_async_context(named_workers(signal, server, *names))
            by_service, by_host = f"localhost:{port}", f"127.0.0.1:{port}"
            await until(lambda: set(built.fleet.decode) == {by_service, by_host})
            trouble = {one: link.find_trouble for one, link in built.fleet.decode.items()}
            await until(lambda: trouble[by_service]() is None and "is the worker at" in (trouble[by_host]() or ""))
            assert await built.collect(wanted()) == (answer(4), "length")
            del server.records["_grpc._tcp.decode.test", "SRV"]
            server.name_services("_grpc._tcp.decode.test", 1, host="localhost")
            await until(lambda: trouble[by_host]() is None)
            assert await built.collect(wanted()) == (answer(4), "length")


@bounded
async def test_half_an_answer_takes_no_living_worker_away() -> None:
    """Without it, a failure of one record type would look like the end of all its workers."""
    signal = Signal()
    with dns_server() as server:
        async with AsyncExitStack() as stack:
            address = await stack.enter_async_context(serving(FakeDecode("D1", signal)))
            port = int(address.rpartition(":")[2])
            dead = f"127.0.0.9:{port}"
            server.name_hosts("decode.test", "127.0.0.1", "127.0.0.9", "::2")
            built = await stack.enter_async_context(named_workers(signal, server, f"dns:decode.test:{port}"))
            await until(lambda: alive(built) == ["D1"])
            await until(lambda: set(built.fleet.decode) == {address, dead, f"[::2]:{port}"})
            server.failing.add("A")
            await until(lambda: dead not in built.fleet.decode)
            asked = server.num_asked
            await until(lambda: server.num_asked >= asked + 6)
            assert alive(built) == ["D1"] and not built.failed_lookups()
            assert not server.num_short, "answers may be long"


def test_srv_records_that_are_not_offered_or_for_later_are_left_out() -> None:
    texts = ["10 0 9000 A.test.", "10 5 9001 a.test.", "20 0 9000 later.test.", "0 0 0 none.test.", "0 0 9000 ."]
    records = dns.rrset.from_text("x.", 1, "IN", "SRV", *texts)
    assert discovery._srv_addresses(records) == {"a.test:9000", "a.test:9001"}


@bounded
async def test_names_that_nothing_knows_are_logged_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    signal = Signal()
    with dns_server() as server, capture_logs() as logs:
        async with named_workers(signal, server, "dns:nothing.test:9000") as built:
            await until(lambda: built.failed_lookups() >= 3)
            reason = built.router.readiness()
            assert reason is not None and "no decode worker is known" in reason
            monkeypatch.setattr(discovery, "ANSWER_S", 0.1)
            server.is_silent = True
            failed = built.failed_lookups()
            await until(lambda: built.failed_lookups() >= failed + 3)
    (logged,) = [one for one in logs if one["event"].startswith("a lookup of workers failed")]
    assert logged["name"] == "dns:nothing.test:9000" and "does not exist" in logged["reason"]


@bounded
async def test_an_address_given_by_hand_outranks_dns() -> None:
    signal = Signal()
    worker: FakeWorker = FakeDecode("D1", signal)
    with dns_server() as server:
        async with serving(worker) as address:
            server.name_hosts("decode.test", "127.0.0.1")
            name = f"dns:decode.test:{address.rpartition(':')[2]}"
            async with named_workers(signal, server, name, static=[address]) as built:
                await until(lambda: alive(built) == ["D1"])
                assert [one.source for one in built.fleet.workers()] == [""]
                server.name_hosts("decode.test", "127.0.0.9")
                await until(lambda: len(built.fleet.decode) == 2)
                assert alive(built) == ["D1"]


@bounded
async def test_a_worker_that_moves_under_its_own_name_is_reached_again() -> None:
    """gRPC alone looks a name up again after 30 s at the earliest."""
    signal = Signal()
    with dns_server() as server:
        async with AsyncExitStack() as stack:
            before = await stack.enter_async_context(AsyncExitStack())
            address = await before.enter_async_context(serving(FakeDecode("D1", signal), host="127.0.0.2"))
            port = int(address.rpartition(":")[2])
            server.name_hosts("decode.test", "127.0.0.2")
            open_channel = partial(rpc.open_channel, dns_server=server.address)
            fleet = Fleet([], [f"decode.test:{port}"], PATIENCE_S, PATIENCE_S, 0, open_channel)
            stack.push_async_callback(fleet.close)
            fleet.start()
            (link,) = fleet.workers()
            await until(lambda: link.find_trouble() is None)
            await before.aclose()
            await stack.enter_async_context(serving(FakeDecode("D2", signal), port, "127.0.0.3"))
            server.name_hosts("decode.test", "127.0.0.3")
            async with asyncio.timeout(15.0):
                await until(lambda: link.status.peer.incarnation == "D2")


@bounded
async def test_workers_of_a_file_come_and_go_with_its_lines(tmp_path: Path) -> None:
    """What cannot be read, or names no worker, changes nothing: somebody is about to write it."""
    signal, path = Signal(), tmp_path / "decode"
    first, second = FakeDecode("D1", signal), FakeDecode("D2", signal)
    with dns_server() as server, capture_logs() as logs:
        server.is_silent = True
        async with AsyncExitStack() as stack:
            here, there = [await stack.enter_async_context(serving(worker)) for worker in (first, second)]
            built = await stack.enter_async_context(named_workers(signal, server, f"file:{path}"))
            assert alive(built) == [] and built.failed_lookups() == 1
            path.write_text(f"# of this fleet\n\n {here} \n")
            await until(lambda: alive(built) == ["D1"])
            assert await built.collect(wanted("r")) == (answer(4), "length")
            for text in ("", "nonsense\n", "#", None):
                failed = built.failed_lookups()
                path.unlink() if text is None else path.write_text(text)
                await until(lambda failed=failed: built.failed_lookups() > failed + MISSES)  # type: ignore[misc]
                assert alive(built) == ["D1"]
            path.write_text(f"{here}\n{there}\n{there}\nhost\n")
            await until(lambda: alive(built) == ["D1", "D2"])
            path.write_text(f"{there}\n")
            await until(lambda: alive(built) == ["D2"])
            await until(lambda: here not in built.fleet.decode)
            assert await built.collect(wanted("s")) == (answer(4), "length")
    (failure, *_) = (line["reason"] for line in logs if line["event"].startswith("a lookup of workers failed"))
    assert str(path) in failure
