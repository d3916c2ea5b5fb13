"""A long conversation through gateway, prefill and decode worker: its answers equal transformers'."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from demo.paths import TARGET_DIR
from tests.support.checkpoints import write_checkpoint
from tests.support.live import HTTP, WAIT_S, Live, serve_calmly

NUM_PROMPT = int(os.environ.get("TEST_CONTEXT", "67000"))  # more than 16 bits count; `make nightly`: 128,000
CONTEXT, NUM_ANSWER = 1 << 18, 12
FLAGS = ("--dtype=float32", "--kv-memory-mib=512", "--decode-max-running=2", "--prefill-max-running=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("long")
    shape: dict[str, Any] = dict(num_heads=1, num_kv_heads=1, head_dim=64, hidden=64, layers=1, vocab=1024)
    write_checkpoint(folder, "llama", context=CONTEXT, rope_theta=1e6, **shape)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, folder)
    return folder


def ask(live: Live, messages: Sequence[dict[str, str]]) -> dict[str, Any]:
    body = {
        "model": "long", "messages": messages, "max_tokens": NUM_ANSWER, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, "include_timing": True,
    }  # fmt: skip
    response = HTTP.post(f"{live.url}/v1/chat/completions", json=body, timeout=WAIT_S)
    assert response.is_success, response.text
    answer: dict[str, Any] = response.json()
    return answer


@torch.no_grad()
def reference(folder: Path, prompt_ids: Sequence[int]) -> list[int]:
    """Greedy tokens. In the only layer, keys and values of a position depend on its token alone: no n * n attention."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (layer,), cache, ids = model.model.layers, DynamicCache(), torch.tensor([prompt_ids])
    before = layer.input_layernorm(model.model.embed_tokens(ids[:, :-1]))
    shape = (1, before.shape[1], 1, -1)
    keys, values = (
        part(before).view(shape).transpose(1, 2) for part in (layer.self_attn.k_proj, layer.self_attn.v_proj)
    )
    rotations = model.model.rotary_emb(before, torch.arange(before.shape[1])[None])
    cache.update(apply_rotary_pos_emb(keys, keys, *rotations)[1], values, 0)
    found, last = list[int](), ids[:, -1:]
    for _ in range(NUM_ANSWER):
        last = model(last, past_key_values=cache).logits[:, -1:].argmax(-1)
        found.append(int(last))
    return found


@pytest.mark.nightly
def test_a_long_conversation_and_its_next_turn(folder: Path) -> None:
    messages = [
        {"role": role, "content": " ".join(f"story {turn}.{at}: the fox {at * 7919 % 1000} runs" for at in range(20))}
        for turn in range(NUM_PROMPT // 690)
        for role in ("user", "assistant")
    ]
    messages.append({"role": "user", "content": "And then?"})
    with serve_calmly(folder, "--served-name=long", *FLAGS) as live:
        first = ask(live, messages)
        said = first["choices"][0]["message"]["content"]
        second = ask(live, [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}])
    assert first["usage"]["prompt_tokens"] >= NUM_PROMPT
    for answer in (first, second):
        assert answer["choices"][0]["token_ids"] == reference(folder, answer["prompt_token_ids"])
    num_cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first["usage"]["prompt_tokens"] - num_cached < 64  # a page, and what the template ends an open turn with
