"""Tokens to text and back: whole characters, no loss, stop strings cut where str.find says."""

import json
import re
import statistics
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.detokenize import last_with_text
from gateway.text.stops import StopStrings
from gateway.text.tokenizer import TemplateRefusalError, Tokenizer
from tests.support.texts import KINDS, edges, split, tiny
from tests.support.tiny_tokenizer import CONTEXT, write_byte_level


def _deltas(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """The text of each group; groups end at the cuts."""
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.push(ids[begin:end]) for begin, end in edges(len(ids), cuts)]
    return [*deltas, detokenizer.flush()]


texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)
words = st.lists(st.sampled_from(["hello", " world", " ", "  ", "é", "🙂", "日本", "\n", "fox", "▁", "\ufffd"])).map(
    "".join
)
cuts = st.lists(st.integers(0, 200), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(text=texts | words, cuts=cuts)
def test_deltas_of_any_text_are_its_full_decode(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert "".join(_deltas(tokenizer, ids, cuts)) == tokenizer.decode(ids)
    if kind == "byte_level":
        assert tokenizer.decode(ids) == re.sub(r"<\|\w+\|>", "", text)


@settings(max_examples=300)
@given(data=st.data(), cuts=cuts)
def test_deltas_of_any_byte_level_tokens_are_their_full_decode(data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = tiny("byte_level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(_deltas(tokenizer, ids, cuts)) == tokenizer.decode(ids)


def _sentencepiece_truth(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Runs of byte tokens decoded as UTF-8; other pieces as written, the first without its leading space."""
    out, run, is_first = "", b"", True
    for token_id in ids:
        raw = None if tokenizer.is_silent(token_id) else tokenizer.raw_bytes(token_id)
        if tokenizer.is_silent(token_id):
            continue
        if raw is not None:
            run += raw
        else:
            piece = tokenizer._backend.id_to_token(token_id).replace("▁", " ")
            out, run = out + run.decode(errors="replace"), b""
            out += piece[1:] if is_first and piece.startswith(" ") else piece
        is_first = False
    return out + run.decode(errors="replace")


@settings(max_examples=300)
@given(data=st.data(), cuts=cuts)
def test_deltas_of_any_sentencepiece_tokens(data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = tiny("sentencepiece")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(_deltas(tokenizer, ids, cuts)) == _sentencepiece_truth(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(data=st.data(), cut=st.integers(0, 40))
def test_text_goes_on_as_if_it_had_not_been_cut(kind: str, data: st.DataObject, cut: int) -> None:
    tokenizer = tiny(kind)
    spaces = [token_id for token_id, piece in enumerate(tokenizer.pieces(range(350))) if piece.startswith(("▁", "Ġ"))]
    ids = data.draw(st.lists(st.sampled_from(spaces) | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    before, after = ids[:cut], ids[cut:]
    detokenizer = tokenizer.detokenizer(before=last_with_text(tokenizer, before))
    text = detokenizer.push(after) + detokenizer.flush()
    prompt = "".join(_deltas(tokenizer, before, []))
    if prompt + text != "".join(_deltas(tokenizer, ids, [])):
        assert prompt.endswith("\ufffd")  # the cut splits a character
        assert text.startswith("\ufffd")


def test_a_character_cut_in_two_is_whole_on_neither_side() -> None:
    for tokenizer in map(tiny, KINDS):
        ids = tokenizer.encode("🙂", add_special_tokens=False)[-4:]
        detokenizer = tokenizer.detokenizer(before=last_with_text(tokenizer, ids[:2]))
        assert detokenizer.push(ids[2:]) + detokenizer.flush() == "\ufffd\ufffd"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(text=words)
def test_no_delta_of_well_formed_text_holds_a_broken_character(kind: str, text: str) -> None:
    text = text.replace("\ufffd", "")
    tokenizer = tiny(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all("\ufffd" not in delta for delta in _deltas(tokenizer, ids, list(range(len(ids)))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_answer_costs_the_same_per_token_throughout(kind: str) -> None:
    tokenizer = tiny(kind)
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("hello world 🙂 日本", add_special_tokens=False)
    costs = []
    for _ in range(1000):
        began = time.thread_time()
        for token_id in ids:
            detokenizer.push([token_id])
        costs.append(time.thread_time() - began)
    assert statistics.median(costs[-100:]) < 5 * statistics.median(costs[:100])


def _truth(text: str, stops: list[str]) -> str:
    """Cut at the stop string that is complete first; if several are, at the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


small = st.text(alphabet="abA", max_size=40)


@settings(max_examples=500)
@given(text=small, stops=st.lists(st.text(alphabet="abA", min_size=1, max_size=5), max_size=4), cuts=cuts)
def test_stop_strings_cut_where_find_says_however_the_text_is_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, shown, is_stopped = StopStrings(stops), "", False
    for piece in split(text, cuts):
        part, is_stopped = matcher.push(piece)
        shown += part
        if is_stopped:
            break
        assert all(stop not in shown for stop in stops)
    assert shown + ("" if is_stopped else matcher.flush()) == _truth(text, stops)
    assert is_stopped == any(stop in text for stop in stops)


def test_text_that_cannot_start_a_stop_string_is_shown_at_once() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("the E") == ("the ", False)
    assert matcher.push("Nd") == ("ENd", False)
    assert matcher.push(" EN") == (" ", False)
    assert matcher.push("D of") == ("", True)


def test_facts_of_the_checkpoint(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 3], "temperature": 0.5, "top_k": None})
    )
    tokenizer = Tokenizer(folder, max_context_tokens=100)
    assert tokenizer.eos_token_ids == {1, 2, 3}  # includes the tokenizer's own
    assert tokenizer.context_tokens == 100
    assert tokenizer.sampling_defaults.temperature == 0.5
    assert tokenizer.sampling_defaults.top_k == 0
    assert Tokenizer(folder, max_context_tokens=10**6).context_tokens == CONTEXT
    assert len(tokenizer.examples) == 4
    (folder / "examples.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"examples\.json must hold a list of texts"):
        Tokenizer(folder)


def test_a_folder_without_a_context_length_says_what_it_lacks(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="max_position_embeddings"):
        Tokenizer(tmp_path)


def test_the_template_renders_in_a_sandbox_and_may_refuse(tmp_path: Path) -> None:
    tokenizer = tiny("byte_level")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.render_chat([{"role": "developer", "content": "x"}]).startswith("<|system|>x")
    with pytest.raises(TemplateRefusalError, match="must follow a call"):
        tokenizer.render_chat([{"role": "tool", "content": "x"}])
    hostile = Tokenizer(write_byte_level(tmp_path))
    hostile._hf.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TemplateRefusalError, match="unsafe"):
        hostile.render_chat([{"role": "user", "content": "x"}])
    injected = "{{ 7 * 7 }}"
    assert injected in tokenizer.render_chat([{"role": "user", "content": injected}])


def test_encoding_leaves_other_threads_running() -> None:
    """The event loop runs on while a thread tokenises."""
    tokenizer, text = tiny("byte_level"), "hello world " * 60_000
    is_done, num_turns = threading.Event(), 0

    def encode() -> None:
        tokenizer.encode(text, add_special_tokens=False)
        is_done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not is_done.wait(0.001):
        num_turns += 1
    thread.join()
    assert num_turns > 10


@pytest.mark.parametrize("kind", KINDS)
def test_markers_are_seen_though_they_are_control_tokens(kind: str) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode("hello <|user|>fox<|tool|> now", add_special_tokens=False)
    assert sum(tokenizer.is_silent(token) for token in ids) == 2
    detokenizer = tokenizer.detokenizer({"<|user|>", "[NONE]"})
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert re.sub(" +", " ", text) == "hello <|user|>fox now"
    assert "<|user|>" not in tokenizer.decode(ids)
