"""API keys and request ids, the same for REST and gRPC. Pure except for random ids; must not know HTTP or gRPC."""

import hmac
import secrets
from collections.abc import Sequence

from gateway.errors import ApiError

REQUEST_ID_HEADER = "x-request-id"
WARNING_HEADER = "x-baton-warning"
MAX_WARNING_CHARS = 1024
_MAX_ID_CHARS = 128


def check_key(authorization: bytes, api_keys: Sequence[str], api_key: bytes | None = None) -> None:
    """Raises ApiError 401 unless a header has one of the keys. Compares in constant time.

    `authorization`: the header's value, `Bearer <key>`; `api_key`: the value of the header x-api-key.
    """
    if not api_keys:
        return
    scheme, _, given = authorization.strip().partition(b" ")
    is_known = False
    for key in api_keys:
        is_bearer = hmac.compare_digest(given.strip(), key.encode()) and scheme.lower() == b"bearer"
        is_known |= is_bearer or (api_key is not None and hmac.compare_digest(api_key.strip(), key.encode()))
    if not is_known:
        raise ApiError(
            401, "a valid API key is needed; send it as 'Authorization: Bearer <key>'", None, "invalid_api_key"
        )


def pick_request_id(given: str | None) -> str:
    """Returns the client's id if it is short printable ASCII, else a new one."""
    if given and len(given) <= _MAX_ID_CHARS and given.isascii() and given.isprintable():
        return given
    return f"req-{secrets.token_hex(12)}"


def unique_id(request_id: str) -> str:
    """Returns a unique id for the workers: clients may reuse a request id, even in concurrent requests."""
    return f"{request_id}.{secrets.token_hex(4)}"


def warning_headers(warnings: Sequence[str]) -> dict[str, str]:
    """Warnings about parts of a request without effect, for a header or metadata: printable ASCII; names may be any."""
    text = "; ".join(warnings)
    shown = "".join(char if " " <= char <= "~" else f"\\u{ord(char):04x}" for char in text)
    return {WARNING_HEADER: shown[:MAX_WARNING_CHARS]} if shown else {}
