"""The endpoints of stored answers."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI, Query
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.http.answer import json_response
from gateway.api.http.errors import RESPONSES_PATH
from gateway.api.http.pages import cut_page
from gateway.api.http.read_body import limited_route
from gateway.api.responses.answers import ResponseBody
from gateway.errors import ApiError, bad_request
from gateway.request.prepare import ServedModels
from gateway.store.keeper import AnswerKeeper
from gateway.store.replay import as_items

_ONE = RESPONSES_PATH + "/{response_id}"


class DeletedResponse(msgspec.Struct):
    """An answer is gone."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class ItemPage(msgspec.Struct):
    """Part of a request's input."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


_ANSWERS: dict[str, type[msgspec.Struct]] = {  # as those of openapi.py
    f"GET {_ONE}": ResponseBody,
    f"DELETE {_ONE}": DeletedResponse,
    f"{_ONE}/cancel": ResponseBody,
    f"{_ONE}/input_items": ItemPage,
}


def add_answers(app: FastAPI, served: ServedModels, keeper: AnswerKeeper | None) -> None:
    """`keeper`: None refuses everything."""
    router = APIRouter(route_class=limited_route(served))

    def enter() -> AnswerKeeper:
        if keeper is None:
            why = "start the gateway with --state-dir DIR, or --state-url URL, if answers should be kept here"
            raise ApiError(403, why, None, "no_store")
        return keeper

    @router.get(_ONE)
    async def get_response(
        response_id: str,
        request: Request,
        stream: bool = False,
        starting_after: int | None = Query(None, ge=0),
    ) -> Response:
        """A stored answer; with `stream` its events, behind the number `starting_after`, and those to come."""
        if stream:
            begin = 0 if starting_after is None else starting_after + 1
            return await enter().events(response_id, request.state.key, begin)
        if starting_after is not None:
            raise bad_request("starting_after needs stream=true", "starting_after")
        return json_response((await enter().find(response_id, request.state.key)).result)

    @router.delete(_ONE)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Deletes an answer; one that is not over ends."""
        await enter().delete(response_id, request.state.key)
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
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """What the request of an answer had as its input, without the conversation before it."""
        answer = await enter().find(response_id, request.state.key)
        given = as_items(msgspec.json.decode(answer.body).get("input"))
        items = [_shown(item, f"{response_id}_{at}") for at, item in enumerate(given)]
        items = items if order == "asc" else items[::-1]
        return json_response(ItemPage(**cut_page(items, [item["id"] for item in items], after, limit)))

    app.include_router(router)
    app.state.answers |= _ANSWERS


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
