"""A checkpoint's files: the folder's name, the shards, and the tensors that their headers describe.

Imports no torch, so that commands can look at a checkpoint at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wire.files import check_file, parse_json, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
GGUF = ".gguf"  # the suffix of such files
MAX_DIMS, MAX_DTYPE_CHARS = 8, 16
HEADER_LIMIT_BYTES = 100 * 2**20  # of safetensors, the format's own limit


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as a file's header describes it."""

    path: Path
    dtype: str  # the format's name: "BF16", "F32", "Q4_K", ...
    shape: tuple[int, ...]
    begin_bytes: int  # offset in the file
    num_bytes: int


ReadHeader = Callable[[Path], dict[str, TensorEntry]]
"""A file |-> tensor name |-> its entry. Raises like `read_safetensors`."""


def is_path(name: str) -> bool:
    """Whether a model's name can only be a folder, and no hub id such as "org/name"."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def list_shards(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, sorted: those named by the index, else the single one, else GGUF files.

    Of one file in the place of a folder: that one.
    """
    if folder.is_file():
        return [folder]
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return [folder / SINGLE_NAME]
        if found := sorted(folder.glob(f"*{GGUF}")):
            return found
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME} nor a .gguf; other files of weights are not supported"
        )
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} is not a safetensors index: weight_map must name a file for each tensor")
    shards = sorted(set(names.values()))
    for name in shards:
        if Path(name).name != name:
            raise ValueError(f"{index} names the shard {name!r}, which is not a plain file name")
        if not (folder / name).exists():
            raise FileNotFoundError(f"{index} names the shard {name}, which is not in {folder}")
    return [folder / name for name in shards]


def read_safetensors(path: Path) -> dict[str, TensorEntry]:
    """Tensor name |-> entry of one file.

    Format: 8 bytes little-endian header length N, N bytes of JSON, then the tensors at `data_offsets` from there.
    Raises ValueError if the header is damaged or the file's size differs from what the header says, OSError if it
    cannot be read.
    """
    size = check_file(path, None)
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, HEADER_LIMIT_BYTES):
            raise ValueError(f"{path} is truncated or not a safetensors file: {size} bytes, header {header_bytes}")
        header = parse_json(file.read(header_bytes), path)
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a header that is no JSON object")
    header.pop("__metadata__", None)
    entries = {name: _build_entry(path, 8 + header_bytes, name, fields) for name, fields in header.items()}
    expected = max((entry.begin_bytes + entry.num_bytes for entry in entries.values()), default=8 + header_bytes)
    if size != expected:
        kind = "truncated" if size < expected else "longer than its header says"
        raise ValueError(f"{path} is {kind}: its header describes {expected} bytes, the file has {size}")
    return entries


def _build_entry(path: Path, data_begin: int, name: str, fields: Any) -> TensorEntry:
    match fields:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]} if (
            len(dtype) <= MAX_DTYPE_CHARS
            and len(shape) <= MAX_DIMS
            and all(map(_is_size, [*shape, begin, end]))
            and begin <= end
        ):
            return TensorEntry(path, dtype, tuple(shape), data_begin + begin, end - begin)
    raise ValueError(f"{path} has a damaged header: {name[:80]!r} is {fields!r:.80}")


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60
