"""From a sequence's start to the last kernel of its steps the host never waits for the GPU.

The engine's own launches run on a GPU whose tensors have no values; see shape_gpu for what that detects. Tensors on the
wrong device, which a machine without a GPU would hide, fail here too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.attention.base import AttentionBackend
from engine.attention.torch_sdpa import TorchSdpaAttention
from engine.batch import ForwardRow
from engine.catalogue import build_config
from engine.compose import LAYER_PARTS, choose_format
from engine.cuda import flashinfer, flashinfer_latents
from engine.cuda import gpu_sampling as sampling_kernels
from engine.cuda import sampling as gpu_sampling
from engine.cuda.captured import capture_graphs
from engine.cuda.flashinfer_latents import FlashInferLatents
from engine.cuda.graph_shapes import choose_shapes
from engine.cuda.largest_step import LargestStep, run
from engine.cuda.ops import CudaOps
from engine.cuda.warm_up import run_prompts
from engine.input_batch import InputBatch
from engine.latent.attention import LatentAttention
from engine.latent.expand import RaggedExpansion
from engine.models.assemble import build_decoder
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.ranks import ONE_RANK, Ranks
from engine.runner import Launched, Runner
from engine.weights.reader import ShardReader
from engine.weights.table import Shard
from tests.support.batches import SAMPLINGS
from tests.support.checkpoints import tiny_config
from tests.support.combinations import combination, others
from tests.support.families import DEEPSEEK_V3
from tests.support.flashinfer_doubles import Wrapper, use_latent_module
from tests.support.gpu_doubles import Choices, PlansDecode, PlansPrefill, PlansRagged, ShapesLatents
from tests.support.random_models import RandomCheckpoint
from tests.support.shape_gpu import CUDA, ShapeGpu, WaitsError
from worker.startup.limits import Limits, estimate_step_bytes, shape_of

CONFIG = build_config(
    tiny_config("llama", hidden=256, head_dim=64, intermediate=512, layers=2, vocab=1024, tied=True).to_dict()
)
EXPERTS = build_config(
    tiny_config("qwen3_moe", hidden=256, head_dim=64, intermediate=512, layers=2, vocab=1024).to_dict()
)
SINKS = build_config(tiny_config("gpt_oss", hidden=256, head_dim=64, intermediate=512, vocab=1024).to_dict())
SMALL: dict[str, Any] = dict(
    num_hidden_layers=2, first_k_dense_replace=1, hidden_size=256, intermediate_size=512, q_lora_rank=64,
    vocab_size=1024, num_attention_heads=16, num_key_value_heads=16, n_routed_experts=8, n_group=4, topk_group=2,
    num_experts_per_tok=2, moe_intermediate_size=64, num_nextn_predict_layers=0,
)  # fmt: skip
LATENTS = build_config(DEEPSEEK_V3 | SMALL)
BF16, FP16 = torch.bfloat16, torch.float16
EVERYONE, PROMPT, ROW_PAGES, PAGE_TOKENS = range(len(SAMPLINGS)), 20, 4, 16
PADDING_PAGE = len(SAMPLINGS) * ROW_PAGES
WORDS = -(-CONFIG.vocab_size // 32)


class Built:
    """A runner, with a sequence of every kind of sampling in its rows."""

    def __init__(
        self, gpu: ShapeGpu, way: str, config: ModelConfig = CONFIG, dtype: torch.dtype = BF16,
        ranks: Ranks = ONE_RANK, context_tokens: int = 48,
    ) -> None:  # fmt: skip
        """way: an attention backend; or fp8 (weights and pages) or graphs (plain steps), both with FlashInfer."""
        is_fp8 = way == "fp8"
        checkpoint = RandomCheckpoint(config, CUDA)
        reader = ShardReader(checkpoint, dtype, CUDA, lambda *_: None, Shard(ranks.rank, ranks.size))
        format = choose_format(reader, CudaOps(), "fp8" if is_fp8 else "none")
        decoder = build_decoder(config, format, LAYER_PARTS, ranks)
        config = decoder.config
        attention: AttentionBackend = TorchSdpaAttention(config.attention_shapes[0])
        shape = config.attention_shapes[0]
        if shape.value_dim:
            latents = FlashInferLatents(shape, dtype, CUDA, 132, "fa3")
            attention = LatentAttention(shape, latents, RaggedExpansion(shape, dtype, latents))
        elif way != "torch_sdpa":
            attention = flashinfer.FlashInferAttention(
                config.attention_shapes[0], {*config.windows}, dtype, CUDA, 132,
                sinks_kv=dtype if config.has_sinks else None,
            )  # fmt: skip
        sizes = config.kv_parts[0].pool_sizes(PADDING_PAGE + 1, PAGE_TOKENS)
        pool = torch.zeros(sizes, dtype=torch.float8_e4m3fn if is_fp8 else dtype, device=CUDA)
        self.gpu, self.has_graphs = gpu, way == "graphs"
        self.rows = InputBatch(len(SAMPLINGS), context_tokens, PAGE_TOKENS, config.vocab_size, CUDA)
        self.runner = Runner(decoder, attention, pool, self.rows)
        if self.has_graphs:
            capture_graphs(self.runner, choose_shapes(len(SAMPLINGS), 3, 256), gpu.capture, PADDING_PAGE)
            gpu.finish()

    def launch(self, *steps: Sequence[ForwardRow]) -> int:
        """Start sequences and launch steps for them. Returns the number of steps that were graphs."""
        before = self.gpu.num_replays
        for requests in steps:
            with self.gpu.step():
                if requests is steps[0]:
                    self._open_rows()
                self.runner.launch(requests)
        return (self.gpu.num_replays - before) // 2  # a forward, then the choice of its tokens

    def _open_rows(self) -> None:
        for row, sampling in enumerate(SAMPLINGS):
            self.rows.close(row)
            self.rows.open(row, np.arange(PROMPT, dtype=np.int32), sampling, PROMPT)
            self.rows.write_pages(row, 0, range(row * ROW_PAGES, (row + 1) * ROW_PAGES))
            self.rows.write_tokens([(row, PROMPT, np.arange(4, dtype=np.int32))])


@pytest.fixture(scope="module")
def ways() -> dict[str, Built]:
    """Cache: way |-> runner."""
    return {}


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Choices:
    choices = Choices()
    monkeypatch.setattr(sampling_kernels, "choose_tokens", choices)
    monkeypatch.setattr(gpu_sampling, "choose_tokens", choices)
    monkeypatch.setattr(flashinfer, "BatchDecodeWithPagedKVCacheWrapper", PlansDecode)
    monkeypatch.setattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", PlansPrefill)
    return choices


@pytest.fixture(params=["flashinfer", "graphs"])
def built(request: pytest.FixtureRequest, ways: dict[str, Built], choices: Choices) -> Iterator[Built]:
    with use(ways, request.param) as built:
        yield built


@contextmanager
def use(ways: dict[str, Built], way: str) -> Iterator[Built]:
    gpu = ways[way].gpu if way in ways else ShapeGpu()
    with gpu.on():
        if way not in ways:
            ways[way] = Built(gpu, way)
        yield ways[way]


def plain(position: int, rows: Sequence[int] = EVERYONE, **asked: Any) -> list[ForwardRow]:
    return [ForwardRow(row, position, 1, 1, **asked) for row in rows]


def of_odd_rows(requests: list[ForwardRow], **asked: Any) -> list[ForwardRow]:
    return [one._replace(**asked) if one.row % 2 else one for one in requests]


PROMPTS = [ForwardRow(row, 0, PROMPT, 1) for row in EVERYONE]


@pytest.mark.parametrize("built", ["flashinfer", "graphs", "fp8", combination("torch_sdpa")], indirect=True)
def test_prompts_and_decode(built: Built, choices: Choices) -> None:
    num_replays = built.launch(PROMPTS, plain(20), plain(21), plain(31), plain(32), plain(33, [3, 4, 5]))
    assert num_replays == 5 * built.has_graphs
    *others, last = choices.fields[-6:]
    assert len(last.positions) == (4 if built.has_graphs else 3)
    for fields in others:
        assert len(fields.positions) == len(SAMPLINGS) and len(fields.counts) > 1 and len(fields.bias_ids) > 2


@pytest.mark.parametrize("built", [combination("flashinfer"), "graphs"], indirect=True)
def test_masks(built: Built, choices: Choices) -> None:
    mask = np.full((1, WORDS), -1, np.int32)
    assert built.launch(PROMPTS, of_odd_rows(plain(20), mask=mask), plain(21)) == 2 * built.has_graphs
    assert choices.fields[-2].masks.shape == (len(SAMPLINGS) if built.has_graphs else 6, WORDS)


@pytest.mark.parametrize("built", [combination("flashinfer"), "graphs"], indirect=True)
def test_log_probabilities(built: Built) -> None:
    of_some = of_odd_rows(plain(21), chosen_logprobs=2)
    assert built.launch(PROMPTS, plain(20, chosen_logprobs=3), of_some) == 2 * built.has_graphs
    scored = [ForwardRow(row, 0, PROMPT, PROMPT - 1, PROMPT - 1, 3) for row in EVERYONE]
    scored_and_chosen = ForwardRow(0, 0, PROMPT, PROMPT, PROMPT - 1, 3)
    assert not built.launch(scored, [scored_and_chosen, *plain(20, EVERYONE[1:])])


def test_drafts(built: Built, choices: Choices) -> None:
    checked = [ForwardRow(row, 19, 4, 4) for row in EVERYONE]
    masks = np.full((4, WORDS), -1, np.int32)
    drafted = [ForwardRow(row, 21, 1, 1, num_drafted=2) for row in EVERYONE]
    assert not built.launch(PROMPTS, checked, of_odd_rows(checked, mask=masks), drafted)  # penalties count drafts
    assert [fields.extra_ids.numel() > 1 for fields in choices.fields[-4:]] == [False, True, True, True]
    some = [part for part in checked if not SAMPLINGS[part.row].has_penalties]
    assert built.launch(PROMPTS, some) == built.has_graphs


@pytest.mark.parametrize("built", ["flashinfer", "fp8"], indirect=True)
def test_a_layer_takes_few_launches(built: Built) -> None:
    """Rotation with the write of KV, attention (its double's copy), four products, a gate, two sums with norms."""
    built.launch(PROMPTS)
    built.gpu.launched.clear()
    built.launch(plain(20))
    begins = [at for at, name in enumerate(built.gpu.launched) if name == "rope_and_write_kernel"]
    assert len(begins) == CONFIG.num_layers > 1
    assert begins[1] - begins[0] <= 9, built.gpu.launched[begins[0] : begins[1]]


@pytest.mark.parametrize(
    ("capability", "dtype", "config"),
    [
        combination((8, 0), BF16, EXPERTS), combination((8, 9), BF16, EXPERTS), combination((9, 0), FP16, EXPERTS),
        ((9, 0), BF16, EXPERTS), combination((12, 0), BF16, EXPERTS), combination((9, 0), BF16, SINKS),
    ],
    ids=["sm_80", "sm_89", "float16", "sm_90", "sm_120", "sinks"],
)  # fmt: skip
def test_steps_of_experts_are_captured_on_every_card(
    capability: tuple[int, int], dtype: torch.dtype, config: ModelConfig, choices: Choices
) -> None:
    gpu = ShapeGpu(capability)
    with gpu.on():
        built = Built(gpu, "graphs", config, dtype)
        checked = [ForwardRow(row, 19, 4, 4) for row in EVERYONE if not SAMPLINGS[row].has_penalties]
        assert built.launch(PROMPTS, plain(20), checked) == 2
        assert {"multiply_slots", "multiply_tiles"} <= {*gpu.launched}  # few rows and many
        gpu.launched.clear()
        built.launch(checked)
        begins = [at for at, name in enumerate(gpu.launched) if name == "rope_and_write_kernel"]
        assert begins[1] - begins[0] <= 14, gpu.launched[begins[0] : begins[1]]


@pytest.mark.parametrize(
    ("way", "config", "dtype"),
    [
        combination("flashinfer", CONFIG, BF16), combination("flashinfer", EXPERTS, FP16),
        combination("flashinfer", EXPERTS, BF16), ("flashinfer", SINKS, BF16), ("fp8", CONFIG, BF16),
    ],
    ids=["dense", "experts in float16", "experts", "sinks", "fp8"],
)  # fmt: skip
def test_steps_of_any_size_wait_for_nothing_multiply_no_float32_and_launch_little(
    way: str, config: ModelConfig, dtype: torch.dtype, choices: Choices
) -> None:
    gpu = ShapeGpu()
    with gpu.on():
        built = Built(gpu, way, config, dtype)
        for counts in ([1], [17], [32, 32], [43] * 12):  # 1, 17, 64 and 516 rows
            before = gpu.num_products
            gpu.launched.clear()
            built.launch([ForwardRow(row, 0, count, 1) for row, count in enumerate(counts)])
            assert gpu.num_products > before
            begins = [at for at, name in enumerate(gpu.launched) if name == "rope_and_write_kernel"]
            most = 12 if way == "fp8" or config is CONFIG else 16
            assert begins[1] - begins[0] <= most, gpu.launched[begins[0] : begins[1]]
        assert not gpu.wide
        wide = torch.zeros(2, 2, device=CUDA)
        wide.mm(wide)
        assert gpu.wide, "one is noticed"


class SecondOfTwo(Ranks):
    """A rank whose peer is not there: exchanges have the right shapes."""

    rank, size = 1, 2

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, tensor], -1)

    def own_rows(self, count: int) -> slice:
        return slice(-(-count // 2), count)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(len(tensor) // 2, 2 * tensor.shape[1])

    def gather_rows(self, tensor: Tensor, count: int) -> Tensor:
        return tensor.new_empty(count)


@pytest.mark.parametrize(
    ("way", "config", "ranks"),
    [
        combination("flashinfer", CONFIG, ONE_RANK), combination("graphs", CONFIG, ONE_RANK),
        ("fp8", CONFIG, ONE_RANK), combination("flashinfer", EXPERTS, ONE_RANK),
        combination("graphs", SINKS, ONE_RANK), combination("flashinfer", CONFIG, SecondOfTwo()),
        ("graphs", EXPERTS, SecondOfTwo()),
    ],
    ids=["dense", "graphs", "fp8", "experts", "sinks", "ranks", "ranks with graphs"],
)  # fmt: skip
def test_a_worker_compiles_all_that_its_steps_launch_before_the_first_request(
    way: str, config: ModelConfig, ranks: Ranks, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel anew, for seconds, where a pointer is aligned otherwise or a number is one or odd."""
    gpu, masks = ShapeGpu(), np.full((4, WORDS), -1, np.int32)
    monkeypatch.setattr(Launched, "collect", lambda _step: None)
    with gpu.on():
        built = Built(gpu, way, config, BF16, ranks, context_tokens=600)
        run(LargestStep(512, len(SAMPLINGS), ""), built.runner, built.rows)
        run_prompts(built.runner, PADDING_PAGE)
        gpu.finish()
        warm = gpu.variants.copy()
        assert warm
        for counts in ([1], [3, 17], [16, 16], [33] * 3, [43] * 12):
            built.launch([ForwardRow(row, 0, count, 1) for row, count in enumerate(counts)])
        checked = [ForwardRow(row, 19, 4, 4) for row in EVERYONE]
        drafted = [ForwardRow(row, 21, 1, 1, num_drafted=2) for row in EVERYONE]
        for step in (
            plain(20), plain(20, [0]), plain(20, [3, 4, 5, 6, 7, 8, 9]), plain(20, chosen_logprobs=3), checked,
            checked[6:9], drafted, of_odd_rows(checked, mask=masks), [*plain(20, [0, 1, 2]), *PROMPTS[3:6]],
        ):  # fmt: skip
            built.launch(PROMPTS, step)
        assert gpu.variants == warm, sorted(map(str, gpu.variants - warm))
        gate_up = torch.empty(9, 512, dtype=BF16, device=CUDA)
        CudaOps().norm(gate_up[:, 1:257].contiguous().flatten()[1:1281].view(5, 256), gate_up[0, :256], 1e-5)
        assert len(gpu.variants) == len(warm) + 1, "one is noticed"


def large(family: str, **sizes: Any) -> ModelConfig:
    """Two layers of it."""
    return build_config(AutoConfig.for_model(family, num_hidden_layers=2, **sizes).to_dict())


LARGE = {
    "Llama 8B": large("llama", hidden_size=4096, intermediate_size=14_336, num_attention_heads=32,
                      num_key_value_heads=8, vocab_size=128_256),
    "Qwen3 30B-A3B": large("qwen3_moe", hidden_size=2048, moe_intermediate_size=768, num_experts=128,
                           num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
                           vocab_size=151_936),
    "gpt-oss": large("gpt_oss", vocab_size=201_088),
}  # fmt: skip


@pytest.mark.parametrize("name", others(LARGE, "Llama 8B"))
def test_the_largest_step_takes_what_is_planned_for_it(
    name: str, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Launched, "collect", lambda _step: None)
    gpu, config, largest = ShapeGpu(), LARGE[name], LargestStep(2048, len(SAMPLINGS), "")
    with gpu.on():
        built = Built(gpu, "flashinfer", config, BF16, context_tokens=2048)
        shape = shape_of(config)
        gpu.most_bytes = before = gpu.held_bytes
        run(largest, built.runner, built.rows)
        used, planned = gpu.most_bytes - before, estimate_step_bytes(shape, Limits(len(SAMPLINGS), 2048), 1)
        assert 0.5 * planned < used <= planned, (used, planned)


@pytest.mark.parametrize("way", ["flashinfer", combination("graphs")])
def test_steps_with_latents(way: str, choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts expand, answers and drafts absorb, one beside the other too."""
    gpu = ShapeGpu()
    with gpu.on():
        use_latent_module(monkeypatch, ShapesLatents)
        monkeypatch.setattr(flashinfer_latents, "BatchPrefillWithRaggedKVCacheWrapper", PlansRagged)
        built = Built(gpu, way, LATENTS)
        checked = [ForwardRow(row, 19, 4, 4) for row in EVERYONE if not SAMPLINGS[row].has_penalties]
        mixed = [*plain(20, [0, 1]), *PROMPTS[2:5]]
        assert built.launch(PROMPTS, plain(20), plain(21), checked, mixed) == 3 * built.has_graphs
        assert not gpu.wide and ShapesLatents.made and Wrapper.plans


def test_logits_in_chunks(built: Built, choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built.rows, "max_logits", 5 * CONFIG.vocab_size)
    assert not built.launch(PROMPTS, plain(20, chosen_logprobs=1))
    assert [len(fields.positions) for fields in choices.fields[-6:]] == [5, 5, 2] * 2


MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda logits: logits[0, 0].item(),
    "mask": lambda logits: logits[logits > 0],
    "pageable": lambda logits: torch.zeros(3).to(CUDA, non_blocking=True),
    "to the host": lambda logits: logits.cpu(),
    "values of the host": lambda logits: logits + torch.zeros(CONFIG.vocab_size),
    "synchronize": lambda logits: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wait_is_noticed(
    mistake: str, ways: dict[str, Built], choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute_logits(self: Decoder, hidden: Tensor) -> Tensor:
        logits = right(self, hidden)
        MISTAKES[mistake](logits)
        return logits

    right = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", compute_logits)
    with use(ways, "flashinfer") as built, pytest.raises(WaitsError):
        built.launch(PROMPTS)
