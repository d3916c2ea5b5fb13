"""Adds answers to the OpenAPI document: FastAPI describes request bodies itself, but answers are msgspec types."""

from typing import Any, Literal

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from starlette.responses import Response

from gateway.api.anthropic.writer import CountAnswer, MessageBody
from gateway.api.http.access import CheckedRoute, Need
from gateway.api.http.answer import json_response
from gateway.api.http.errors import (
    MESSAGES_PATH,
    OLLAMA_PATH,
    RESPONSES_PATH,
    ErrorEnvelope,
    ErrorEvent,
    ErrorText,
    is_below,
)
from gateway.api.http.service_routes import WorkerStatus
from gateway.api.openai import answers
from gateway.api.responses.answers import InputTokens, ResponseBody

_REF = "#/components/schemas/{name}"


class ChatCompletion(answers.Envelope):
    """A whole answer to a chat."""

    object: Literal["chat.completion"]
    choices: list[answers.ChatChoice]


class TextCompletion(answers.Envelope):
    """A whole answer to a completion request."""

    object: Literal["text_completion"]
    choices: list[answers.TextChoice]


class Alive(msgspec.Struct):
    """State of the process or the service."""

    status: str


class Version(msgspec.Struct):
    """Version of this software."""

    version: str


class FleetStatus(msgspec.Struct):
    """All workers."""

    workers: list[WorkerStatus]


_ANSWERS: dict[str, type[msgspec.Struct]] = {  # path, or method and path |-> JSON body of a 200
    "POST /v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
    "/v1/models": answers.ModelList,
    "/v1/models/{model_id}": answers.ModelCard,
    RESPONSES_PATH: ResponseBody,
    f"{RESPONSES_PATH}/input_tokens": InputTokens,
    MESSAGES_PATH: MessageBody,
    f"{MESSAGES_PATH}/count_tokens": CountAnswer,
    "/tokenize": answers.TokenizeAnswer,
    "/detokenize": answers.DetokenizeAnswer,
    "/live": Alive,
    "/ready": Alive,
    "/health": Alive,
    "/version": Version,
    "/status": FleetStatus,
}
_EVENTS = (
    "/v1/chat/completions", "/v1/chat/completions/{completion_id}", "/v1/completions", RESPONSES_PATH,
    f"{RESPONSES_PATH}/{{response_id}}", MESSAGES_PATH,
)  # fmt: skip
_STREAMED = {  # path |-> media type of its stream
    **dict.fromkeys(_EVENTS, "text/event-stream"),
    **dict.fromkeys((f"{OLLAMA_PATH}/chat", f"{OLLAMA_PATH}/generate"), "application/x-ndjson"),
}
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def add_document(app: FastAPI, *, needs_key: bool) -> None:
    """Adds answers, and API keys if `needs_key`, to the OpenAPI document that `app` serves.

    Routes that are added later have their answers in `app.state.answers`.
    """
    build, known = app.openapi, dict(_ANSWERS)
    app.state.answers = known
    document_route = APIRouter(route_class=CheckedRoute, include_in_schema=False)

    @document_route.get("/openapi.json")
    async def get_document() -> Response:
        return json_response(app.openapi())

    app.include_router(document_route)

    def build_whole() -> dict[str, Any]:
        if app.openapi_schema is None:
            document, open_routes = build(), _find_open(app)
            _, schemas = msgspec.json.schema_components(
                [*known.values(), ErrorEnvelope, ErrorEvent, ErrorText, answers.TokenLogprob], ref_template=_REF
            )
            # msgspec does not know the types of these fields: they hold JSON that was encoded before
            schemas["ChatLogprobs"]["properties"]["content"]["items"] = _reference(answers.TokenLogprob)
            by_token = {"type": "object", "additionalProperties": {"type": "number"}}
            schemas["TextLogprobs"]["properties"]["top_logprobs"]["items"] = {"anyOf": [by_token, {"type": "null"}]}
            schemas["ToolUseBody"]["properties"]["input"] = {"type": "object"}
            document["components"]["schemas"] |= schemas
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    operation["responses"] = _responses(path, known.get(path) or known.get(f"{method.upper()} {path}"))
                    if needs_key and (method.upper(), path) in open_routes:
                        operation["security"] = []
            if needs_key:
                document["components"]["securitySchemes"] = _KEY_SCHEMES
                document["security"] = [{name: []} for name in _KEY_SCHEMES]  # one of them is enough
        return app.openapi_schema or {}

    app.openapi = build_whole  # type: ignore[method-assign]


def _find_open(app: FastAPI) -> set[tuple[str, str]]:
    """Method and path of the routes that need no key."""
    routes = [one.original_route for one in iter_route_contexts(app.routes)]
    checked = [route for route in routes if isinstance(route, CheckedRoute) and route.need is Need.NOTHING]
    return {(method, route.path) for route in checked for method in route.methods or ()}


def _responses(path: str, answer: type[msgspec.Struct] | None) -> dict[str, Any]:
    """Status |-> response of one operation."""
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if answer is not None:
        content = {"application/json": {"schema": _reference(answer)}}
    if path in _STREAMED:
        content[_STREAMED[path]] = {}  # OpenAPI 3.1 cannot describe events
    error: type[msgspec.Struct] = ErrorEvent if is_below(path, MESSAGES_PATH) else ErrorEnvelope
    if is_below(path, OLLAMA_PATH):
        error = ErrorText
    failure = {"description": "The error.", "content": {"application/json": {"schema": _reference(error)}}}
    return {"200": {"description": "The answer.", "content": content}, "4XX": failure, "5XX": failure}


def _reference(answer: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=answer.__name__)}
