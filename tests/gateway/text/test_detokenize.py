"""Where each token's text begins, in bytes that may be ill-formed."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.text.detokenize import IncrementalDetokenizer

WORD = 0  # a token with text instead of bytes; the others have bytes


class Words:
    """A vocabulary given by its bytes: token 1 is the first; token 0 is the word "w"."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = tokens

    def is_silent(self, token_id: int) -> bool:
        return False

    def raw_bytes(self, token_id: int) -> bytes | None:
        return None if token_id == WORD else self._tokens[token_id - 1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(
            "w" if token_id == WORD else self._tokens[token_id - 1].decode(errors="replace") for token_id in token_ids
        )


@pytest.mark.parametrize(
    ("tokens", "pushed"),
    [
        ([b"\xe2", b"x"], [("", ""), ("\ufffd", "x")]),
        ([b"\xe2", b"\xe2"], [("", ""), ("\ufffd", "")]),
        ([b"\xe2\x82", b"\xacx"], [("", ""), ("", "€x")]),
        ([b"\xef\xbf", b"\xbd"], [("", ""), ("", "\ufffd")]),  # a literal U+FFFD
        ([b"\xf0\x9f", b"\x82x"], [("", ""), ("", "\ufffdx")]),  # ill-formed from this token's first byte on
        ([b"\xed", b"\xa0"], [("", ""), ("\ufffd", "\ufffd")]),  # a surrogate
        ([b"\xe2", b"", b"\x82\xac"], [("", ""), ("", ""), ("", "€")]),
    ],
)
def test_what_came_before_is_told_apart(tokens: list[bytes], pushed: list[tuple[str, str]]) -> None:
    detokenizer = IncrementalDetokenizer(Words(tokens))
    assert [detokenizer.push_token(rank + 1) for rank in range(len(tokens))] == pushed


def test_a_word_ends_the_bytes_before_it() -> None:
    detokenizer = IncrementalDetokenizer(Words([b"\xe2"]))
    assert [detokenizer.push_token(token_id) for token_id in (1, WORD)] == [("", ""), ("\ufffd", "w")]


some_bytes = st.lists(st.sampled_from(b"x\x80\x82\xa0\xac\xbd\xbf\xe0\xe2\xed\xef\xf0\xf4\xff"), max_size=4).map(bytes)


@given(st.lists(some_bytes, max_size=8))
@example([b"\xed\xa0", b"\x80"])
def test_a_token_begins_at_the_character_of_its_first_byte(tokens: list[bytes]) -> None:
    detokenizer = IncrementalDetokenizer(Words(tokens))
    before, text = b"", ""
    for rank, token in enumerate(tokens):
        ended, more = detokenizer.push_token(rank + 1)
        if token:  # cut after its first byte, the bytes so far end with the character it belongs to
            assert len(text + ended) == len((before + token[:1]).decode(errors="replace")) - 1
        before, text = before + token, text + ended + more
    assert text + detokenizer.flush() == before.decode(errors="replace")
