"""What REST and gRPC share: API keys, request ids, warnings, and how long a client may take."""

import asyncio
import hmac
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gateway.errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
WARNING_HEADER = "x-baton-warning"
MAX_WARNING_CHARS = 1024
_MAX_ID_CHARS = 128
_SLICES = 10


def check_key(authorization: bytes, api_keys: Sequence[str], api_key: bytes | None = None) -> None:
    """Raises ApiError 401 unless a header has one of the keys, if there are any. Compares in constant time.

    `authorization`: the header's value, `Bearer <key>`; `api_key`: the value of the header x-api-key.
    """
    if api_keys and find_key(authorization, api_keys, api_key) is None:
        message = "a valid API key is needed; send it as 'Authorization: Bearer <key>'"
        raise ApiError(401, message, None, "invalid_api_key")


def check_admin(authorization: bytes, admin_key: str) -> None:
    """Raises ApiError 403 if there is no admin key, 401 unless `authorization` has it as in `check_key`."""
    if not admin_key:
        message = "start the gateway with --admin-key (BATON_ADMIN_KEY) if adapters should be loaded and unloaded here"
        raise ApiError(403, message, None, "no_admin_key")
    if find_key(authorization, (admin_key,)) is None:
        message = "the key given as --admin-key is needed; send it as 'Authorization: Bearer <key>'"
        raise ApiError(401, message, None, "invalid_admin_key")


def find_key(authorization: bytes, api_keys: Sequence[str], api_key: bytes | None = None) -> str | None:
    """The one of the keys that the headers have, as in `check_key`; None if they have none."""
    scheme, _, given = authorization.strip().partition(b" ")
    found = None
    for key in api_keys:
        is_bearer = hmac.compare_digest(given.strip(), key.encode()) and scheme.lower() == b"bearer"
        if is_bearer or (api_key is not None and hmac.compare_digest(api_key.strip(), key.encode())):
            found = key
    return found


def pick_request_id(given: str | None) -> str:
    """Returns the client's id if it is short printable ASCII, else a new one."""
    if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(12)}"


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
