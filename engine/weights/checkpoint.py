"""The tensors of a checkpoint: their places, and their data, mapped into memory on demand.

A tensor that needs no conversion stays a view of the file's mapping: all processes of a host share its pages.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.weights.files import TensorEntry, list_shards, read_safetensors

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # of plain entries, in any format


class CodedMatrix(Protocol):
    """A matrix [N, K] in few bits, in a form that products take."""

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """`change`: of rows, which all its tensors have."""
        ...

    def columns(self, begin: int, count: int) -> Self | None:
        """Columns from `begin` on; None if they cut what shares a scale."""
        ...


FormT = TypeVar("FormT", bound=CodedMatrix)


class StoredMatrix(Protocol):
    """A matrix [N, K] as a file has it in few bits."""

    def dense(self) -> Tensor:
        """float32"""
        ...

    def find(self, form: type[FormT]) -> FormT | None:
        """Equal values in that form; None if they do not fit it."""
        ...


class Checkpoint(ABC):
    """All tensors of one checkpoint, under the names that a model's table has for them."""

    entries: dict[str, TensorEntry]  # tensor name |-> entry
    dtypes: Collection[str]  # of entries that can be read

    @abstractmethod
    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        """The tensor on the CPU: in its own dtype a read-only view of a mapping, else in float32. KeyError if absent.

        The mapping is freed with the tensor, after one read; is_kept: it lives as long as this object or its tensors.
        """

    def coded(self, name: str, index: int | None = None) -> StoredMatrix | None:
        """A matrix that the file has in few bits, or one of a tensor of several, whose transpose it is; None: it has
        floats, or several that are not matrices of their own. KeyError if absent."""
        return None


class SafetensorsCheckpoint(Checkpoint):
    """A folder of safetensors files. A damaged one is a ValueError."""

    dtypes = tuple(FLOATS)

    def __init__(self, folder: Path) -> None:
        """Reads headers only. Raises FileNotFoundError for a missing file, ValueError for a damaged one."""
        self.entries = {}
        self._files: dict[Path, Any] = {}  # shard |-> open safetensors file
        for path in list_shards(folder):
            self.entries.update(read_safetensors(path))

    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        path = self.entries[name].path
        if is_kept and path not in self._files:
            self._files[path] = _open(path)
        with nullcontext(self._files[path]) if is_kept else _open(path) as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
