"""What texts become before they are placed: cut, joined, put into a reranker's prompt, or refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gateway.embeddings.embed import EmbedRequest, _check, _encode, _shorten, activate, find_pooling
from gateway.errors import ApiError
from gateway.router.placement import Need, Placement, choose_placement
from gateway.router.readiness import find_unready
from gateway.text.tokenizer import Tokenizer
from tests.support.checkpoints import write_tokenizer
from tests.support.pooled import write_pooled
from tests.support.worker_views import PREFILL, PREFILL_2
from wire.pooling import RERANK_PROMPT, Pooling, read_pooling


@pytest.fixture
def reranker(tmp_path: Path) -> Tokenizer:
    folder = tmp_path / "Qwen3-Reranker-0.6B"
    write_pooled(folder, "qwen3", "Qwen3ForCausalLM", max_position_embeddings=900)
    return Tokenizer(write_tokenizer(folder, 300))


def encode(tokenizer: Tokenizer, *texts: Any, **fields: Any) -> list[list[int]]:
    pooling = tokenizer.pooling
    assert pooling is not None
    raw = EmbedRequest(None, texts, [f"input[{at}]" for at in range(len(texts))], **fields)
    _check(raw, pooling, tokenizer)
    return [list(ids) for ids in _encode(raw, pooling, tokenizer, lambda: None)]


def test_a_rerankers_prompt(reranker: Tokenizer) -> None:
    """Its name says that it is one. Only the middle is cut; a text cannot name another part of the prompt."""
    pooling = reranker.pooling
    assert pooling is not None and pooling.task == "score" and pooling.answers == ("yes", "no")
    (plain,) = encode(reranker, ("{document}?", "an answer"))
    (cut,) = encode(reranker, ("{document}?", "an answer"), truncate=len(plain) - 4)
    text = reranker.decode(plain, with_control_tokens=True)
    assert "<Query>: {document}?\n<Document>: an answer" in text and "Given a web search query" in text
    assert text.startswith(RERANK_PROMPT[0]) and text.endswith(RERANK_PROMPT[2])
    assert reranker.decode(cut, with_control_tokens=True) == text.replace("an answer", "an an"[:5])
    assert "find oil" in reranker.decode(encode(reranker, ("a", "b"), instruction="find oil")[0])


def test_cut_texts_keep_what_is_around_them(tmp_path: Path) -> None:
    write_pooled(tmp_path, "bert", "BertModel", "cls_token")
    write_tokenizer(tmp_path, 300)
    path = tmp_path / "tokenizer.json"
    tokens = {name: {"id": name, "ids": [at], "tokens": [name]} for at, name in ((2, "<|user|>"), (5, "<|end|>"))}
    single = [{"SpecialToken": {"id": "<|user|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    end, second = {"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    template = {
        "type": "TemplateProcessing", "single": [*single, end], "pair": [*single, end, second, end],
        "special_tokens": tokens,
    }  # fmt: skip
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": template}))
    tokenizer = Tokenizer(tmp_path)
    whole, cut = (encode(tokenizer, "abcdefgh", truncate=most)[0] for most in (None, 5))
    assert [whole[0], whole[-1]] == [cut[0], cut[-1]] == [2, 5] and len(cut) == 5 and cut[1:4] == whole[1:4]
    pair, short = (tokenizer.encode_cut([("ab", "cdef")], most)[0] for most in (None, 7))
    assert (len(pair), len(short)) == (9, 7) and short[:4] == pair[:4] and short[-1] == 5
    assert encode(tokenizer, [7, 8, 9], truncate=2) == [[7, 8]]


@pytest.mark.parametrize(
    ("texts", "fields", "param"),
    [
        ((), {}, "input"),
        (("a", ""), {}, "input[1]"),
        (([],), {}, "input[0]"),
        (([300],), {}, "input[0]"),
        (([5] * 901,), {}, "input[0]"),
        (("x" * 20_000,), {}, "input[0]"),
        (("x" * (2 << 20),), {"truncate": 5}, "input[0]"),
        ([("q" * (1 << 19), "a")] * 17, {"truncate": 5}, "input"),
        (("a",), {"truncate": 0}, "truncate_prompt_tokens"),
        (("a",), {"truncate": 901}, "truncate_prompt_tokens"),
        (("a",), {"prompt_name": "query"}, "prompt_name"),
        (("a",), {"priority": 10}, "priority"),
        (("a",), {"deadline_ms": 0}, "deadline_ms"),
        (["a"] * 2049, {}, "input"),
    ],
)
def test_refusals_name_the_field(reranker: Tokenizer, texts: Any, fields: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        encode(reranker, *texts, **fields)
    assert caught.value.status == 400 and caught.value.param == param


def test_models_for_something_else_say_what_they_are(reranker: Tokenizer) -> None:
    for tokenizer, detail in ((reranker, "makes scores of pairs"), (SimpleNamespace(pooling=None), "answers prompts")):
        with pytest.raises(ApiError, match=detail):
            find_pooling(SimpleNamespace(tokenizer=tokenizer), "m", ("embed",))  # type: ignore[arg-type]


def test_vectors_and_logits_as_clients_get_them() -> None:
    unit = Pooling("embed", "last", False, 8, normalizes=True)
    assert np.allclose(_shorten(np.array([3, 4, 12], np.float32), 2, unit), [0.6, 0.8])
    logits = np.array([0.0, np.log(3)], np.float32)
    for activation, expected in (("none", logits), ("sigmoid", [0.5, 0.75]), ("softmax", [0.25, 0.75])):
        pooling = Pooling("classify", "last", False, 8, activation=activation)  # type: ignore[arg-type]
        assert np.allclose(activate(logits, pooling), expected)


def test_texts_go_to_prefill_workers_of_such_models_alone() -> None:
    one, other = (replace(view, embeds=True) for view in (PREFILL, PREFILL_2))
    assert find_unready([one, other]) is None
    choice = choose_placement([replace(one, num_mine=2), other], Need(10))
    assert isinstance(choice, Placement) and (choice.decode, choice.prefill) == (other, None)
    dead = [replace(view, is_alive=False, trouble="is gone") for view in (one, other)]
    unready = find_unready(dead)
    assert unready is not None and unready.detail == "no prefill worker is alive: p:1 is gone; p:2 is gone"


def test_a_chat_model_is_none(tmp_path: Path) -> None:
    write_pooled(tmp_path, "qwen3", "Qwen3ForCausalLM")
    assert read_pooling(tmp_path) is None
