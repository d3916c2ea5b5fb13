"""What others send, checked and shortened before it is used or repeated. Pure."""

import numpy as np
from numpy.typing import NDArray

MAX_DETAIL_BYTES = 1024  # gRPC sends a detail as a header, percent-encoded to at most 3 times that; 8 KiB are allowed
MAX_LOGPROBS = 20  # likeliest tokens told beside one, as OpenAI's API has it
MAX_JSON_DEPTH = 64  # objects and arrays in each other; who walks such a value is far from the end of the stack
MAX_JSON_WHITESPACE = (
    16  # in a row in JSON that a model writes: without a limit, models that are lost write it for ever
)
_CUT = " [...]"


def shorten(text: str, max_bytes: int = MAX_DETAIL_BYTES) -> str:
    """`text`, or its beginning with a mark when it is longer than `max_bytes` in UTF-8."""
    if len(text) * 4 <= max_bytes:
        return text
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[: max_bytes - len(_CUT)].decode(errors="ignore") + _CUT


def find_too_many_logprobs(name: str, count: int) -> str | None:
    """What is wrong with the field `name` that asks for so many; None when nothing is."""
    return None if count <= MAX_LOGPROBS else f"{name} is {count}, expected at most {MAX_LOGPROBS}"


def find_foreign_token(token_ids: NDArray[np.int32], vocab_size: int) -> str | None:
    """What is wrong with a prompt that no row of the embedding fits; None when all do. `token_ids`: at least one."""
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest >= 0 and highest < vocab_size:
        return None
    return (
        f"prompt holds {lowest if lowest < 0 else highest}; the model of this worker has the tokens 0 to "
        f"{vocab_size - 1}: give the gateway and all workers the same --model"
    )
