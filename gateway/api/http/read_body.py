"""Reads a request's JSON body within limits of size, time and complexity."""

import codecs
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.access import waking_timeout
from gateway.api.http.access import CheckedRoute
from gateway.api.http.body import Body
from gateway.errors import ApiError, bad_request
from gateway.fair_turns import LoopTurn
from gateway.request.prepare import ServedModels
from gateway.tools.json_text import MAX_DIGITS, MAX_ELEMENTS, JsonBudget, LongNumberError

_MAX_PATH_CHARS = 200
_Members = Sequence[tuple[str, object]]
_LONG = object()  # stands for a number that is too long
_MAX_IDS = 400_000  # of several prompts, in addition to one that fills the context; 0.1 us each


def limited_route(served: ServedModels, other_types: Collection[str] = ()) -> type[CheckedRoute]:
    """Returns a route class that reads bodies within the limits before FastAPI validates them.

    `other_types`: content types besides JSON's whose bodies are JSON all the same.
    """

    class LimitedRoute(CheckedRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            body = self.body_field.field_info.annotation
            takes_ids = isinstance(body, type) and issubclass(body, Body) and body.takes_ids

            async def handle_read(request: Request) -> Response:
                request.state.turn = LoopTurn()
                try:
                    _check_content_type(request, other_types)
                    value = await _read_object(request, served, takes_ids=takes_ids)
                    await request.state.turn.step()
                    return await handle(_ReadRequest(request, value))
                finally:
                    request.state.turn.end()

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
    owner = request.state.key.name
    async with served.held.body(owner) as hold:
        async with in_time(served.options.body_timeout_s):
            body = (await _read_bytes(request, served, hold)).removeprefix(codecs.BOM_UTF8)
        turn = request.state.turn = served.new_turn(owner, len(body))
        await turn.step()
        budget = JsonBudget(elements=MAX_ELEMENTS + (served.context_tokens + _MAX_IDS if takes_ids else 0))
        try:
            marks = budget.take(body)
        except LongNumberError as error:
            await turn.step()
            path = (_find_long_number(body) or "")[:_MAX_PATH_CHARS]
            raise bad_request(f"{path or 'the body'} {error}", path or None, "body_too_complex") from error
        except ValueError as error:
            raise bad_request(f"the body {error}", None, "body_too_complex") from error
        await turn.step()
        try:
            value = pydantic_core.from_json(body, allow_inf_nan=True)  # NaN is refused later, with the field's name
        except ValueError as error:
            raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    if marks.count(b":") != _count_keys(value, marks.count(b"{")):
        path = (_find_path(json.loads(body, object_pairs_hook=tuple), _repeated_key) or "")[:_MAX_PATH_CHARS]
        raise bad_request(f"{path} comes twice in one JSON object; send it once", path or None, "invalid_json")
    return value


async def _read_bytes(request: Request, served: ServedModels, hold: Callable[[int], None]) -> bytes:
    """The body. `hold`: called with what has arrived of it. Raises as above."""
    advice = "send a shorter one, or raise --body-limit-bytes"
    chunks, num_bytes = list[bytes](), 0
    async for chunk in limited_chunks(request, served.options.max_body_bytes, advice):
        chunks.append(chunk)
        num_bytes += len(chunk)
        hold(num_bytes)
    return b"".join(chunks)


def _check_content_type(request: Request, others: Collection[str]) -> None:
    """Raises ApiError 415 unless the content type is JSON, missing or of `others`. Sets the header to JSON."""
    given = request.headers.get("content-type", "application/json")
    kind = given.partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and kind not in others:
        message = f"the body is {given[:100]!r}; send JSON with the header 'Content-Type: application/json'"
        raise ApiError(415, message, None, "unsupported_media_type")
    rest = [header for header in request.scope["headers"] if header[0] != b"content-type"]
    request.scope["headers"] = [*rest, (b"content-type", b"application/json")]


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
    """Bounds the time to read a body inside the block. Raises ApiError 408."""
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


def _find_path(value: object, find_wrong: Callable[[_Members], str | None]) -> str | None:
    """The path of the first wrong member, such as `messages[0].role`. Objects are tuples of (key, value).

    `find_wrong`: the key of one in an object or a list.
    """
    if not isinstance(value, (tuple, list)):
        return None
    members = value if isinstance(value, tuple) else [(f"[{index}]", inner) for index, inner in enumerate(value)]
    if (wrong := find_wrong(members)) is not None:
        return wrong
    for step, inner in members:
        if (found := _find_path(inner, find_wrong)) is not None:
            return f"{step}{found}" if found.startswith("[") else f"{step}.{found}"
    return None


def _repeated_key(members: _Members) -> str | None:
    seen: set[str] = set()
    for key, _ in members:
        if key in seen:
            return key
        seen.add(key)
    return None


def _find_long_number(body: bytes) -> str | None:
    """The path of a number with too many digits; None if there is none, or the body is not JSON."""

    def read(number: str) -> object:
        return _LONG if len(number) > MAX_DIGITS else None

    try:
        value = json.loads(body, object_pairs_hook=tuple, parse_int=read, parse_float=read)
        return _find_path(value, lambda members: next((key for key, inner in members if inner is _LONG), None))
    except (ValueError, RecursionError):
        return None
