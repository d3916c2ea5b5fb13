"""Loads a model of a family that Baton has code for. Runs no code from a checkpoint and unpickles nothing."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.device import Device
from engine.json_values import Json
from engine.layers.linear import NO_ADDITIONS, Additions, Quantization
from engine.models.assemble import LayerParts, build_decoder, check_tensors, refuse
from engine.models.config import FallbackConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.models.read_config import load_config
from engine.models.sizes import check_sizes
from engine.models.table import shard_config
from engine.ops.base import Ops
from engine.ranks import ONE_RANK, Ranks
from engine.weights.cache import SMALLEST_FILE_BYTES, CannotShareError, Weights, share_weights
from engine.weights.checkpoint import FLOATS, Checkpoint, SafetensorsCheckpoint
from engine.weights.files import GGUF, ReadHeader, is_path, list_shards, read_safetensors
from engine.weights.fingerprint import weight_fingerprint
from engine.weights.folders import cache_folder
from engine.weights.formats import PlainFormat
from engine.weights.reader import OnProgress, ShardReader
from engine.weights.table import Shard
from wire.files import check_access, named

DecoderT = TypeVar("DecoderT", bound=Decoder)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DOWNLOADED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]
NOT_DOWNLOADED = ["*.bin", "*.py", "*.pt", "*.pth", "*/*", "consolidated*"]
HEADS = {  # prefix of a language model beside other parts |-> its head
    "language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head",
    "model.text_model.": "lm_head", "model.": "lm_head",
}  # fmt: skip
PACKED_VERSION = 4  # of the layout of packed weights, and of how they are chosen


@dataclass(frozen=True, slots=True)
class Parts:
    """What completes loading; engine/compose.py names all of it. Without them, plain dense models load."""

    layers: LayerParts = field(default_factory=LayerParts)
    choose_format: Callable[[ShardReader, Ops, Quantization, Weights | None], PlainFormat] = (
        lambda reader, ops, quantization, weights: PlainFormat(reader, ops)
    )
    open_gguf: Callable[[ModelConfig, Sequence[Path]], tuple[ModelConfig, Checkpoint]] = refuse
    read_scheme: Callable[[Json], Any] = refuse  # `ModelConfig.quantization` |-> what `decode` is given
    decode: Callable[[ModelConfig, Any, Checkpoint], Checkpoint] = refuse  # of a checkpoint in few bits
    make_gguf_folder: Callable[[Path], Path] = refuse  # a model's folder of a GGUF file
    read_header: ReadHeader = read_safetensors


def open_model(folder: Path, parts: Parts) -> tuple[ModelConfig, Checkpoint]:
    """Reads configurations and headers. Raises FileNotFoundError for a missing file, ValueError for a bad one."""
    config, shards = load_config(folder), list_shards(folder)
    if shards[0].suffix == GGUF:
        return parts.open_gguf(config, shards)
    plain = SafetensorsCheckpoint(folder)
    with named(folder / "config.json"):
        check_sizes(config, plain.entries)
    if config.whole is not None:
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
    chosen = torch.bfloat16 if quantization in ("int8", "int4") else choose_dtype(config, checkpoint, dtype)
    num_reported = 0

    def report(done_bytes: int, total_bytes: int) -> None:  # tensors packed into a file are then loaded again from it
        nonlocal num_reported
        if on_progress and (done_bytes > num_reported or done_bytes == total_bytes):
            num_reported = done_bytes
            on_progress(done_bytes, total_bytes)

    def build(weights: Weights | None) -> Decoder:
        """weights: memory for packed ones; None: not packed."""
        reader = ShardReader(checkpoint, chosen, device.torch, report, Shard(ranks.rank, ranks.size))
        format = parts.choose_format(reader, device.ops, quantization, weights)
        return build_decoder(config, format, parts.layers, ranks, add(chosen))

    name = partial(name_weights, folder, quantization, ranks, parts.read_header)
    with named(source):
        return build_packed(build, name, checkpoint, chosen, device, quantization, ranks)


def build_packed(
    build: Callable[[Weights | None], DecoderT], name: Callable[[], str], checkpoint: Checkpoint, dtype: torch.dtype,
    device: Device, quantization: Quantization, ranks: Ranks,
) -> DecoderT:  # fmt: skip
    """`build` with memory for packed weights, where they are packed: in the file `name`, if they are large."""
    is_packed = dtype is torch.bfloat16 and quantization != "fp8" and device.can_pack()
    num_bytes = 2 * sum(math.prod(entry.shape) for entry in checkpoint.entries.values()) // ranks.size  # at most
    if not is_packed or num_bytes < SMALLEST_FILE_BYTES:
        return build(Weights() if is_packed else None)
    try:
        shared = share_weights(cache_folder(), name(), num_bytes, build)
    except (CannotShareError, OSError) as error:  # of which a folder that cannot be made
        decoder = build(Weights())
        decoder.why_unshared = str(error)
        return decoder
    decoder = build(shared)
    decoder.mapped_bytes = shared.num_bytes
    return decoder


def name_weights(
    folder: Path, quantization: Quantization, ranks: Ranks, read_header: ReadHeader, part: str = ""
) -> str:
    """The file name of packed weights: a hash of everything they depend on."""
    parts = [PACKED_VERSION, weight_fingerprint(folder, quantization, read_header), ranks.rank, ranks.size]
    parts += [part] if part else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def choose_dtype(config: ModelConfig | FallbackConfig, checkpoint: Checkpoint, dtype: str) -> torch.dtype:
    """The dtype of a model; "auto" is that of its embedding, or of its largest tensor; bfloat16 if quantised.

    Raises ValueError naming what is supported.
    """
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in checkpoint.dtypes:
            raise ValueError(
                f"{entry.path}: {name} is stored as {entry.dtype}; supported: {', '.join(checkpoint.dtypes)}"
            )
    if dtype == "auto":
        entries = checkpoint.entries
        name = f"{config.prefix}embed_tokens.weight" if isinstance(config, ModelConfig) else ""
        entry = entries.get(name) or max(entries.values(), key=lambda entry: entry.num_bytes)
        return FLOATS.get(entry.dtype, torch.bfloat16)
    check_dtype(dtype)
    return DTYPES[dtype]


def check_dtype(dtype: str) -> None:
    """Raises ValueError naming what is supported; for "auto" too."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")


def resolve_model_folder(name_or_path: str, parts: Parts) -> Path:
    """A folder stays as it is, and a GGUF file gets one; else it is a hub id, in the local cache or to be downloaded.

    Fetches only configs, safetensors and tokenizer files. Raises FileNotFoundError that says what to do if the name is
    neither, the hub does not know it, or the hub cannot be reached; DeniedError.
    """
    folder = Path(name_or_path).expanduser()
    check_access(folder)
    if folder.is_dir():
        return folder
    if folder.suffix == GGUF and folder.is_file():
        return parts.make_gguf_folder(folder)
    if is_path(name_or_path):
        raise FileNotFoundError(f"model folder {name_or_path!r} does not exist")
    from huggingface_hub import snapshot_download  # not for models that are folders

    try:
        found = snapshot_download(name_or_path, allow_patterns=DOWNLOADED, ignore_patterns=NOT_DOWNLOADED)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"model {name_or_path!r} is not a folder here and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}). Offline: copy the "
            "model's folder (config.json, *.safetensors, tokenizer files) to this machine and pass its path, or fill "
            "the cache elsewhere with `hf download` and point HF_HOME at it. Private or gated: set HF_TOKEN."
        ) from error
    return Path(found)
