"""Messages on the pipes to and from the compiler process: a JSON object and bytes.

4 bytes: length of the JSON | 4 bytes: length of the body | JSON | body         (both lengths big-endian)
"""

import json
import struct
from asyncio import StreamReader
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_LENGTHS = struct.Struct("!II")
MAX_HEAD_BYTES = 16 << 20
MAX_BODY_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Frame:
    """One message."""

    head: dict[str, Any]
    body: bytes = b""


def pack(frame: Frame) -> bytes:
    head = json.dumps(frame.head).encode()
    return b"".join((_LENGTHS.pack(len(head), len(frame.body)), head, frame.body))


def read(read_exactly: Callable[[int], bytes]) -> Frame:
    """The next message. `read_exactly(n)` returns n bytes or raises. ValueError if it is not a message."""
    num_head, num_body = _unpack(read_exactly(_LENGTHS.size))
    return Frame(json.loads(read_exactly(num_head)), read_exactly(num_body))


async def read_from(stream: StreamReader) -> Frame:
    """The next message. IncompleteReadError at the end of the stream; ValueError if it is not a message."""
    num_head, num_body = _unpack(await stream.readexactly(_LENGTHS.size))
    return Frame(json.loads(await stream.readexactly(num_head)), await stream.readexactly(num_body))


def _unpack(data: bytes) -> tuple[int, int]:
    num_head, num_body = _LENGTHS.unpack(data)
    if num_head > MAX_HEAD_BYTES or num_body > MAX_BODY_BYTES:
        raise ValueError(f"a message of {num_head} + {num_body} bytes is too long")
    return num_head, num_body
