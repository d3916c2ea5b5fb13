"""The tensors of GGUF files under the names of a family.

What llama.cpp's conversion changed is put right here: 1 added to Gemma's norms, experts in one tensor. Rows of queries
and keys in pairs are ordered anew like those of models whose rope is interleaved.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor

from engine.formats.gguf_blocks import QUANTISED, read_dense, read_groups
from engine.formats.gguf_config import OTHERS, PAIRED, architecture_of
from engine.formats.gguf_file import read_gguf
from engine.formats.groups import Groups, round_to_8_bits
from engine.models.config import ModelConfig
from engine.models.table import build_table, check_sizes
from engine.weights.checkpoint import FLOATS, Checkpoint, FormT
from engine.weights.files import TensorEntry
from wire.files import named

EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor is."""

    entry: TensorEntry  # as it lies in the file
    expert: int | None = None  # in a tensor of all experts
    added: float = 0.0  # to its values


class GgufCheckpoint(Checkpoint):
    """The tensors of GGUF files under the names of a family, mapped into memory on demand."""

    dtypes = (*FLOATS, *QUANTISED)

    def __init__(self, architecture: str, config: ModelConfig, stored: Mapping[str, TensorEntry]) -> None:
        """stored: of all files. Tensors that the family does not have keep their names."""
        self._places: dict[str, _Place] = {}
        names = get_tensor_name_map(
            next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture), config.num_layers
        )
        used = set(OTHERS)
        for wanted in build_table(config).stored():
            base, _, kind = wanted.name.rpartition(".")
            found = EXPERT.search(base)
            name = f"{names.get_name(EXPERT.sub('.experts.', base))}.{kind}"
            if name in stored:
                added = -1.0 if config.norm_offset and name.endswith("_norm.weight") else 0.0
                self._places[wanted.name] = _Place(stored[name], int(found[1]) if found else None, added)
                used.add(name)
        self._places |= {name: _Place(entry) for name, entry in stored.items() if name not in used}
        self.entries = {name: _logical(place) for name, place in self._places.items()}

    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        """Each has a mapping of its own."""
        place = self._places[name]
        tensor = _blocks(place).dense().view(self.entries[name].shape)
        return tensor + place.added if place.added else tensor

    def coded(self, name: str, index: int | None = None) -> "Blocks | None":
        """See `Checkpoint`. Experts have names of their own."""
        place = self._places[name]
        is_matrix = place.entry.dtype not in FLOATS and len(self.entries[name].shape) == 2
        return _blocks(place) if is_matrix else None


class Blocks(NamedTuple):
    dtype: str
    rows: Tensor  # [N, bytes] uint8, a view of the file's mapping

    def dense(self) -> Tensor:
        """[N, K]: floats as stored, others float32."""
        return read_dense(self.dtype, self.rows)

    def find(self, form: type[FormT]) -> FormT | None:
        """See `StoredMatrix`."""
        return cast("FormT | None", self.groups() if issubclass(form, Groups) else None)

    def groups(self) -> Groups | None:
        """Those of more complicated formats, mostly of 6 bits, are rounded to 8."""
        return read_groups(self.dtype, self.rows) or round_to_8_bits(self.dense())


def _logical(place: _Place) -> TensorEntry:
    """The entry as the family's name has it."""
    entry = place.entry
    if place.expert is None:
        return entry
    return replace(entry, shape=entry.shape[1:], num_bytes=entry.num_bytes // entry.shape[0])


def _blocks(place: _Place) -> Blocks:
    entry, shape = place.entry, _logical(place).shape
    mapped = torch.from_file(str(entry.path), shared=False, size=entry.begin_bytes + entry.num_bytes, dtype=torch.uint8)
    data = mapped[entry.begin_bytes :]
    if place.expert is not None:
        data = data.view(entry.shape[0], -1)[place.expert]
    return Blocks(entry.dtype, data.view(shape[0] if len(shape) > 1 else 1, -1))


def open_gguf(config: ModelConfig, shards: Sequence[Path]) -> tuple[ModelConfig, Checkpoint]:
    """The model of a folder of GGUF files. ValueError for a damaged file."""
    headers = [read_gguf(shard) for shard in shards]
    architecture = architecture_of(headers[0].metadata)
    if architecture in PAIRED:
        config = replace(config, rope_is_interleaved=True)  # so the rows are ordered anew where they are read
    stored = {name: entry for header in headers for name, entry in header.entries.items()}
    with named(shards[0].resolve()):
        check_sizes(config, stored)
    return config, GgufCheckpoint(architecture, config, stored)
