"""Each family's tiny checkpoint is whole, and fit for comparing greedy tokens: the same with and without a KV cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.support.checkpoints import write_checkpoint
from tests.support.families import FAMILIES, VOCAB
from tests.support.oracle import random_prompt
from tests.support.threads import one_thread

__all__ = ["one_thread"]  # a fixture

PROMPT_TOKENS = 37  # more than any window, chunk or original context
NUM_TOKENS = 8
LEAST_MARGIN = 1e-3  # of a greedy token's logit over the next; float32 implementations differ by about 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_need_no_cache(family: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, family)
    model_class: Any = getattr(transformers, FAMILIES[family].model)
    model, loading = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert {problem: names for problem, names in loading.items() if names} == {}
    prompt = torch.tensor([random_prompt(PROMPT_TOKENS, VOCAB, seed=7)])
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NUM_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.inference_mode():
        logits = model(generated, use_cache=False).logits[0, PROMPT_TOKENS - 1 : -1]  # [NUM_TOKENS, VOCAB]
    best, second = logits.topk(2).values.unbind(-1)
    assert logits.argmax(-1).tolist() == generated[0, PROMPT_TOKENS:].tolist()
    assert float((best - second).min()) > LEAST_MARGIN
