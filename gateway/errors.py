"""Errors that clients see, independent of REST and gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class ApiError(Exception):
    """An error for the client. `status` is the HTTP status; gRPC maps it. `param` names the wrong request field."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    overflow: tuple[int, int] | None = None  # tokens of a prompt that has too many, and how many it may have

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """400: the request is invalid. `message` says what is wrong and which value is allowed."""
    return ApiError(400, message, param, code)


def check_count(param: str, count: int, most: int, unit: str) -> None:
    """Raises ApiError if a field has more than `most` of something."""
    if count > most:
        raise bad_request(f"{param} has {count} {unit}; at most {most} are allowed", param)


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    """404: the request names another model than the served one, which has these names."""
    names = ", ".join(f"'{name}'" for name in served)
    return ApiError(404, f"model '{model}' is not served here; this service has {names}", "model", "model_not_found")


def overloaded(message: str) -> ApiError:
    """429: the queue is full; a retry may succeed."""
    return ApiError(429, message, None, "overloaded", retry_after_s=1)


def took_too_long() -> ApiError:
    """504: the request's deadline has passed."""
    return ApiError(504, "the request took longer than --request-timeout-s allows", code="timeout")


def not_ready(message: str) -> ApiError:
    """503: no worker can serve the request now."""
    return ApiError(503, message, None, "not_ready", retry_after_s=1)
