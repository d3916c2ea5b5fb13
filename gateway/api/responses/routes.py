"""OpenAI's Responses endpoint. Must not know how requests are checked or answers written."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.http.json_answer import json_response
from gateway.api.http.json_body import limited_route
from gateway.api.http.respond import respond
from gateway.api.responses.answers import InputTokens
from gateway.api.responses.types import CountInputRequest, ResponsesRequest
from gateway.api.responses.wire import ResponseWriter, asked_of
from gateway.request.prepare import ServedModel, tokenize


def build_responses_router(served: ServedModel) -> APIRouter:
    router = APIRouter(prefix="/v1", route_class=limited_route(served))

    @router.post("/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation, which is not stored."""
        return await respond(
            served,
            request,
            body.raw(),
            lambda totals: ResponseWriter(
                totals, asked_of(body, totals.job), body.called(), served.tokenizer.token_bytes
            ),
            is_streamed=bool(body.stream),
        )

    @router.post("/responses/input_tokens")
    async def count_input_tokens(body: CountInputRequest) -> Response:
        """Counts the tokens of a request's prompt."""
        ids = await tokenize(served, body.raw())
        return json_response(InputTokens(len(ids)))

    return router
