"""Checkpoints with random weights in the shapes of real models, for what does not depend on a model's answers."""

import json
import math
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from demo.shapes import llama_config, new_model
from engine.models.config import ModelConfig
from engine.models.table import build_table
from engine.weights.checkpoint import Checkpoint
from engine.weights.files import TensorEntry
from tests.support.checkpoints import CHAT_TEMPLATE

VOCAB_SIZE = 32_000
LLAMA_1B: Mapping[str, Any] = {  # the shape of Llama-3.2-1B
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True, "max_position_embeddings": 8192,
    "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "attention_bias": False, "mlp_bias": False,
    "model_type": "llama", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SPECIAL_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|user|>", "<|assistant|>", "<|end|>"]
TRAINED_TOKENS, TRAINING_BYTES = 8000, 4_000_000  # of the tokenizer; the rest of the vocabulary is made up


class RandomCheckpoint(Checkpoint):
    """Tensors of a config's shapes, drawn when they are taken; scaled so that activations stay finite."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        shapes = {stored.name: stored.shape for stored in build_table(config).stored()}
        if config.is_tied:
            del shapes["lm_head.weight"]
        self._device = device
        self.entries = {
            name: TensorEntry(Path(), "BF16", shape, 0, 2 * torch.Size(shape).numel()) for name, shape in shapes.items()
        }

    def tensor(self, name: str, *, is_kept: bool = False) -> Tensor:
        """See `Checkpoint.tensor`, but on the device."""
        shape = self.entries[name].shape
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device).mul_(shape[1] ** -0.5)


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A target of 213 million parameters and a draft model of 10 million, both bfloat16."""
    target = _write(folder / "target", width=1024, inner=2816, num_layers=16, num_heads=16, num_kv_heads=4)
    draft = _write(folder / "draft", width=256, inner=704, num_layers=2, num_heads=4, num_kv_heads=2)
    return target, draft


def _write(folder: Path, **shape: int) -> Path:
    config = llama_config(**shape, vocab_size=VOCAB_SIZE)
    new_model(config, seed=0).bfloat16().save_pretrained(folder)
    return folder


def write_llama_1b(folder: Path) -> Path:
    """Llama-3.2-1B's shape, bfloat16, with a tokenizer: a folder that any engine loads. Does nothing if it exists."""
    if folder.exists():
        return folder
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    write_tokenizer(fresh, LLAMA_1B["vocab_size"])
    (fresh / "config.json").write_text(json.dumps(LLAMA_1B, indent=1))
    ids = {name: LLAMA_1B[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (fresh / "generation_config.json").write_text(json.dumps(ids))
    save_file(dict(draw_weights(LLAMA_1B)), fresh / "model.safetensors", metadata={"format": "pt"})
    fresh.rename(folder)
    return folder


def draw_weights(config: Mapping[str, Any], seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor; the deviations keep activations near 1 through all layers."""
    dice = torch.Generator().manual_seed(seed)
    hidden, inner, num_layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def draw(rows: int, columns: int, deviation: float) -> Tensor:
        return (torch.randn(rows, columns, generator=dice) * deviation).bfloat16()

    into, out = hidden**-0.5, (2 * num_layers) ** -0.5
    yield "model.embed_tokens.weight", draw(config["vocab_size"], hidden, 0.02)
    for layer in range(num_layers):
        name = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{name}{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
        for part, rows in (("q", query), ("k", key), ("v", key)):
            yield f"{name}self_attn.{part}_proj.weight", draw(rows, hidden, into)
        yield f"{name}self_attn.o_proj.weight", draw(hidden, query, out / math.sqrt(query))
        for part in ("gate", "up"):
            yield f"{name}mlp.{part}_proj.weight", draw(inner, hidden, into)
        yield f"{name}mlp.down_proj.weight", draw(hidden, inner, out / math.sqrt(inner))
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE with GPT-2's rules; tokens that it has not learned are made up, so that every id has a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_read_texts(TRAINING_BYTES), trainer)
    data = json.loads(tokenizer.to_str())
    vocabulary = data["model"]["vocab"]
    vocabulary.update({f"~{token:06x}": token for token in range(len(vocabulary), vocab_size)})
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(data)),
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        pad_token=SPECIAL_TOKENS[1],
        model_max_length=LLAMA_1B["max_position_embeddings"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(folder, save_jinja_files=False)


def _read_texts(num_bytes: int) -> Iterator[str]:
    """Python's own library: text on every machine with Python."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        yield text
        num_bytes -= len(text)
        if num_bytes <= 0:
            return
