"""Errors that clients see, independent of REST and gRPC."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

MAX_RETRY_S = 600  # predictions for a later time say little


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


def over_goal(predicted_s: float, patience_s: float) -> ApiError:
    """429: it would wait for too long, as more answers at once would break the goal for the time between tokens."""
    message = (
        f"as many answers run as keep --itl-goal-ms, and this one would wait for about {predicted_s:.0f} s, longer "
        "than --patience-s; try again later"
    )
    return ApiError(429, message, None, "goal", _retry_s(predicted_s - patience_s))


def cannot_keep_deadline(predicted_s: float, left_s: float) -> ApiError:
    """429: the answer will probably not begin in time."""
    times = f"about {predicted_s:.1f} s are predicted, {max(left_s, 0):.1f} s are left"
    message = f"the answer cannot begin within deadline_ms: {times}; try again later or allow more time"
    return ApiError(429, message, "deadline_ms", "deadline", _retry_s(predicted_s - left_s))


def missed_deadline() -> ApiError:
    """429: the answer did not begin in time."""
    return ApiError(429, "deadline_ms has passed before the answer began", "deadline_ms", "deadline", 1)


def over_limit(key: str, limit: str, wait_s: float) -> ApiError:
    """429: the key has used what it may in a minute."""
    message = f"the key {key} has used its {limit} a minute; try again in {ceil(wait_s)} s"
    return ApiError(429, message, None, "rate_limit_exceeded", _retry_s(wait_s))


def _retry_s(seconds: float) -> int:
    return min(max(ceil(seconds), 1), MAX_RETRY_S)


def took_too_long() -> ApiError:
    """504: the request's deadline has passed."""
    return ApiError(504, "the request took longer than --request-timeout-s allows", code="timeout")


WEIGHTS_GONE = "weights_gone"  # code of an answer's error: no worker is left that has what began it


def not_ready(message: str, code: str = "not_ready") -> ApiError:
    """503: no worker can serve the request now."""
    return ApiError(503, message, None, code, retry_after_s=1)
