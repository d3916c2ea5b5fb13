"""Tokens of a text in segments, kept or not, are those of the whole text."""

from functools import cache
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway.text import segments
from gateway.text.segments import ENTRY_BYTES, SegmentEncoder, find_marks
from gateway.text.tokenizer import Tried
from tests.support.combinations import examples
from tests.support.texts import tiny
from tests.support.tiny_tokenizer import CORPUS

TURN, END = AddedToken("<|user|>", special=True, normalized=False), AddedToken("[END]", special=True, normalized=False)
GREEDY = [  # beside turns; a text must not be cut before these, nor may they reach into turns
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("think", normalized=True),
    AddedToken("<|user|>s", lstrip=True, normalized=False),  # longer than a turn that stands there
    AddedToken("x[EN", normalized=False),  # reaches into an end from before
    AddedToken("\n", normalized=False),
]
WORDS = ["hello", "Hello", "think", " ", "  ", "\n", "▁", "é", "e\u0301", "日本", "🙂", "ﬁ", "<", "|>", "x", "[", "s"]
MARKS = ["<|user|>", "[END]", "<left>", "<right>"]
SAMPLE = "".join([*MARKS, "think\n"])


def _trained(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def _unigram(prepend_scheme: str) -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    space = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=prepend_scheme != "first")
    return _trained(models.Unigram(), trainer, normalizers.NFKC(), space)


def _word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    return _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizers.Sequence([normalizers.BertNormalizer(), normalizers.Strip()]),
        pre_tokenizers.BertPreTokenizer(),
    )


def _byte_level() -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    return _trained(models.BPE(), trainer, None, pre_tokenizers.ByteLevel(add_prefix_space=True))


BUILD = {
    "byte-level BPE": lambda: tiny("byte_level")._backend,
    "byte-level BPE, a space before each text": _byte_level,
    "BPE with a prepending normalizer": lambda: tiny("sentencepiece")._backend,
    "Unigram, first": lambda: _unigram("first"),
    "Unigram, always": lambda: _unigram("always"),
    "WordPiece": _word_piece,
}


@cache
def backend(kind: str, is_greedy: bool) -> Tokenizer:
    tokenizer = Tokenizer.from_str(BUILD[kind]().to_str())
    tokenizer.add_tokens([TURN, END, *(GREEDY if is_greedy else ())])
    return tokenizer


class Plain:
    """A Tokenizer without a checkpoint, which counts the characters that it tokenises."""

    tried = Tried(True, SAMPLE)

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.num_chars = backend, 0
        self.added_tokens = list(backend.get_added_tokens_decoder().values())

    def encode_all(self, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
        assert not add_special_tokens
        self.num_chars += sum(map(len, texts))
        return [one.ids for one in self.backend.encode_batch_fast(texts, add_special_tokens=False)]


def encoder_of(tokenizer: Plain, **others: int) -> SegmentEncoder:
    return SegmentEncoder(cast(Any, tokenizer), **others)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.fixture(autouse=True, scope="module")
def _short_segments() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "LEAST_CHARS", 1)
        patch.setattr(segments, "CHEAP_CHARS", -1)
        yield


texts = st.lists(
    st.sampled_from(WORDS * 2 + [*MARKS, "x[END]", " <|user|>s"] * 3) | st.text(max_size=4), max_size=24
).map("".join)


@pytest.mark.parametrize("is_greedy", [False, True], ids=["plain", "greedy"])
@pytest.mark.parametrize("kind", BUILD)
@settings(max_examples=examples(150))
@given(turns=st.lists(texts, min_size=1, max_size=3))
def test_segments_have_the_tokens_of_the_whole_text(kind: str, is_greedy: bool, turns: list[str]) -> None:
    tokenizer = backend(kind, is_greedy)
    encoder = encoder_of(Plain(tokenizer), max_bytes=8 * ENTRY_BYTES)
    assert encoder._marks is not None
    for count in range(len(turns) + 1):
        text = "".join(turns[:count])
        assert encoder.encode(text) == whole(tokenizer, text)
        assert encoder._num_bytes <= 8 * ENTRY_BYTES


@pytest.mark.parametrize("kind", BUILD)
def test_texts_are_cut_before_tokens_that_nothing_reaches_into(kind: str) -> None:
    added = [TURN, END]
    assert find_marks(added, "<|user|>") == ["<|user|>"]
    assert set(find_marks(Plain(backend(kind, False)).added_tokens, SAMPLE)) == {
        "<|user|>", "[END]"
    }  # fmt: skip
    assert find_marks([*added, *GREEDY], SAMPLE) == ["<right>"]
    assert find_marks([*added, AddedToken("word", single_word=True)], "<|user|>") == []


def test_a_turn_tokenises_what_is_new_and_salts_share_nothing() -> None:
    tokenizer = Plain(backend("byte-level BPE", False))
    encoder, text = encoder_of(tokenizer), ""
    for turn in range(20):
        more = f"<|user|>question {turn}" + "hello world " * turn
        text += more
        before = tokenizer.num_chars
        assert encoder.encode(text) == whole(tokenizer.backend, text)
        assert tokenizer.num_chars - before == len(more)
    before = tokenizer.num_chars
    assert encoder.encode(text, "salt") == encoder.encode(text, "salt") == encoder.encode(text)
    assert tokenizer.num_chars - before == len(text)


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    tokenizer = Plain(backend("byte-level BPE", False))
    encoder = encoder_of(tokenizer, max_bytes=3 * ENTRY_BYTES)
    for text in ("a", "b", "a", "c", "a"):
        encoder.encode(text)
    assert tokenizer.num_chars == 3
    encoder.encode("b")
    assert tokenizer.num_chars == 4
