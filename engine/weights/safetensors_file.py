"""The header of a safetensors file. Imports no torch, so that commands can look at a checkpoint at once."""

import json
from pathlib import Path
from typing import Any

from engine.weights.entry import TensorEntry

HEADER_LIMIT_BYTES = 100 * 2**20  # the format's own limit


def read_safetensors(path: Path) -> dict[str, TensorEntry]:
    """Tensor name |-> entry of one file.

    Format: 8 bytes little-endian header length N, N bytes of JSON, then the tensors at `data_offsets` from there.
    Raises ValueError if the header is damaged or the file's size differs from what the header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, HEADER_LIMIT_BYTES):
            raise ValueError(f"{path} is truncated or not a safetensors file: {size} bytes, header {header_bytes}")
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            entries = {name: _build_entry(path, 8 + header_bytes, fields) for name, fields in header.items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{path} has a damaged safetensors header: {error!r}") from error
    expected = max((entry.begin_bytes + entry.num_bytes for entry in entries.values()), default=8 + header_bytes)
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header says"
        raise ValueError(f"{path} is {kind}: its header describes {expected} bytes, the file has {size}")
    return entries


def _build_entry(path: Path, data_begin: int, fields: dict[str, Any]) -> TensorEntry:
    begin, end = fields["data_offsets"]
    return TensorEntry(path, fields["dtype"], tuple(fields["shape"]), data_begin + begin, end - begin)
