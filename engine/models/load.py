"""A model by name: its folder, and loading.

The entry to `engine.models`. Runs no code from a checkpoint and unpickles nothing.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from engine.adapters.slots import NO_ADAPTERS, AdapterLimits, Adapters
from engine.cpu.build import cache_folder
from engine.cpu.packed import can_pack
from engine.formats.fp8 import check_fp8
from engine.formats.gguf import GgufCheckpoint
from engine.formats.gguf_config import PAIRED, architecture_of
from engine.formats.gguf_file import read_gguf
from engine.formats.gguf_folder import GGUF, gguf_cache, make_gguf_folder
from engine.formats.quantised import QuantisedCheckpoint
from engine.heads.decoder import HeadDecoder
from engine.heads.read_head import name_eagle3, name_mtp, read_head
from engine.layers.linear import Quantization
from engine.models.assemble import build_decoder, build_head, check_tensors
from engine.models.config import FallbackConfig, ModelConfig
from engine.models.decoder import Decoder
from engine.models.read_config import has_native_code, load_config
from engine.models.sizes import check_sizes
from engine.models.table import build_table, shard_config
from engine.ops.choose import ops_for
from engine.ranks import ONE_RANK, Ranks
from engine.weights.cache import SMALLEST_FILE_BYTES, CannotShareError, Weights, share_weights
from engine.weights.checkpoint import FLOATS, Checkpoint, RenamedCheckpoint, SafetensorsCheckpoint
from engine.weights.files import is_path, list_shards
from engine.weights.fingerprint import weight_fingerprint
from engine.weights.formats import choose_format
from engine.weights.reader import OnProgress, ShardReader
from engine.weights.table import Shard
from wire.files import check_folder, named, read_json_object
from wire.kv_layout import KvPart

DecoderT = TypeVar("DecoderT", bound=Decoder)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DOWNLOADED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "*.txt"]
NOT_DOWNLOADED = ["*.bin", "*.py", "*.pt", "*.pth", "*/*", "consolidated*"]
HEADS = {  # prefix of a language model beside other parts |-> its head
    "language_model.model.": "language_model.lm_head", "model.language_model.": "lm_head",
    "model.text_model.": "lm_head", "model.": "lm_head",
}  # fmt: skip
PACKED_VERSION = 4  # of the layout of packed weights, and of how they are chosen


def load_any_config(folder: Path) -> ModelConfig | FallbackConfig:
    """`load_config` for any model. Without native code: by transformers on the meta device, in seconds."""
    if has_native_code(folder):
        return load_config(folder)
    from engine.fallback.probe import probe

    return probe(folder)


def open_any_model(folder: Path) -> tuple[ModelConfig | FallbackConfig, Checkpoint]:
    """`open_model` for any model. Without native code: by transformers on the meta device, in seconds."""
    return open_model(folder) if has_native_code(folder) else (load_any_config(folder), SafetensorsCheckpoint(folder))


def open_model(folder: Path) -> tuple[ModelConfig, Checkpoint]:
    """Reads configurations and headers. Raises FileNotFoundError for a missing file, ValueError for a bad one."""
    config, shards = load_config(folder), list_shards(folder)
    if shards[0].suffix != ".gguf":
        plain = SafetensorsCheckpoint(folder)
        with named(folder / "config.json"):
            check_sizes(config, plain.entries)
        if config.whole is not None:
            found = [prefix for prefix in HEADS if f"{prefix}embed_tokens.weight" in plain.entries]
            config = replace(config, prefix=found[0], head=HEADS[found[0]]) if found else config
        if config.scheme is None:
            return config, plain
        wanted = {tensor.name for tensor in build_table(config).stored()}
        with named(shards[0]):
            return config, QuantisedCheckpoint(plain, config.scheme, wanted)
    headers = [read_gguf(shard) for shard in shards]
    architecture = architecture_of(headers[0].metadata)
    if architecture in PAIRED:
        config = replace(config, rope_is_interleaved=True)  # so the rows are ordered anew where they are read
    stored = {name: entry for header in headers for name, entry in header.entries.items()}
    with named(shards[0].resolve()):
        check_sizes(config, stored)
    return config, GgufCheckpoint(architecture, config, stored)


def load_model(
    folder: Path,
    dtype: str,
    device: torch.device,
    on_progress: OnProgress | None = None,
    quantization: Quantization = "none",
    ranks: Ranks = ONE_RANK,
    adapter_limits: AdapterLimits = NO_ADAPTERS,
    has_mtp: bool = False,
    max_context_tokens: int = 0,
) -> Decoder:
    """Load the checkpoint in `folder` onto `device`, in "float32", "bfloat16", "float16" or "auto" (its own dtype).

    With `quantization` the weights of its layers are rounded while loading; the rest keeps that dtype. With several
    `ranks` it loads this rank's shard. Calls on_progress(done_bytes, total_bytes) after each tensor, the last time with
    both equal, in bytes of the files. Raises FileNotFoundError for a missing file, ValueError for an unsupported config
    or dtype, a damaged file, missing, unexpected or mis-shaped tensors, or a device that does not support such weights.
    has_mtp: `load_head` follows, with the model's own layer. max_context_tokens: see `ModelConfig.within`.
    """
    check_quantization(quantization, dtype, device)
    check_folder(folder)
    if not has_native_code(folder):
        if adapter_limits.num_slots:
            raise ValueError(f"{folder}: models without code of Baton's own take no adapters; set --max-loras 0")
        return _load_without_native_code(folder, dtype, device, on_progress, quantization, ranks, has_mtp)
    config, checkpoint = open_model(folder)
    config = config.within(max_context_tokens)
    source = list_shards(folder)[0].resolve()
    with named(source):
        check_tensors(config, checkpoint)
    shard_config(config, Shard(ranks.rank, ranks.size))
    chosen = torch.bfloat16 if quantization in ("int8", "int4") else choose_dtype(config, checkpoint, dtype)
    ops, num_reported = ops_for(device), 0

    def report(done_bytes: int, total_bytes: int) -> None:  # tensors packed into a file are then loaded again from it
        nonlocal num_reported
        if on_progress and (done_bytes > num_reported or done_bytes == total_bytes):
            num_reported = done_bytes
            on_progress(done_bytes, total_bytes)

    def build(weights: Weights | None) -> Decoder:
        """weights: memory for packed ones; None: not packed."""
        reader = ShardReader(checkpoint, chosen, device, report, Shard(ranks.rank, ranks.size))
        adapters = Adapters(*adapter_limits, chosen, device, ops) if adapter_limits.num_slots else None
        return build_decoder(config, choose_format(reader, ops, quantization, weights), ranks, adapters)

    name = partial(_name_weights, folder, quantization, ranks)
    with named(source):
        return _build_packed(build, name, checkpoint, chosen, device, quantization, ranks)


def load_head(
    folder: Path, model: Decoder, quantization: Quantization, *, is_mtp: bool
) -> tuple[HeadDecoder, tuple[KvPart, ...]]:
    """A draft head of a loaded model, in its dtype and on its device and ranks, and its KV over all ranks.

    is_mtp: from the model's own folder.

    Raises like `load_model`; ValueError also if it is the head of another model.
    """
    is_native = isinstance(model.config, ModelConfig)
    context_tokens = model.config.context_tokens
    own = load_config(folder).within(context_tokens) if is_mtp and is_native else model.config  # of all ranks
    config = read_head(folder, own, is_mtp=is_mtp)
    device, ranks, stored = model.device, model.ranks, SafetensorsCheckpoint(folder)
    names = name_mtp(own, stored.entries) if is_mtp else name_eagle3(stored.entries)
    checkpoint: Checkpoint = RenamedCheckpoint(stored, names)
    if config.scheme is not None:
        wanted = {tensor.name for tensor in build_table(config).stored()}
        with named(list_shards(folder)[0]):
            checkpoint = QuantisedCheckpoint(checkpoint, config.scheme, wanted)
    with named(list_shards(folder)[0]):
        check_sizes(config, checkpoint.entries)
        target_ids = _read_target_ids(stored, config, device)
        if target_ids is not None and len(target_ids) < own.vocab_size and "lm_head.weight" not in checkpoint.entries:
            raise ValueError(f"lm_head.weight is missing, for draft_vocab_size {len(target_ids)}")
    if config.vocab_size != own.vocab_size:
        path = folder / "config.json"
        raise ValueError(f"{path}: its vocab_size is {config.vocab_size}, the model's {own.vocab_size}")
    if is_mtp and not is_native:
        from engine.fallback.head import build_fallback_head  # imports transformers

        return build_fallback_head(config, checkpoint, cast(Any, model)), config.kv_parts
    with named(list_shards(folder)[0]):
        check_tensors(config, checkpoint)

    def build(weights: Weights | None) -> HeadDecoder:
        """See `load_model`."""
        shard = Shard(ranks.rank, ranks.size)
        reader = ShardReader(checkpoint, model.dtype, device, lambda done, total: None, shard)
        return build_head(config, choose_format(reader, model.ops, quantization, weights), model, target_ids)

    name = partial(_name_weights, folder, quantization, ranks, "mtp" if is_mtp else "head")
    return _build_packed(build, name, checkpoint, model.dtype, device, quantization, ranks), config.kv_parts


def _read_target_ids(stored: Checkpoint, config: ModelConfig, device: torch.device) -> Tensor | None:
    """[draft vocabulary] int64: the model's ids of a head's tokens; None: they are the same. `d2t` has differences."""
    head = config.draft_head
    assert head is not None
    if "d2t" not in stored.entries:
        if head.vocab_size != config.vocab_size:
            raise ValueError(f"d2t is missing, for draft_vocab_size {head.vocab_size} of {config.vocab_size}")
        return None
    differences = stored.tensor("d2t").long()
    found = differences + torch.arange(len(differences))
    if found.shape != (head.vocab_size,) or not 0 <= int(found.min()) <= int(found.max()) < config.vocab_size:
        raise ValueError(f"d2t does not give {head.vocab_size} of the model's {config.vocab_size} tokens")
    return found.to(device)


def _build_packed(
    build: Callable[[Weights | None], DecoderT], name: Callable[[], str], checkpoint: Checkpoint, dtype: torch.dtype,
    device: torch.device, quantization: Quantization, ranks: Ranks,
) -> DecoderT:  # fmt: skip
    """`build` with memory for packed weights, where they are packed: in the file `name`, if they are large."""
    is_packed = device.type == "cpu" and dtype is torch.bfloat16 and quantization != "fp8" and can_pack()
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


def _load_without_native_code(
    folder: Path, dtype: str, device: torch.device, on_progress: OnProgress | None, quantization: Quantization,
    ranks: Ranks, has_mtp: bool,
) -> Decoder:  # fmt: skip
    """By transformers' code. The result has the interface of a Decoder."""
    lacking = f"Baton has no code for model_type {read_json_object(folder / 'config.json').get('model_type')!r}"
    if ranks.size > 1:
        raise ValueError(f"{lacking}, so only one rank can compute it: set --tp 1")
    if quantization != "none":
        raise ValueError(f"{lacking}, so its weights cannot be rounded: set --quantization none")
    if dtype != "auto":
        check_dtype(dtype)
    from engine.fallback.load import load_fallback  # imports transformers, seconds

    return cast(Decoder, load_fallback(folder, DTYPES.get(dtype), device, on_progress, has_mtp))


def _name_weights(folder: Path, quantization: Quantization, ranks: Ranks, part: str = "") -> str:
    """The file name of packed weights: a hash of everything they depend on."""
    parts = [PACKED_VERSION, weight_fingerprint(folder, quantization), ranks.rank, ranks.size]
    parts += [part] if part else []
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def check_quantization(quantization: Quantization, dtype: str, device: torch.device) -> None:
    """Raises ValueError if the device or dtype does not support it."""
    if quantization == "fp8":
        check_fp8(device)
    if quantization == "int8" and device.type != "cpu":
        raise ValueError("--quantization int8 is for CPUs: use --quantization fp8 or int4 on a GPU, or --device cpu")
    if quantization in ("int8", "int4") and dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"--quantization {quantization} computes in bfloat16, not {dtype}: set --dtype bfloat16 or auto"
        )


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


def resolve_model_folder(name_or_path: str) -> Path:
    """A folder stays as it is, and a GGUF file gets one; else it is a hub id, in the local cache or to be downloaded.

    Fetches only configs, safetensors and tokenizer files. Raises FileNotFoundError that says what to do if the name is
    neither, the hub does not know it, or the hub cannot be reached.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == GGUF and folder.is_file():
        return make_gguf_folder(folder, gguf_cache())
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
