"""An EAGLE-3 draft head (arXiv:2503.01840): one layer that reads hidden states of a target and guesses what follows.

Its state dict has the names and shapes of checkpoints of SpecForge and SafeAILab. The target embeds the tokens.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

Past = list[tuple[Tensor, Tensor]]  # keys and values [batch, KV heads, rows, head size] of each step so far


def tap_layers(num_layers: int) -> list[int]:
    """The layers of the target whose inputs the head reads."""
    return [2, num_layers // 2, num_layers - 3]


class Attention(nn.Module):
    """Step 0 is causal. A row of a later step sees what it saw at step 0, and its own entries of the steps since."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        assert config.head_dim and config.num_key_value_heads  # LlamaConfig has filled them in
        self._num_kv_heads, self._head_dim = config.num_key_value_heads, config.head_dim
        width, inner = 2 * config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """x [batch, rows, 2 * hidden] -> [batch, rows, hidden]. Appends this step to `past`."""
        num_rows = x.shape[1]
        q, k, v = (
            project(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)  # [batch, heads, rows, head size]
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rope)
        past.append((k, v))
        q = q.unflatten(1, (self._num_kv_heads, -1)) * self._head_dim**-0.5  # [batch, KV heads, group, rows, head size]
        first_k, first_v = (one.unsqueeze(2) for one in past[0])
        later = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(later, float("-inf"))]  # [..., rows, rows]
        scores += [(q * key.unsqueeze(2)).sum(-1, keepdim=True) for key, _ in past[1:]]  # [..., rows, 1]
        weights = torch.cat(scores, -1).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :num_rows] @ first_v
        for step, (_, value) in enumerate(past[1:]):
            out = out + weights[..., num_rows + step, None] * value.unsqueeze(2)
        result: Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return result


class Layer(nn.Module):
    """The only layer. The token's embedding enters through the attention alone."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(self, embedded: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], past: Past) -> Tensor:
        """All but rope [batch, rows, hidden]."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        hidden = hidden + self.self_attn(both, rope, past)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Guesser(nn.Module):
    """Row i has hidden states of the target at position i, and guesses tokens from i + 2 on, one a step."""

    draft_ids: Tensor  # [draft vocabulary] target's ids, ascending
    t2d: Tensor  # [target's vocabulary] whether the draft vocabulary has it

    def __init__(self, config: LlamaConfig, draft_ids: Tensor, *, saves_t2d: bool) -> None:
        """config: the target's."""
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        is_known = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, draft_ids, True)
        self.register_buffer("t2d", is_known, persistent=saves_t2d)

    def tap(self, states: Sequence[Tensor]) -> Tensor:
        """The target's hidden states [batch, rows, hidden], the last one normed |-> what `unroll` takes."""
        raise NotImplementedError

    def unroll(self, embed: Callable[[Tensor], Tensor], tokens: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
        """As if each row began a chain: yields, for at most so many steps, [batch, rows, hidden], from which step k
        guesses the token at i + 2 + k.

        tokens [batch, rows + steps or more]: right guesses of all steps. taps: see `tap`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., draft vocabulary], float32"""
        result: Tensor = self.lm_head(hidden)
        return result.float()

    def guess(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [...], ids of the target"""
        return self.draft_ids[self.logits(hidden).argmax(-1)]

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16; each file is replaced as a whole."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: value.bfloat16().contiguous() if value.is_floating_point() else value
            for name, value in self.state_dict().items()
        }
        weights, config = folder / "model.safetensors", folder / "config.json"
        config.with_suffix(".new").write_text(json.dumps(self.describe(), indent=1))
        config.with_suffix(".new").replace(config)
        save_file(tensors, weights.with_suffix(".new"), metadata={"format": "pt"})
        weights.with_suffix(".new").replace(weights)

    def describe(self) -> dict[str, Any]:
        """The contents of config.json."""
        raise NotImplementedError


class DraftHead(Guesser):
    """Reads the token at i + 1, too."""

    d2t: Tensor  # [draft vocabulary] draft id |-> target's id - draft id

    def __init__(self, config: LlamaConfig, draft_ids: Tensor) -> None:
        super().__init__(config, draft_ids, saves_t2d=True)
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        self._rope = LlamaRotaryEmbedding(config)

    def tap(self, states: Sequence[Tensor]) -> Tensor:
        """[batch, rows, 3 * hidden]"""
        return torch.cat([states[layer] for layer in tap_layers(self.config.num_hidden_layers)], -1)

    def unroll(self, embed: Callable[[Tensor], Tensor], tokens: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
        """The head's output for each step: [texts, rows, hidden]. From the second on its input is the one before."""
        num_rows = taps.shape[1]
        hidden = self.fc(taps)
        past: Past = []
        for step in range(steps):
            rope = self._rope(hidden, torch.arange(step, step + num_rows)[None])
            hidden = self.midlayer(embed(tokens[:, step + 1 : step + 1 + num_rows]), hidden, rope, past)
            yield hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))

    @classmethod
    def load(cls, config: LlamaConfig, folder: Path) -> "DraftHead":
        """Read what `save` wrote for this target. FileNotFoundError if there is nothing."""
        tensors = load_file(folder / "model.safetensors")
        head = cls(config, tensors["d2t"] + torch.arange(len(tensors["d2t"])))
        head.load_state_dict(tensors)
        return head

    def describe(self) -> dict[str, Any]:
        assert self.config.rope_parameters
        names = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size"
        names += " max_position_embeddings rms_norm_eps"
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{name: getattr(self.config, name) for name in names.split()},
            "num_hidden_layers": 1,
            "draft_vocab_size": len(self.d2t),
            "rope_theta": self.config.rope_parameters["rope_theta"],
            "rope_scaling": None,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": tap_layers(self.config.num_hidden_layers),
                "use_aux_hidden_state": True,
            },
        }
