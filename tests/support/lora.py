"""Adapters that PEFT itself writes, and the model that it merges with them."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

from tests.support.families import FAMILIES

TARGETS = re.compile(
    r"(?!.*(vision|kv_b_proj)).*layers\.\d+\.(?!.*(experts|router|\.gate$)).*"
)  # products that take adapters
MIXED = re.compile(
    r"(?!.*(vision|kv_b_proj)).*layers\.\d+\.(self_attn|linear_attn|conv)\..*"
)  # those of a mixture: PEFT renames its MLPs


def write_adapter(
    folder: Path, base: Path, family: str, *, seed: int, r: int = 4, targets: Any = None, **settings: Any
) -> Any:
    """Writes the adapter of a checkpoint that `write_checkpoint` wrote; returns transformers' model merged with it.

    targets: names of modules; None: every product of the layers that takes one. settings: of LoraConfig.
    """
    kind: Any = getattr(transformers, FAMILIES[family].model)
    model = kind.from_pretrained(base, dtype=torch.float32)
    if targets is None:
        names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        wanted = MIXED if any("experts" in name for name, _ in model.named_modules()) else TARGETS
        targets = [name for name in names if wanted.fullmatch(name)]
    adapted = get_peft_model(model, LoraConfig(r=r, target_modules=targets, **settings))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    adapted.save_pretrained(str(folder))
    return adapted.merge_and_unload().eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The first tokens of transformers' answer."""
    found = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1)
    return [int(token) for token in found[0, len(prompt) :]]
