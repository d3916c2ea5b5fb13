"""Anthropic's Messages endpoints. Must not know how requests are checked or answers written."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.anthropic.answers import CountAnswer
from gateway.api.anthropic.types import CountTokensRequest, MessagesRequest
from gateway.api.anthropic.wire import MessageWriter
from gateway.api.http.errors import MESSAGES_PATH
from gateway.api.http.json_answer import json_response
from gateway.api.http.json_body import limited_route
from gateway.api.http.respond import respond
from gateway.request.prepare import ServedModel, tokenize


def build_messages_router(served: ServedModel) -> APIRouter:
    router = APIRouter(prefix=MESSAGES_PATH, route_class=limited_route(served))

    @router.post("")
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation."""
        return await respond(
            served,
            request,
            body.raw(),
            MessageWriter,
            is_streamed=bool(body.stream),
        )

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Counts a conversation's tokens."""
        return json_response(CountAnswer(len(await tokenize(served, body.raw()))))

    return router
