"""The tensors in a folder of safetensors files: their places, and their data, mapped into memory on demand.

Knows nothing of models. A tensor that needs no conversion stays a view of the file's mapping, so all processes of a
host that load the same checkpoint share its pages.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from engine.weights.files import TensorEntry, list_shards, read_header


class Checkpoint:
    """All tensors of one checkpoint. A file's mapping lives as long as this object or any of its tensors."""

    def __init__(self, folder: Path) -> None:
        """Reads headers only. Raises FileNotFoundError for a missing file, ValueError for a damaged one."""
        self.entries: dict[str, TensorEntry] = {}  # tensor name |-> entry
        self._files: dict[Path, Any] = {}  # shard |-> open safetensors file
        for path in list_shards(folder):
            self.entries.update(read_header(path))

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU in its own dtype: a read-only view of the mapping. KeyError if absent."""
        path = self.entries[name].path
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt", device="cpu")
        tensor: Tensor = self._files[path].get_tensor(name)
        return tensor

    def borrow(self, name: str) -> Tensor:
        """Like `tensor`, but through a mapping that is freed with the tensor: for one read. KeyError if absent."""
        with safe_open(self.entries[name].path, framework="pt", device="cpu") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor
