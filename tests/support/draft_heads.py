"""Random draft heads beside random models, and what they compute by plain torch, whole sequences at a time."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import VOCAB, tiny_config, tiny_model

DRAFT_VOCAB = 48
SIZES: dict[str, Any] = {"num_hidden_layers": 6}
LAYER: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 1000.0, "hidden_act": "silu",
    "max_position_embeddings": 64, "vocab_size": VOCAB, "attention_bias": False,
}  # fmt: skip


class Head(NamedTuple):
    """A head's folder, or "mtp", and its truth."""

    draft_model: str
    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """[n] tokens, [n, H] hidden rows that go with them |-> [n, H] rows to go on from, [n, V] logits"""
    fuse: Callable[[Sequence[Tensor]], Tensor]
    """transformers' hidden states of n tokens, [n, H] each |-> [n, H]"""


def write_target(folder: Path, model_type: str = "llama", **special: Any) -> Any:
    """A random model of transformers, saved there."""
    model = tiny_model(tiny_config(model_type, **{**SIZES, **special}))
    model.save_pretrained(folder)
    return model


def write_eagle3(
    folder: Path, target: Any, flags: Mapping[str, bool] = {}, *, is_speculators: bool = False,
    has_all_words: bool = False, seed: int = 0, given: Mapping[str, Tensor] = {},
) -> Head:  # fmt: skip
    """In SpecForge's form or that of `speculators`, which has other flags and a layer of Qwen 3.

    given: weights that are not random.
    """
    dice = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        drawn = torch.randn(*sizes, generator=dice)
        return 1 + 0.1 * drawn if len(sizes) == 1 else 0.2 * drawn

    hidden, inner, heads, kv_heads, dim = 64, 96, 4, 2, 16
    num_layers, vocab = target.config.num_hidden_layers, target.config.vocab_size
    taps = (1, 3, 4) if num_layers > 4 else (0, num_layers - 1)
    weights = {
        "fc.weight": draw(hidden, len(taps) * hidden), "norm.weight": draw(hidden),
        "midlayer.hidden_norm.weight": draw(hidden), "midlayer.input_layernorm.weight": draw(hidden),
        "midlayer.post_attention_layernorm.weight": draw(hidden),
        "midlayer.self_attn.q_proj.weight": draw(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": draw(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": draw(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": draw(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": draw(inner, hidden), "midlayer.mlp.up_proj.weight": draw(inner, hidden),
        "midlayer.mlp.down_proj.weight": draw(hidden, inner),
    }  # fmt: skip
    words = torch.arange(vocab)
    if not has_all_words:
        words = torch.randperm(vocab, generator=dice)[:DRAFT_VOCAB].sort().values
        weights["d2t"] = words - torch.arange(DRAFT_VOCAB)
        weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, words, True)
    weights["lm_head.weight"] = draw(len(words), hidden)
    weights |= given
    if flags.get("norm_before_fc"):
        weights["input_norm.weight"] = draw(len(taps) * hidden)
    if flags.get("fc_norm"):
        weights |= {f"fc_norm.{index}.weight": draw(hidden) for index in range(len(taps))}
    layer, own = LAYER | {"vocab_size": vocab}, {"draft_vocab_size": len(words), **flags}
    if is_speculators:
        layer["model_type"] = "qwen3"
        weights |= {f"midlayer.self_attn.{name}_norm.weight": draw(dim) for name in "qk"}
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
        weights["embed_tokens.weight"] = draw(vocab, hidden)
        config = {
            **own, "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"],
            "eagle_aux_hidden_state_layer_ids": list(taps), "transformer_layer_config": layer,
        }  # fmt: skip
    else:
        config = {
            **layer, **own, "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps), "use_aux_hidden_state": True},
        }  # fmt: skip
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())

    def norm(rows: Tensor, name: str) -> Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], weights[f"{name}.weight"], 1e-5)

    def fuse(states: Sequence[Tensor]) -> Tensor:
        chosen = [states[tap] for tap in taps]
        if flags.get("fc_norm"):
            chosen = [norm(rows, f"fc_norm.{index}") for index, rows in enumerate(chosen)]
        joined = torch.cat(chosen, -1)
        return (norm(joined, "input_norm") if flags.get("norm_before_fc") else joined) @ weights["fc.weight"].T

    def run(tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(rows, "layers.0.hidden_norm")
        joined = torch.cat((norm(embedding[tokens], "layers.0.input_layernorm"), normed), -1)
        query, key, value = (
            (joined @ weights[f"layers.0.self_attn.{name}_proj.weight"].T).view(len(tokens), -1, dim) for name in "qkv"
        )
        if is_speculators:
            query, key = norm(query, "layers.0.self_attn.q_norm"), norm(key, "layers.0.self_attn.k_norm")
        query, key = turn(query), turn(key)
        query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0]
        out = normed if flags.get("norm_before_residual") else rows
        out = out + attended.transpose(0, 1).flatten(1) @ weights["layers.0.self_attn.o_proj.weight"].T
        inner_rows = norm(out, "layers.0.post_attention_layernorm")
        gate, up = (inner_rows @ weights[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        out = out + (functional.silu(gate) * up) @ weights["layers.0.mlp.down_proj.weight"].T
        last = norm(out, "norm")
        logits = torch.full((len(tokens), vocab), -torch.inf)
        logits[:, words] = last @ weights["lm_head.weight"].T
        return last if flags.get("norm_output") else out, logits

    return Head(str(folder), run, fuse)


class Medusa(NamedTuple):
    """How a folder of Medusa heads is laid out."""

    is_vllm: bool = False  # else as Medusa and TGI have it
    num_layers: int = 1  # residual blocks of a head
    lm_heads: str = "own"  # "own" of each head, "model": the model's, "first": that of the first head for all
    has_biases: bool = True
    num_words: int = 0  # of the heads, named by token_map; 0: the model's


TGI = Medusa()
MEDUSA = {
    "medusa": TGI, "medusa 2 layers": Medusa(num_layers=2), "medusa of the model's lm_head": Medusa(lm_heads="model"),
    "medusa of vllm": Medusa(is_vllm=True, has_biases=False),
    "medusa of vllm, words": Medusa(is_vllm=True, num_layers=2, num_words=DRAFT_VOCAB),
    "medusa of vllm, one lm_head": Medusa(is_vllm=True, lm_heads="first"),
}  # fmt: skip


def write_medusa(
    folder: Path, target: Any, layout: Medusa = TGI, *, num_heads: int = 3, is_identity: bool = False,
    given: Sequence[Tensor] = (),
) -> Head:  # fmt: skip
    """Random heads; is_identity: their blocks add nothing. given: their products, if they are not random."""
    dice, weights = torch.Generator().manual_seed(0), dict[str, Tensor]()
    vocab, hidden = target.config.vocab_size, target.config.hidden_size
    words = torch.randperm(vocab, generator=dice)[: layout.num_words or vocab].sort().values

    def draw(*sizes: int, scale: float) -> Tensor:
        return scale * torch.randn(*sizes, generator=dice)

    blocks, heads = list[list[tuple[Tensor, Tensor]]](), list[Tensor]()
    for number in range(num_heads):
        scale = 0.0 if is_identity else 0.2
        own = [
            (draw(hidden, hidden, scale=scale), draw(hidden, scale=scale if layout.has_biases else 0.0))
            for _ in range(layout.num_layers)
        ]
        blocks.append(own)
        heads.append(
            target.lm_head.weight.detach() if layout.lm_heads == "model" else draw(len(words), hidden, scale=0.2)
        )
        for at, (weight, bias) in enumerate(own):
            name = f"blocks.{number}.layers.{at}" if layout.is_vllm else f"{number}.{at}.linear"
            weights |= {f"{name}.weight": weight} | ({f"{name}.bias": bias} if layout.has_biases else {})
        if given:
            heads[-1] = given[number]
        if layout.lm_heads != "model":
            name = f"lm_heads.{number}" if layout.is_vllm else f"{number}.{layout.num_layers}"
            weights[f"{name}.weight"] = heads[-1]
    if layout.lm_heads == "first":
        heads = heads[:1] * num_heads
    config: dict[str, Any] = {"medusa_num_heads": num_heads, "medusa_num_layers": layout.num_layers}
    if layout.is_vllm:
        config = {
            "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": hidden, "vocab_size": vocab,
            "num_heads": num_heads, "num_hidden_layers": layout.num_layers, "medusa_fc_bias": layout.has_biases,
            "truncated_vocab_size": layout.num_words or None, "original_lm_head": layout.lm_heads == "first",
        }  # fmt: skip
    if layout.num_words:
        weights["token_map"] = words
    folder.mkdir()
    file = "model.safetensors" if layout.is_vllm else "medusa_lm_head.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / file)
    (folder / "config.json").write_text(json.dumps(config))

    def run(tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The last column of rows says which head comes next; logits: of the last row."""
        number, row = int(rows[-1, -1]), rows[-1:, :-1]
        for weight, bias in blocks[number]:
            row = row + functional.silu(row @ weight.T + bias)
        logits = torch.full((1, vocab), -torch.inf)
        logits[:, words] = row @ heads[number].T
        return torch.cat((rows[:, :-1], rows[:, -1:] + 1), 1), logits

    return Head(str(folder), run, lambda states: torch.cat((states[-1], torch.zeros(len(states[-1]), 1)), 1))


def write_guessing_medusa(folder: Path, target: Any) -> Head:
    """Heads for the model of `write_oracle` that are sometimes right: with few signs, tokens are alike."""
    rows = target.get_input_embeddings().weight.detach()
    follows = (functional.rms_norm(rows, rows.shape[-1:]) @ target.lm_head.weight.T).argmax(-1)
    found, after = list[Tensor](), follows
    for _ in range(3):
        after = follows[after]
        found.append(torch.zeros_like(rows).index_add_(0, after, rows))
    return write_medusa(folder, target, num_heads=3, is_identity=True, given=found)


def write_medusa_oracle(folder: Path) -> tuple[Any, Head]:
    """A model whose logits are the same everywhere, and heads that are its own lm_head: right at any temperature."""
    target = write_target(folder / "model", num_hidden_layers=2, tie_word_embeddings=False)
    with torch.no_grad():
        rows = target.get_input_embeddings().weight
        rows.copy_(rows[:1].expand_as(rows))
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target.save_pretrained(folder / "model")
    return target, write_medusa(folder / "head", target, Medusa(lm_heads="model"), is_identity=True)


def write_oracle(folder: Path, *, vocab: int = VOCAB, noise: float = 0.0, num_layers: int = 2) -> tuple[Any, Head]:
    """A model whose next token depends on the last one alone, and a head that knows how: with noise, sometimes.

    A token's row has 32 signs. Queries and keys are the first 16, so that attention finds the token itself.
    """
    target = write_target(
        folder / "model", "llama", vocab_size=vocab, num_hidden_layers=num_layers, tie_word_embeddings=False
    )
    dice = torch.Generator().manual_seed(3)
    with torch.no_grad():
        rows = target.get_input_embeddings().weight
        rows.zero_()[:, :32].copy_(torch.randint(0, 2, (vocab, 32), generator=dice) * 2.0 - 1)
        target.model.norm.weight.fill_(1)
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    target.save_pretrained(folder / "model")

    def place(rows: int, columns: int, *blocks: tuple[int, int, float]) -> Tensor:
        """(first row, first column, value) of diagonals of 16."""
        made, own = torch.zeros(rows, columns), torch.arange(16)
        for row, column, value in blocks:
            made[row + own, column + own] = value
        return made

    lm_head = target.lm_head.weight.detach()
    given = {
        "fc.weight": torch.zeros(64, 128), "norm.weight": torch.ones(64),
        "midlayer.input_layernorm.weight": torch.ones(64), "midlayer.hidden_norm.weight": torch.zeros(64),
        "midlayer.self_attn.q_proj.weight": place(64, 128, *((row, 0, 30.0) for row in (0, 16, 32, 48))),
        "midlayer.self_attn.k_proj.weight": place(32, 128, (0, 0, 30.0), (16, 0, 30.0)),
        "midlayer.self_attn.v_proj.weight": place(32, 128, (0, 0, 1.0), (16, 16, 1.0)),
        "midlayer.self_attn.o_proj.weight": place(64, 64, (0, 0, 1.0), (16, 32, 1.0)),
        "midlayer.mlp.down_proj.weight": torch.zeros(64, 96),
        "lm_head.weight": lm_head + noise * torch.randn(lm_head.shape, generator=dice),
    }  # fmt: skip
    flags = {"norm_before_residual": True}  # with a norm of zeros, so that nothing is left of the row before
    return target, write_eagle3(folder / "head", target, flags, has_all_words=True, given=given)


def turn(heads: Tensor) -> Tensor:
    """[n, heads, D] at positions 0 to n - 1."""
    dim = heads.shape[-1]
    angles = torch.arange(len(heads))[:, None] * LAYER["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


def write_mtp(folder: Path, model_type: str) -> tuple[Any, Head]:
    """A random model with an MTP layer in its folder: the last layer of a deeper model, which attends to all."""
    is_qwen = model_type.startswith("qwen")
    shape = {"layer_types": ["linear_attention", "full_attention"] * 2} if is_qwen else {}
    last = len(shape.get("layer_types", range(7))) - 1
    deep = write_target(folder, model_type, **shape, num_hidden_layers=last + 1)
    weights, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    dice, offset = torch.Generator().manual_seed(1), 1 if is_qwen else 0
    norms = {name: 0.1 * torch.randn(64, generator=dice) + 1 - offset for name in ("embedding", "hidden", "last")}
    fc, head = 0.2 * torch.randn(64, 128, generator=dice), 0.2 * torch.randn(VOCAB, 64, generator=dice)
    if is_qwen:
        own = {"pre_fc_norm_embedding": norms["embedding"], "pre_fc_norm_hidden": norms["hidden"]}
        own, head = own | {"fc": fc, "norm": norms["last"]}, deep.lm_head.weight
        weights |= {f"mtp.{name}.weight": tensor for name, tensor in own.items()}
        layer = f"model.layers.{last}."
        weights = {name.replace(layer, "mtp.layers.0."): tensor for name, tensor in weights.items()}
        config |= {"num_hidden_layers": last, "mtp_num_hidden_layers": 1, "layer_types": shape["layer_types"][:last]}
    else:
        own = {"enorm": norms["embedding"], "hnorm": norms["hidden"], "shared_head.norm": norms["last"]}
        own |= {"eh_proj": fc, "shared_head.head": head}
        weights |= {f"model.layers.{last}.{name}.weight": tensor for name, tensor in own.items()}
        config |= {"num_hidden_layers": last, "num_nextn_predict_layers": 1}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    library: Any = AutoModelForCausalLM
    target, inner = library.from_pretrained(folder), deep.model

    def norm(rows: Tensor, name: str) -> Tensor:
        return functional.rms_norm(rows, rows.shape[-1:], norms[name] + offset, config["rms_norm_eps"])

    def run(tokens: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        embedded = norm(inner.embed_tokens(tokens), "embedding")
        joined = torch.cat((embedded, norm(rows, "hidden")), -1) @ fc.T
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        out = inner.layers[last](
            joined[None], attention_mask=mask, position_ids=positions,
            position_embeddings=inner.rotary_emb(joined[None], positions),
        )  # fmt: skip
        out = (out[0] if isinstance(out, tuple) else out)[0]
        normed = norm(out, "last")
        return normed if is_qwen else out, normed @ head.T

    return target, Head("mtp", run, lambda states: states[-1])


@lru_cache(maxsize=64)
def _fuse(target: Any, head: Head, tokens: tuple[int, ...]) -> Tensor:
    """[n, H]"""
    states = target(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return head.fuse([state[0] for state in states])


@torch.inference_mode()
def draft_truth(
    target: Any, head: Head, tokens: Sequence[int], guesses: Sequence[int], answer: Sequence[int] = ()
) -> list[Tensor]:  # fmt: skip
    """[V] log-probabilities of the head for the token after `tokens`, and after each of the `guesses` that follow.

    answer: what follows `tokens` in the end: the model runs once for all prefixes.
    """
    hidden = _fuse(target, head, (*tokens, *answer))[: len(tokens) - 1]
    found, seen = list[Tensor](), torch.tensor(list(tokens)[1:])
    for guess in [*guesses, None]:
        rows, logits = head.run(seen, hidden)
        found.append(logits[-1].log_softmax(-1))
        if guess is not None:
            seen, hidden = torch.cat((seen, torch.tensor([guess]))), torch.cat((hidden, rows[-1:]))
    return found
