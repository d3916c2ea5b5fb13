"""A request's JSON body, read within limits of size, time and nesting.

Knows ASGI messages and JSON; must not know what the fields mean.
"""

import asyncio

import pydantic_core
from starlette.requests import Request

from gateway.errors import ApiError, bad_request
from gateway.front import FrontOptions

# Parsing holds the event loop: 0.3 us per container, 0.5 us per key and 0.03 us per list element (measured). Within
# these limits, which a prompt of token ids or of quoted code stays under, it takes some 0.1 s at worst.
_MAX_CONTAINERS = 200_000
_MAX_ELEMENTS = 2_500_000


async def read_object(request: Request, options: FrontOptions) -> dict[str, object]:
    """The body as a JSON object. Raises ApiError 400, 408 or 413, and ClientDisconnect."""
    body = await _read_body(request, options)
    if _num_containers(body) > _MAX_CONTAINERS or body.count(b",") > _MAX_ELEMENTS:
        raise bad_request("the body has too many JSON elements", None, "body_too_complex")
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=True)  # NaN is refused later, by the field's name
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    return value


async def _read_body(request: Request, options: FrontOptions) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > options.max_body_bytes):
        raise _too_large(options)
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(options.body_timeout_s):
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > options.max_body_bytes:
                    raise _too_large(options)
                chunks.append(chunk)
    except TimeoutError as error:
        message = f"the body did not arrive within {options.body_timeout_s:g} s; send it faster"
        raise ApiError(408, message, None, "body_timeout") from error
    return b"".join(chunks)


def _num_containers(body: bytes) -> int:
    """Containers and keys, and such marks inside strings."""
    return sum(body.count(mark) for mark in (b"[", b"{", b":"))


def _too_large(options: FrontOptions) -> ApiError:
    return ApiError(
        413, f"the body is larger than {options.max_body_bytes} bytes; send a shorter one", None, "body_too_large"
    )
