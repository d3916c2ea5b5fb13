"""A TCP proxy between two processes that misbehaves on command. Runs an asyncio loop in its own thread."""

import asyncio
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

CHUNK_BYTES = 1 << 16
CALL_S = 10.0


class FaultProxy:
    """Forwards connections to a target. Use with `with`; callable from any thread.

    Faults, all off at first: `delay_s` delays each chunk of data, `loss` is a chunk's chance to cost its connection,
    `hold` lets nothing pass in either direction until `release`, which lets the held data pass.
    """

    def __init__(self, host: str, port: int, target_host: str, target_port: int, seed: int = 0) -> None:
        self.address = f"{host}:{port}"
        self.num_lost = 0  # connections cut by `loss`
        self._where = (host, port)
        self._target = (target_host, target_port)
        self._random = random.Random(seed)
        self._delay_s = 0.0
        self._loss = 0.0
        self._passes = asyncio.Event()  # cleared while held
        self._passes.set()
        self._links: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy {self.address}", daemon=True)

    def __enter__(self) -> "FaultProxy":
        self._thread.start()
        self._server = self._call(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)

    # -- faults --------------------------------------------------------------------------------------------------

    def set_delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def set_loss(self, chance: float) -> None:
        self._loss = chance

    def hold(self) -> None:
        """A partition: sockets stay open, new ones are accepted, and no byte passes."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def release(self) -> None:
        """End the partition."""
        self._loop.call_soon_threadsafe(self._passes.set)

    def cut(self) -> None:
        """Reset all connections; new ones are forwarded."""
        self._call(self._cut())

    def heal(self) -> None:
        """Turn all faults off."""
        self._delay_s = self._loss = 0.0
        self.release()

    # -- on the loop's thread ----------------------------------------------------------------------------------------

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, *self._where)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        far: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._passes.wait()
            far_reader, far = await asyncio.open_connection(*self._target)
            pumps = [asyncio.create_task(self._pump(reader, far)), asyncio.create_task(self._pump(far_reader, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # nothing listens there, or `cut`: just end the connection
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, far):
                if end is not None:
                    end.transport.abort()
            self._links.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(self._delay_s)
                await self._passes.wait()
                if self._loss and self._random.random() < self._loss:
                    self.num_lost += 1
                    return
                writer.write(data)
                await writer.drain()

    async def _cut(self) -> None:
        links = list(self._links)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
