"""All workers of this gateway: links by address, and what the policy sees of them."""

from collections.abc import Callable, Sequence

import structlog

from gateway.ring.decode_link import DecodeLink
from gateway.ring.policy import WorkerView
from gateway.ring.worker_link import LinkOptions, PrefillLink, WorkerLink
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
        self._context_tokens = context_tokens
        self._subscribers: list[Callable[[], None]] = [self._report_mismatches]
        self._compared: set[tuple[str, ...]] = set()  # incarnations of workers and of pairs already compared
        options = LinkOptions(heartbeat_s, stall_s, self._notify, open_channel)
        self.prefill = {address: PrefillLink(address, options) for address in prefill}
        self.decode = {address: DecodeLink(address, options) for address in decode}

    def _report_mismatches(self) -> None:
        """Say once, naming both values, which alive workers refuse what we accept, or cannot exchange pages."""
        for link in self.links():
            if self._is_news(link) and link.status.context_tokens < self._context_tokens:
                reason = f"max_context_tokens here {self._context_tokens}, there {link.status.context_tokens}"
                log.error("a worker has less context than the gateway", there=link.address, reason=reason)
        for prefill in self.prefill.values():
            for decode in self.decode.values():
                if not self._is_news(prefill, decode):
                    continue
                mismatch = find_mismatch(prefill.status.peer.layout, decode.status.peer.layout)
                if mismatch is not None:
                    log.error("workers do not match", here=prefill.address, there=decode.address, reason=mismatch)

    def _is_news(self, *links: WorkerLink) -> bool:
        """Whether these are alive and were not compared before; from now on they were."""
        incarnations = tuple(link.status.peer.incarnation for link in links)
        if incarnations in self._compared or any(link.find_trouble() for link in links):
            return False
        self._compared.add(incarnations)
        return True

    def subscribe(self, on_change: Callable[[], None]) -> None:
        self._subscribers.append(on_change)

    def _notify(self) -> None:
        for on_change in self._subscribers:
            on_change()

    def links(self) -> list[WorkerLink]:
        return [*self.prefill.values(), *self.decode.values()]

    def views(self) -> list[WorkerView]:
        return [link.view() for link in self.links()]

    def start(self) -> None:
        for link in self.links():
            link.start()

    async def close(self) -> None:
        for link in self.links():
            await link.close()
