"""Errors as HTTP responses, in Anthropic's form under MESSAGES_PATH, in Ollama's under /api/, else in OpenAI's."""

from dataclasses import replace
from http import HTTPStatus

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.api.http.body import first_fault
from gateway.errors import ApiError

MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
OLLAMA_PATH = "/api"
_CLIENT_GONE = 499  # for access logs: the client is gone

_TYPES = {  # HTTP status |-> error type
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_OPENAI_TYPES = _TYPES | {503: "service_unavailable_error"}
_ANTHROPIC_TYPES = _TYPES | {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


class Tagged(msgspec.Struct, tag_field="type"):
    """An object that is sent with a field `type`: the tag of its class."""


class ErrorBody(msgspec.Struct):
    """A description of an error, in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """An error as OpenAI's clients expect it."""

    error: ErrorBody


class ErrorDetail(msgspec.Struct):
    """A description of an error, in Anthropic's form."""

    type: str
    message: str


class ErrorEvent(Tagged, tag="error"):
    """An error as Anthropic's clients expect it: a body, or a stream's last event."""

    error: ErrorDetail


class ErrorText(msgspec.Struct):
    """An error as Ollama's clients expect it: a body, or a stream's last line."""

    error: str


def is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")


def build_error(error: ApiError) -> ErrorEnvelope:
    """An error in OpenAI's form."""
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return ErrorEnvelope(ErrorBody(error.message, kind, error.param, error.code))


def build_messages_error(error: ApiError) -> ErrorEvent:
    """An error in Anthropic's form."""
    message = build_error_text(error).error
    if error.overflow is not None:  # clients read the numbers to shorten their prompts
        message = "prompt is too long: {} tokens > {} maximum; ".format(*error.overflow) + message
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return ErrorEvent(ErrorDetail(kind, message))


def build_error_text(error: ApiError) -> ErrorText:
    """An error in Ollama's form. It has no `param`, so the message names the wrong field."""
    is_named = error.param is None or error.param in error.message
    return ErrorText(error.message if is_named else f"{error.param}: {error.message}")


def error_response(error: ApiError, path: str, headers: dict[str, str] | None = None) -> Response:
    """Returns the response for an error of a request to `path`, in the form of its API."""
    headers = dict(headers or {})
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    body: ErrorEnvelope | ErrorEvent | ErrorText
    if is_below(path, MESSAGES_PATH):
        body = build_messages_error(error)
    elif is_below(path, OLLAMA_PATH):
        body = build_error_text(error)
    elif path == RESPONSES_PATH and error.overflow is not None:
        message = f"Your input exceeds the context window of this model: {error.message}"
        body = build_error(replace(error, message=message))
    else:
        body = build_error(error)
    return Response(msgspec.json.encode(body), error.status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Writes every error in the form of its API."""
    for kind in (ApiError, RequestValidationError, ClientDisconnect, HTTPException):
        app.add_exception_handler(kind, _on_error)


async def _on_error(request: Request, error: Exception) -> Response:
    path, headers = request.url.path, None
    match error:
        case ClientDisconnect():
            return Response(status_code=_CLIENT_GONE)
        case RequestValidationError():
            error = first_fault(error.errors())
        case HTTPException():
            messages = {404: f"nothing is served at {path[:200]}", 405: f"{path[:200]} does not take {request.method}"}
            message = messages.get(error.status_code, str(error.detail))
            code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
            headers = dict(error.headers or {})
            error = ApiError(error.status_code, message, None, code)
    assert isinstance(error, ApiError)
    return error_response(error, path, headers)
