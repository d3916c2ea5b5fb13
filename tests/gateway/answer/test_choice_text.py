"""Tokens with their text: each reported once, with its own text, however tokens and stop strings fall."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.answer.choice_text import OutputDelta, OutputReader
from gateway.router.engine_client import FinishReason, Tokens
from gateway.text.stops import StopStrings
from gateway.text.tokenizer import Tokenizer
from gateway.tools.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningReader
from tests.support.combinations import examples
from tests.support.texts import KINDS, edges, tiny
from wire.logprobs import TokenLogprobs


def _likely(ids: list[int]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(-float(token_id)) for token_id in ids)


def _read(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], cuts: list[int], ending: FinishReason
) -> list[OutputDelta]:
    """Pieces of an answer whose tokens arrive in groups that end at the cuts."""
    reader = OutputReader(
        tokenizer.detokenizer(), StopStrings(stops), frozenset(ids[-1:]), with_logprobs=True, text_offset=7
    )
    pieces: list[OutputDelta] = []
    for start, end in edges(len(ids), cuts):
        reason = ending if end == len(ids) else None
        pieces.append(reader.read(Tokens(tuple(ids[start:end]), reason, _likely(ids[start:end]))))
        if pieces[-1].finish_reason:
            break
    return pieces


texts = st.lists(st.sampled_from(["hello", " world", " ", "é", "🙂", "日本", "END", "E", "N", "fox"]), max_size=14)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(100))
@given(
    words=texts, cuts=st.lists(st.integers(0, 99), max_size=6), ending=st.sampled_from(["stop", "length"]),
    stops=st.lists(st.sampled_from(["END", "lo w", "🙂", "日本E", "x"]), max_size=2),
)  # fmt: skip
def test_told_tokens(kind: str, words: list[str], cuts: list[int], ending: FinishReason, stops: list[str]) -> None:
    tokenizer = tiny(kind)
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    ids += [1] if ending == "stop" else []  # the end token
    pieces = _read(tokenizer, ids, stops, cuts, ending)
    told = [token for piece in pieces for token in piece.shown_tokens]
    text = "".join(piece.text for piece in pieces)
    counted = [token_id for piece in pieces for token_id in piece.token_ids]
    assert [token.token_id for token in told] == ids[: len(told)]
    assert all(token.logprobs == TokenLogprobs(-float(token.token_id)) for token in told)
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    offsets = [token.offset for token in told]
    assert offsets == sorted(offsets)
    assert all(7 <= offset <= 7 + len(text) for offset in offsets)
    if not any(stop in "".join(words) for stop in stops):
        assert len(told) == len(ids) == len(counted)
    elif len(told) < len(ids):  # the next token begins in the text that was cut
        assert len(tokenizer.decode(ids[: len(told)]).rstrip("\ufffd")) >= len(text)
    _check_chunks(tokenizer, pieces)


def _check_chunks(tokenizer: Tokenizer, pieces: list[OutputDelta]) -> None:
    """Every token arrives in the chunk that has its text's first character."""
    num_shown = 7
    for piece in pieces:
        begin, num_shown = num_shown, num_shown + len(piece.text)
        for token in piece.shown_tokens:
            if token.offset < num_shown:
                assert token.offset >= begin or not tokenizer.decode([token.token_id]).strip("\ufffd")


def test_a_held_back_token_is_told_when_its_text_is_shown() -> None:
    tokenizer = tiny("byte_level")
    smile, end = tokenizer.encode("🙂", add_special_tokens=False), tokenizer.encode("EN", add_special_tokens=False)
    assert len(smile) == 4
    reader = OutputReader(tokenizer.detokenizer(), StopStrings(["END"]), frozenset(), with_logprobs=True)
    for token_id in smile[:3]:
        assert reader.read(Tokens((token_id,), None, _likely([token_id]))).shown_tokens == ()
    whole = reader.read(Tokens((smile[3],), None, _likely(smile[3:])))
    assert [token.offset for token in whole.shown_tokens] == [0] * 4
    assert reader.read(Tokens(tuple(end), None, _likely(end))).shown_tokens == ()
    last = reader.read(Tokens((), "length"))
    assert (last.text, [token.token_id for token in last.shown_tokens]) == ("EN", end)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stop", "text", "offsets"), [("none", "\ufffdx", [0, 1]), ("x", "\ufffd", [0]), ("\ufffd", "", [])]
)
def test_a_token_is_behind_ill_formed_bytes(kind: str, stop: str, text: str, offsets: list[int]) -> None:
    tokenizer = tiny(kind)
    byte = next(
        i for i in range(tokenizer.vocab_size) if not tokenizer.is_silent(i) and tokenizer.raw_bytes(i) == b"\xe2"
    )
    ids = [byte, *tokenizer.encode("x", add_special_tokens=False)[-1:]]
    reader = OutputReader(tokenizer.detokenizer(), StopStrings([stop]), frozenset(), with_logprobs=True)
    pieces = [reader.read(Tokens((ids[0],), None, _likely(ids[:1])))]
    pieces.append(reader.read(Tokens((ids[1],), "length", _likely(ids[1:]))))
    assert "".join(piece.text for piece in pieces) == text
    assert [token.offset for piece in pieces for token in piece.shown_tokens] == offsets


def test_only_a_stop_token_has_no_text_at_the_end() -> None:
    """A grammar may end an answer without a stop token."""
    tokenizer = tiny("byte_level")
    ids = tokenizer.encode("hello world", add_special_tokens=False)
    for stop_token_ids, text in [(frozenset(ids[-1:]), "hello"), (frozenset({ids[-1] + 1}), "hello world")]:
        reader = OutputReader(tokenizer.detokenizer(), StopStrings([]), stop_token_ids, with_logprobs=False)
        assert reader.read(Tokens(tuple(ids), "stop")).text == text
    reader = OutputReader(tokenizer.detokenizer(), StopStrings([]), frozenset(ids), with_logprobs=False)
    assert reader.read(Tokens((), "stop")).text == ""


def test_log_probabilities_that_are_missing_are_a_bug() -> None:
    tokenizer = tiny("byte_level")
    reader = OutputReader(tokenizer.detokenizer(), StopStrings([]), frozenset(), with_logprobs=True)
    with pytest.raises(ValueError, match="2 tokens came with 0"):
        reader.read(Tokens((5, 6), None))


def test_reasoning_that_ends_in_the_last_part_is_no_text() -> None:
    """As with speculation: all tokens of a short answer may come together."""
    tokenizer = tiny(KINDS[0])
    ids = [*tokenizer.encode("world</think>hello", add_special_tokens=False), 1]
    reader = OutputReader(
        tokenizer.detokenizer(),
        StopStrings([]),
        frozenset([1]),
        with_logprobs=True,
        reasoning=ReasoningReader(ReasoningFormat("think", "<think>", "</think>"), "inside"),
    )
    delta = reader.read(Tokens(tuple(ids), "stop", _likely(ids)))
    assert (delta.reasoning, delta.text) == ("world", "hello")
    shown = [token.token_id for token in delta.shown_tokens if not token.is_reasoning]
    assert tokenizer.decode(shown) == "hello" and len(delta.shown_tokens) == len(ids)


@pytest.mark.parametrize("group", [1, 3, 100])
@pytest.mark.parametrize("waits", [False, True])
def test_tokens_of_reasoning_that_nothing_opens_are_counted_once_it_is_known(waits: bool, group: int) -> None:
    tokenizer = tiny(KINDS[0])
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("hi\n</think>", "hello"))
    reader = OutputReader(
        tokenizer.detokenizer(),
        StopStrings([]),
        frozenset([1]),
        with_logprobs=True,
        reasoning=ReasoningReader(REASONING_FORMATS["think"], "possible", waits=waits),
    )
    ids = [*before, *after, 1]
    deltas = []
    for start in range(0, len(ids), group):
        part, is_last = ids[start : start + group], start + group >= len(ids)
        deltas.append(reader.read(Tokens(tuple(part), "stop" if is_last else None, _likely(part))))
    assert "".join(delta.text for delta in deltas) == ("hello" if waits else "hihello")
    assert sum(delta.num_reasoning_tokens for delta in deltas) == (len(before) if waits else 1)  # the marker
    shown = [token.token_id for delta in deltas for token in delta.shown_tokens if not token.is_reasoning]
    assert tokenizer.decode(shown) == ("hello" if waits else "hihello")
