"""All workers of this gateway: links by address, and what the policy sees of them."""

from collections.abc import Callable, Sequence

from gateway.decode_link import DecodeLink
from gateway.policy import WorkerView
from gateway.worker_link import PrefillLink, WorkerLink


class Fleet:
    """Owns the links. Subscribers are called whenever a worker may have got room, appeared or died."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], heartbeat_s: float, stall_s: float) -> None:
        self._subscribers: list[Callable[[], None]] = []
        self.prefill = {address: PrefillLink(address, heartbeat_s, stall_s, self._notify) for address in prefill}
        self.decode = {address: DecodeLink(address, heartbeat_s, stall_s, self._notify) for address in decode}

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
