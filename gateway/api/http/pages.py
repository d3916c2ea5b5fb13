"""Pages of lists, as OpenAI's clients ask for them."""

from collections.abc import Sequence
from typing import Any

from gateway.errors import bad_request


def cut_page(values: Sequence[Any], ids: Sequence[str], after: str | None, limit: int) -> dict[str, Any]:
    """Fields of the page behind the value with the id `after`. `ids`: of the values. Raises ApiError 400."""
    begin = 0
    if after is not None:
        if after not in ids:
            raise bad_request("after names nothing in this list", "after")
        begin = ids.index(after) + 1
    shown, ids = list(values[begin : begin + limit]), ids[begin:]
    first, last = (ids[0], ids[len(shown) - 1]) if shown else (None, None)
    return {"data": shown, "first_id": first, "last_id": last, "has_more": len(ids) > limit}
