"""Looks workers up, in DNS or a file, every LOOKUP_S seconds; the fleet has those. Lives on the asyncio thread.

in an answer ──► used ──MISSES answers in a row without it──► leaving: no new work ──no work left──► forgotten
                  ▲                                              │
                  └────────────── in an answer again ────────────┘
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

import dns.asyncresolver
import dns.exception
import dns.name
import dns.resolver
import structlog
from dns.rdatatype import RdataType
from dns.rdtypes.IN.SRV import SRV
from prometheus_client import CollectorRegistry, Counter

from gateway.router.fleet import Fleet
from gateway.router.worker_client import Identity, WorkerClient
from gateway.router.worker_view import Role
from runtime.addresses import AddressFile, DnsName, Named, bare, bracketed, is_host_port
from runtime.settings import ConfigError
from wire.files import check_file

log = structlog.get_logger()

LOOKUP_S = 2.0  # between two lookups of a name
ANSWER_S = 2.0  # for an answer
MISSES = 2  # more than one, as a server may leave out an address by chance
MOST_FILE_BYTES = 1 << 20
ANSWER_BYTES = 4096  # of an answer by UDP; without that, some servers name only the workers that fit into 512


class Discovery:
    """Keeps the fleet to what DNS and files name, besides the workers with fixed addresses."""

    def __init__(
        self, fleet: Fleet, names: Iterable[tuple[Role, Named]], server: str, registry: CollectorRegistry
    ) -> None:
        """`server`: IP:port to ask; empty: as the system is configured. Raises ConfigError if it is not."""
        self._fleet = fleet
        self._server = server
        self._known: dict[tuple[Role, Named], dict[str, int]] = {name: {} for name in names}
        self._failures: dict[tuple[Role, Named], str] = {}  # as logged
        self._asks_dns = any(isinstance(name, DnsName) for _role, name in self._known)
        self._task: asyncio.Task[None] | None = None
        text = "Lookups of workers' names that gave no address"
        self._failed = Counter("baton:dns_lookups_failed", text, ["name"], registry=registry)
        for _role, name in self._known:
            self._failed.labels(str(name))
        if self._asks_dns:
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
        if self._asks_dns and any(self._failures.values()) and not self._server:
            with suppress(ConfigError):
                self._resolver = _build_resolver("")  # the system may have got another server
        answers = await asyncio.gather(*(self._look_up(name) for _role, name in self._known))
        gone: list[WorkerClient] = []
        for (role, name), (found, failure) in zip(list(self._known), answers, strict=True):
            self._note(role, name, found, failure)
            gone += self._apply(role, name, found, is_whole=not failure)
        mark_duplicates(self._fleet.workers())
        for worker in gone:
            await worker.close()

    def _apply(self, role: Role, name: Named, found: set[str], is_whole: bool) -> Sequence[WorkerClient]:
        """Connect to new workers; returns the forgotten ones. Does not await, so no request is placed in between."""
        source, before = str(name), self._known[role, name]
        workers = self._fleet.of_role(role)
        if found and not is_whole:  # what is missing may be there: a worker that answers by itself is
            found |= {address for address in before if workers[address].find_trouble() is None}
        busy = {address for address in before if workers[address].num_mine}
        elsewhere = {address for address, worker in workers.items() if worker.source != source}
        now = self._known[role, name] = reconcile(before, found - elsewhere, busy)
        gone = [self._fleet.leave(role, address) for address in before.keys() - now.keys()]
        for address, num_missed in now.items():
            if address not in before:
                self._fleet.join(role, address, source, name.name if isinstance(name, DnsName) and name.port else "")
            worker = self._fleet.of_role(role)[address]
            if worker.is_leaving != is_leaving(num_missed):
                worker.is_leaving = not worker.is_leaving
                self._fleet.changes.mark()
        return gone

    def _note(self, role: Role, name: Named, found: set[str], failure: str) -> None:
        """Count an answer without addresses; log the first of failures in a row. Reasons that hold times differ."""
        if not found:
            self._failed.labels(str(name)).inc()
        before = self._failures.get((role, name), "")
        self._failures[role, name] = failure
        if failure and not before:
            log.warning("a lookup of workers failed; those known stay", name=str(name), reason=failure)
        elif before and not failure:
            log.info("the workers are found again", name=str(name))

    async def _look_up(self, name: Named) -> tuple[set[str], str]:
        """The addresses of a name, and why there are none, or perhaps not all."""
        if isinstance(name, AddressFile):
            return await asyncio.to_thread(_read_addresses, Path(name.path))
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
        return found, "; ".join(failures) or ("" if found else "the name does not exist, or has no address")

    async def _ask(self, name: DnsName, kind: RdataType) -> set[str]:
        """Raises DNSException or OSError."""
        try:
            records = await self._resolver.resolve(name.name, kind, lifetime=ANSWER_S, search=True)
        except (dns.resolver.NoAnswer, dns.resolver.NXDOMAIN):
            return set()
        if kind is RdataType.SRV:
            return _srv_addresses(records)
        return {f"{bracketed(record.address)}:{name.port}" for record in records}


def _read_addresses(path: Path) -> tuple[set[str], str]:
    """Reads the addresses in a file. Returns what `Discovery._look_up` does."""
    try:
        check_file(path, MOST_FILE_BYTES)
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        return set(), str(error)
    named = {line for line in lines if line and not line.startswith("#")}
    wrong = sorted(line for line in named if not is_host_port(line))
    failure = f"{path} has the line {wrong[0][:100]!r}: write host:port, such as 10.0.0.1:9000" if wrong else ""
    found = named.difference(wrong)
    return found, failure or ("" if found else f"{path} names no worker")


def _srv_addresses(records: Iterable[SRV]) -> set[str]:
    """Addresses of the lowest priority number. The others are for when none of these is there, which gateways notice.

    The target "." says that the service is not offered.
    """
    offered = [record for record in records if record.target != dns.name.root and record.port]
    least = min((record.priority for record in offered), default=0)
    hosts = [(record.target.to_text(omit_final_dot=True).lower(), record) for record in offered]
    return {f"{host}:{record.port}" for host, record in hosts if record.priority == least}


def _build_resolver(server: str) -> dns.asyncresolver.Resolver:
    """Raises ConfigError if this system has no DNS server."""
    resolver = dns.asyncresolver.Resolver(configure=False)
    if server:
        host, _, port = server.rpartition(":")
        resolver.nameservers, resolver.port = [bare(host)], int(port)
    else:
        try:
            resolver = dns.asyncresolver.Resolver()
        except (dns.exception.DNSException, OSError) as error:
            reason = f"this system has no DNS server ({error})"
            raise ConfigError(f"dns: names cannot be looked up, {reason}: set --dns-server to one") from error
    resolver.timeout = ANSWER_S / (2 * max(len(resolver.nameservers), 1))  # each server is asked twice
    resolver.use_edns(0, payload=ANSWER_BYTES)
    return resolver


def reconcile(known: Mapping[str, int], found: Set[str], busy: Collection[str]) -> dict[str, int]:
    """Addresses (host:port) to keep links to, the known ones first: address |-> answers in a row without it.

    `found`: the addresses of an answer. `busy`: addresses where requests of this gateway run.
    """
    if not found:
        return dict(known)
    kept = {address: 0 if address in found else num + 1 for address, num in known.items()}
    kept |= dict.fromkeys(sorted(found - kept.keys()), 0)
    return {address: num for address, num in kept.items() if not is_leaving(num) or address in busy}


def is_leaving(num_missed: int) -> bool:
    """Whether an address that `num_missed` answers in a row left out gets no new work."""
    return num_missed >= MISSES


def mark_duplicates(workers: Iterable[WorkerClient]) -> None:
    """A worker with two addresses gets requests at the first that answers, as long as that does."""
    firsts: dict[Identity, str] = {}  # worker |-> address
    for worker in workers:
        first = worker.address
        if worker.find_stall() is None and not worker.is_leaving:
            first = firsts.setdefault(worker.identity, first)
        duplicate_of = first if first != worker.address else ""
        if duplicate_of != worker.duplicate_of:
            worker.duplicate_of = duplicate_of
