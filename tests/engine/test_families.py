"""Every native family against transformers' own code, on tiny checkpoints: chunks, batches, windows, experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from bench.batches import Part, pack
from engine.attention.choose import choose_for_layers
from engine.kv.pool import PoolShape
from engine.models.json_values import read_json
from engine.models.load import load_model
from engine.models.read_config import build_config, load_config
from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES, VOCAB

CPU = torch.device("cpu")
PAGE_TOKENS = 16
LENGTHS = (75, 41, 34)  # beyond the original context of phi4_mini: transformers has other frequencies below it
PROMPTS = [torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


class Steps:
    """A model over pages of its own, one run of pages for each of PROMPTS."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.decoder = load_model(folder, dtype, CPU)
        config = self.decoder.config
        shape = PoolShape(24, config.kv_parts, PAGE_TOKENS, self.decoder.dtype)
        self.pool = torch.zeros(shape.sizes, dtype=shape.dtype)
        self.attention = choose_for_layers(
            config.attention_shapes, config.windows, PAGE_TOKENS, CPU, self.decoder.dtype, has_sinks=config.has_sinks
        ).backend

    def step(self, *spans: tuple[int, int, int]) -> list[Tensor]:
        """(prompt, begin, end) of each sequence |-> logits [end - begin, V] of each."""
        parts = [
            Part(PROMPTS[which][begin:end].tolist(), begin, list(range(8 * which, 8 * which + 8)), end - begin)
            for which, begin, end in spans
        ]
        logits = self.decoder.logits(self.decoder.forward(pack(parts, PAGE_TOKENS, CPU), self.pool, self.attention))
        return list(torch.split(logits, [end - begin for _, begin, end in spans]))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, write_checkpoint(tmp_path_factory.mktemp(name), name)


def test_logits_are_those_of_transformers(family: tuple[str, Path]) -> None:
    """Prompts in chunks, some tokens one at a time, several sequences in a batch."""
    name, folder = family
    model_class: Any = getattr(transformers, FAMILIES[name].model)
    reference = model_class.from_pretrained(folder).eval()
    steps = Steps(folder)
    with torch.inference_mode():
        expected = [reference(prompt[None], use_cache=False).logits[0] for prompt in PROMPTS]
        found: list[list[Tensor]] = [[], [], []]
        for spans in (
            [(0, 0, 40)], [(1, 0, 20), (0, 40, 41), (2, 0, 34)], [(0, 41, 42), (1, 20, 41)], [(0, 42, 75)],
        ):  # fmt: skip
            for (which, *_), logits in zip(spans, steps.step(*spans), strict=True):
                found[which].append(logits)
    for parts, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(parts), truth, rtol=1e-4, atol=5e-4)
        assert torch.equal(torch.cat(parts).argmax(-1), truth.argmax(-1))


def test_a_row_is_the_same_alone_and_among_others(family: tuple[str, Path]) -> None:
    """In bfloat16, which the CPU's kernels multiply row by row."""
    _, folder = family
    alone, among = Steps(folder, "bfloat16"), Steps(folder, "bfloat16")
    with torch.inference_mode():
        for which in range(3):
            alone.step((which, 0, 8))
            among.step((which, 0, 8))
        together = among.step(*((which, 8, 9) for which in range(3)))
        for which in range(3):
            (own,) = alone.step((which, 8, 9))
            assert torch.equal(own, together[which]), which


def test_older_spellings_mean_the_same(tmp_path: Path) -> None:
    """Files from before transformers 5 have the rope's values beside each other, and other keys for experts."""
    for name in FAMILIES:
        config = dict(read_json(write_checkpoint(tmp_path / name, name) / "config.json"))
        text = dict(config.get("text_config") or config)
        rope = text.pop("rope_parameters")
        if "full_attention" in rope:
            text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = rope["full_attention"]
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        if "partial_rotary_factor" in rope:
            text["partial_rotary_factor"] = rope["partial_rotary_factor"]
        if name == "qwen3_moe":
            text["num_experts"] = text.pop("num_local_experts", None) or text["num_experts"]
        old = {**config, "text_config": text} if "text_config" in config else text
        assert build_config(old) == load_config(tmp_path / name), name
