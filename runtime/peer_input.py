"""Checks and shortens what others send, before it is used or repeated. Pure."""

import numpy as np
from numpy.typing import NDArray

MAX_DETAIL_BYTES = 1024  # gRPC percent-encodes a detail into a header, up to 3 times as long; the limit is 8 KiB
MAX_LOGPROBS = 20  # top logprobs per token, as in OpenAI's API
MAX_JSON_DEPTH = 64  # nested objects and arrays; keeps recursion far from the stack limit
MAX_JSON_WHITESPACE = 16  # in a row in JSON that a model writes; without a limit a lost model writes it forever
_CUT = " [...]"


def shorten(text: str, max_bytes: int = MAX_DETAIL_BYTES) -> str:
    """`text`, or its beginning with a mark if it is longer than `max_bytes` in UTF-8."""
    if len(text) * 4 <= max_bytes:
        return text
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


def find_too_many_logprobs(name: str, count: int) -> str | None:
    """Why the field `name` must not have this value; None if it is within the limit."""
    return None if count <= MAX_LOGPROBS else f"{name} is {count}, expected at most {MAX_LOGPROBS}"


def find_foreign_token(token_ids: NDArray[np.int32], vocab_size: int) -> str | None:
    """Why a prompt is refused that has tokens outside the vocabulary; None if none. `token_ids`: at least one."""
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest >= 0 and highest < vocab_size:
        return None
    return (
        f"prompt holds {lowest if lowest < 0 else highest}; the model of this worker has the tokens 0 to "
        f"{vocab_size - 1}: give the gateway and all workers the same --model"
    )
