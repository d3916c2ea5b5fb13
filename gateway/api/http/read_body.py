"""Reads a request's JSON body within limits of size, time and complexity."""

import asyncio
import codecs
import json
from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.access import waking_timeout
from gateway.api.http.access import CheckedRoute
from gateway.api.http.body import Body
from gateway.errors import ApiError, bad_request, overloaded
from gateway.held import Holder
from gateway.request.prepare import ServedModels
from gateway.tools.json_text import MAX_ELEMENTS, JsonBudget

_MAX_PATH_CHARS = 200
_MAX_IDS = 400_000  # of several prompts, in addition to one that fills the context; 0.1 us each


def limited_route(served: ServedModels) -> type[CheckedRoute]:
    """Returns a route class that reads bodies within the limits before FastAPI validates them."""

    class LimitedRoute(CheckedRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            body = self.body_field.field_info.annotation
            takes_ids = isinstance(body, type) and issubclass(body, Body) and body.takes_ids

            async def handle_read(request: Request) -> Response:
                value = await _read_object(request, served, takes_ids=takes_ids)
                await sleep(0)  # lets other requests run between reading and checking a long body
                return await handle(_ReadRequest(request, value))

            return handle_read

    return LimitedRoute


class _ReadRequest(Request):
    """A request whose body has been read and parsed."""

    def __init__(self, request: Request, value: dict[str, object]) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        return b"{}"  # the bytes are not kept

    async def json(self) -> dict[str, object]:
        return self._value


async def _read_object(request: Request, served: ServedModels, *, takes_ids: bool) -> dict[str, object]:
    """Returns the body as a JSON object. Raises ApiError 400, 408, 413 or 415, and ClientDisconnect."""
    _check_content_type(request)
    async with in_time(served.options.body_timeout_s):
        body = (await _read_bytes(request, served)).removeprefix(codecs.BOM_UTF8)
    budget = JsonBudget(elements=MAX_ELEMENTS + (served.context_tokens + _MAX_IDS if takes_ids else 0))
    try:
        marks = budget.take(body)
    except ValueError as error:
        raise bad_request(f"the body {error}", None, "body_too_complex") from error
    await sleep(0)  # counting and parsing are a step each
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=True)  # NaN is refused later, with the field's name
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    if marks.count(b":") != _count_keys(value, marks.count(b"{")):
        path = (_repeated_key(json.loads(body, object_pairs_hook=tuple)) or "")[:_MAX_PATH_CHARS]
        raise bad_request(f"{path} comes twice in one JSON object; send it once", path or None, "invalid_json")
    return value


async def _read_bytes(request: Request, served: ServedModels) -> bytes:
    """The body, of which all that has arrived counts as held. Raises as above, and ApiError 429."""
    advice = "send a shorter one, or raise --body-limit-bytes"
    chunks, num_bytes = list[bytes](), 0
    try:
        async with asyncio.timeout(None) as limit:
            owner = request.state.key.name
            holder = Holder(owner, lambda: limit.reschedule(asyncio.get_running_loop().time()))
            try:
                async for chunk in limited_chunks(request, served.options.max_body_bytes, advice):
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    served.held.hold(holder, num_bytes)
                return b"".join(chunks)
            finally:
                served.held.end(holder)
    except TimeoutError as error:
        why = "the body came slowly while clients sent too much at once; send it again in a moment"
        raise overloaded(why) from error


def _check_content_type(request: Request) -> None:
    """Raises ApiError 415 unless the content type is JSON or missing. Sets the header to application/json."""
    given = request.headers.get("content-type", "application/json")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        message = f"the body is {given[:100]!r}; send JSON with the header 'Content-Type: application/json'"
        raise ApiError(415, message, None, "unsupported_media_type")
    others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
    request.scope["headers"] = [*others, (b"content-type", b"application/json")]


async def limited_chunks(request: Request, most: int, advice: str) -> AsyncGenerator[bytes, None]:
    """Yields a body of at most `most` bytes as it arrives. Raises ApiError 413 or 415, and ClientDisconnect."""
    if (coding := request.headers.get("content-encoding", "").lower()) not in ("", "identity"):
        why = f"the body's Content-Encoding is {coding[:100]!r}; send it as it is, without one"
        raise ApiError(415, why, None, "unsupported_media_type")
    message = f"the body is larger than {most} bytes; {advice}"
    too_large = ApiError(413, message, None, "body_too_large")
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > most):
        raise too_large
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > most:
            raise too_large
        yield chunk


@asynccontextmanager
async def in_time(timeout_s: float) -> AsyncIterator[None]:
    """Around reading a body. Raises ApiError 408."""
    try:
        async with waking_timeout(timeout_s):
            yield
    except TimeoutError as error:
        message = f"the body did not arrive within {timeout_s:g} s; send it faster"
        raise ApiError(408, message, None, "body_timeout") from error


def _count_keys(value: object, num_objects: int) -> int:
    """Returns the number of keys of all objects in a parsed value with at most `num_objects` objects."""
    num_keys, rest = 0, [value]
    while rest and num_objects:
        item = rest.pop()
        if isinstance(item, dict):
            num_objects -= 1
            num_keys += len(item)
            rest += item.values()
        elif isinstance(item, list):
            rest += [inner for inner in item if isinstance(inner, (dict, list))]
    return num_keys


def _repeated_key(value: object) -> str | None:
    """The first repeated key by its path, such as `messages[0].role`. Objects are tuples of (key, value)."""
    if isinstance(value, tuple):
        seen: set[str] = set()
        for key, _ in value:
            if key in seen:
                return str(key)
            seen.add(key)
    if isinstance(value, (tuple, list)):
        for index, member in enumerate(value):
            step, inner = member if isinstance(value, tuple) else (f"[{index}]", member)
            if isinstance(inner, (tuple, list)) and (found := _repeated_key(inner)) is not None:
                return f"{step}{found}" if found.startswith("[") else f"{step}.{found}"
    return None
