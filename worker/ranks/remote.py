"""A rank on another host, as rank 0 sees it: it answers calls over TCP, and has ended when its connection has."""

import asyncio
import errno
import os
import select
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec

from runtime.child import END_S, Answerer, AnswerT


class RemoteRank(Answerer[AnswerT]):
    """Its process is its own host's, which ends it when this connection ends."""

    def __init__(self, link: socket.socket, start: msgspec.Struct, answers: Any, where: str) -> None:
        """`link`: watched, see meeting.py. `where`: its host."""
        super().__init__(link, start, answers)
        self._where = where
        self._link = link.dup()  # while asyncio has the other
        self.ended: Future[int] = Future()
        self.ended.set_running_or_notify_cancel()
        threading.Thread(target=self._watch, name="rank", daemon=True).start()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._link, select.POLLRDHUP)
        ((_fd, found),) = poller.poll()
        why = "hung up"
        if found & (select.POLLERR | select.POLLHUP):  # else it has ended the connection itself
            number = self._link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.ETIMEDOUT  # asyncio may take it
            why = f"does not answer: {os.strerror(number)}"
        self.trouble = self.trouble or f"{self._where} {why}"
        self.ended.set_result(1)

    async def wait(self, timeout_s: float | None = None) -> int:
        return await asyncio.wait_for(asyncio.wrap_future(self.ended), timeout_s)

    def kill(self) -> None:
        with suppress(OSError):  # it has ended
            self._link.shutdown(socket.SHUT_RDWR)

    async def close(self, timeout_s: float = END_S) -> None:
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_WR)
        await super().close(timeout_s)
