"""Loads what makes vectors: texts' models by transformers, from safetensors alone, and what follows any model.

Imports transformers when there is such a model: it takes seconds.
"""

from pathlib import Path
from typing import Any, cast

import torch

from engine.attention.shape import AttentionShape
from engine.device import Device
from engine.fallback.config import FallbackConfig
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.load import DTYPES, check_dtype
from engine.pooling.encoder import Encoder
from engine.pooling.forwards import PooledForwards, Pooler, Product
from engine.weights.checkpoint import SafetensorsCheckpoint
from engine.weights.files import SINGLE_NAME, read_safetensors
from engine.weights.reader import OnProgress
from wire.files import blamed, blamed_tokenizer, read_json_object
from wire.pooling import SHIFTED, Pooling, read_pooling

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")  # of torch.nn
HEAD, HEAD_BIAS = "score.weight", "score.bias"  # of a decoder with classes
PAGE_DIM = 64  # pages are not used, and an engine has some
MAX_NAMES_SHOWN = 8


def probe_encoder(folder: Path) -> FallbackConfig:
    """Its config, without weights. FileNotFoundError or ValueError say what is wrong with it."""
    from engine.fallback.probe import read_config

    pooling, config = read_pooling(folder), read_config(folder).get_text_config()
    hidden_size, depth = int(config.hidden_size), int(config.num_hidden_layers)
    shape = AttentionShape(max(hidden_size // PAGE_DIM, 1), 1, PAGE_DIM, 1.0)
    context = (pooling.max_tokens if pooling else 0) + 1  # as for a token after the text
    return FallbackConfig(
        config.model_type,
        config.vocab_size,
        context,
        (shape,),
        (None,),
        False,
        (),
        hidden_size=hidden_size,
        depth=depth,
    )


def load_encoder(
    folder: Path, pooling: Pooling, dtype: str, device: Device, on_progress: OnProgress | None = None
) -> Decoder:
    """It has the interface of a Decoder. dtype: as in `load_model`."""
    if pooling.answers:
        raise ValueError(f"{folder}: scores by tokens need a model that Baton has code for")
    if dtype != "auto":
        check_dtype(dtype)
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    config = probe_encoder(folder)
    total_bytes = sum(entry.num_bytes for entry in SafetensorsCheckpoint(folder).entries.values())
    if on_progress:
        on_progress(0, total_bytes)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers, on stderr
    library: Any = AutoModelForSequenceClassification if pooling.labels else AutoModel
    with blamed(folder / "config.json"):
        loaded, report = library.from_pretrained(
            folder, dtype=DTYPES.get(dtype, "auto"), local_files_only=True, trust_remote_code=False,
            use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    # transformers fills such tensors with random numbers; a pooler is not used here
    missing = [name for name in report["missing_keys"] if pooling.labels or "pooler." not in name]
    if lacking := sorted([*missing, *(name for name, *_ in report["mismatched_keys"])]):
        shown = ", ".join(lacking[:MAX_NAMES_SHOWN]) + (", ..." if len(lacking) > MAX_NAMES_SHOWN else "")
        raise ValueError(f"{folder}: the checkpoint does not fit its config.json: missing or mis-shaped: {shown}")
    separator = None
    has_segments = (
        getattr(loaded.config, "type_vocab_size", 1) > 1 and config.family not in SHIFTED
    )  # RoBERTa's are one
    if pooling.labels and has_segments:
        with blamed_tokenizer(folder):
            separator = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).sep_token_id
    if on_progress:
        on_progress(total_bytes, total_bytes)
    return cast(Decoder, Encoder(device.take(loaded), config, pooling, device.ops, separator))


def build_forwards(folder: Path, model: Decoder) -> PooledForwards | None:
    """The forwards that make vectors of the model's rows; None if it answers. ValueError names an unusable file."""
    pooling = read_pooling(folder) if (folder / "config.json").is_file() else None  # else: random weights
    if pooling is None:
        return None
    is_native, device = isinstance(model.config, ModelConfig), model.device
    products = [_read_dense(folder / name, device) for name in pooling.dense]
    if pooling.labels and is_native:
        products.append(_read_product(folder, HEAD, HEAD_BIAS, torch.nn.Identity(), device))
    answers = [token if isinstance(token, int) else _find_token(folder, token) for token in pooling.answers]
    if not all(0 <= token < model.config.vocab_size for token in answers):
        raise ValueError(f"{folder}: {pooling.answers} are not all tokens of the model's")
    return PooledForwards(Pooler(products, pooling.normalizes, answers), is_whole=not is_native)


def _read_dense(folder: Path, device: torch.device) -> Product:
    given = str(read_json_object(path := folder / "config.json").get("activation_function", "Tanh")).rpartition(".")[2]
    if given not in ACTIVATIONS:
        raise ValueError(f"{path}: activation_function {given!r:.80} is not one of {', '.join(ACTIVATIONS)}")
    read_safetensors(folder / SINGLE_NAME)
    return _read_product(folder, "linear.weight", "linear.bias", getattr(torch.nn, given)(), device)


def _read_product(folder: Path, weight: str, bias: str, activation: torch.nn.Module, device: torch.device) -> Product:
    checkpoint = SafetensorsCheckpoint(folder)
    if weight not in checkpoint.entries:
        raise ValueError(f"{folder} has no tensor {weight}")
    tensors = [checkpoint.tensor(name).float().to(device) for name in (weight, bias) if name in checkpoint.entries]
    return Product(tensors[0], tensors[1] if len(tensors) > 1 else None, activation)


def _find_token(folder: Path, text: str) -> int:
    from transformers import AutoTokenizer

    with blamed_tokenizer(folder):
        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).convert_tokens_to_ids(text)
    return found if isinstance(found, int) else -1
