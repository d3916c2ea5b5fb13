"""What grammars need of the tokenizer: each token's bytes, and the tokens that no answer may hold.

Control tokens have a text too (`<|user|>`), which a JSON string could hold; the gateway drops them from answers. So no
mask allows them, except those that the grammar names, as formats of tool calls do. xgrammar also allows tokens with
bytes that never occur in UTF-8 or in JSON; masks exclude these too.
"""

import re
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from decode_worker.grammar.bindings import TokenizerInfo, build_info, read_info

# xgrammar allows control characters in strings with a maximum length or a pattern.
_NOT_UTF8 = re.compile(rb"[\xc0\xc1\xf5-\xff]")
_NOT_JSON = re.compile(rb"[\xc0\xc1\xf5-\xff\x00-\x08\x0b\x0c\x0e-\x1f]")
_NOT_IN_STRINGS = re.compile(rb"[\xc0\xc1\xf5-\xff\x00-\x1f]")  # JSON can do without \t, \n and \r between values
_NEVER = {
    "json_schema": _NOT_IN_STRINGS,
    "json_object": _NOT_JSON,  # its strings have neither
    "regex": _NOT_UTF8,
    "ebnf": _NOT_UTF8,
    "structural_tag": _NOT_JSON,  # has text around its JSON
}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer as xgrammar wants it. Does not change."""

    info: TokenizerInfo
    size: int  # rows of the embedding: more than the tokenizer has tokens where it is padded
    control: dict[int, str]  # control token |-> its text
    never: dict[str, list[int]]  # kind of grammar |-> tokens that no such answer holds

    def text_mask(self, kind: str, text: str) -> NDArray[np.int32]:
        """[ceil(size / 32)]: the tokens that an answer may hold, of a grammar that reads `text`; stop tokens aside."""
        bits = np.zeros(-(-self.size // 32) * 32, np.bool_)
        bits[: self.size] = True
        bits[self.never[kind]] = False
        bits[[token for token, name in self.control.items() if not name or name not in text]] = False
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)

    def pack(self) -> "PackedVocabulary":
        """Takes 0.1 s for 128k tokens."""
        return PackedVocabulary(self.info.serialize_json().encode(), self.size, self.control, self.never)


class PackedVocabulary(msgspec.Struct, tag=True):
    """A vocabulary on its way between processes."""

    info: bytes
    size: int
    control: dict[int, str]
    never: dict[str, list[int]]


def unpack_vocabulary(packed: PackedVocabulary) -> Vocabulary:
    return Vocabulary(read_info(packed.info.decode()), packed.size, packed.control, packed.never)


def build_vocabulary(
    tokens: list[bytes], control: dict[int, str], stop_token_ids: list[int] | None, *, add_prefix_space: bool = False
) -> Vocabulary:
    """`tokens`: each one's bytes, b"" where there is none; of control tokens, as they are written."""
    spoiled = {
        pattern: [token for token, text in enumerate(tokens) if pattern.search(text)]
        for pattern in set(_NEVER.values())
    }
    never = {kind: spoiled[pattern] for kind, pattern in _NEVER.items()}
    info = build_info(tokens, stop_token_ids, add_prefix_space=add_prefix_space)
    return Vocabulary(info, len(tokens), control, never)
