"""Answers as JSON. Must not know any API."""

import msgspec
from starlette.responses import Response

encode = msgspec.json.Encoder().encode  # any value of an answer |-> bytes


class Tagged(msgspec.Struct, tag_field="type"):
    """An object that is sent with a field `type`: the tag of its class."""


def json_response(value: object) -> Response:
    """A whole answer. Bytes must be JSON; other values are encoded."""
    return Response(value if isinstance(value, bytes) else encode(value), media_type="application/json")
