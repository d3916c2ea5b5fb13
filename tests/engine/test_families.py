"""Every native family against transformers' own code, on tiny checkpoints: chunks, batches, windows, experts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from bench.batches import Part, pack
from engine.attention.choose import choose_for_layers
from engine.kv.pool import PoolShape
from engine.layers.linear import Quantization
from engine.models import load as weights
from engine.models.json_values import read_json
from engine.models.load import load_model
from engine.models.read_config import build_config, load_config
from engine.models.table import shard_config
from engine.weights.table import Shard
from tests.support.attention import needs_compiler
from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES, VOCAB
from wire.kv_layout import KvPart

CPU = torch.device("cpu")
PAGE_TOKENS = 16
LENGTHS = (75, 41, 34)  # beyond the original context of phi4_mini: transformers has other frequencies below it
PROMPTS = [torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


class Steps:
    """A model over pages of its own, one run of pages for each of PROMPTS."""

    def __init__(self, folder: Path, dtype: str = "float32", quantization: Quantization = "none") -> None:
        self.decoder = load_model(folder, dtype, CPU, quantization=quantization)
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
        if "per_layer_config" in text:  # Gemma 4's older files have keys for its full layers
            full = next(iter(text.pop("per_layer_config").values()))
            text["global_head_dim"] = full["head_dim"]
            text["num_global_key_value_heads"] = full.get("num_key_value_heads")
            old = {**config, "text_config": text} if "text_config" in config else text
            assert build_config(old) == load_config(tmp_path / name), name
            continue
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


@needs_compiler
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_packed_weights_from_a_file_are_those_in_memory(
    family: tuple[str, Path], quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what rounding adds to logits is no more than a part of them: experts of other choices add most."""
    _, folder = family
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    span = (0, 0, 40)
    with torch.inference_mode():
        (own,) = Steps(folder, "bfloat16", quantization).step(span)
        monkeypatch.setattr(weights, "SMALLEST_FILE_BYTES", 0)
        for _ in ("written", "mapped"):
            steps = Steps(folder, "bfloat16", quantization)
            assert steps.decoder.mapped_bytes
            assert torch.equal(steps.step(span)[0], own)
        (truth,) = Steps(folder).step(span)
    assert (own - truth).norm() < 0.4 * truth.norm()


def test_layers_that_read_the_keys_of_others_have_no_pages(tmp_path: Path) -> None:
    small = load_config(write_checkpoint(tmp_path / "e2b", "gemma4_e2b"))
    assert [layer.kv_layer for layer in small.layers] == [None] * 4 + [2, 3]
    assert small.kv_parts == (KvPart(2, 2, 32), KvPart(2, 2, 64)) and small.windows == (8, None, 8, None)
    large = load_config(write_checkpoint(tmp_path / "31b", "gemma4_31b"))
    assert large.kv_parts == (KvPart(1, 2, 32), KvPart(1, 1, 64))
    assert shard_config(large, Shard(1, 2)).kv_parts == (KvPart(1, 1, 32), KvPart(1, 1, 64))


def test_weights_that_shared_layers_do_not_use_may_be_in_the_file(tmp_path: Path) -> None:
    """As in the published E2B and E4B."""
    folder = write_checkpoint(tmp_path, "gemma4_e2b")
    expected = Steps(folder).step((0, 0, 20))[0]
    tensors = load_file(folder / "model.safetensors")
    for layer in (4, 5):
        for name in ("k_proj", "v_proj", "k_norm"):
            full = f"model.language_model.layers.{layer}.self_attn.{name}.weight"
            tensors[full] = tensors[full.replace(f".{layer}.", f".{layer - 2}.")].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(Steps(folder).step((0, 0, 20))[0], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 5}, "leaves no layer whose keys and values fit those of layer 1"),
        ({"num_kv_shared_layers": 7}, "leaves no layer whose keys and values fit those of layer 0"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers must be an integer from 0"),
        ({"per_layer_config": {"1": {"sliding_window": 4}}}, "per_layer_config with sliding_window is not supported"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 heads are to be divided"),
        ({"per_layer_config": {"1": {"head_dim": 15}}}, "head_dim even"),
        ({"per_layer_config": {"1": 15}}, "1 must be an object, not 15"),
        ({"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input 100 .* supported: vocab_size, 320"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
    ],
)
def test_what_gemma_4_cannot_be_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = read_json(write_checkpoint(tmp_path, "gemma4_e2b") / "config.json")
    with pytest.raises(ValueError, match=message):
        build_config({**config, "text_config": {**config["text_config"], **change}})


def test_the_last_layer_is_full_and_images_may_see_both_ways() -> None:
    layers = {"num_hidden_layers": 7, "hidden_size": 64, "hidden_size_per_layer_input": 0}
    config = build_config({"model_type": "gemma4_text", "use_bidirectional_attention": "vision", **layers})
    assert config.windows == (512,) * 5 + (None, None)  # each sixth, and the last
    assert [shape.head_dim for shape in config.attention_shapes] == [256] * 5 + [512] * 2
    assert [rope.turned_share for rope in config.ropes] == [0.25, 1.0]
