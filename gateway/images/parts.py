"""Images in requests, before they are read. Pure."""

import binascii
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wire.image_formats import FORMATS, MAX_FILE_BYTES, TAKEN, find_type

MAX_URL_CHARS = 2048  # of an image elsewhere

_DATA_URI = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w-]+=[\w.+-]+)*;base64,", re.ASCII | re.IGNORECASE)
_PIECE_CHARS = 1 << 18  # decoded at once: 0.2 ms, in which no other thread runs


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message."""

    source: str | bytes  # its URL, which may be a data URI with the file, or the file
    param: str  # its field, for errors


Content = str | Sequence[str | ImagePart]  # of a message: texts alone are one


def read_data_uri(url: str) -> bytes:
    """The file in a data URI. Raises ValueError saying what is wrong with it."""
    found = _DATA_URI.match(url[:200])
    if found is None:
        raise ValueError("it must begin like data:image/png;base64,")
    told, data = found[1].lower().replace("image/jpg", "image/jpeg"), url[found.end() :]
    if told not in FORMATS:
        raise ValueError(f"it is {told[:40]}; images are {TAKEN}")
    file = _read_base64(data)
    if (kind := find_type(file)) not in (told, None):
        raise ValueError(f"it says that it is {told}, and is {kind}")
    return file


def too_large(num_bytes: int) -> str:
    return f"it has {num_bytes} bytes; at most {MAX_FILE_BYTES} are read"


def _read_base64(data: str) -> bytes:
    data = data.replace("\n", "").replace("\r", "")  # MIME's lines have 76 characters
    pieces = [data[begin : begin + _PIECE_CHARS] for begin in range(0, len(data), _PIECE_CHARS)]
    if any("=" in piece for piece in pieces[:-1]):
        raise ValueError("its base64 ends before its end")
    try:
        return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])
    except ValueError as error:
        raise ValueError(f"it is no base64: {error}") from error
