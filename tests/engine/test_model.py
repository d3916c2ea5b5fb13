"""The decoder against transformers: logits, greedy text, rope tables. For loading see test_model_loading.py."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bench.batches import Part, pack
from engine.attention.base import AttentionBackend
from engine.attention.choose import choose_for_layers
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.kv.pool import PoolShape
from engine.layers.rope import FREQUENCIES, build_rope_table
from engine.models.decoder import Decoder
from engine.models.load import load_model
from tests.support.checkpoints import EOS_ID, write_checkpoint
from tests.support.threads import one_thread

__all__ = ["one_thread"]  # a fixture

CPU = torch.device("cpu")
PAGE_TOKENS = 16
NUM_PAGES = 64
VOCAB = 300
BACKENDS = pytest.mark.parametrize("backend", ["torch_sdpa", "best"])

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def shape(family: str, num_heads: int, num_kv_heads: int, head_dim: int, tied: bool, **rest: Any) -> dict[str, Any]:
    """Keyword arguments of `write_checkpoint`."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return {"family": family, "tied": tied, **heads, **rest}


# Each GQA ratio (1, 3, 8), head_dim (64, 80, 128), tying, rope, window and sharding occurs in at least two families.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": shape("llama", 2, 2, 64, False),
    "llama-linear": shape("llama", 6, 2, 80, True, hidden=192, rope_scaling=LINEAR),
    "llama-llama3-bias-sharded": shape(
        "llama", 8, 1, 128, False, rope_scaling=LLAMA3, attention_bias=True, mlp_bias=True, shards=3, layers=3
    ),
    "llama-yarn": shape("llama", 4, 2, 64, False, rope_scaling=YARN, rope_theta=500000.0),
    "mistral-yarn": shape("mistral", 3, 3, 80, False, rope_scaling=YARN),
    "mistral-window": shape("mistral", 8, 1, 64, True, sliding_window=21),
    "mistral-sharded": shape("mistral", 3, 1, 128, False, shards=4),
    "qwen2": shape("qwen2", 3, 1, 64, True),
    "qwen2-window-linear": shape("qwen2", 2, 2, 128, False, layers=3, sliding_window=16, rope_scaling=LINEAR),
    "qwen2-yarn": shape("qwen2", 8, 1, 80, False, rope_scaling=YARN),
    "qwen3": shape("qwen3", 2, 2, 64, True),
    "qwen3-window-sharded": shape("qwen3", 3, 1, 128, False, sliding_window=17, shards=2),
    "qwen3-llama3-bias": shape("qwen3", 8, 1, 80, False, rope_scaling=LLAMA3, attention_bias=True),
}


@dataclass
class Engine:
    """A decoder with a pool, and sequences that own shuffled pages of it."""

    decoder: Decoder
    backend: str = "torch_sdpa"
    attention: AttentionBackend = field(init=False)
    pool: Tensor = field(init=False)
    free_pages: list[int] = field(init=False)

    def __post_init__(self) -> None:
        config = self.decoder.config
        self.attention = TorchSdpaAttention(config.attention_shapes[0])
        if self.backend == "best":
            windows, dtype = config.windows, self.decoder.dtype
            self.attention = choose_for_layers(config.attention_shapes, windows, PAGE_TOKENS, CPU, dtype).backend
        shape = PoolShape(NUM_PAGES, config.kv_parts, PAGE_TOKENS, self.decoder.dtype)
        self.pool = torch.full(shape.sizes, float("nan"), dtype=shape.dtype)
        self.free_pages = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist()

    def take_pages(self, num_tokens: int) -> list[int]:
        return [self.free_pages.pop() for _ in range(-(-num_tokens // PAGE_TOKENS))]

    def step(self, *parts: Part) -> Tensor:
        batch = pack(parts, PAGE_TOKENS, CPU)
        return self.decoder.logits(self.decoder.forward(batch, self.pool, self.attention))


@dataclass
class Pair:
    """One checkpoint in transformers and in Baton, and transformers' logits of one text."""

    folder: Path
    reference: Any
    decoder: Decoder
    ids: list[int]  # 75 tokens: longer than any window, four pages and a part
    logits: Tensor  # [75, VOCAB]


@pytest.fixture(scope="module", params=list(SHAPES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    write_checkpoint(folder, vocab=VOCAB, **SHAPES[request.param])
    reference = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.randint(2, VOCAB, (75,), generator=torch.Generator().manual_seed(7)).tolist()
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0]
    return Pair(folder, reference, load_model(folder, "auto", CPU), ids, logits)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@BACKENDS
def test_mixed_batches(pair: Pair, backend: str) -> None:
    engine = Engine(pair.decoder, backend)
    pages = [engine.take_pages(75) for _ in range(4)]

    def part(sequence: int, begin: int, end: int, num_logits: int = 1) -> Part:
        return Part(pair.ids[begin:end], begin, pages[sequence], num_logits)

    assert_close(engine.step(part(0, 0, 15), part(1, 0, 16, 0), part(2, 0, 33)), pair.logits[[14, 32]])
    assert_close(engine.step(part(2, 33, 34), part(0, 15, 16), part(3, 0, 40, 0)), pair.logits[[33, 15]])
    assert_close(engine.step(part(1, 16, 17), part(3, 40, 75), part(0, 16, 20)), pair.logits[[16, 74, 19]])


@BACKENDS
def test_greedy_equals_generate(pair: Pair, backend: str) -> None:
    prompt = pair.ids[:37]
    expected = pair.reference.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=EOS_ID, pad_token_id=EOS_ID
    )[0, len(prompt) :].tolist()
    engine = Engine(pair.decoder, backend)
    pages = engine.take_pages(len(prompt) + 24)
    tokens = [int(engine.step(Part(prompt, 0, pages, 1)).argmax())]
    while len(tokens) < 24 and tokens[-1] != EOS_ID:
        begin = len(prompt) + len(tokens) - 1
        tokens.append(int(engine.step(Part(tokens[-1:], begin, pages, 1)).argmax()))
    assert tokens == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(pair: Pair, dtype: str) -> None:
    engine = Engine(load_model(pair.folder, dtype, CPU))
    logits = engine.step(Part(pair.ids, 0, engine.take_pages(75), 1))[0]
    reference = AutoModelForCausalLM.from_pretrained(pair.folder, dtype=engine.decoder.dtype)
    with torch.inference_mode():
        theirs = reference(torch.tensor([pair.ids])).logits[0, -1].float()
    truth = pair.logits[-1]
    error, their_error = (logits - truth).norm(), (theirs - truth).norm()
    assert error < 2 * their_error + 1e-3 * truth.norm()  # as close to float32 as transformers


def test_rope_tables_equal_transformers(pair: Pair) -> None:
    config = AutoConfig.from_pretrained(pair.folder)
    kind = config.rope_parameters["rope_type"]
    rope, head_dim = pair.decoder.config.ropes[0], pair.decoder.config.head_dim
    rotary = pair.reference.model.rotary_emb
    frequencies = FREQUENCIES[rope.kind](rope, head_dim)
    assert rope.kind == kind
    torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=0, atol=0)
    if kind != "default":
        theirs, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
        torch.testing.assert_close(frequencies, theirs, rtol=0, atol=0)
        assert rope.attention_factor == pytest.approx(attention_factor)
    positions = torch.arange(pair.decoder.config.context_tokens)
    cos, sin = rotary(torch.empty(1), positions[None])
    table = build_rope_table(rope, head_dim, len(positions))
    torch.testing.assert_close(table[:, 0], cos[0, :, : head_dim // 2], rtol=0, atol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, : head_dim // 2], rtol=0, atol=0)
