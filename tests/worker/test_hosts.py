"""How the hosts of a worker meet, over real sockets: who is let in, who is waited for, and what a lost link says."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import pytest
from structlog.testing import capture_logs

from runtime.child import pack
from runtime.config import DecodeConfig
from runtime.hardware import OWN_VERSION
from tests.support.fleet import free_ports
from tests.support.ipv6 import needs_ipv6
from worker.ranks import meeting
from worker.ranks.calls import Done, Ready, Start
from worker.ranks.host_process import explain_end
from worker.ranks.links import LENGTH_BYTES, MAX_MESSAGE_BYTES, LinkError, StepReceiver, open_links
from worker.ranks.meeting import Guest, Hello, Meeting, Welcome, find_interface, prove, read_message, visit, watch
from worker.ranks.remote import RemoteRank
from worker.thread import _fulfil

SECRET, WAIT_S = "a-secret-of-this-fleet", 60.0
T = TypeVar("T")


def build_config(host_rank: int = 0, **others: Any) -> DecodeConfig:
    """Of four ranks on two hosts."""
    config = DecodeConfig(
        tp=4, num_hosts=2, host_rank=host_rank, rendezvous=f"127.0.0.1:{free_ports(1)[0]}", fleet_secret=SECRET
    )
    return replace(config, **others)


def in_thread(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(work, done), daemon=True).start()
    return done


@contextmanager
def gathering(config: DecodeConfig) -> Iterator[Future[list[Guest]]]:
    """Host 0's side of a meeting; what came is closed at the end."""
    done = in_thread(lambda: Meeting("decode", config).gather(WAIT_S))
    yield done
    for guest in done.result(WAIT_S):
        guest.close()


def as_other(config: DecodeConfig, **others: Any) -> DecodeConfig:
    return replace(config, host_rank=1, **others)


def test_hosts_meet_and_each_connection_is_known_by_its_number() -> None:
    config = build_config()
    with gathering(config) as gathered:
        links = visit("decode", as_other(config), WAIT_S)
        (guest,) = gathered.result(WAIT_S)
        assert sorted(guest.links) == list(range(5)) == list(range(len(links)))
        assert guest.address == guest.our_address == "127.0.0.1"
        for number, link in enumerate(links):
            link.sendall(bytes([number]))
            assert guest.links[number].recv(1) == bytes([number])
            link.close()


@pytest.mark.parametrize(
    ("change", "role", "said"),
    [
        ({"fleet_secret": "another-secret-of-16"}, "decode", "has another secret: set the same BATON_FLEET_SECRET"),
        ({"tp": 2}, "decode", "refuses this host: tp differs: 4 on host 0, 2 there"),
        ({}, "prefill", "refuses this host: role differs: 'decode' on host 0, 'prefill' there"),
    ],
)
def test_a_host_that_does_not_belong_is_refused_and_the_meeting_goes_on(
    change: dict[str, Any], role: str, said: str
) -> None:
    config = build_config()
    with gathering(config) as gathered:
        with pytest.raises(ValueError, match=said):
            visit(role, as_other(config, **change), WAIT_S)
        links = visit("decode", as_other(config), WAIT_S)
        assert len(gathered.result(WAIT_S)) == 1
        for link in links:
            link.close()


def connect(config: DecodeConfig) -> socket.socket:
    """As soon as host 0 listens."""
    host, _, port = config.rendezvous.rpartition(":")
    for _ in range(1000):
        with suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), WAIT_S)
        threading.Event().wait(0.01)
    raise AssertionError("nothing listens")


def test_strangers_and_rubbish_do_not_disturb_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "HELLO_S", 0.2)
    config, hello = build_config(), Hello(OWN_VERSION, "decode", 2, 4, 1, "v")
    with gathering(config) as gathered, capture_logs() as logs:
        silent = connect(config)
        connect(config).close()
        rubbish = connect(config)
        rubbish.sendall(b"GET / HTTP/1.1\r\nHost: worker.example.com\r\nAccept: text/html, */*\r\n\r\n")
        for sent in (b"\xff\xff\xff\x7f", pack("no hello"), pack(msgspec.structs.replace(hello, host_rank=0))):
            link = connect(config)
            assert prove(link, SECRET, is_first=False)
            link.sendall(sent)
            with suppress(LinkError, OSError):
                assert "no connection 0 of host 0" in read_message(link, Welcome).reason
            link.close()
        links = visit("decode", as_other(config), WAIT_S)
        assert len(gathered.result(WAIT_S)) == 1
        for link in (silent, rubbish, *links):
            link.close()
    refused = [line for line in logs if "refused" in str(line["event"])]
    assert len(refused) >= 4 and not any(SECRET in str(line) for line in logs)


def test_the_later_visit_of_a_host_counts() -> None:
    config = build_config()
    with gathering(config) as gathered:
        link = connect(config)
        assert prove(link, SECRET, is_first=False)
        link.sendall(pack(Hello(OWN_VERSION, "decode", 2, 4, 1, "before", 3)))
        assert not read_message(link, Welcome).reason
        links = visit("decode", as_other(config), WAIT_S)
        (guest,) = gathered.result(WAIT_S)
        assert guest.visit != "before" and link.recv(1) == b""
        for one in (link, *links):
            one.close()


def test_who_is_missing_is_named_within_a_bound() -> None:
    config = build_config(tp=3, num_hosts=3)
    with pytest.raises(ValueError, match=rf"host 1, host 2 did not come to {config.rendezvous} within 0.1 s"):
        Meeting("decode", config).gather(0.1)
    with pytest.raises(ValueError, match=rf"host 0 was not at {config.rendezvous} within 0.1 s: .*refused"):
        visit("decode", as_other(config), 0.1)


def test_a_secret_is_proved_and_not_sent() -> None:
    (ours,), (theirs,) = open_links(1)
    sent = bytearray()

    class Tap:
        """What a stranger on the network sees of one side."""

        def sendall(self, data: bytes) -> None:
            sent.extend(data)
            ours.sendall(data)

        def recv_into(self, into: memoryview) -> int:
            return ours.recv_into(into)

    first = in_thread(lambda: prove(theirs, SECRET, is_first=True))
    assert prove(Tap(), SECRET, is_first=False)  # type: ignore[arg-type]
    assert first.result(WAIT_S) and SECRET.encode() not in sent
    ours.sendall(sent)  # again, to a host 0 that draws other numbers
    again = in_thread(lambda: prove(theirs, SECRET, is_first=True))
    assert again.result(WAIT_S) is False
    for end in (ours, theirs):
        end.close()


def test_a_watched_link_does_not_outlast_the_time_to_find_a_stall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
        watch(link, 12.0)
        idle, between, silent_ms = (
            link.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
        )
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and link.gettimeout() is None
        assert (idle, between, silent_ms) == (1, 1, 6000) and idle + between + silent_ms / 1000 < 12.0


@pytest.mark.parametrize(("is_reset", "why"), [(False, "hung up"), (True, "does not answer: Connection reset by peer")])
def test_a_rank_on_another_host_ends_with_its_connection_and_is_named(is_reset: bool, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    start = Start("decode", b"", "w", 1, "", "", (-1, -1))
    rank: RemoteRank[Ready | Done] = RemoteRank(ours, start, Ready | Done, "host 1 at 10.0.0.2")
    assert not rank.ended.done()
    if is_reset:  # it closes with something unread
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    else:
        length = int.from_bytes(theirs.recv(4), "little")
        theirs.recv(length, socket.MSG_WAITALL)
    theirs.close()
    assert rank.ended.result(WAIT_S) == 1 and rank.trouble == f"host 1 at 10.0.0.2 {why}"
    ours.close()


@pytest.mark.parametrize(
    ("host", "codes", "reason"),
    [
        ("", {}, ""),
        ("", {2: 0, 3: 0}, ""),
        ("host 0 hung up", {2: -9, 3: 0}, "rank 2 ended with signal SIGKILL"),
        ("host 0 hung up", {2: 0, 3: 0}, "host 0 hung up"),
        ("host 0 hung up", {2: 1, 3: 0}, "host 0 hung up; rank 2 ended with exit status 1"),
        ("", {3: 1}, "rank 3 ended with exit status 1"),
    ],
)
def test_the_end_of_a_worker_is_put_down_to_what_ended_first(host: str, codes: dict[int, int], reason: str) -> None:
    assert explain_end(host, codes) == reason


def test_a_step_that_is_too_long_is_not_taken() -> None:
    (ours,), (theirs,) = open_links(1)
    ours.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(LENGTH_BYTES, "little"))
    with pytest.raises(LinkError, match=f"a step of {MAX_MESSAGE_BYTES + 1} bytes is too long"):
        StepReceiver(theirs).read(WAIT_S)
    for end in (ours, theirs):
        end.close()


def test_the_interface_of_an_address_is_found() -> None:
    assert find_interface("127.0.0.1") == "lo"
    with pytest.raises(OSError, match=r"no network interface here has 192\.0\.2\.77"):
        find_interface("192.0.2.77")


@needs_ipv6
def test_the_interface_of_an_ipv6_address_is_found() -> None:
    assert find_interface("::1") == "lo"
