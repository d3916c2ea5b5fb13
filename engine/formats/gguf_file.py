"""GGUF files: their metadata, and the tensors that their headers describe. No number is used before it is checked.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import itertools
import math
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.weights.files import GGUF, TensorEntry, read_safetensors
from wire.files import MOST_BYTES, check_file

VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME_CHARS = 256
LEAST_KEY_BYTES, LEAST_TENSOR_BYTES = 13, 24  # of an entry: bounds the counts
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")  # at the end of a shard's name

Metadata = dict[str, Any]  # strings, numbers, bools, and lists of them
Open = Callable[[Path], BinaryIO]
"""Opens a file that can seek, here or on a hub. Raises ValueError or OSError."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Metadata
    entries: dict[str, TensorEntry]  # shapes as in torch: the last dimension lies contiguous


def open_file(path: Path) -> BinaryIO:
    """An `Open` for files of this machine."""
    check_file(path, None)
    return path.open("rb")


def read_gguf(path: Path, open_: Open = open_file) -> GgufHeader:
    """Raises ValueError with one sentence if the file is damaged or truncated, OSError if it cannot be read.

    Reads the file from its begin to the end of its header, MOST_BYTES at most.
    """
    with open_(path) as file:
        try:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size < 24 or file.read(4) != b"GGUF":
                raise ValueError("it does not begin like one")
            return _read(path, _Cursor(file, 4, size))
        except (ValueError, struct.error) as error:
            raise ValueError(f"{path} is no whole GGUF file: {error}") from error


def read_header(path: Path) -> dict[str, TensorEntry]:
    """A `ReadHeader` for files of all formats."""
    return read_gguf(path).entries if path.suffix == GGUF else read_safetensors(path)


class _Cursor:
    """Reads a file that stands at `at`; ValueError at its end, and where its header is longer than MOST_BYTES."""

    def __init__(self, file: BinaryIO, at: int, end: int) -> None:
        self._file = file
        self.at = at
        self.end = end

    def take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > min(self.end, MOST_BYTES) - self.at:
            has = f"the file has {self.end}" if self.end < MOST_BYTES else f"a header may have {MOST_BYTES}"
            raise ValueError(f"{what} needs {num_bytes} bytes at {self.at}, and {has}")
        self.at += num_bytes
        taken = self._file.read(num_bytes)
        if len(taken) < num_bytes:
            raise ValueError(f"it ends within {what}")
        return taken

    def scalar(self, code: str, what: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A number of things that take at least so many bytes each."""
        number: int = self.scalar("Q", what)
        if number * least_bytes > self.end - self.at:
            raise ValueError(f"it says that it has {number} {what}, which do not fit its {self.end} bytes")
        return number

    def text(self, what: str) -> str:
        return self.take(self.count(f"bytes of {what}", 1), what).decode("utf-8", errors="replace")

    def name(self, what: str) -> str:
        """A text that errors may show."""
        found = self.text(what)
        if len(found) > MAX_NAME_CHARS:
            raise ValueError(f"{what} has {len(found)} characters")
        return found


def _read(path: Path, cursor: _Cursor) -> GgufHeader:
    version = cursor.scalar("I", "the version")
    if version not in VERSIONS:
        raise ValueError(f"its version is {version}, supported: {', '.join(map(str, VERSIONS))}")
    num_tensors, num_keys = cursor.count("tensors", LEAST_TENSOR_BYTES), cursor.count("keys", LEAST_KEY_BYTES)
    metadata: Metadata = {}
    for _ in range(num_keys):
        key = cursor.name("a key")
        metadata[key] = _read_value(cursor, cursor.scalar("I", f"the type of {key!r}"), key)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, expected a power of two from 8 on")
    described = [_read_tensor(cursor) for _ in range(num_tensors)]
    data_begin = -(-cursor.at // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, dtype, shape, offset, num_bytes in described:
        begin = data_begin + offset
        if name in entries:
            raise ValueError(f"it has two tensors {name!r}")
        if offset % alignment or begin + num_bytes > cursor.end:
            raise ValueError(f"{name!r} takes {num_bytes} bytes at {begin}, and the file has {cursor.end}")
        entries[name] = TensorEntry(path, dtype, shape, begin, num_bytes)
    placed = sorted(entries.items(), key=lambda item: item[1].begin_bytes)
    for (first, one), (second, other) in itertools.pairwise(placed):
        if one.begin_bytes + one.num_bytes > other.begin_bytes:
            raise ValueError(f"{first!r} and {second!r} overlap")
    return GgufHeader(metadata, entries)


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == STRING:
        return cursor.text(repr(key))
    if kind in SCALARS:
        return cursor.scalar(SCALARS[kind], repr(key))
    if kind != ARRAY:
        raise ValueError(f"{key!r} is of type {kind}, which is not known")
    kind = cursor.scalar("I", f"the type of {key!r}")
    if kind == STRING:
        return [cursor.text(repr(key)) for _ in range(cursor.count(f"texts in {key!r}", 8))]
    if kind not in SCALARS:
        raise ValueError(f"{key!r} is a list of type {kind}, which is not known")
    width = struct.calcsize(f"<{SCALARS[kind]}")
    number = cursor.count(f"values in {key!r}", width)
    return list(struct.unpack(f"<{number}{SCALARS[kind]}", cursor.take(number * width, repr(key))))


def _read_tensor(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, dtype, shape, offset in the data, bytes."""
    name = cursor.name("a tensor's name")
    num_dims = cursor.scalar("I", f"the shape of {name!r}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise ValueError(f"{name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
    shape = tuple(cursor.scalar("Q", f"the shape of {name!r}") for _ in range(num_dims))[::-1]
    kind = cursor.scalar("I", f"the type of {name!r}")
    try:
        dtype = GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(f"{name!r} is of type {kind}, which is not known") from error
    block, block_bytes = GGML_QUANT_SIZES[dtype]
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{name!r} has shape {list(shape)}, and {dtype.name} needs rows of a multiple of {block}")
    return (
        name,
        dtype.name,
        shape,
        cursor.scalar("Q", f"the place of {name!r}"),
        math.prod(shape) // block * block_bytes,
    )


def list_gguf_shards(path: Path, is_there: Callable[[Path], bool] = Path.exists) -> list[Path]:
    """The files of a model whose first is `path`: those named -00001-of-0000N, or itself alone."""
    found = SHARD.search(path.stem)
    if found is None:
        return [path]
    total = int(found[2])
    names = [f"{path.stem[: found.start()]}-{number:05}-of-{found[2]}{path.suffix}" for number in range(1, total + 1)]
    for name in names:
        if not is_there(path.parent / name):
            raise FileNotFoundError(f"{path} is one of {total} files, and {name} is not beside it")
    return [path.parent / name for name in names]
