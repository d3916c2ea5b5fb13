"""Asks DNS for workers, again and again, and has the fleet open and close links. Lives on the asyncio thread.

What follows from an answer is dns_names.py's.
"""

import asyncio
from collections.abc import Iterable, Sequence, Set

import dns.asyncresolver
import dns.exception
import dns.resolver
import structlog
from dns.rdatatype import RdataType
from prometheus_client import CollectorRegistry, Counter

from gateway.ring.dns_names import is_leaving, reconcile
from gateway.ring.fleet import Fleet
from gateway.ring.request_steps import Role
from gateway.ring.worker_link import WorkerLink
from runtime.addresses import DnsName, bracketed
from runtime.settings import ConfigError

log = structlog.get_logger()

LOOKUP_S = 2.0  # between two lookups of a name, and for an answer


class Discovery:
    """Keeps the fleet's links those that DNS names, besides those with fixed addresses."""

    def __init__(
        self, fleet: Fleet, names: Iterable[tuple[Role, DnsName]], server: str, registry: CollectorRegistry
    ) -> None:
        """`server`: host:port to ask; empty: as the system is configured. Raises ConfigError if it is not."""
        self._fleet = fleet
        self._known: dict[tuple[Role, DnsName], dict[str, int]] = {name: {} for name in names}
        self._failures: dict[tuple[Role, DnsName], str] = {}  # as logged
        self._task: asyncio.Task[None] | None = None
        text = "Lookups of workers' names that failed or gave nothing"
        self._failed = Counter("baton:dns_lookups_failed", text, ["name"], registry=registry)
        for _role, name in self._known:
            self._failed.labels(str(name))
        if self._known:
            self._resolver = _build_resolver(server)

    async def start(self) -> None:
        """Returns after the first answers."""
        if self._known:
            await self._look_up_all()
            self._task = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(LOOKUP_S)
            try:
                await self._look_up_all()
            except Exception:
                log.exception("looking up workers failed; tried again")

    async def _look_up_all(self) -> None:
        answers = await asyncio.gather(*(self._look_up(name) for _role, name in self._known))
        gone: list[WorkerLink] = []
        for (role, name), (found, failure) in zip(list(self._known), answers, strict=True):
            self._note_failure(role, name, failure)
            gone += self._apply(role, name, found)
        self._fleet.find_doubles()
        for link in gone:
            await link.close()

    def _apply(self, role: Role, name: DnsName, found: Set[str]) -> Sequence[WorkerLink]:
        """Open links, and forget others, which are returned. Without yielding: nothing is placed meanwhile."""
        source, before = str(name), self._known[role, name]
        links = self._fleet.links_of(role)
        busy = {address for address in before if links[address].state.num_mine}
        elsewhere = {address for address, link in links.items() if link.state.source != source}
        now = self._known[role, name] = reconcile(before, found - elsewhere, busy)
        gone = [self._fleet.leave(role, address) for address in before.keys() - now.keys()]
        for address, num_missed in now.items():
            if address not in before:
                self._fleet.join(role, address, source, name.name if name.port else "")
            self._fleet.set_leaving(role, address, is_leaving(num_missed))
        return gone

    def _note_failure(self, role: Role, name: DnsName, failure: str) -> None:
        """Count it; log the first in a row. Reasons that hold times differ each time."""
        if failure:
            self._failed.labels(str(name)).inc()
        before = self._failures.get((role, name), "")
        self._failures[role, name] = failure
        if failure and not before:
            log.warning("a lookup of workers failed; those known stay", name=str(name), reason=failure)
        elif before and not failure:
            log.info("DNS knows the workers again", name=str(name))

    async def _look_up(self, name: DnsName) -> tuple[set[str], str]:
        """The addresses of a name, and why there are none."""
        types = (RdataType.A, RdataType.AAAA) if name.port else (RdataType.SRV,)
        answers = await asyncio.gather(*(self._ask(name, kind) for kind in types), return_exceptions=True)
        found, failures = set[str](), []
        for answer in answers:
            if isinstance(answer, set):
                found |= answer
            elif isinstance(answer, dns.exception.DNSException | OSError):
                failures.append(str(answer) or type(answer).__name__)
            else:
                raise answer
        return found, "" if found else "; ".join(failures) or "it has no address"

    async def _ask(self, name: DnsName, kind: RdataType) -> set[str]:
        """Raises DNSException or OSError."""
        try:
            records = await self._resolver.resolve(name.name, kind, lifetime=LOOKUP_S, search=True)
        except dns.resolver.NoAnswer:
            return set()
        if kind is RdataType.SRV:
            return {f"{record.target.to_text(omit_final_dot=True)}:{record.port}" for record in records}
        return {f"{bracketed(record.address)}:{name.port}" for record in records}


def _build_resolver(server: str) -> dns.asyncresolver.Resolver:
    if not server:
        try:
            return dns.asyncresolver.Resolver()
        except (dns.exception.DNSException, OSError) as error:
            reason = f"this system has no DNS server ({error})"
            raise ConfigError(f"dns: names cannot be looked up, {reason}: set --dns-server to one") from error
    host, _, port = server.rpartition(":")
    resolver = dns.asyncresolver.Resolver(configure=False)
    try:
        resolver.nameservers, resolver.port = [host.strip("[]")], int(port)
    except ValueError as error:
        raise ConfigError(f"dns_server={server!r} cannot be used: --dns-server needs an IP address and port") from error
    return resolver
