"""Completes the OpenAPI document: FastAPI describes requests; this adds kinds of answers, errors and API keys."""

from typing import Any

from fastapi import FastAPI

from gateway.api.http.errors import MESSAGES_PATH, RESPONSES_PATH
from gateway.api.http.middleware import OPEN_PATHS

_STREAMED = ("/v1/chat/completions", "/v1/completions", RESPONSES_PATH, MESSAGES_PATH)
_KEY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_FIELDS = {"message": {"type": "string"}, "type": {"type": "string"}}
_ERROR = {"type": "object", "properties": {"error": {"type": "object", "properties": _FIELDS}}, "required": ["error"]}


def add_document(app: FastAPI, *, needs_key: bool) -> None:
    """Adds answers, and API keys if `needs_key`, to the OpenAPI document that `app` serves."""
    build = app.openapi

    def build_whole() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = build()
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    operation["responses"] = _responses(path)
                    if needs_key and path in OPEN_PATHS:
                        operation["security"] = []
            if needs_key:
                document["components"]["securitySchemes"] = _KEY_SCHEMES
                document["security"] = [{name: []} for name in _KEY_SCHEMES]  # one of them is enough
        return app.openapi_schema or {}

    app.openapi = build_whole  # type: ignore[method-assign]


def _responses(path: str) -> dict[str, Any]:
    """Status |-> response of one operation."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path in _STREAMED:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe events
    failure = {"description": "The error.", "content": {"application/json": {"schema": _ERROR}}}
    return {"200": {"description": "The answer.", "content": content}, "4XX": failure, "5XX": failure}
