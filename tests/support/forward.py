"""Forwards of a model, without an engine."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import States
from engine.compose import choose_for_layers, load_model
from engine.kv.pool import PoolShape
from engine.layers.linear import Quantization
from engine.models.decoder import Decoder
from engine.ranks import ONE_RANK, Ranks
from tests.support.batches import Part, pack
from tests.support.families import VOCAB

CPU = torch.device("cpu")
PAGE_TOKENS = 16
LENGTHS = (75, 41, 34)  # beyond the original context of phi4_mini: transformers has other frequencies below it
PROMPTS = [torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


class Steps:
    """A model over pages of its own: one run of pages, and two slots for states, for each of PROMPTS."""

    def __init__(
        self, folder: Path, dtype: str = "float32", quantization: Quantization = "none", ranks: Ranks = ONE_RANK
    ) -> None:
        self.decoder = load_model(folder, dtype, CPU, quantization=quantization, ranks=ranks)
        config = self.decoder.config
        shape = PoolShape(24, config.kv_parts, PAGE_TOKENS, self.decoder.dtype)
        self.pool = torch.zeros(shape.sizes, dtype=shape.dtype)
        slots = PoolShape(2 * len(PROMPTS), config.state_parts, 1, torch.float32)
        self.states = slots.split(torch.full((slots.num_pages, slots.page_elements), torch.nan))
        self.slots = [-1] * len(PROMPTS)  # with the state of each
        self.attention = choose_for_layers(
            config.attention_shapes, config.windows, PAGE_TOKENS, CPU, self.decoder.dtype, has_sinks=config.has_sinks
        ).backend

    def step(self, *spans: tuple[int, int, int], has_logits: bool = True) -> list[Tensor]:
        """(prompt, begin, end) of each sequence |-> logits [end - begin, V] of each, or [0, V]."""
        num_logits = [(end - begin) * has_logits for _, begin, end in spans]
        parts = [
            Part(PROMPTS[which][begin:end].tolist(), begin, list(range(8 * which, 8 * which + 8)), count)
            for (which, begin, end), count in zip(spans, num_logits, strict=True)
        ]
        batch = pack(parts, PAGE_TOKENS, CPU)
        if self.states:
            batch = replace(batch, states=self._take_slots([which for which, *_ in spans]))
        logits = self.decoder.logits(self.decoder.forward(batch, self.pool, self.attention))
        return list(torch.split(logits, num_logits))

    def _take_slots(self, prompts: Sequence[int]) -> States:
        """The slots of a sequence take turns."""
        sources = [self.slots[which] for which in prompts]
        for which in prompts:
            self.slots[which] = 2 * which + (self.slots[which] == 2 * which)
        return States(self.states, torch.tensor(sources), torch.tensor([self.slots[which] for which in prompts]))


def logits_of(decoder: Decoder, ids: list[int]) -> Tensor:
    """[n, V] of up to 128 tokens of a model whose layers are alike."""
    config = decoder.config
    shape = PoolShape(8, config.kv_parts, 16, decoder.dtype)
    batch = pack([Part(ids, 0, list(range(8)), len(ids))], 16, torch.device("cpu"))
    pool = torch.zeros(shape.sizes, dtype=decoder.dtype)
    return decoder.logits(decoder.forward(batch, pool, TorchSdpaAttention(config.attention_shapes[0])))
