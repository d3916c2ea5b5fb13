"""Tokens to text and back: whole characters, no loss, stop strings cut where str.find says."""

import json
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.text.stops import StopStrings
from gateway.text.template import TemplateRefusalError
from gateway.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.combinations import examples
from tests.support.texts import KINDS, edges, split, tiny
from tests.support.tiny_tokenizer import CHAT_TEMPLATE, CONTEXT, write_byte_level


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
@settings(max_examples=examples(150))
@given(text=texts | words, cuts=cuts)
def test_deltas_of_any_text_are_its_full_decode(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode(text, add_special_tokens=True)
    deltas = _deltas(tokenizer, ids, cuts)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in delta for delta in deltas), "a character came in parts"
    if kind == "byte_level":
        assert tokenizer.decode(ids) == re.sub(r"<\|\w+\|>", "", text)


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


@pytest.mark.parametrize(("kind", "truth"), [("byte_level", Tokenizer.decode), ("sentencepiece", _sentencepiece_truth)])
@settings(max_examples=examples(150))
@given(data=st.data(), cuts=cuts)
def test_deltas_of_any_tokens(kind: str, truth: Any, data: st.DataObject, cuts: list[int]) -> None:
    tokenizer = tiny(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(_deltas(tokenizer, ids, cuts)) == truth(tokenizer, ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(150))
@given(data=st.data(), cut=st.integers(0, 40))
def test_text_goes_on_as_if_it_had_not_been_cut(kind: str, data: st.DataObject, cut: int) -> None:
    tokenizer = tiny(kind)
    spaces = [token_id for token_id, piece in enumerate(tokenizer.pieces(range(350))) if piece.startswith(("▁", "Ġ"))]
    ids = data.draw(st.lists(st.sampled_from(spaces) | st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    before, after = ids[:cut], ids[cut:]
    detokenizer = tokenizer.detokenizer(before=tokenizer.last_with_text(before))
    text = detokenizer.push(after) + detokenizer.flush()
    prompt = "".join(_deltas(tokenizer, before, []))
    if prompt + text != "".join(_deltas(tokenizer, ids, [])):
        assert prompt.endswith("\ufffd")  # the cut splits a character
        assert text.startswith("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_answer_costs_the_same_per_token_throughout(kind: str) -> None:
    tokenizer = tiny(kind)
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("hello world 🙂 日本", add_special_tokens=False)
    costs = []
    for _ in range(400):
        began = time.thread_time()
        for token_id in ids:
            detokenizer.push([token_id])
        costs.append(time.thread_time() - began)
    assert statistics.median(costs[-40:]) < 5 * statistics.median(costs[:40])


# -- where each token's text begins, in bytes that may be ill-formed --------------------------------------------------


class Words:
    """A vocabulary given by its tokens' bytes; None: a token with text instead, the word "w"."""

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        self._tokens = tokens

    def is_silent(self, token_id: int) -> bool:
        return False

    def raw_bytes(self, token_id: int) -> bytes | None:
        return self._tokens[token_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        found = [self._tokens[token_id] for token_id in token_ids]
        return "".join("w" if raw is None else raw.decode(errors="replace") for raw in found)


@pytest.mark.parametrize(
    ("tokens", "pushed"),
    [
        ([b"\xe2", b"x"], [("", ""), ("\ufffd", "x")]),
        ([b"\xe2", None], [("", ""), ("\ufffd", "w")]),  # a word ends the bytes before it
        ([b"\xe2", b"\xe2"], [("", ""), ("\ufffd", "")]),
        ([b"\xe2\x82", b"\xacx"], [("", ""), ("", "€x")]),
        ([b"\xef\xbf", b"\xbd"], [("", ""), ("", "\ufffd")]),  # a literal U+FFFD
        ([b"\xf0\x9f", b"\x82x"], [("", ""), ("", "\ufffdx")]),  # ill-formed from this token's first byte on
        ([b"\xed", b"\xa0"], [("", ""), ("\ufffd", "\ufffd")]),  # a surrogate
        ([b"\xe2", b"", b"\x82\xac"], [("", ""), ("", ""), ("", "€")]),
    ],
)
def test_what_came_before_is_told_apart(tokens: list[bytes | None], pushed: list[tuple[str, str]]) -> None:
    detokenizer = IncrementalDetokenizer(cast(Any, Words(tokens)))
    assert [detokenizer.push_token(rank) for rank in range(len(tokens))] == pushed


some_bytes = st.lists(st.sampled_from(b"x\x80\x82\xa0\xac\xbd\xbf\xe0\xe2\xed\xef\xf0\xf4\xff"), max_size=4).map(bytes)


@given(st.lists(some_bytes, max_size=8))
@example([b"\xed\xa0", b"\x80"])
def test_a_token_begins_at_the_character_of_its_first_byte(tokens: list[bytes]) -> None:
    detokenizer = IncrementalDetokenizer(cast(Any, Words(tokens)))
    before, text = b"", ""
    for rank, token in enumerate(tokens):
        ended, more = detokenizer.push_token(rank)
        if token:  # cut after its first byte, the bytes so far end with the character it belongs to
            assert len(text + ended) == len((before + token[:1]).decode(errors="replace")) - 1
        before, text = before + token, text + ended + more
    assert text + detokenizer.flush() == before.decode(errors="replace")


# -- stop strings -----------------------------------------------------------------------------------------------------


def _truth(text: str, stops: list[str]) -> str:
    """Cut at the stop string that is complete first; if several are, at the longest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


small = st.text(alphabet="abA", max_size=40)


@settings(max_examples=examples(250))
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
    set_template(hostile, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateRefusalError, match="unsafe"):
        hostile.render_chat([{"role": "user", "content": "x"}])
    injected = "{{ 7 * 7 }}"
    assert injected in tokenizer.render_chat([{"role": "user", "content": injected}])


def test_encoding_leaves_other_threads_running() -> None:
    """The event loop runs on while a thread tokenises."""
    tokenizer, text, num_turns = tiny("byte_level"), "hello world " * 30_000, 0
    with ThreadPoolExecutor() as threads:
        encoding = threads.submit(tokenizer.encode, text, add_special_tokens=False)
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert num_turns > 10


# -- a conversation with an open last message: the prompt ends where the answer continues it --------------------------

ASKED = {"role": "user", "content": "Paris is?"}
START = "<|user|>Paris is?<|end|><|assistant|>"
TRIMMING = CHAT_TEMPLATE.replace("m.content", "m.content | trim")
WITH_BLOCK = CHAT_TEMPLATE.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
CUTTING = CHAT_TEMPLATE.replace("m.content", "m.content.split('</think>')[-1]")
REFUSING = "{% if messages[-1].role != 'user' %}{{ raise_exception('ask first') }}{% endif %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_byte_level(tmp_path_factory.mktemp("tiny")))  # its template is changed


def set_template(tokenizer: Tokenizer, template: str) -> None:
    tokenizer.template = msgspec.structs.replace(tokenizer.template, plain=template, with_tools=template)


def render(tokenizer: Tokenizer, template: str, text: str) -> str:
    set_template(tokenizer, template)
    return tokenizer.render_chat([ASKED, {"role": "assistant", "content": text}], is_open=True)


@pytest.mark.parametrize(
    ("template", "text", "end"),
    [
        (CHAT_TEMPLATE, " a city \n", " a city \n"),
        (CHAT_TEMPLATE, "Paris is?", "Paris is?"),  # the same as for another message
        (CHAT_TEMPLATE, "<|end|>", "<|end|>"),
        (CHAT_TEMPLATE, " \n", ""),
        (TRIMMING, " a city \n", "a city"),
        (TRIMMING, "", ""),
        (WITH_BLOCK, "a city", "<think>\n\n</think>\n\na city"),
        (CUTTING, "a city", "a city"),
    ],
)
def test_the_prompt_ends_with_the_open_message(tokenizer: Tokenizer, template: str, text: str, end: str) -> None:
    assert render(tokenizer, template, text) == START + end


@pytest.mark.parametrize(
    ("template", "text", "why"),
    [
        (CUTTING, "<think>a town?</think>a city", "drops or changes the text of the last message"),
        (CHAT_TEMPLATE.replace("m.content", "'...'"), "a city", "drops or changes"),
        (REFUSING, "a city", "ask first"),
    ],
)
def test_a_template_may_not_leave_it_open(tokenizer: Tokenizer, template: str, text: str, why: str) -> None:
    with pytest.raises(TemplateRefusalError, match=why) as refused:
        render(tokenizer, template, text)
    assert "Paris" not in str(refused.value)
