"""A checkpoint's files: the folder's name, the shards, and the tensors that their headers describe.

Imports no torch, so that commands can look at a checkpoint at once.
"""

import json
from pathlib import Path

from engine.weights.entry import TensorEntry
from engine.weights.gguf_file import read_gguf
from engine.weights.safetensors_file import read_safetensors

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def is_path(name: str) -> bool:
    """Whether a model's name can only be a folder, and no hub id such as "org/name"."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def list_shards(folder: Path) -> list[Path]:
    """The files of a checkpoint's weights, sorted: those named by the index, else the single one, else GGUF files."""
    index = folder / INDEX_NAME
    if not index.exists():
        if (folder / SINGLE_NAME).exists():
            return [folder / SINGLE_NAME]
        if found := sorted(folder.glob("*.gguf")):
            return found
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME} nor a .gguf; other files of weights are not supported"
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} names the shard {name!r}, which is not a plain file name")
        if not (folder / name).exists():
            raise FileNotFoundError(f"{index} names the shard {name}, which is not in {folder}")
    return [folder / name for name in names]


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensor name |-> entry of one file. ValueError if it is damaged, OSError if it cannot be read."""
    return read_gguf(path).entries if path.suffix == ".gguf" else read_safetensors(path)
