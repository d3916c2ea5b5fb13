"""Loads a model of a family that Baton has code for. Runs no code from a checkpoint and unpickles nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from engine.device import Device
from engine.json_values import Json
from engine.layers.linear import NO_ADDITIONS, Additions, Quantization
from engine.models.assemble import LayerParts, build_decoder, check_tensors, refuse
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.read_config import PLAIN, Catalogue, load_config
from engine.models.table import check_sizes, shard_config
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks
from engine.weights.checkpoint import FLOATS, Checkpoint, SafetensorsCheckpoint
from engine.weights.files import GGUF, ReadHeader, list_shards, read_safetensors
from engine.weights.formats import PlainFormat
from engine.weights.reader import OnProgress, ShardReader
from engine.weights.table import Shard
from wire.files import named

DecoderT = TypeVar("DecoderT", bound=Decoder)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HEADS = {  # prefix of a language model, beside other parts or alone |-> its head
    "language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head",
    "model.text_model.": "lm_head", "model.": "lm_head", "": "lm_head",
}  # fmt: skip


OpenFormat = Callable[[ShardReader, Ops], PlainFormat]
"""(a rank's part of a checkpoint, the device's operations) |-> how products keep their weights"""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a decoder's weights, and how they are to be loaded."""

    folder: Path
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: Device
    quantization: Quantization
    ranks: Ranks
    part: str = ""  # of the folder: a head; empty: the model


class BuildWeights(Protocol):
    """Builds a decoder with weights in a format that its device multiplies."""

    def __call__(self, build: Callable[[OpenFormat], DecoderT], source: Source) -> DecoderT: ...


def build_plain(build: Callable[[OpenFormat], DecoderT], source: Source) -> DecoderT:
    """In the source's dtype."""
    return build(PlainFormat)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that complete loading; engine/compose.py names all of them. Without them, plain dense models load."""

    layers: LayerParts = field(default_factory=LayerParts)
    build: BuildWeights = build_plain
    open_gguf: Callable[[ModelConfig, Sequence[Path]], tuple[ModelConfig, Checkpoint]] = refuse
    read_scheme: Callable[[Json], Any] = refuse  # `ModelConfig.quantization` |-> what `decode` is given
    decode: Callable[[ModelConfig, Any, Checkpoint], Checkpoint] = refuse  # of a checkpoint in few bits
    read_header: ReadHeader = read_safetensors
    catalogue: Catalogue = PLAIN
    assemble: Callable[..., Decoder] = build_decoder  # takes what that takes


def open_model(folder: Path, parts: Parts) -> tuple[ModelConfig, Checkpoint]:
    """Reads configurations and headers. Raises FileNotFoundError for a missing file, ValueError for a bad one."""
    config, shards = load_config(folder, parts.catalogue), list_shards(folder)
    if shards[0].suffix == GGUF:
        return parts.open_gguf(config, shards)
    plain = SafetensorsCheckpoint(folder)
    with named(folder / "config.json"):
        check_sizes(config, plain.entries)
    if config.whole is not None or f"{config.prefix}embed_tokens.weight" not in plain.entries:
        found = [prefix for prefix in HEADS if f"{prefix}embed_tokens.weight" in plain.entries]
        config = replace(config, prefix=found[0], head=HEADS[found[0]]) if found else config
    if config.quantization is None:
        return config, plain
    with named(folder / "config.json"):
        scheme = parts.read_scheme(config.quantization)
    with named(shards[0]):
        return config, parts.decode(config, scheme, plain)


def load_model(
    folder: Path,
    dtype: str,
    device: Device,
    parts: Parts,
    on_progress: OnProgress | None = None,
    quantization: Quantization = "none",
    ranks: Ranks = ONE_RANK,
    max_context_tokens: int = 0,
    add: Callable[[torch.dtype], Additions] = lambda dtype: NO_ADDITIONS,
) -> Decoder:
    """Load the checkpoint in `folder` onto `device`, in "float32", "bfloat16", "float16" or "auto" (its own dtype).

    With `quantization` the weights of its layers are rounded while loading; the rest keeps that dtype. With several
    `ranks` it loads this rank's shard. Calls on_progress(done_bytes, total_bytes) after each tensor, the last time with
    both equal, in bytes of the files. Raises FileNotFoundError for a missing file, ValueError for an unsupported config
    or dtype, a damaged file, or missing, unexpected or mis-shaped tensors.
    max_context_tokens: see `ModelConfig.within`. add: the model's dtype |-> what is added to its products.
    """
    config, checkpoint = open_model(folder, parts)
    config = config.within(max_context_tokens)
    source = list_shards(folder)[0].resolve()
    with named(source):
        check_tensors(config, checkpoint)
    shard_config(config, Shard(ranks.rank, ranks.size))
    embedding = f"{config.prefix}embed_tokens.weight"
    chosen = torch.bfloat16 if quantization in ("int8", "int4") else choose_dtype(checkpoint, dtype, embedding)
    num_reported = 0

    def report(done_bytes: int, total_bytes: int) -> None:  # formats may read tensors twice
        nonlocal num_reported
        if on_progress and (done_bytes > num_reported or done_bytes == total_bytes):
            num_reported = done_bytes
            on_progress(done_bytes, total_bytes)

    def build(open_format: OpenFormat) -> Decoder:
        reader = ShardReader(checkpoint, chosen, device.torch, report, Shard(ranks.rank, ranks.size))
        return parts.assemble(config, open_format(reader, device.ops), parts.layers, ranks, add(chosen))

    with named(source):
        return parts.build(build, Source(folder, checkpoint, chosen, device, quantization, ranks))


def choose_dtype(checkpoint: Checkpoint, dtype: str, embedding: str) -> torch.dtype:
    """The dtype of a model; "auto" is that of `embedding`, or of its largest tensor; bfloat16 if quantised.

    Raises ValueError naming what is supported.
    """
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in checkpoint.dtypes:
            raise ValueError(
                f"{entry.path}: {name} is stored as {entry.dtype}; supported: {', '.join(checkpoint.dtypes)}"
            )
    if dtype == "auto":
        entries = checkpoint.entries
        largest = max(entries.values(), key=lambda entry: entry.num_bytes)
        entry = entries.get(embedding, largest)
        return FLOATS.get(entry.dtype, torch.bfloat16)
    check_dtype(dtype)
    return DTYPES[dtype]


def check_dtype(dtype: str) -> None:
    """Raises ValueError naming what is supported; for "auto" too."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
