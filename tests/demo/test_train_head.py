"""Training a draft head: the saved folder, a loss that falls, and chains as a decoder would run them."""

import itertools
import json
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from demo import head_text, medusa_heads, train_head
from demo.draft_head import DraftHead
from demo.head_text import Text, first_prompts, read_text, write_text
from demo.medusa_heads import MedusaHeads, new_medusa
from demo.muon import Muon, orthogonalize
from demo.paths import TARGET_DIR
from demo.train_head import count_tokens, evaluate, make_batches, new_head, train
from engine.batch import ForwardRow
from engine.compose import build_engine
from tests.support.threads import one_thread
from wire.sampling import SamplingParams

__all__ = ["one_thread"]  # a fixture

HIDDEN, VOCAB, DRAFT_VOCAB, HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS = 32, 96, 64, 8, 4, 2


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=6, num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS, head_dim=HEAD_SIZE, vocab_size=VOCAB, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def texts(target: LlamaForCausalLM) -> list[Text]:
    """Greedy answers of the target."""
    rng, found = Random(1), []
    for _ in range(24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(3, 9))]
        tokens = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
        found.append(Text(tokens[0].tolist(), len(prompt), 0.0, False))
    return found


def test_training_lowers_the_loss_and_saves_a_checkpoint_of_the_public_format(
    target: LlamaForCausalLM, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_head, "time", SimpleNamespace(monotonic=itertools.count().__next__))  # a batch a second
    monkeypatch.setattr(train_head, "BATCH_TOKENS", 128)
    torch.manual_seed(0)
    head = new_head(target, count_tokens(texts, VOCAB).topk(DRAFT_VOCAB).indices.sort().values)
    batches = make_batches(texts)
    before = evaluate(head, target, batches, (4,))
    losses = train(head, target, batches, batches, 150, tmp_path, 1, Console(quiet=True))
    after = evaluate(head, target, batches, (4,))
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert after.right[0] > before.right[0] + 0.2
    assert 0 < after.chains[4] <= 4
    again = evaluate(DraftHead.load(target.config, tmp_path), target, batches, (4,))
    assert again.right[0] == pytest.approx(after.right[0], abs=0.02)  # it is saved in bfloat16

    kv, inner = NUM_KV_HEADS * HEAD_SIZE, NUM_HEADS * HEAD_SIZE
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (inner, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, inner),
        "midlayer.mlp.gate_proj.weight": (48, HIDDEN),
        "midlayer.mlp.up_proj.weight": (48, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 48),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
    }
    ids = torch.arange(DRAFT_VOCAB) + tensors["d2t"]
    assert tensors["t2d"].nonzero().flatten().equal(ids)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16", "torch.int64", "torch.bool"}
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 48, "num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE, "num_hidden_layers": 1, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 5000.0, "rope_scaling": None,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 3], "use_aux_hidden_state": True},
    }  # fmt: skip


def test_medusa_heads_learn_and_are_saved_as_the_engine_reads_them(
    target: LlamaForCausalLM, texts: list[Text], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_head, "time", SimpleNamespace(monotonic=itertools.count().__next__))  # a batch a second
    monkeypatch.setattr(train_head, "BATCH_TOKENS", 128)
    torch.manual_seed(0)
    count = medusa_heads.NUM_HEADS
    heads = new_medusa(target, count_tokens(texts, VOCAB).topk(DRAFT_VOCAB).indices.sort().values)
    batches = make_batches(texts)
    before = evaluate(heads, target, batches, (4,))
    losses = train(heads, target, batches, batches, 150, tmp_path / "heads", 1, Console(quiet=True))
    after = evaluate(heads, target, batches, (4,))
    assert sum(losses[-10:]) < 0.85 * sum(losses[:10])
    assert after.right[0] > before.right[0] + 0.1 and after.right[count - 1] > 0 == after.right[count]

    target.save_pretrained(tmp_path / "model")
    engine = build_engine(
        str(tmp_path / "model"), str(tmp_path / "heads"), "float32", "cpu", 1, 16, 1, lambda *_: (8, 0),
        lambda *_: None, 64,
    )  # fmt: skip
    drafter = engine.draft_runner
    assert drafter is not None and drafter.most_drafts == count
    again = MedusaHeads.load(target.config, tmp_path / "heads")
    tokens = texts[0].tokens[:12]
    engine.rows.open(0, np.array(tokens, np.int32), SamplingParams(temperature=0.0), len(tokens))
    engine.rows.write_pages(0, 0, [0, 1])
    tokens += engine.runner.launch([ForwardRow(0, 0, 12, 1)]).collect().tokens
    with torch.no_grad():
        states = target.model(torch.tensor([tokens[:-1]])).last_hidden_state
        expected = [int(again.guess(one)[0, -1]) for one in again.unroll(target.model.embed_tokens, states, states, 9)]
    guesses = [
        drafter.launch([ForwardRow(0, 12 + depth, 1, 1, num_drafted=depth)]).collect().tokens[0]
        for depth in range(count)
    ]
    assert guesses == expected


def forward_plainly(head: DraftHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The head over entries one after another, by the format's definition. All [entries, hidden]."""
    w = {name.removeprefix("midlayer."): value for name, value in head.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        normed: Tensor = w[name] * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        return normed

    def rotate(x: Tensor) -> Tensor:
        """[heads, entries, head size]"""
        half = HEAD_SIZE // 2
        angles = torch.arange(x.shape[1])[:, None] * 5000.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    both = torch.cat([norm(embedded, "input_layernorm.weight"), norm(hidden, "hidden_norm.weight")], -1)
    q, k, v = (
        (both @ w[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_SIZE)).transpose(0, 1) for name in "qkv"
    )
    k, v = (one.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0) for one in (rotate(k), v))
    out = functional.scaled_dot_product_attention(rotate(q), k, v, is_causal=True)
    x = hidden + out.transpose(0, 1).flatten(1) @ w["self_attn.o_proj.weight"].T
    y = norm(x, "post_attention_layernorm.weight")
    up = functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
    down = up @ w["mlp.down_proj.weight"].T
    result: Tensor = x + down
    return result


@torch.no_grad()
def test_the_steps_of_training_are_those_of_a_chain_from_every_row(target: LlamaForCausalLM) -> None:
    torch.manual_seed(2)
    head, steps, num_rows = new_head(target, torch.arange(0, VOCAB, 2)), 4, 7
    known, taps = torch.randint(VOCAB, (num_rows + 1,)), torch.randn(num_rows, 3 * HIDDEN)
    for row in range(num_rows):
        tokens = known[: row + 2].tolist()
        hidden = head.fc(taps[: row + 1])
        chain = []
        for _ in range(steps):
            embedded = target.model.embed_tokens(torch.tensor(tokens[1:]))
            chain.append(forward_plainly(head, embedded, hidden)[-1])
            hidden = torch.cat([hidden, chain[-1][None]])
            tokens.append(int(head.guess(chain[-1])))
        agreed = torch.tensor([tokens + [0] * num_rows])  # rows before it see other tokens than those they would guess
        unrolled = head.unroll(target.model.embed_tokens, agreed, taps[None, : row + 1], steps)
        for expected, hidden_at in zip(chain, unrolled, strict=True):
            torch.testing.assert_close(head.logits(hidden_at[0, row]), head.logits(expected), rtol=1e-4, atol=1e-4)


def test_there_are_thousands_of_prompts() -> None:
    prompts = list(itertools.islice(first_prompts(Random(1)), 6000))
    assert len(set(prompts)) > 3000
    assert not any("{" in prompt or "\n" in prompt for prompt in prompts)


def test_text_is_what_the_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_text, "PROMPTS_AT_ONCE", 3)
    monkeypatch.setattr(head_text, "ANSWER_TOKENS", 8)
    path = tmp_path / "made" / "text.json"
    write_text(str(TARGET_DIR), 0.0, 1, path, Console(quiet=True))
    found = read_text(path)
    assert len(found) == 3
    model = LlamaForCausalLM.from_pretrained(TARGET_DIR, dtype=torch.float32)
    for text in found:
        assert 0 < text.num_prompt < len(text.tokens) <= text.num_prompt + 8
        with torch.no_grad():
            logits = model(torch.tensor([text.tokens])).logits[0, text.num_prompt - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(text.tokens[text.num_prompt :])[:, None])
        assert (logits.amax(-1, keepdim=True) - chosen).max() < 0.25  # greedy, but for the engine's rounding


def test_muon_is_torchs_in_bfloat16_and_makes_updates_orthogonal_in_float32() -> None:
    torch.manual_seed(0)
    for shape in ((24, 16), (16, 24), (16, 16)):
        ours = torch.nn.Parameter(torch.randn(shape))
        theirs = torch.nn.Parameter(ours.detach().clone())
        pairs: list[tuple[torch.nn.Parameter, torch.optim.Optimizer]] = [
            (ours, Muon([ours], torch.bfloat16, momentum=0.95, weight_decay=0.01)),
            (theirs, torch.optim.Muon([theirs], weight_decay=0.01, adjust_lr_fn="match_rms_adamw")),
        ]
        for _ in range(3):
            gradient = torch.randn(shape)
            for matrix, optimizer in pairs:
                matrix.grad = gradient.clone()
                optimizer.param_groups[0]["lr"] = 0.01
                optimizer.step()
        assert torch.equal(ours, theirs)
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape), torch.float32))
        assert values.min() > 0.5 and values.max() < 1.3
