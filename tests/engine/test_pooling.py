"""Vectors, scores and classes equal those of transformers, for a tiny checkpoint of each kind."""

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.pooling.encoder import Encoder, group_by_length
from tests.support.checkpoints import write_tokenizer
from tests.support.pooled import cosine, embed, hidden_of, open_engine, write_pooled
from wire.pooling import read_pooling

DICE = np.random.default_rng(0)
TEXTS = [[0, *DICE.integers(3, 300, length).tolist(), 2] for length in (1, 3, 17, 40, 42, 100)]
SAME = 0.999999

POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean_tokens": lambda rows: rows.mean(0), "cls_token": lambda rows: rows[0], "lasttoken": lambda rows: rows[-1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "model", "pool"),
    [
        ("bert", "BertModel", "mean_tokens"),
        ("roberta", "RobertaModel", "cls_token"),
        ("xlm-roberta", "XLMRobertaModel", "mean_tokens"),
        ("modernbert", "ModernBertModel", "cls_token"),
        ("mpnet", "MPNetModel", "mean_tokens"),
        ("distilbert", "DistilBertModel", "mean_tokens"),
        ("gemma3_text", "Gemma3TextModel", "mean_tokens"),  # attention both ways
        ("qwen3", "Qwen3Model", "lasttoken"),
        ("qwen3", "Qwen3ForCausalLM", "lasttoken"),
        ("qwen3", "Qwen3Model", "mean_tokens"),
    ],
)
def test_vectors(tmp_path: Path, kind: str, model: str, pool: str) -> None:
    theirs = write_pooled(tmp_path, kind, model, pool, normalizes=True)
    engine = open_engine(tmp_path)
    vectors = embed(engine, TEXTS)
    for ids, vector in zip(TEXTS, vectors, strict=True):
        assert cosine(POOLS[pool](hidden_of(theirs.base_model, ids)), vector) > SAME
        assert abs(np.linalg.norm(vector) - 1) < 1e-5
        assert cosine(embed(engine, [ids])[0], vector) > SAME, "the other texts of the step count"


def test_a_causal_text_in_chunks(tmp_path: Path) -> None:
    write_pooled(tmp_path, "qwen3", "Qwen3Model", "lasttoken", normalizes=True)
    engine = open_engine(tmp_path)
    together = embed(engine, TEXTS)
    for chunk in (1, 5, 16, 41, 64):
        for whole, cut in zip(together, embed(engine, TEXTS, chunk), strict=True):
            assert cosine(whole, cut) > SAME, chunk


def test_a_thread_for_each_part(tmp_path: Path) -> None:
    """As many texts as threads, and more: each thread computes whole texts, with one thread's results."""
    write_pooled(tmp_path, "bert", "BertModel", "mean_tokens")
    engine, texts = open_engine(tmp_path), (TEXTS * 2)[:8]
    model, seen = engine.runner.model, set[tuple[str, int]]()
    assert isinstance(model, Encoder)
    model._model.register_forward_hook(lambda *_: seen.add((threading.current_thread().name, torch.get_num_threads())))
    together = embed(engine, texts)
    assert len(seen) == 2 == torch.get_num_threads() and {count for _, count in seen} == {1}
    seen.clear()
    for one, ids in zip(together, texts, strict=True):
        assert cosine(embed(engine, [ids])[0], one) > SAME
    assert seen == {(threading.current_thread().name, 2)}, "one text has all threads"


def test_groups() -> None:
    counts = DICE.integers(1, 300, 50)
    for most in (math.inf, 600.0, 1.0):
        groups = group_by_length(counts, most)
        assert sorted(at for group in groups for at in group) == list(range(50))
        for own in (counts[group] for group in groups):
            assert own.max() <= 1.25 * own.min() and (len(own) == 1 or own.max() * len(own) <= most)
    assert [len(group) for group in group_by_length([128] * 8, 512.0)] == [4, 4]


def test_products_follow(tmp_path: Path) -> None:
    dense = ("activation.Tanh", "linear.Identity")
    theirs = write_pooled(tmp_path, "distilbert", "DistilBertModel", "mean_tokens", dense, normalizes=True)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("2_Dense", "3_Dense"))
    for ids, vector in zip(TEXTS, embed(open_engine(tmp_path), TEXTS), strict=True):
        rows = torch.tanh(hidden_of(theirs, ids).mean(0) @ first["linear.weight"].T + first["linear.bias"])
        assert cosine(rows @ second["linear.weight"].T, vector) > SAME and len(vector) == 32


@pytest.mark.parametrize(
    ("kind", "model", "labels"),
    [
        ("bert", "BertForSequenceClassification", 1),
        ("roberta", "RobertaForSequenceClassification", 3),
        ("modernbert", "ModernBertForSequenceClassification", 1),
        ("qwen3", "Qwen3ForSequenceClassification", 2),
    ],
)
def test_heads_with_classes(tmp_path: Path, kind: str, model: str, labels: int) -> None:
    theirs = write_pooled(tmp_path, kind, model, num_labels=labels)
    write_tokenizer(tmp_path, 300, sep_token="<|user|>")  # whose id is 2
    pairs = [[*one[:-1], 2, *other[1:]] for one, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    pooling = read_pooling(tmp_path)
    assert (
        pooling is not None
        and len(pooling.labels) == labels
        and pooling.task == ("score" if labels == 1 else "classify")
    )
    for ids, logits in zip(pairs, embed(open_engine(tmp_path), pairs), strict=True):
        split = ids.index(2) + 1
        segments = torch.tensor([[0] * split + [1] * (len(ids) - split)])
        given: dict[str, Any] = {"token_type_ids": segments} if kind == "bert" else {}
        with torch.inference_mode():
            expected = theirs(input_ids=torch.tensor([ids]), **given).logits[0]
        assert np.allclose(expected, logits, atol=1e-4), (expected, logits)


def test_scores_by_two_tokens(tmp_path: Path) -> None:
    """As Qwen3-Reranker's, which are a chat model's."""
    theirs = write_pooled(tmp_path, "qwen3", "Qwen3ForCausalLM")
    write_tokenizer(tmp_path, 300)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"classifier_from_token": ["a", "b"]}))
    pooling = read_pooling(tmp_path)
    assert pooling is not None and pooling.task == "score" and pooling.answers == ("b", "a")
    places = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    for ids, score in zip(TEXTS, embed(open_engine(tmp_path), TEXTS), strict=True):
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([ids])).logits[0, -1]
        assert np.allclose(logits[places["b"]] - logits[places["a"]], score, atol=1e-4)


def test_rounded_weights_and_formats(tmp_path: Path) -> None:
    """Vectors come from the same rounded weights as answers do."""
    theirs = write_pooled(tmp_path, "qwen3", "Qwen3Model", "lasttoken", normalizes=True)
    for dtype, quantization, least in (("bfloat16", "none", 0.999), ("bfloat16", "int8", 0.99)):
        for ids, vector in zip(TEXTS, embed(open_engine(tmp_path, dtype, quantization), TEXTS), strict=True):
            assert cosine(hidden_of(theirs, ids)[-1], vector) > least, (dtype, quantization)


def test_numbers_that_are_none(tmp_path: Path) -> None:
    theirs = write_pooled(tmp_path, "bert", "BertModel", "mean_tokens")
    theirs.embeddings.word_embeddings.weight.data[7] = torch.nan
    theirs.save_pretrained(tmp_path)
    engine = open_engine(tmp_path)
    assert engine.pooled is not None
    vectors = embed(engine, [[0, 5, 2], [0, 7, 2]])
    assert np.isfinite(vectors[0]).all() and not np.isfinite(vectors[1]).all()


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("modules.json", [{"type": "x.WordWeights", "path": ""}], "WordWeights; supported: Transformer"),
        ("modules.json", [{"type": "x.Pooling", "path": "../1"}], "expected the name of a folder"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "supported: one of lasttoken"),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length is 'x'"),
        ("config_sentence_transformers.json", {"prompts": [1]}, "expected texts by name"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, file: str, content: object, problem: str) -> None:
    write_pooled(tmp_path, "bert", "BertModel", "mean_tokens")
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=problem):
        read_pooling(tmp_path)


def test_missing_weights(tmp_path: Path) -> None:
    write_pooled(tmp_path, "bert", "BertModel", "mean_tokens")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.0.output.dense.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing or mis-shaped: encoder\.layer\.0\.output\.dense\.weight"):
        open_engine(tmp_path)
