"""A DNS server on a free port of the loopback interface; tests change its records while it answers."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import dns.exception
import dns.message
import dns.rcode
import dns.rrset
from dns.rdatatype import RdataType

Key = tuple[str, str]  # name without a dot at its end, record type


@dataclass
class DnsServer:
    """Its records; answers NXDOMAIN for names without any."""

    socket: socket.socket
    records: dict[Key, Sequence[str]] = field(default_factory=dict)
    is_silent: bool = False
    failing: set[str] = field(default_factory=set)  # record types that get SERVFAIL
    num_asked: int = 0
    num_short: int = 0  # queries that allow no answer above 512 bytes

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()
        return f"{host}:{port}"

    def name_hosts(self, name: str, *hosts: str) -> None:
        """A and AAAA records."""
        self.records[name, "A"] = [host for host in hosts if ":" not in host]
        self.records[name, "AAAA"] = [host for host in hosts if ":" in host]

    def name_services(self, name: str, *ports: int, host: str = "worker.test") -> None:
        """SRV records of services on these ports of one host, 127.0.0.1."""
        self.name_hosts(host, "127.0.0.1")
        self.records[name, "SRV"] = [f"0 0 {port} {host}." for port in ports]

    def run(self) -> None:
        while True:
            try:
                data, client = self.socket.recvfrom(4096)
            except OSError:  # closed
                return
            self.num_asked += 1
            if not self.is_silent:
                with suppress(OSError, dns.exception.DNSException):
                    self.socket.sendto(self._answer(dns.message.from_wire(data)), client)

    def _answer(self, query: dns.message.Message) -> bytes:
        answer = dns.message.make_response(query)
        (question,) = query.question
        self.num_short += query.payload <= 512
        if RdataType(question.rdtype).name in self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
            return answer.to_wire()
        name = question.name.to_text(omit_final_dot=True)
        if values := self.records.get((name, RdataType(question.rdtype).name)):
            answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", question.rdtype, *values))
        elif not any(known == name and values for (known, _), values in self.records.items()):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer.to_wire()


@contextmanager
def dns_server() -> Iterator[DnsServer]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        server = DnsServer(listener)
        threading.Thread(target=server.run, daemon=True).start()
        yield server
