"""Several generations of one prompt: the first one's session holds its KV, the others take it over.

The queue takes all of them with the first, or none. Lives on the asyncio thread.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.generation import SharedPrompt
from gateway.ring.admission import Admission, Expected
from gateway.ring.decode_link import RemoteSession


@dataclass(slots=True)
class Leader:
    """The generation that came first, as the others see it."""

    expected: Expected  # the others
    session: RemoteSession | None = None  # while it is open
    is_over: bool = False
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)  # set while there is a session, or will be none

    def open(self, session: RemoteSession) -> None:
        """An attempt has this session."""
        self.session = session
        self._has_news.set()

    def close(self) -> None:
        """The attempt is over. The next one may have a session to share."""
        self.session = None
        self._has_news.clear()

    def end(self) -> None:
        """There will be no session any more."""
        self.session, self.is_over = None, True
        self._has_news.set()

    async def find_session(self, timeout_s: float) -> RemoteSession | None:
        """Wait for the session to share; None when there is none."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.session is None and not self.is_over:
                    await self._has_news.wait()
        except TimeoutError:
            return None
        return self.session


@contextmanager
def admitted(shared: SharedPrompt | None, admission: Admission) -> Iterator[Leader | None]:
    """Held by each generation while it is under way. The leader, for whoever comes first; None for all others.

    Raises ApiError when the queue has no room for the first one and those that come with it.
    """
    others = find_leader(shared)
    if others is not None:
        admission.come(others.expected)
        yield None
        return
    with admission.admit(1 if shared is None else shared.num_choices) as expected:
        if shared is None:
            yield None
            return
        shared.leader = leader = Leader(expected)
        try:
            yield leader
        finally:
            leader.end()


def find_leader(shared: SharedPrompt | None) -> Leader | None:
    """Whose session to share."""
    if shared is None:
        return None
    assert shared.leader is None or isinstance(shared.leader, Leader)
    return shared.leader
