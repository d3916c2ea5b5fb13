"""Request ids, warnings, and how long a client may take: shared by REST and gRPC."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import structlog

from gateway.access.keys import Key

REQUEST_ID_HEADER = "x-request-id"
WARNING_HEADER = "x-baton-warning"
MAX_WARNING_CHARS = 1024
_MAX_ID_CHARS = 128
_SLICES = 10


def pick_request_id(given: str | None) -> str:
    """Returns the client's id if it is short printable ASCII, else a new one."""
    if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(12)}"


def log_key(key: Key) -> None:
    """Lines of this request's log have its key's name from now on."""
    if key.name:
        structlog.contextvars.bind_contextvars(key=key.name)


def unique_id(request_id: str) -> str:
    """Returns a unique id for the workers: clients may reuse a request id, even in concurrent requests."""
    return f"{request_id}.{secrets.token_hex(4)}"


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Warnings about parts of a request without effect, for a header or metadata: printable ASCII; names may be any."""
    text = "; ".join(warnings)
    shown = "".join(char if " " <= char <= "~" else f"\\u{ord(char):04x}" for char in text)
    return {WARNING_HEADER: shown[:MAX_WARNING_CHARS]} if shown else {}


@asynccontextmanager
async def waking_timeout(seconds: float) -> AsyncIterator[None]:
    """Like asyncio.timeout, but a stop of this process counts as a tenth of the limit at most.

    A plain deadline would blame the client for our pause. Raises TimeoutError at the end of the block.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def begin_slice(num_left: int) -> None:
        nonlocal timer
        timer = loop.call_later(seconds / _SLICES, end_slice, num_left - 1)

    def end_slice(num_left: int) -> None:
        if num_left:
            begin_slice(num_left)
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        begin_slice(_SLICES)
        try:
            yield
        finally:
            timer.cancel()
