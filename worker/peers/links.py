"""Connections to peers, one per address: as many as are useful, and none that failed. Lives on the asyncio thread.

An address comes with a call, so it may be invented, or its peer gone:

    opened ──used──► idle, connected ──used──► ...
              │            └── many others were used since ──► closed
              └── not connected when its last user is done ──► closed
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from runtime.rpc import OpenChannel

MOST_IDLE = 256  # more than the workers of a role that one peer serves
LinkT = TypeVar("LinkT")


@dataclass(slots=True, eq=False)
class _Entry(Generic[LinkT]):
    channel: grpc.aio.Channel
    link: LinkT
    num_users: int = 0


class PeerLinks(Generic[LinkT]):
    """Owns the channels. A link is what the caller makes of one, and lives as long."""

    def __init__(self, open_channel: OpenChannel, build: Callable[[grpc.aio.Channel], LinkT]) -> None:
        self._open_channel = open_channel
        self._build = build
        self._entries: dict[str, _Entry[LinkT]] = {}  # address |->, the one used last is the last

    def items(self) -> Iterator[tuple[str, LinkT]]:
        return ((address, entry.link) for address, entry in self._entries.items())

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[LinkT]:
        """The link to a peer, which stays open meanwhile."""
        entry = self._entries.pop(address, None) or self._open(address)
        self._entries[address] = entry
        entry.num_users += 1
        try:
            yield entry.link
        finally:
            entry.num_users -= 1
            await self._close_useless(address, entry)

    def _open(self, address: str) -> _Entry[LinkT]:
        channel = self._open_channel(address)
        return _Entry(channel, self._build(channel))

    async def _close_useless(self, address: str, entry: _Entry[LinkT]) -> None:
        """This one, if it has no connection; then those unused for longest, while there are too many."""
        useless = [one for one, other in self._entries.items() if not other.num_users][:-MOST_IDLE]
        if not entry.num_users and entry.channel.get_state() is not grpc.ChannelConnectivity.READY:
            useless.append(address)
        for closed in [self._entries.pop(one) for one in dict.fromkeys(useless)]:
            await closed.channel.close()

    async def close(self) -> None:
        for entry in self._entries.values():
            await entry.channel.close()
