"""Hosts as users write them, and as sockets and URLs need them: `::1` and `[::1]` are the same. Pure; uses no DNS."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.settings import MAX_PORT

_DNS, _FILE = "dns:", "file:"
# Routed within a site, or by relays that no longer exist: `is_global` calls them public.
_NOT_PUBLIC = tuple(map(ipaddress.ip_network, ("64:ff9b::/96", "fec0::/10", "192.88.99.0/24")))


@dataclass(frozen=True, slots=True)
class DnsName:
    """Workers that DNS knows by one name: of hosts that all serve on `port`, or of a service (SRV), with hosts and
    ports."""

    name: str
    port: int | None  # None: SRV

    def __str__(self) -> str:
        return f"{_DNS}{self.name}" + (f":{self.port}" if self.port else "")


@dataclass(frozen=True, slots=True)
class AddressFile:
    """Workers that a file names: one host:port a line. Empty lines, and those that begin with #, name none."""

    path: str

    def __str__(self) -> str:
        return f"{_FILE}{self.path}"


Named = DnsName | AddressFile  # workers that come and go


def parse_named(text: str) -> Named | None:
    """`dns:NAME:PORT`, `dns:_SERVICE._PROTO.NAME` or `file:PATH`. None for anything else. Raises ValueError."""
    if text.startswith(_FILE):
        if path := text.removeprefix(_FILE):
            return AddressFile(path)
        raise ValueError(f"{text!r} names no file: write file:PATH")
    if not text.startswith(_DNS):
        return None
    name, colon, port = text.removeprefix(_DNS).partition(":")
    is_service = name.startswith("_")
    is_name = all(re.fullmatch(r"[\w-]{1,63}", label, re.ASCII) for label in name.removesuffix(".").split("."))
    if not is_name or find_ip(name) or is_service == bool(colon) or not (is_service or is_port(port)):
        raise ValueError(
            f"{text!r} is no name to look up: write dns:NAME:PORT, or dns:_SERVICE._PROTO.NAME for SRV records"
        )
    return DnsName(name, None if is_service else int(port))


def is_port(text: str) -> bool:
    """Whether it is the number of a port that a process can listen on."""
    return text.isdecimal() and len(text) < 6 and 0 < int(text) <= MAX_PORT


def is_host_port(text: str) -> bool:
    """Whether it is host:port, an IPv6 host in brackets."""
    host, _, port = text.rpartition(":")
    return bool(host) and host == bracketed(host) and is_port(port)


def is_host_pattern(text: str) -> bool:
    """Whether it is a host's name or address, or *.SUFFIX for all names below one."""
    return re.fullmatch(r"(\*\.)?[\w-]+(\.[\w-]+)*|[0-9a-f:]+", text, re.ASCII | re.IGNORECASE) is not None


def matches_host(patterns: Iterable[str], host: str) -> bool:
    """Whether one of the patterns (see `is_host_pattern`) is the host, or stands for it. All in lower case."""
    return any(
        host.endswith(one[1:]) and find_ip(host) is None if one.startswith("*.") else host == one for one in patterns
    )


def split_host(authority: str) -> str:
    """The host of `host:port` or `host`, in lower case; empty for what is neither."""
    match = re.fullmatch(r"(\[[0-9a-f:.]+\]|[^\[\]:,\s]+)(:\d*)?", authority.lower())
    return match[1].removesuffix(".") if match else ""


def find_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address; None for a name."""
    try:
        return ipaddress.ip_address(bare(host))
    except ValueError:
        return None


def bare(host: str) -> str:
    """The host for sockets: an IPv6 address without brackets."""
    return host.removeprefix("[").removesuffix("]")


def bracketed(host: str) -> str:
    """The host for use before :port: an IPv6 address in brackets."""
    host = bare(host)
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether it is this machine only."""
    address = find_ip(host)
    return host == "localhost" if address is None else address.is_loopback


def is_public(host: str) -> bool:
    """Whether it is an address that the internet routes, not one that leads to another inside an IPv6 address."""
    address = find_ip(host)
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped
        if inner is None and (address.sixtofour or address.teredo):
            return False
        address = inner or address
    if address is None or any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def is_any(host: str) -> bool:
    """Whether it means all interfaces."""
    address = find_ip(host)
    return address is not None and address.is_unspecified
