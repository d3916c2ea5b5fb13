"""All workers of this gateway: links by address, and what the policy sees of them. Lives on the asyncio thread."""

import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from gateway.ring.decode_link import DecodeLink
from gateway.ring.decode_state import DecodeState
from gateway.ring.policy import WorkerView
from gateway.ring.request_steps import Role
from gateway.ring.worker_link import PrefillLink
from gateway.ring.worker_state import WorkerState
from kvtransfer.layout import find_mismatch
from runtime import rpc
from runtime.rpc import OpenChannel

log = structlog.get_logger()


class Fleet:
    """Owns the links. Subscribers are called whenever a worker may have got room, appeared or died."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        heartbeat_s: float,
        stall_s: float,
        context_tokens: int,
        open_channel: OpenChannel = rpc.open_channel,
    ) -> None:
        """context_tokens: the longest prompt and answer that this gateway accepts."""
        self._limits = heartbeat_s, stall_s
        self._context_tokens = context_tokens
        self._open_channel = open_channel
        self._subscribers: list[Callable[[], None]] = [self._report_mismatches, self._report_outage]
        self._is_started = False
        self._serving: dict[Role, bool] = {}  # whether a worker of the role takes requests, as logged
        self._compared: set[str] = set()  # incarnations compared with all others in the set
        self.on_join: Callable[[WorkerState], None] = lambda _worker: None  # called when a worker appears
        self.on_leave: Callable[[WorkerState], None] = lambda _worker: None  # called when one has gone
        self.prefill: dict[str, PrefillLink] = {}
        self.decode: dict[str, DecodeLink] = {}
        for address in prefill:
            self.join("prefill", address)
        for address in decode:
            self.join("decode", address)

    def join(self, role: Role, address: str, source: str = "", server_name: str = "") -> None:
        """Open a link. `source`: the DNS name that has the address. `server_name`: as in `OpenChannel`."""
        channel = self._open_channel(address, server_name)
        link: PrefillLink | DecodeLink
        if role == "prefill":
            link = self.prefill[address] = PrefillLink(WorkerState(role, address, *self._limits, source), channel)
        else:
            link = self.decode[address] = DecodeLink(DecodeState(address, *self._limits, source), channel)
        link.state.on_change = self._notify
        self.on_join(link.state)
        if source:
            log.info("worker found", role=role, address=address, source=source)
        if self._is_started:
            link.start()

    def leave(self, role: Role, address: str) -> PrefillLink | DecodeLink:
        """Forget a worker where no request runs. The caller closes its link."""
        link = self.prefill.pop(address) if role == "prefill" else self.decode.pop(address)
        self.on_leave(link.state)
        self._compared.discard(link.state.status.peer.incarnation)
        log.info("worker left", role=role, address=address, source=link.state.source)
        return link

    def set_leaving(self, role: Role, address: str, is_leaving: bool) -> None:
        """Whether the worker gets no new requests, as DNS does not name it any more."""
        state = self.links_of(role)[address].state
        if state.is_leaving != is_leaving:
            state.is_leaving = is_leaving
            self._notify()

    def mark_duplicates(self) -> None:
        """A worker with two addresses gets requests at the first that answers, as long as that does."""
        now = time.monotonic()
        firsts: dict[str, str] = {}  # incarnation |-> address
        for link in self.links():
            state = link.state
            first = state.address
            if state.find_stall(now) is None and not state.is_leaving:
                first = firsts.setdefault(state.status.peer.incarnation, first)
            state.duplicate_of = first if first != state.address else ""

    def _report_mismatches(self) -> None:
        """Log once, naming both values, which alive workers refuse what we accept, or cannot exchange pages."""
        for link in self.links():
            status = link.state.status
            incarnation = status.peer.incarnation
            if incarnation in self._compared or link.find_trouble():
                continue
            self._compared.add(incarnation)
            if status.context_tokens < self._context_tokens:
                reason = f"max_context_tokens here {self._context_tokens}, there {status.context_tokens}"
                log.error("a worker has less context than the gateway", there=link.address, reason=reason)
            if isinstance(link, PrefillLink):
                for decode in self.decode.values():
                    self._report_pair(link, decode)
            else:
                for prefill in self.prefill.values():
                    self._report_pair(prefill, link)

    def _report_pair(self, prefill: PrefillLink, decode: DecodeLink) -> None:
        """Unless one of them was not alive yet: it is compared when it is."""
        here, there = prefill.state.status.peer, decode.state.status.peer
        if here.incarnation in self._compared and there.incarnation in self._compared:
            mismatch = find_mismatch(here.layout, there.layout)
            if mismatch is not None:
                log.error("workers do not match", here=prefill.address, there=decode.address, reason=mismatch)

    def _report_outage(self) -> None:
        """Log once that no worker of a role takes requests any more, and once that one does again."""
        effects: dict[Role, str] = {
            "prefill": "--no-prefill says what follows",
            "decode": "they wait, then get a 503",
        }
        for role, effect in effects.items():
            troubles = {address: link.find_trouble() for address, link in self.links_of(role).items()}
            was_serving = self._serving.get(role, False)
            is_serving = bool(troubles) and not all(troubles.values())
            if is_serving and not was_serving:
                log.info(f"{role} workers take requests")
            elif was_serving and not is_serving:
                reason = "; ".join(f"{address} {trouble}" for address, trouble in troubles.items())
                log.error(f"no {role} worker takes requests: {effect}", reason=reason or "none is known")
            self._serving[role] = is_serving

    def subscribe(self, on_change: Callable[[], None]) -> None:
        self._subscribers.append(on_change)

    def _notify(self) -> None:
        for on_change in self._subscribers:
            on_change()

    def links_of(self, role: Role) -> Mapping[str, PrefillLink | DecodeLink]:
        """address |-> link"""
        return self.prefill if role == "prefill" else self.decode

    def links(self) -> list[PrefillLink | DecodeLink]:
        return [*self.prefill.values(), *self.decode.values()]

    def states(self) -> list[WorkerState]:
        return [link.state for link in self.links()]

    def views(self) -> list[WorkerView]:
        now = time.monotonic()
        return [state.view(now) for state in self.states()]

    def start(self) -> None:
        self._is_started = True
        for link in self.links():
            link.start()

    async def close(self) -> None:
        for link in self.links():
            await link.close()
