"""Several generations of one prompt: the first one's session holds its KV, the others take it over.

Lives on the asyncio thread.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.generation import SharedPrompt
from gateway.ring.decode_link import RemoteSession


@dataclass(slots=True)
class Leader:
    """The generation that came first, as the others see it."""

    session: RemoteSession | None = None  # while it is open
    _is_settled: asyncio.Event = field(default_factory=asyncio.Event)  # it has a session, or will have none to share

    def settle(self, session: RemoteSession | None) -> None:
        """The first attempt has this session, or is over."""
        self.session = session
        self._is_settled.set()

    async def find_session(self, timeout_s: float) -> RemoteSession | None:
        """Wait for the session to share; None when there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_settled.wait()
        except TimeoutError:
            return None
        return self.session


@contextmanager
def lead(shared: SharedPrompt | None) -> Iterator[Leader | None]:
    """The leader to settle, for whoever comes first; None for the others and for those who share nothing."""
    if shared is None or shared.leader is not None:
        yield None
        return
    shared.leader = leader = Leader()
    try:
        yield leader
    finally:
        leader.settle(None)


def find_leader(shared: SharedPrompt | None) -> Leader | None:
    """Whose session to share."""
    if shared is None:
        return None
    assert shared.leader is None or isinstance(shared.leader, Leader)
    return shared.leader
