"""The endpoints of stored answers."""

import re
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.http.answer import encode, json_response
from gateway.api.http.body import MAX_METADATA, Body, check_metadata
from gateway.api.http.errors import RESPONSES_PATH
from gateway.api.http.pages import cut_page
from gateway.api.http.read_body import limited_route
from gateway.api.openapi import ChatCompletion
from gateway.api.responses.answers import ResponseBody
from gateway.errors import ApiError, bad_request
from gateway.request.prepare import ServedModels
from gateway.store.keeper import AnswerKeeper
from gateway.store.kinds import Kind, show
from gateway.store.replay import as_items

_ONE = RESPONSES_PATH + "/{response_id}"
_CHATS = "/v1/chat/completions"
_CHAT = _CHATS + "/{completion_id}"
_LABEL = re.compile(r"metadata\[(.{1,64})\]")
_LABELS = {
    "name": "metadata",
    "in": "query",
    "style": "deepObject",
    "schema": {"type": "object", "additionalProperties": {"type": "string"}},
}
Order = Literal["asc", "desc"]


class DeletedResponse(msgspec.Struct):
    """An answer is gone."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class DeletedCompletion(msgspec.Struct):
    """A chat's answer is gone."""

    id: str
    deleted: bool = True
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"


class StoredCompletion(ChatCompletion):
    """A stored answer to a chat."""

    metadata: dict[str, str] = msgspec.field(default_factory=dict)


class ItemPage(msgspec.Struct):
    """Part of a list: of a request's input, of its messages, or of stored answers to chats."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


_ANSWERS: dict[str, type[msgspec.Struct]] = {  # as those of openapi.py
    f"GET {_ONE}": ResponseBody,
    f"DELETE {_ONE}": DeletedResponse,
    f"{_ONE}/cancel": ResponseBody,
    f"{_ONE}/input_items": ItemPage,
    f"GET {_CHATS}": ItemPage,
    f"GET {_CHAT}": StoredCompletion,
    f"POST {_CHAT}": StoredCompletion,
    f"DELETE {_CHAT}": DeletedCompletion,
    f"{_CHAT}/messages": ItemPage,
}


class MetadataRequest(Body):
    """Body of POST /v1/chat/completions/{completion_id}."""

    metadata: dict[str, str] | None = Field(json_schema_extra={"maxProperties": MAX_METADATA})


def add_answers(app: FastAPI, served: ServedModels, keeper: AnswerKeeper | None) -> None:
    """`keeper`: None refuses everything."""

    def enter() -> AnswerKeeper:
        if keeper is None:
            why = "start the gateway with --state-dir DIR, or --state-url URL, if answers should be kept here"
            raise ApiError(403, why, None, "no_store")
        return keeper

    for add in (_add_responses, _add_chats):
        router = APIRouter(route_class=limited_route(served))
        add(router, enter)
        app.include_router(router)
    app.state.answers |= _ANSWERS


def _add_responses(router: APIRouter, enter: Callable[[], AnswerKeeper]) -> None:
    @router.get(_ONE)
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: int | None = Query(None, ge=0),
    ) -> Response:
        """A stored answer; with `stream` its events, behind the number `starting_after`, and those to come."""
        after = "" if starting_after is None else str(starting_after)
        return await _read(enter(), "responses", response_id, request, after, is_streamed=stream)

    @router.delete(_ONE)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Deletes an answer; one that is not over ends."""
        await enter().delete("responses", response_id, request.state.key)
        return json_response(DeletedResponse(response_id))

    @router.post(f"{_ONE}/cancel")
    async def cancel_response(response_id: str, request: Request) -> Response:
        """Ends an answer in the background."""
        return json_response(await enter().cancel(response_id, request.state.key))

    @router.get(f"{_ONE}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=100),
        order: Order = "desc",
    ) -> Response:
        """Lists the input of a stored answer's request, without the conversation before it."""
        answer = await enter().find("responses", response_id, request.state.key)
        given = as_items(msgspec.json.decode(answer.body).get("input"))
        items = [_shown(item, f"{response_id}_{at}") for at, item in enumerate(given)]
        return _cut(items, after, limit, order)


def _add_chats(router: APIRouter, enter: Callable[[], AnswerKeeper]) -> None:
    @router.get(_CHATS, openapi_extra={"parameters": [_LABELS]})
    async def list_completions(
        request: Request,
        model: str | None = None,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=100),
        order: Order = "asc",
    ) -> Response:
        """Stored answers to chats, those with all of the texts `metadata[NAME]`; a page may have fewer than `limit`."""
        given = request.query_params.items()
        labels = {found[1]: value for name, value in given if (found := _LABEL.fullmatch(name))}
        kept, has_more = await enter().list_chats(
            request.state.key, after or "", limit, model=model or "", labels=labels, is_newest_first=order == "desc"
        )
        first, last = (kept[0].id, kept[-1].id) if kept else (None, None)
        return json_response(ItemPage([msgspec.Raw(show(answer)) for answer in kept], first, last, has_more))

    @router.get(_CHAT)
    async def get_completion(
        completion_id: str, request: Request, stream: bool = False, starting_after: str | None = None
    ) -> Response:
        """A stored answer to a chat; with `stream` its chunks behind the SSE id `starting_after`, and those to come."""
        return await _read(enter(), "chat", completion_id, request, starting_after or "", is_streamed=stream)

    @router.post(_CHAT)
    async def update_completion(body: MetadataRequest, completion_id: str, request: Request) -> Response:
        """Gives a stored answer to a chat other metadata."""
        check_metadata(body.metadata or {})
        labels = encode(body.metadata or {}).decode()
        return json_response(show(await enter().set_labels("chat", completion_id, request.state.key, labels)))

    @router.delete(_CHAT)
    async def delete_completion(completion_id: str, request: Request) -> Response:
        """Deletes an answer to a chat; one that is not over ends."""
        await enter().delete("chat", completion_id, request.state.key)
        return json_response(DeletedCompletion(completion_id))

    @router.get(f"{_CHAT}/messages")
    async def list_messages(
        completion_id: str,
        request: Request,
        after: str | None = None,
        limit: int = Query(20, ge=1, le=100),
        order: Order = "asc",
    ) -> Response:
        """Lists the messages of the request that a stored answer to a chat belongs to."""
        answer = await enter().find("chat", completion_id, request.state.key)
        given = msgspec.json.decode(answer.body)["messages"]
        messages = [_shown_message(message, f"{completion_id}-{at}") for at, message in enumerate(given)]
        return _cut(messages, after, limit, order)


async def _read(
    keeper: AnswerKeeper, kind: Kind, answer_id: str, request: Request, after: str, *, is_streamed: bool
) -> Response:
    """A stored answer. `after`: as in AnswerKeeper.events; a client that connects again says it in a header."""
    if is_streamed:
        after = request.headers.get("last-event-id", "") or after
        return await keeper.events(kind, answer_id, request.state.key, after)
    if after:
        raise bad_request("starting_after needs stream=true", "starting_after")
    return json_response(show(await keeper.find(kind, answer_id, request.state.key)))


def _cut(items: list[dict[str, Any]], after: str | None, limit: int, order: Order) -> Response:
    """A page of a list. Raises ApiError."""
    items = items if order == "asc" else items[::-1]
    return json_response(ItemPage(**cut_page(items, [item["id"] for item in items], after, limit)))


def _shown(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An item as OpenAI's clients expect it."""
    kind = item.get("type") or "message"
    shown = {**item, "type": kind, "id": item.get("id") or item_id}
    if kind == "message":
        content = item["content"]
        part = "output_text" if item["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": part, "text": content}] if isinstance(content, str) else content
        shown["status"] = "completed"
    return shown


def _shown_message(message: dict[str, Any], message_id: str) -> dict[str, Any]:
    """A message as OpenAI's clients expect it."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return {**message, "id": message_id, "content": content, "content_parts": None}
    texts = [part["text"] for part in content if part["type"] == "text"]
    return {**message, "id": message_id, "content": "".join(texts), "content_parts": content}
