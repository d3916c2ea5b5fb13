"""Medusa heads (arXiv:2401.10774): residual blocks on the target's last hidden states, one head for each place ahead.

Saved in vLLM's layout, with one product to a draft vocabulary for all heads.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig

from demo.draft_head import Guesser

NUM_HEADS, NUM_LAYERS = 4, 2


class Blocks(nn.Module):
    """The residual blocks of one head. They begin as the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(NUM_LAYERS))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + functional.silu(layer(hidden))
        return hidden


class MedusaHeads(Guesser):
    """Reads no tokens."""

    token_map: Tensor  # `draft_ids`, saved

    def __init__(self, config: LlamaConfig, draft_ids: Tensor) -> None:
        super().__init__(config, draft_ids, saves_t2d=False)
        self.blocks = nn.ModuleList(Blocks(config.hidden_size) for _ in range(NUM_HEADS))
        self.register_buffer("token_map", draft_ids)

    def tap(self, states: Sequence[Tensor]) -> Tensor:
        return states[-1]

    def unroll(self, embed: Callable[[Tensor], Tensor], tokens: Tensor, taps: Tensor, steps: int) -> Iterator[Tensor]:
        for block in self.blocks[:steps]:
            yield block(taps)

    @classmethod
    def load(cls, config: LlamaConfig, folder: Path) -> "MedusaHeads":
        """Read what `save` wrote for this target. FileNotFoundError if there is nothing."""
        tensors = load_file(folder / "model.safetensors")
        heads = cls(config, tensors["token_map"])
        heads.load_state_dict(tensors)
        return heads

    def describe(self) -> dict[str, Any]:
        return {
            "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": self.config.hidden_size,
            "vocab_size": self.config.vocab_size, "truncated_vocab_size": len(self.token_map), "num_heads": NUM_HEADS,
            "num_hidden_layers": NUM_LAYERS, "medusa_fc_bias": True, "original_lm_head": True,
            "torch_dtype": "bfloat16",
        }  # fmt: skip


def new_medusa(target: Any, draft_ids: Tensor) -> MedusaHeads:
    """All heads begin as the target's own."""
    heads = MedusaHeads(target.config, draft_ids)
    with torch.no_grad():
        heads.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
    return heads
