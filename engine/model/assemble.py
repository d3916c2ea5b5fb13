"""Builds a `Decoder` out of a checkpoint's tensors: checks names and shapes, converts, fuses.

Knows the Hugging Face tensor names of the decoder family. Weights that need neither a conversion nor fusing stay in
the file's mapping; fused ones are filled part by part, so no weight ever exists twice outside the page cache. Weights
of layers are quantised where asked, each on its device; embedding, norms, biases and head stay in the model's dtype.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.checkpoint import Checkpoint
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder, DecoderLayer
from engine.model.embedding import Embedding, SummedEmbedding
from engine.model.fp8 import E4M3, Fp8Linear, quantise_rows
from engine.model.head import Head, JoinedHead
from engine.model.linear import Linear, PlainLinear, Quantization, SummedLinear
from engine.model.shard import EMBEDDING, LM_HEAD, Shard, ShardedCheckpoint, shard_config
from engine.ranks import ONE_RANK, Ranks

OnProgress = Callable[[int, int], None]  # (done_bytes, total_bytes) of the checkpoint

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # old Llama checkpoints carry it; it follows from the config
FINAL_NORM = "model.norm.weight"
PAGE_BYTES = 4096
MAX_FAULTS_SHOWN = 8


def build_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: OnProgress,
    quantization: Quantization = "none",
    ranks: Ranks = ONE_RANK,
) -> Decoder:
    """Convert and fuse layer by layer. The caller has run `check_tensors`.

    config: of the whole model, of which this rank loads its shard.
    """
    if ranks.size > 1:
        shard = Shard(ranks.rank, ranks.size)
        config, checkpoint = shard_config(config, shard), ShardedCheckpoint(checkpoint, config, shard)
    loader = _Loader(checkpoint, dtype, device, on_progress, quantization)
    embedding = loader.take(EMBEDDING)  # [V, H]
    layers = [_build_layer(loader, config, f"model.layers.{index}.", ranks) for index in range(config.num_layers)]
    final_norm = loader.take(FINAL_NORM)  # [H]
    lm_head = loader.take(LM_HEAD) if LM_HEAD in checkpoint.entries else embedding  # [V, H]
    if config.is_tied and lm_head is not embedding and torch.equal(lm_head, embedding):
        lm_head = embedding  # some tied checkpoints carry a copy; one that differs is meant, as in transformers
    loader.finish()
    if ranks.size == 1:
        return Decoder(config, Embedding(embedding), layers, final_norm, Head(lm_head))
    table = SummedEmbedding(embedding, ranks.rank * len(embedding), ranks)
    return Decoder(config, table, layers, final_norm, JoinedHead(Head(lm_head), ranks), ranks)


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming every tensor that is missing, unexpected or mis-shaped (with both shapes)."""
    expected = expected_shapes(config)
    entries = checkpoint.entries
    optional = {LM_HEAD} if config.is_tied else set()
    faults = [
        f"missing: {name}, expected shape {list(shape)}"
        for name, shape in expected.items()
        if name not in entries and name not in optional
    ]
    for name, entry in entries.items():
        if name not in expected and not name.endswith(IGNORED_SUFFIX):
            faults.append(f"unexpected: {name}, shape {list(entry.shape)}")
        elif name in expected and entry.shape != expected[name]:
            faults.append(
                f"mis-shaped: {name} has shape {list(entry.shape)}, config.json implies {list(expected[name])}"
            )
    if faults:
        more = f"; and {len(faults) - MAX_FAULTS_SHOWN} more" if len(faults) > MAX_FAULTS_SHOWN else ""
        raise ValueError("the checkpoint does not fit its config.json: " + "; ".join(faults[:MAX_FAULTS_SHOWN]) + more)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Tensor name |-> shape of every tensor the config implies, lm_head included even when it is tied."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    products = {
        "self_attn.q_proj": (query, hidden, config.has_qkv_bias),
        "self_attn.k_proj": (key, hidden, config.has_qkv_bias),
        "self_attn.v_proj": (key, hidden, config.has_qkv_bias),
        "self_attn.o_proj": (hidden, query, config.has_output_bias),
        "mlp.gate_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.up_proj": (inner, hidden, config.has_mlp_bias),
        "mlp.down_proj": (hidden, inner, config.has_mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, has_bias) in products.items():
        layer[f"{name}.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}.bias"] = (rows,)
    if config.has_qk_norm:
        layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}
    table = (config.vocab_size, hidden)
    return shapes | {EMBEDDING: table, FINAL_NORM: (hidden,), LM_HEAD: table}


class _Loader:
    """Takes tensors out of a checkpoint, once each, and counts their bytes."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: OnProgress,
        quantization: Quantization,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._quantization = quantization
        self._done_bytes = 0
        self._total_bytes = sum(entry.num_bytes for entry in checkpoint.entries.values())

    def take(self, name: str) -> Tensor:
        """The tensor in the model's dtype on its device: the mapping itself where that is already so."""
        borrowed = self._checkpoint.borrow(name)
        tensor = borrowed.to(self._device, self._dtype)
        if tensor is borrowed:
            tensor = self._checkpoint.tensor(name)
            tensor.view(torch.uint8).flatten()[::PAGE_BYTES].sum()  # reads each page now, not in the first request
        self._count(name)
        return tensor

    def fuse(self, names: list[str]) -> Tensor:
        """The tensors one below the other, [sum of rows, ...]; one alone as `take` gives it."""
        if len(names) == 1:
            return self.take(names[0])
        shapes = [self._checkpoint.entries[name].shape for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        for name, part in zip(names, torch.split(fused, [shape[0] for shape in shapes]), strict=True):
            part.copy_(self._checkpoint.borrow(name))
            self._count(name)
        return fused

    def linear(self, names: list[str], bias: Tensor | None) -> Linear:
        """The product with the weights `names` one below the other, in the layout that was asked for."""
        if self._quantization == "none":
            return PlainLinear(self.fuse(names), bias)
        codes, scale = self._quantise(names)
        return Fp8Linear(codes, scale, bias)

    def _quantise(self, names: list[str]) -> tuple[Tensor, Tensor]:
        """[sum of rows, K] e4m3 and [sum of rows] float32, from the tensors in their stored dtype, one at a time."""
        num_rows = [self._checkpoint.entries[name].shape[0] for name in names]
        depth = self._checkpoint.entries[names[0]].shape[1]
        codes = torch.empty((sum(num_rows), depth), dtype=E4M3, device=self._device)
        scale = torch.empty(sum(num_rows), dtype=torch.float32, device=self._device)
        parts = zip(names, torch.split(codes, num_rows), torch.split(scale, num_rows), strict=True)
        for name, part_codes, part_scale in parts:
            found_codes, found_scale = quantise_rows(self._checkpoint.borrow(name).to(self._device))
            part_codes.copy_(found_codes)
            part_scale.copy_(found_scale)
            self._count(name)
        return codes, scale

    def finish(self) -> None:
        """Reports the tensors that nobody took (ignored ones) as done."""
        self._on_progress(self._total_bytes, self._total_bytes)

    def _count(self, name: str) -> None:
        self._done_bytes += self._checkpoint.entries[name].num_bytes
        self._on_progress(self._done_bytes, self._total_bytes)


def _build_layer(loader: _Loader, config: ModelConfig, prefix: str, ranks: Ranks) -> DecoderLayer:
    def product(names: list[str], has_bias: bool) -> Linear:
        bias = loader.fuse([f"{prefix}{name}.bias" for name in names]) if has_bias else None
        return loader.linear([f"{prefix}{name}.weight" for name in names], bias)

    def summed(name: str, has_bias: bool) -> Linear:
        own = product([name], has_bias)
        return own if ranks.size == 1 else SummedLinear(own, ranks)

    query_key_norm = None
    if config.has_qk_norm:
        query_norm = loader.take(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)  # [Hq, D]
        key_norm = loader.take(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)  # [Hkv, D]
        query_key_norm = torch.cat((query_norm, key_norm))
    return DecoderLayer(
        input_norm=loader.take(f"{prefix}input_layernorm.weight"),
        qkv=product(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], config.has_qkv_bias),
        query_key_norm=query_key_norm,
        output=summed("self_attn.o_proj", config.has_output_bias),
        mlp_norm=loader.take(f"{prefix}post_attention_layernorm.weight"),
        gate_up=product(["mlp.gate_proj", "mlp.up_proj"], config.has_mlp_bias),
        down=summed("mlp.down_proj", config.has_mlp_bias),
    )
