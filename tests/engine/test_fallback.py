"""Models without native code: transformers' own code over pages says what transformers alone says, or is refused."""

import json
import os
import re
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from engine.attention.choose import reference_attention
from engine.attention.shape import AttentionShape
from engine.batch import ForwardRow, take_turns
from engine.compose import build_engine, load_any_config, load_model
from engine.cuda.captured import is_capturable
from engine.fallback import probe as fallback_probe
from engine.fallback.load import check
from engine.fallback.model import FallbackModel
from engine.fallback.probe import probe_config
from engine.input_batch import InputBatch
from engine.kv.pool import PoolShape
from engine.models.decoder import Decoder
from engine.ops.base import Ops
from engine.ranks import Ranks
from engine.runner import Runner
from tests.support.batches import Part, pack
from tests.support.families import rope
from tests.support.threads import one_thread
from tests.support.tiny_models import CONTEXT, VOCAB, WINDOW, tiny_config, tiny_model
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture

CPU = torch.device("cpu")
PAGE_TOKENS, ROW_PAGES, NUM_PAGES, NUM_SLOTS = 16, 4, 9, 4
PROMPTS = [
    torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (37, 18)
]
ANSWER_TOKENS = 8
LONGROPE = rope("longrope", 10000.0, short_factor=[1.0] * 8, long_factor=[4.0] * 8)

# What can be served of transformers 5.24, less native families and kimi_linear (`make families`). All: `make nightly`.
# Always: each kind of positions, windows, soft caps, sinks, heads, latents, experts and recurrent layers.
TYPES = (  # noqa: SIM905
    "afmoe bamba cohere2 ctrl exaone4 falcon_h1 gemma2 gemma3n_text gpt2 gpt_bigcode gpt_neox gpt_oss "
    "granitemoehybrid lfm3 mimo_v2_flash minimax_m2 modernbert-decoder nemotron_h olmo_hybrid opt phi "
    "phi4_multimodal qwen3_next youtu"
).split()
if os.environ.get("TEST_FAMILIES"):
    TYPES += (  # noqa: SIM905
        "apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2_moe cwm dots1 emu3 ernie4_5 ernie4_5_moe "
        "exaone_moe flex_olmo flint fuyu gemma gemma4_text gemma4_unified_text got_ocr2 gpt-sw3 granite_swa granitemoe "
        "granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 "
        "iquestcoder jais2 kolibri1 laguna mellum minimax_m3_vl_text ministral ministral3 moss_transcribe_diarize "
        "nanochat nemotron olmo olmoe persimmon qwen2_moe seed_oss solar_open stablelm starcoder2 vaultgemma"
    ).split()


def generate(model: Any) -> list[list[int]]:
    """transformers alone, one prompt at a time, with its own cache."""
    model.generation_config.eos_token_id = None
    return [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


def serve(runner: Runner, rows: InputBatch) -> list[list[int]]:
    """Both prompts at once, then decode steps of both. In chunks: see `check`."""
    answers = [list[int]() for _ in PROMPTS]
    for row, prompt in enumerate(PROMPTS):
        rows.open(row, np.array(prompt, np.int32), SamplingParams(temperature=0.0), len(prompt))
        rows.write_pages(row, 0, range(NUM_PAGES - 1 - row, 0, -2))
    for step in range(ANSWER_TOKENS):
        requests = []
        for row, prompt in enumerate(PROMPTS):
            begin, count = (len(prompt) + step - 1, 1) if step else (0, len(prompt))
            source, target = take_turns(row, step)
            requests.append(ForwardRow(row, begin, count, 1, state_from=source, state_to=target))
        for told, token in zip(answers, runner.launch(requests).collect().tokens, strict=True):
            told.append(token)
    return answers


def serve_logits(model: FallbackModel) -> Tensor:
    """[T, V] of the first prompt."""
    attention, parts = reference_attention(model.config.attention_shapes, PAGE_TOKENS), model.config.kv_parts
    pool = torch.zeros(PoolShape(ROW_PAGES, parts, PAGE_TOKENS, model.dtype).sizes)
    batch = pack([Part(PROMPTS[0], 0, list(range(ROW_PAGES)), len(PROMPTS[0]))], PAGE_TOKENS, CPU)
    return model.logits(model.forward(batch, pool, attention))


def load(model_type: str, dtype: torch.dtype = torch.float32, **special: Any) -> FallbackModel:
    """In memory."""
    config = tiny_config(model_type, **special)
    return FallbackModel(tiny_model(config, dtype), probe_config(config), Ops())


HALVES = [(name, dtype) for name in ("gpt_oss", "youtu") for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("model_type", "dtype"), [*((name, torch.float32) for name in TYPES), *HALVES])
def test_logits_over_pages_are_those_of_transformers_alone(model_type: str, dtype: torch.dtype) -> None:
    """In ragged chunks and decode steps. Tokens by an engine: see test_saved_checkpoints."""
    check(load(model_type, dtype))


@pytest.mark.parametrize("model_type", ["gpt2", "youtu", "gemma3n_text", "olmo_hybrid"])
def test_saved_checkpoints(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(tiny_config(model_type))
    model.save_pretrained(tmp_path)
    progress: list[tuple[int, int]] = []
    engine = build_engine(
        str(tmp_path), "", "auto", "cpu", 1, PAGE_TOKENS, 2, lambda *_: (NUM_PAGES, NUM_SLOTS),
        lambda *done: progress.append(done),
    )  # fmt: skip
    assert serve(engine.runner, engine.rows) == generate(model)
    assert progress[-1][0] == progress[-1][1] > 0
    assert engine.find_weaknesses()["slow model"].startswith(f"Baton has no code for {model_type}: ")
    assert engine.weights.endswith(f":transformers-{transformers.__version__}"), "KV depends on its code, too"
    assert engine.config == load_any_config(tmp_path) and engine.pool.shape.parts == engine.config.kv_parts
    assert engine.dtype == "float32" and load_model(tmp_path, "bfloat16", CPU).dtype is torch.bfloat16


def test_a_step_may_begin_earlier_than_planned() -> None:
    """Where drafts of the last step were wrong, as on GPUs, which launch ahead."""
    model = load("gpt_neox")
    attention = reference_attention(model.config.attention_shapes, PAGE_TOKENS)
    shape = PoolShape(NUM_PAGES, model.config.kv_parts, PAGE_TOKENS, model.dtype)
    rows = InputBatch(2, PAGE_TOKENS * ROW_PAGES, PAGE_TOKENS, model.config.vocab_size, CPU)
    attention.is_capturable = True
    runner = Runner(cast(Decoder, model), attention, torch.zeros(shape.sizes), rows)
    assert not is_capturable(runner)


def test_models_of_one_process_do_not_meet() -> None:
    first, second = load("gemma2"), load("gpt_neox")
    expected = [serve_logits(model) for model in (first, second)]
    third = load("gemma2", sliding_window=4)
    assert all(map(torch.equal, map(serve_logits, (first, second)), expected))
    assert not torch.equal(serve_logits(third), expected[0])
    # The model's own head: Gemma's softcap and Cohere's scale are not in the weights.
    assert serve_logits(load("gemma3_text", final_logit_softcapping=0.5)).abs().max() <= 0.5
    plain, scaled = serve_logits(load("cohere", logit_scale=1.0)), serve_logits(load("cohere", logit_scale=0.25))
    torch.testing.assert_close(scaled, plain / 4)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no interface": ("falcon", {}, "failed before any layer called transformers' attention interface"),
    "alibi": ("bloom", {}, "failed before any layer called transformers' attention interface"),
    "no attention": ("rwkv", {}, "0 of its 2 layers use transformers' attention interface"),
    "forgetful": ("jamba", {}, "between chunks of a prompt, its layers lose their state"),
    "states of its own": ("minimax", {}, "MiniMax uses cache of its own"),
    "states alone": ("mamba2", {"num_heads": 4, "head_dim": 32, "n_groups": 1}, "0 of its 2 layers"),
    "chunked": ("llama4_text", {}, "its layers are of type chunked_attention"),
    "compressed": ("deepseek_v4", {}, "compressed_sparse_attention"),
    "sparse": ("deepseek_v32", {}, "its layers are of type indexed_attention"),
    "sparse blocks": ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 2}, "of type minimax_m3_sparse"),
    "several calls": ("diffllama", {}, "self_attn calls attention several times"),
    "window in the mask": ("phimoe", {}, "passes no window to attention, but its mask shows other positions"),
    "window in the cache": ("moshi", {}, f"has sliding_window {WINDOW}, but no layer passes it to attention"),
    "bidirectional": ("bert", {}, "passes no window to attention, but its mask shows other positions"),
    "encoder": ("bart", {}, "it has an encoder"),
    "cross-attention": ("mllama", {"text_config": {"cross_attention_layers": [1]}}, "1 of its 2 layers"),
    "no causal model": ("clip", {}, "transformers has no causal language model for it"),
}


@pytest.mark.parametrize(("model_type", "special", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_before_loading(model_type: str, special: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=rf"model_type '{model_type}' .*{re.escape(reason)}.* What to do: "):
        probe_config(tiny_config(model_type, **special))


@pytest.mark.parametrize("option", ["sinks", "anything"])
def test_unknown_options_of_attention_are_refused(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", partialmethod(attend_with, LlamaAttention.forward, option))
    with pytest.raises(ValueError, match=f"model.layers.0.self_attn passes {option} to attention"):
        probe_config(tiny_config("llama"))


def attend_with(self: Any, forward: Any, option: str, *args: Any, **kwargs: Any) -> Any:
    return forward(self, *args, **kwargs, **{option: torch.zeros(1)})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model_type": "secret", "auto_map": {"AutoConfig": "x.Y"}}, "needs code from its checkpoint (auto_map)"),
        ({"model_type": "secret"}, "this version of transformers does not know it. What to do: upgrade transformers"),
        ({"model_type": None}, "is not the name of a family of models"),
        ({"model_type": ["gpt2"]}, "is not the name of a family of models"),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "fp8"}}, "its weights are quantised (fp8)"),
        ({"model_type": "gpt2", "n_layer": "two"}, "its config.json is refused"),
    ],
)
def test_refused_configs(given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(given))
    for read in (load_any_config, lambda folder: load_model(folder, "auto", CPU)):
        with pytest.raises(ValueError, match=re.escape(reason)):
            read(tmp_path)


class TwoRanks(Ranks):
    size = 2


def test_refused_settings_and_files(tmp_path: Path) -> None:
    model = tiny_model(tiny_config("gpt2"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="'gpt2', so only one rank can compute it: set --tp 1"):
        load_model(tmp_path, "auto", CPU, ranks=TwoRanks())
    with pytest.raises(ValueError, match="'gpt2', so its weights cannot be rounded: set --quantization none"):
        load_model(tmp_path, "auto", CPU, quantization="int8")
    with pytest.raises(ValueError, match=r"'x' .* max_position_embeddings is None.* set it in config.json"):
        fallback_probe._find_context("x", PreTrainedConfig())
    weights = load_file(tmp_path / "model.safetensors")
    weights["transformer.h.1.ln_1.weight"] = torch.ones(3)
    del weights["transformer.h.0.attn.c_attn.bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"mis-shaped: transformer.h.0.attn.c_attn.bias, transformer.h.1.ln_1.weight"):
        load_model(tmp_path, "auto", CPU)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        load_model(tmp_path, "auto", CPU)


@pytest.mark.parametrize(
    "wrong",
    [
        {"windows": (None,) * 2},
        {"attention_shapes": (AttentionShape(4, 2, 16, 0.5),) * 2},
        {"attention_modules": ("model.layers.1.self_attn", "model.layers.0.self_attn")},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_the_check_notices_wrong_attention(wrong: dict[str, Any]) -> None:
    config = tiny_config("gemma2")
    with pytest.raises(ValueError, match=r"'gemma2' .* other logits than alone; they differ by .* in torch.float32 is"):
        check(FallbackModel(tiny_model(config), replace(probe_config(config), **wrong), Ops()))


@pytest.mark.parametrize(
    ("model_type", "special", "context", "beyond"),
    [
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64, CONTEXT),
        ("llama", {"rope_parameters": rope("dynamic", 10000.0, factor=4.0)}, CONTEXT, 4 * CONTEXT),
    ],
    ids=["longrope", "dynamic"],
)
def test_ropes_end_where_frequencies_would_depend_on_neighbours(
    model_type: str, special: dict[str, Any], context: int, beyond: int
) -> None:
    model = load(model_type, **special)
    assert model.config.context_tokens == context
    check(model)
    model.config = replace(model.config, context_tokens=beyond)
    with pytest.raises(ValueError, match="other logits than alone"):
        check(model)
