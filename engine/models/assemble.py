"""Builds a `Decoder` from a checkpoint's tensors: checks names and shapes, and fuses products that belong together.

Knows the Hugging Face tensor names of the decoder family; the loader decides the memory layout of weights.
"""

import torch

from engine.layers.embedding import SummedEmbedding
from engine.layers.linear import Linear, SummedLinear
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder, DecoderLayer
from engine.ranks import ONE_RANK, Ranks
from engine.weights.checkpoint import Checkpoint
from engine.weights.loader import Loader
from engine.weights.sharding import EMBEDDING, LM_HEAD

IGNORED_SUFFIX = "rotary_emb.inv_freq"  # in old Llama checkpoints; the config implies it
FINAL_NORM = "model.norm.weight"
MAX_FAULTS_SHOWN = 8


def build_decoder(config: ModelConfig, loader: Loader, ranks: Ranks = ONE_RANK) -> Decoder:
    """Build layer by layer. The caller has run `check_tensors`. config and loader: of this rank's shard."""
    embedding, head = loader.embed(EMBEDDING, _find_head(config, loader.checkpoint))
    layers = [_build_layer(loader, config, f"model.layers.{index}.", ranks) for index in range(config.num_layers)]
    final_norm = loader.take(FINAL_NORM)  # [H]
    loader.finish()
    if ranks.size == 1:
        return Decoder(config, embedding, layers, final_norm, head)
    table = SummedEmbedding(embedding, ranks.rank * len(embedding), ranks)
    return Decoder(config, table, layers, final_norm, head, ranks)


def _find_head(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """Some tied checkpoints contain a copy of the embedding. If it differs, it is the head, as in transformers."""
    if LM_HEAD not in checkpoint.entries:
        return EMBEDDING
    is_copy = config.is_tied and torch.equal(checkpoint.borrow(LM_HEAD), checkpoint.borrow(EMBEDDING))
    return EMBEDDING if is_copy else LM_HEAD


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
    """Tensor name |-> shape of every tensor that the config implies, lm_head included even if it is tied."""
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


def _build_layer(loader: Loader, config: ModelConfig, prefix: str, ranks: Ranks) -> DecoderLayer:
    def names(kind: str, *products: str) -> list[str]:
        return [f"{prefix}{product}.{kind}" for product in products]

    def product(*products: str, has_bias: bool) -> Linear:
        return loader.linear(names("weight", *products), names("bias", *products) if has_bias else [])

    def summed(name: str, *, has_bias: bool) -> Linear:
        own = product(name, has_bias=has_bias)
        return own if ranks.size == 1 else SummedLinear(own, ranks)

    query_key_norm = None
    if config.has_qk_norm:
        query_norm = loader.take(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)  # [Hq, D]
        key_norm = loader.take(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)  # [Hkv, D]
        query_key_norm = torch.cat((query_norm, key_norm))
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    return DecoderLayer(
        input_norm=loader.take(f"{prefix}input_layernorm.weight"),
        qkv=product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=config.has_qkv_bias),
        query_key_norm=query_key_norm,
        output=summed("self_attn.o_proj", has_bias=config.has_output_bias),
        mlp_norm=loader.take(f"{prefix}post_attention_layernorm.weight"),
        gated=loader.gated(names("weight", *gate_up), names("bias", *gate_up) if config.has_mlp_bias else []),
        down=summed("mlp.down_proj", has_bias=config.has_mlp_bias),
    )
