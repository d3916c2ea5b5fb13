"""Why a request got no answer: a value of the queue and the request's machine, and the error it becomes. Pure."""

from dataclasses import dataclass
from typing import Literal

from gateway.errors import ApiError, bad_request, not_ready, overloaded, took_too_long


@dataclass(frozen=True, slots=True)
class Reason:
    """`kind` decides on the error, `detail` is what the client reads."""

    kind: Literal["queue full", "not ready", "impossible", "out of time", "gave up"]
    detail: str = ""
    param: str | None = None  # the request's field at fault, of what is impossible on any worker


OUT_OF_TIME = Reason("out of time")


def as_error(reason: Reason) -> ApiError:
    match reason.kind:
        case "queue full":
            return overloaded(reason.detail)
        case "not ready":
            return not_ready(reason.detail)
        case "impossible":
            return bad_request(reason.detail, reason.param)
        case "out of time":
            return took_too_long()
        case "gave up":
            return ApiError(503, reason.detail, code="failed", retry_after_s=1)
