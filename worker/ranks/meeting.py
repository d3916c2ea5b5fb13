"""How the hosts of a worker meet: host 0 listens, each other host opens connections, and both prove the fleet's secret.

    host I ── 32 random bytes ──► host 0          then of each connection
    host I ◄── 32 random bytes ── host 0
    host I ── HMAC ──► host 0
    host I ◄── HMAC, or zeros ── host 0
    host I ── Hello ──► host 0
    host I ◄── Welcome ── host 0

Connection 0 of a host is for its own process, 1 and 2 for calls and steps of its first rank, 3 and 4 for the second.
"""

import fcntl
import hmac
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from runtime import rpc
from runtime.addresses import bare
from runtime.child import LENGTH_BYTES, pack
from runtime.config import DecodeConfig, PrefillConfig
from runtime.hardware import OWN_VERSION
from runtime.trust import Refusals
from worker.ranks.links import LinkError, take

log = structlog.get_logger()

MEETING_S = 600.0  # for all hosts to come; then what started this one starts it again
SAY_S = 10.0  # between lines that say for which host this one waits
RETRY_S = 0.5
HELLO_S = 5.0  # for a guest's part of the exchange; host 0 hears one after the other
ANSWER_S = 60.0  # for host 0's part
PROOF_BYTES = 32
MAX_HELLO_BYTES = 4096
SIOCGIFADDR, IFREQ_BYTES = 0x8915, 256  # of Linux's netdevice(7)
T = TypeVar("T")


# of its settings what each host has for itself; all others are host 0's
OWN_SETTINGS = (
    "host_rank", "host", "advertise_host", "model", "draft_model", "kv_disk", "tls_dir", "fleet_secret", "log_level",
    "log_format",
)  # fmt: skip
OWN_VARIABLE = "BATON_RANK_SETTINGS"  # of a rank's process: these as JSON


class Hello(msgspec.Struct, frozen=True):
    """Which connection this is."""

    version: str  # of Baton: hosts exchange messages of one version only
    role: str
    num_hosts: int
    tp: int
    host_rank: int = 0
    visit: str = ""  # random, of one start of that host's process
    number: int = 0
    pp: int = 1


class Welcome(msgspec.Struct, frozen=True):
    reason: str  # why not; empty: it is one of them


class Serving(msgspec.Struct, tag=True):
    """From host 0 on connection 0: the worker takes requests."""


class Ended(msgspec.Struct, tag=True):
    """From host 0: the worker has ended as it was asked to."""


HostMessage = Serving | Ended


@dataclass(slots=True)
class Guest:
    """Another host that has come."""

    visit: str
    links: dict[int, socket.socket] = field(default_factory=dict)  # number |->

    @property
    def address(self) -> str:
        return str(self.links[0].getpeername()[0])

    @property
    def our_address(self) -> str:
        """This host's address, by which the guest reaches it."""
        return str(self.links[0].getsockname()[0])

    def close(self) -> None:
        for link in self.links.values():
            link.close()


class Meeting:
    """Host 0's side. Of a host that comes twice, as after a restart, the later visit counts."""

    def __init__(self, role: str, config: PrefillConfig | DecodeConfig) -> None:
        self._config = config
        self._expected = Hello(OWN_VERSION, role, config.num_hosts, config.tp, pp=config.pp)
        self._num_links = 1 + 2 * config.ranks_here
        self._guests: dict[int, Guest] = {}  # host's rank |->
        self._refusals = Refusals()

    def gather(self, meeting_s: float = MEETING_S) -> list[Guest]:
        """The other hosts in order, all their connections watched. Raises ValueError that names those missing."""
        host, port = self._config.host, int(self._config.rendezvous.rpartition(":")[2])
        began = said = time.monotonic()
        with rpc.listen_tcp(host, port, "--rendezvous") as listener:
            listener.settimeout(RETRY_S)
            while missing := self._find_missing():
                now = time.monotonic()
                if now - began > meeting_s:
                    raise ValueError(f"{missing} did not come to {self._config.rendezvous} within {meeting_s:g} s")
                if now - said > SAY_S:
                    said = now
                    log.info("waiting for other hosts", missing=missing, rendezvous=self._config.rendezvous)
                try:
                    link, peer = listener.accept()
                except TimeoutError:
                    continue
                self._hear(link, f"{peer[0]}")
        return [self._guests[host] for host in sorted(self._guests)]

    def _find_missing(self) -> str:
        come = {host for host, guest in self._guests.items() if len(guest.links) == self._num_links}
        return ", ".join(f"host {host}" for host in range(1, self._config.num_hosts) if host not in come)

    def _hear(self, link: socket.socket, peer: str) -> None:
        """Take the connection if its sender is another host of this worker."""
        link.settimeout(HELLO_S)
        try:
            if not prove(link, self._config.fleet_secret, is_first=True):
                self._refusals.count("secret", "host refused: it has another fleet secret", peer=peer)
                link.close()
                return
            hello = read_message(link, Hello)
            reason = self._find_mismatch(hello)
            link.sendall(pack(Welcome(reason)))
        except (LinkError, OSError, msgspec.MsgspecError) as error:
            self._refusals.count("secret", "connection of no host refused", peer=peer, reason=str(error))
            link.close()
            return
        if reason:
            log.warning("host refused", host=hello.host_rank, peer=peer, reason=reason)
            link.close()
            return
        guest = self._guests.get(hello.host_rank)
        if guest is None or guest.visit != hello.visit:
            if guest is not None:
                guest.close()
            guest = self._guests[hello.host_rank] = Guest(hello.visit)
            log.info("a host has come", host=hello.host_rank, peer=peer)
        watch(link, self._config.stall_s)
        guest.links[hello.number] = link

    def _find_mismatch(self, hello: Hello) -> str:
        for name in ("version", "role", "num_hosts", "tp", "pp"):
            here, there = getattr(self._expected, name), getattr(hello, name)
            if here != there:
                return f"{name} differs: {here!r} on host 0, {there!r} there"
        if not 0 < hello.host_rank < hello.num_hosts or not 0 <= hello.number < self._num_links:
            return f"there is no connection {hello.number} of host {hello.host_rank}"
        return ""


def visit(role: str, config: PrefillConfig | DecodeConfig, meeting_s: float = MEETING_S) -> list[socket.socket]:
    """Another host's side: its connections by number. Waits for host 0. Raises ValueError."""
    began, said = time.monotonic(), 0.0
    while True:
        links: list[socket.socket] = []
        own = config.num_hosts, config.tp, config.host_rank
        hello = Hello(OWN_VERSION, role, *own, secrets.token_hex(8), pp=config.pp)
        try:
            for number in range(1 + 2 * config.ranks_here):
                links.append(_open_link(config, msgspec.structs.replace(hello, number=number)))
            return links
        except (LinkError, OSError, msgspec.MsgspecError) as error:
            for link in links:
                link.close()
            now, where = time.monotonic(), config.rendezvous
            if now - began > meeting_s:
                raise ValueError(f"host 0 was not at {where} within {meeting_s:g} s: {error}") from error
            if now - said > SAY_S:
                said = now
                log.info("waiting for host 0", rendezvous=where, reason=str(error))
            time.sleep(RETRY_S)


def _open_link(config: PrefillConfig | DecodeConfig, hello: Hello) -> socket.socket:
    """Raises LinkError or OSError if host 0 is not there, ValueError if it refuses."""
    host, _, port = config.rendezvous.rpartition(":")
    link = socket.create_connection((bare(host), int(port)), HELLO_S)
    try:
        link.settimeout(ANSWER_S)
        if not prove(link, config.fleet_secret, is_first=False):
            raise ValueError(f"host 0 at {config.rendezvous} has another secret: set the same BATON_FLEET_SECRET")
        link.sendall(pack(hello))
        if reason := read_message(link, Welcome).reason:
            raise ValueError(f"host 0 at {config.rendezvous} refuses this host: {reason}")
    except BaseException:
        link.close()
        raise
    watch(link, config.stall_s)
    return link


def prove(link: socket.socket, secret: str, *, is_first: bool) -> bool:
    """Whether both sides have the secret, which stays here. `is_first`: for host 0. Raises LinkError or OSError."""
    ours = secrets.token_bytes(PROOF_BYTES)
    link.sendall(ours)
    theirs = take(link, PROOF_BYTES)
    nonces = ours + theirs if is_first else theirs + ours

    def sign(who: bytes) -> bytes:
        return hmac.digest(secret.encode(), who + nonces, "sha256")

    if not is_first:
        link.sendall(sign(b"other"))
        return hmac.compare_digest(take(link, PROOF_BYTES), sign(b"first"))
    is_known = hmac.compare_digest(take(link, PROOF_BYTES), sign(b"other"))
    link.sendall(sign(b"first") if is_known else bytes(PROOF_BYTES))
    return is_known


def read_message(link: socket.socket, kind: type[T]) -> T:
    """Raises LinkError, OSError or MsgspecError."""
    length = int.from_bytes(take(link, LENGTH_BYTES), "little")
    if length > MAX_HELLO_BYTES:
        raise LinkError(f"a message of {length} bytes is too long")
    return msgspec.msgpack.decode(take(link, length), type=kind)


def find_interface(address: str) -> str:
    """This host's interface that has an address. Raises OSError."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found, *_numbers, name = line.split()
            if found == packed:
                return name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _number, name in socket.if_nameindex():
            with suppress(OSError):  # it has no such address
                entry = fcntl.ioctl(asking, SIOCGIFADDR, name.encode().ljust(IFREQ_BYTES, b"\0"))
                if socket.inet_ntoa(entry[20:24]) == address:
                    return name
    raise OSError(f"no network interface here has {address}, by which other hosts reach this one")


def watch(link: socket.socket, stall_s: float) -> None:
    """From now on waits on it end with an error once the other host does not answer for half of `stall_s`."""
    silent_s = max(stall_s / 2, 1.0)
    look_s = max(int(silent_s / 4), 1)
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options: Any = socket
    for name, value in (
        ("TCP_NODELAY", 1), ("TCP_KEEPIDLE", look_s), ("TCP_KEEPINTVL", look_s),
        ("TCP_USER_TIMEOUT", int(1000 * silent_s)),
    ):  # fmt: skip
        link.setsockopt(socket.IPPROTO_TCP, getattr(options, name), value)
