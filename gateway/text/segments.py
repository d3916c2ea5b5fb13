"""Tokenises a text in segments, and keeps the tokens of each: the next turn of a conversation tokenises what is new.

Exact, as a fast tokenizer takes the added tokens out of a text before its normalizer and pre-tokenizer see what is
between them. Texts are cut before such tokens only, so each segment but the first begins with one, and nothing in it
counts as the beginning of the text. Without a suitable token the whole text is one segment.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import pairwise
from threading import Lock

from tokenizers import AddedToken

from gateway.text.offload import CHEAP_CHARS, Check
from gateway.text.tokenizer import Tokenizer

LEAST_CHARS = 512  # of a segment but the last, so that short messages do not cost an entry each
AT_ONCE = 128  # segments that are tokenised in one call
MAX_BYTES = 64 << 20  # of all entries: 16 million tokens
ENTRY_BYTES = 256  # of an entry without its tokens


class SegmentEncoder:
    """Encodes texts with one tokenizer, cut before the added tokens that its chat template writes. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        marks = find_marks(tokenizer.added_tokens, tokenizer.tried.sample)
        self._marks = re.compile("|".join(map(re.escape, marks))) if marks else None
        self._lock = Lock()
        self._kept: OrderedDict[bytes, array[int]] = OrderedDict()  # key |-> tokens, the next one to forget first
        self._num_bytes = 0

    def encode(self, text: str, salt: str = "", check: Check = lambda: None) -> list[int]:
        """Token ids, without the model's start token. Texts share kept tokens with those of the same `salt` only.

        Releases the GIL while it tokenises. Tokens of short texts are not kept. `check`: called now and then.
        """
        if len(text) <= CHEAP_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False)
        segments = self._cut(text)
        salted = blake2b(salt.encode(errors="surrogatepass"), digest_size=16).digest()
        keys = [blake2b(segment.encode(), digest_size=16, key=salted).digest() for segment in segments]
        found = self._find(keys)
        new = [index for index, tokens in enumerate(found) if tokens is None]
        fresh: dict[int, array[int]] = {}
        for begin in range(0, len(new), AT_ONCE):
            check()
            some = new[begin : begin + AT_ONCE]
            encoded = self._tokenizer.encode_all([segments[index] for index in some], add_special_tokens=False)
            fresh |= {index: array("i", ids) for index, ids in zip(some, encoded, strict=True)}
        self._keep((keys[index], tokens) for index, tokens in fresh.items())
        ids = array("i")
        for index, tokens in enumerate(found):
            ids.extend(fresh[index] if tokens is None else tokens)
        return ids.tolist()

    def _cut(self, text: str) -> list[str]:
        begins = [0]
        for mark in self._marks.finditer(text) if self._marks else ():
            if mark.start() - begins[-1] >= LEAST_CHARS:
                begins.append(mark.start())
        return [text[begin:end] for begin, end in pairwise([*begins, len(text)])]

    def _find(self, keys: Sequence[bytes]) -> "list[array[int] | None]":
        with self._lock:
            found = [self._kept.get(key) for key in keys]
            for key, tokens in zip(keys, found, strict=True):
                if tokens is not None:
                    self._kept.move_to_end(key)
        return found

    def _keep(self, entries: "Iterable[tuple[bytes, array[int]]]") -> None:
        with self._lock:
            for key, tokens in entries:
                if key not in self._kept:
                    self._kept[key] = tokens
                    self._num_bytes += _size(tokens)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(self._kept.popitem(last=False)[1])


def find_marks(added: Sequence[AddedToken], sample: str) -> list[str]:
    """The added tokens in `sample` before which any text may be cut without a change to its tokens.

    Each is found wherever it stands, as no other token overlaps it from before or goes on behind it, and none looks at
    the characters before or after a cut.
    """
    if any(token.single_word for token in added):
        return []
    texts = [token.content for token in added]
    return [
        token.content
        for token in added
        if not (token.normalized or token.lstrip or token.content[:1].isspace())
        and token.content in sample
        and not any(text != token.content and text.startswith(token.content) for text in texts)
        and not any(_overlaps(text[at:], token.content) for text in texts for at in range(1, len(text)))
    ]


def _overlaps(rest: str, mark: str) -> bool:
    return rest.startswith(mark) or mark.startswith(rest)


def _size(tokens: "array[int]") -> int:
    return ENTRY_BYTES + len(tokens) * tokens.itemsize
