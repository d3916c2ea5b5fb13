"""Pages through NIXL between processes: when it is chosen, what it refuses, and peers that die or stop.

Over main memory of one host, by TCP (the owner's process sends the bytes, as to another host) or CMA (the reader
fetches them). For what all readers promise see test_kvtransfer.py.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from engine.cuda.gpu import GpuPages
from engine.kv.pool import HostPages
from kvtransfer import nixl_agent
from kvtransfer.nixl import MAX_METADATA_BYTES, MAX_PAGES, NixlMemory, NixlReader
from kvtransfer.nixl_agent import UNKNOWN, NixlAgent, find_link, is_fast
from kvtransfer.reader import PageRef, ReadError
from protos import decode_pb2, kv_pb2
from tests.support.fake_cuda import FakeGpu, count_opened
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.pool_process import COMMAND, Exporter, build_local, build_pool, page_content
from tests.support.real_workers import decode_worker, gateway

NIXL_PROCESS = (*COMMAND, "transport=nixl")
NUM_PAGES, NUM_LOCAL = 64, 24
NUMBERS = count()
LOOPBACK = "0100007F"
SHORT_S = 0.4  # for a peer that will not answer


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits UCX to TCP, here and in processes started later."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture(scope="module")
def owners() -> Iterator[list[Exporter]]:
    """All owners started so far."""
    begun: list[Exporter] = []
    yield begun
    for process in begun:
        process.__exit__()


@pytest.fixture
def owner(tcp: None, owners: list[Exporter]) -> Iterator[Exporter]:
    """An owner to stop and kill: replaced after a test that did. Its pages have their first bytes."""
    if not owners or not is_running(owners[-1]):
        owners.append(Exporter(NIXL_PROCESS, NUM_PAGES))
        owners[-1].recycle(*range(NUM_PAGES))
    yield owners[-1]
    if is_running(owners[-1]):
        go_on(owners[-1])


@pytest.fixture(scope="module")
def lasting() -> Iterator[kv_pb2.Peer]:
    """An owner that stays alive."""
    with Exporter(NIXL_PROCESS, NUM_PAGES) as process:
        process.recycle(*range(NUM_PAGES))
        yield process.peer


async def open_reader(
    peer: kv_pb2.Peer, timeout_s: float = PATIENCE_S, gpu: FakeGpu | None = None, is_local: bool = True
) -> NixlReader:
    local = build_local(build_pool(NUM_LOCAL, gpu), f"test {next(NUMBERS)}")
    local.is_loopback = is_local
    reader = await NixlReader.open(local, peer)
    reader._timeout_s = timeout_s  # NIXL may have to load first
    return reader


def ref(page: int) -> PageRef:
    return PageRef(page, 1)


def table(title: str, *rows: str) -> list[str]:
    return [
        "+-----+", f"| {title} |", "| remote memory read by ucp_get*(multi) into host memory from host |", "+-----+",
        "| Range | Description | Config |", "+-----+", *(f"| {row} |" for row in rows), "+-----+",
    ]  # fmt: skip


def far(*rows: str) -> list[str]:
    return table("a-1 inter-node cfg#1", *rows)


SELF = table("a-1 self cfg#0", "0..inf | zero-copy | cma/memory")


@pytest.mark.parametrize(
    ("lines", "link", "fast"),
    [
        ([*SELF, *table("a-1 intra-node cfg#1", "0..inf | zero-copy | cma/memory")], "cma", True),
        (far("0..255 | copy | tcp/eth0", "256..inf | zero-copy | 5% on rc_mlx5/m:1/path0 and 5% on rc_mlx5/n:1"),
         "rc_mlx5", True),
        (far("0..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0"), "tcp", False),
        (far("0..inf | zero-copy | 9% on tcp/lo and 91% on rc_mlx5/m:1"), "rc_mlx5+tcp", False),
        (far("0..9 | zero-copy | cma/memory"), UNKNOWN, False),
        (SELF, UNKNOWN, False),
        (table("a-11 intra-node cfg#1", "0..inf | zero-copy | cma/memory"), UNKNOWN, False),
        (["", "connect(fd=26) failed: a | b | c", "| cfg# |", "||||"], UNKNOWN, False),
    ],
)  # fmt: skip
def test_what_ucx_uses_is_read_from_its_own_tables(lines: list[str], link: str, fast: bool) -> None:
    assert (find_link(lines, "a-1"), is_fast(link)) == (link, fast)


@pytest.mark.usefixtures("tcp")
async def test_tcp_is_refused_unless_it_is_allowed(owner: Exporter) -> None:
    signal = Signal()
    async with decode_worker(signal, "nixl") as decode, gateway(decode, signal) as opened:
        before = count_listening()
        with pytest.raises(grpc.aio.AioRpcError, match="UCX reads by tcp: set --nixl-allow-tcp"):
            await opened.stub.Handshake(decode_pb2.HandshakeRequest(peer=owner.peer))
        assert count_listening() == before, "all that was opened is closed"
    async with decode_worker(signal, "nixl", nixl_allow_tcp=True) as decode:
        for _again in range(2):
            assert (await decode.peers.shake_hands(owner.peer)).transport == "nixl:tcp"
        assert decode.peers.transports() == {owner.peer.address: "nixl:tcp"}


def count_listening(address: str = "") -> int:
    """Listening sockets of this process; an agent has some. `address`: in the kernel's hexadecimal form."""
    tables = (Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = (line.split() for scheduler in tables for line in scheduler)
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and row[1].startswith(address)}
    return sum(path.is_symlink() and str(path.readlink()) in listening for path in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize(
    ("lie", "reason", "words"),
    [
        ({"num_pages": 0}, "layout", "a pool of 0 pages"),
        ({"num_pages": MAX_PAGES + 1}, "layout", f"expected 1 to {MAX_PAGES}"),
        ({"num_pages": NUM_PAGES + 1}, "transport", "NIXL_ERR_NOT_FOUND"),
        ({"metadata": b""}, "layout", "metadata of 0 bytes"),
        ({"metadata": bytes(MAX_METADATA_BYTES + 1)}, "layout", f"expected 1 to {MAX_METADATA_BYTES}"),
        ({"metadata": bytes(400)}, "transport", "NIXL_ERR_MISMATCH"),
        ({"incarnation": "another"}, "transport", "of agent 'exporter.0', not of another.0"),
        ({"pages_address": 0}, "layout", "64 pages cannot lie at address 0x0"),
        ({"pages_address": 2**64 - 8}, "layout", "64 pages cannot lie"),
        ({"pages_address": 4096}, "transport", "NIXL_ERR_NOT_FOUND"),
        ({"generations_address": 4097}, "layout", "64 generations cannot lie at address 0x1001"),
        ({"generations_address": 4096}, "transport", "NIXL_ERR_NOT_FOUND"),
        ({"device_index": -2}, "layout", "no GPU -2"),
        ({"device_index": 3}, "transport", "NIXL_ERR_NOT_FOUND"),
    ],
)
async def test_peers_that_lie_are_refused_and_nothing_stays_open(
    lie: dict[str, object], reason: str, words: str, lasting: kv_pb2.Peer
) -> None:
    peer = kv_pb2.Peer()
    peer.CopyFrom(lasting)
    memory = NixlMemory.read(peer.ranks[0], "nixl")
    assert memory
    for field, value in lie.items():
        if field in ("num_pages", "incarnation"):
            setattr(peer, field, value)
        else:
            memory = msgspec.structs.replace(memory, **{field: value})
    peer.ranks[0].transports["nixl"] = memory.pack()
    before = count_listening()
    with pytest.raises(ReadError) as error:
        await open_reader(peer)
    assert error.value.reason == reason and words in error.value.detail
    assert count_listening() == before


@pytest.mark.parametrize("is_local", [True, False])
async def test_ucx_listens_beyond_this_host_only_when_peers_are_there(is_local: bool, lasting: kv_pb2.Peer) -> None:
    beyond = count_listening() - count_listening(LOOPBACK)
    reader = await open_reader(lasting, is_local=is_local)
    assert count_listening(LOOPBACK) > 0
    assert (count_listening() - count_listening(LOOPBACK) == beyond) == is_local
    await reader.close()


async def test_generations_are_read_after_the_pages(owner: Exporter, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = await open_reader(owner.peer)
    begin_read, num_begun = NixlAgent.begin_read, count(1)

    def recycle_between(agent: NixlAgent, *transfer: Any) -> None:
        if next(num_begun) == 2:
            owner.recycle(NUM_PAGES - 1)  # which no other test reads
        begin_read(agent, *transfer)

    monkeypatch.setattr(NixlAgent, "begin_read", recycle_between)
    with pytest.raises(ReadError, match="page 63 was recycled: offered at generation 1, now 2"):
        await reader.read([ref(3), ref(63)], [0, 1])
    assert not reader._store.load([0, 1]).any()
    await reader.close()


async def test_the_next_pages_arrive_while_the_last_ones_are_copied(
    lasting: kv_pb2.Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the other half of the landing."""
    reader, events = await open_reader(lasting), list[tuple[str, int]]()
    begin_read, copy = NixlAgent.begin_read, HostPages.copy

    def begin_noting(agent: NixlAgent, remote: int, pieces: Any, local: int, first: int) -> None:
        kind = "generations" if remote == reader._generations[1] else "pages"
        events.append((kind, first))
        begin_read(agent, remote, pieces, local, first)

    def copy_noting(landing: HostPages, pages: Any, into: Any) -> None:
        events.append(("copy", pages[0]))
        copy(landing, pages, into)

    monkeypatch.setattr(NixlAgent, "begin_read", begin_noting)
    monkeypatch.setattr(HostPages, "copy", copy_noting)
    monkeypatch.setattr(reader, "_half", 4)
    pages = [5, 40, 7, 63, 2, 1, 33, 12, 50]
    await reader.read([ref(page) for page in pages], range(len(pages)))
    assert events == [
        ("pages", 0), ("generations", 0), ("pages", 4), ("copy", 0), ("generations", 4), ("pages", 0), ("copy", 4),
        ("generations", 0), ("copy", 0),
    ]  # fmt: skip
    found = reader._store.load(range(len(pages)))
    assert (found == np.stack([page_content(page, 1, 512) for page in pages])).all()
    await reader.close()


async def test_a_pool_on_a_gpu_gets_its_pages_by_a_landing_there(lasting: kv_pb2.Peer) -> None:
    before = count_opened()
    reader = await open_reader(lasting, gpu=FakeGpu())
    landing = reader._landing
    assert isinstance(landing, GpuPages) and count_opened() == before + 2, "a pool and a landing"
    await reader.read([ref(9), ref(4)], [1, 0])
    found = reader._store.load([0, 1])
    assert (found == np.stack([page_content(page, 1, 512) for page in (4, 9)])).all()
    await reader.close()
    assert not landing.address


def state_of(owner: Exporter) -> str:
    return Path(f"/proc/{owner.peer.pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_running(owner: Exporter) -> bool:
    try:
        return state_of(owner) != "Z"
    except FileNotFoundError:
        return False


def stop(owner: Exporter) -> None:
    os.kill(owner.peer.pid, signal.SIGSTOP)
    while state_of(owner) != "T":
        time.sleep(0.001)


def go_on(owner: Exporter) -> None:
    os.kill(owner.peer.pid, signal.SIGCONT)


async def test_an_owner_that_stops_ends_the_read_in_time_and_its_bytes_land_where_nothing_is(owner: Exporter) -> None:
    reader = await open_reader(owner.peer, SHORT_S)
    store, landing = reader._store, reader._landing
    assert isinstance(landing, HostPages)
    stop(owner)
    pages, targets = [ref(page) for page in range(12)], list(range(12))
    began = time.monotonic()
    with pytest.raises(ReadError, match="12 pages were not there in time") as error:
        await reader.read(pages, targets)
    assert error.value.reason == "transport" and time.monotonic() - began >= SHORT_S
    store.store(targets, [np.full(512, 255, np.uint8)] * 12)  # the pages have another owner now
    with pytest.raises(ReadError, match="an earlier read has not ended yet"):
        await reader.read(pages[:1], [21])
    assert not (landing._rows == page_content(5, 1, 512)).all(axis=1).any()
    go_on(owner)
    while True:  # until the bytes have arrived
        try:
            await reader.read(pages[:1], [21])
            break
        except ReadError as late:
            assert late.reason == "transport"
            await asyncio.sleep(0.01)
    assert (landing._rows[5] == page_content(5, 1, 512)).all(), "the bytes arrived late"
    assert (store.load(targets) == 255).all(), "no page received them"
    assert (store.load([21])[0] == page_content(0, 1, 512)).all() and not reader.is_gone()
    await reader.close()


async def test_nothing_is_written_after_the_close(owner: Exporter) -> None:
    before = count_listening()
    reader = await open_reader(owner.peer, SHORT_S)
    landing = reader._landing
    assert isinstance(landing, HostPages)
    stop(owner)
    with pytest.raises(ReadError) as kept:
        await reader.read([ref(page) for page in range(20)], list(range(20)))
    await reader.close()
    assert count_listening() == before, "the agent is gone, so nothing can write"
    landing._rows[:] = 255
    go_on(owner)
    await asyncio.sleep(0.5)
    assert (landing._rows == 255).all() and kept.value.reason == "transport"


async def until_in_flight(reader: NixlReader) -> None:
    while not reader._agent.running:  # noqa: ASYNC110, no event for it
        await asyncio.sleep(0.001)


async def test_an_owner_killed_in_mid_read_is_a_read_error_and_gone(owner: Exporter) -> None:
    reader = await open_reader(owner.peer)
    stop(owner)
    reading = asyncio.create_task(reader.read([ref(page) for page in range(20)], list(range(20))))
    await until_in_flight(reader)
    owner.kill()
    with pytest.raises(ReadError, match="NIXL_ERR_REMOTE_DISCONNECT") as error:
        await reading
    assert error.value.reason == "transport" and reader.is_gone()
    with pytest.raises(ReadError, match="has to shake hands again"):
        await reader.read([ref(1)], [1])
    await reader.close()


@pytest.mark.parametrize("installed", [["nixl_cu12"], []])
def test_nixl_is_there_in_the_package_of_either_cuda(monkeypatch: pytest.MonkeyPatch, installed: list[str]) -> None:
    monkeypatch.setattr(nixl_agent, "find_spec", lambda name: name if name in installed else None)
    assert nixl_agent.is_installed() == bool(installed)
    monkeypatch.setattr(nixl_agent, "UcxLog", object)
    loaded: list[str] = []
    monkeypatch.setattr("importlib.import_module", loaded.append)
    if installed:
        nixl_agent._load.__wrapped__()
        assert loaded == [f"{installed[0]}._bindings"]
