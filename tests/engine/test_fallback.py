"""Models without native code: transformers' own code over pages says what transformers alone says, or is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.choose import choose_for_layers
from engine.batch import RowRequest
from engine.kv.pool import PoolShape
from engine.models.fallback_check import check
from engine.models.fallback_model import FallbackModel
from engine.models.fallback_probe import probe_config
from engine.rows import Rows
from engine.runner import Runner
from tests.support.threads import one_thread
from tests.support.tiny_models import CONTEXT, VOCAB, tiny_config, tiny_model
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture

CPU = torch.device("cpu")
PAGE_TOKENS, ROW_PAGES, NUM_PAGES = 16, 4, 9
PROMPTS = [torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (37, 18)]
CHUNKS = [(16, 7), (20, 11), (1, 0)]  # of the two prompts
ANSWER_TOKENS = 8

TYPES = """
afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 dots1
emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4
gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss
granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder jais2 kolibri1 laguna llama mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral
ministral3 mistral mixtral modernbert-decoder moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt
persimmon phi phi3 phi4_multimodal qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
vaultgemma youtu
""".split()


def generate(model: Any) -> list[list[int]]:
    """transformers alone, one prompt at a time, with its own cache."""
    model.generation_config.eos_token_id = None
    return [
        model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=ANSWER_TOKENS, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


def serve(model: Any) -> list[list[int]]:
    """The prompts in ragged chunks, then decode steps of both, by a runner over pages."""
    config = model.config
    attention = choose_for_layers(
        config.attention_shapes, config.windows, PAGE_TOKENS, CPU, model.dtype, has_sinks=config.has_sinks
    ).backend
    shape = PoolShape(NUM_PAGES, config.kv_parts, PAGE_TOKENS, model.dtype)
    pages = torch.full(shape.sizes, float("nan"), dtype=shape.dtype)
    rows = Rows(2, PAGE_TOKENS * ROW_PAGES, PAGE_TOKENS, config.vocab_size, CPU)
    runner = Runner(model, attention, pages, rows)
    for row, prompt in enumerate(PROMPTS):
        rows.open(row, np.array(prompt, np.int32), SamplingParams(temperature=0.0), len(prompt))
        rows.write_pages(row, 0, range(NUM_PAGES - 1 - row, 0, -2))
    ends, answers = [0, 0], [[], []]
    steps = [*CHUNKS, *[(1, 1)] * (ANSWER_TOKENS - 1)]
    for step in steps:
        requests = []
        for row, count in enumerate(step):
            begin, ends[row] = ends[row], ends[row] + count
            if count:
                requests.append(RowRequest(row, begin, count, int(ends[row] >= len(PROMPTS[row]))))
        tokens = iter(runner.launch(requests).collect().tokens)
        for request in requests:
            if request.num_logits:
                answers[request.row].append(next(tokens))
    return answers


@pytest.mark.parametrize("model_type", TYPES)
def test_greedy_answers_equal_generate(model_type: str) -> None:
    config = tiny_config(model_type)
    model = tiny_model(config)
    expected = generate(model)
    fallback = FallbackModel(model, probe_config(config))
    check(fallback)
    assert serve(fallback) == expected
