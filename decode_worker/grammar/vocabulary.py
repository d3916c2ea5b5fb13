"""A tokenizer's vocabulary as grammars need it: each token's bytes, and the tokens that no answer may hold.

Read from a checkpoint's files without transformers, whose import takes seconds of CPU. Control tokens are those that
transformers, and so the gateway, makes special tokens of. They have a text too (`<|user|>`), which a JSON string could
hold; the gateway drops them from answers. So no mask allows them, except those that the grammar names, as formats of
tool calls do. xgrammar also allows bytes that never occur, or never follow each other, in UTF-8 or in JSON; masks
exclude these too.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from decode_worker.grammar.bindings import TokenizerInfo, core
from wire.files import TOKENIZER, blamed_tokenizer, named, read_json_object, read_text

# xgrammar allows control characters in strings with a maximum length or a pattern.
_BAD_PAIRS = {0xE0: rb"[\x80-\x9f]", 0xED: rb"[\xa0-\xbf]", 0xF0: rb"[\x80-\x8f]", 0xF4: rb"[\x90-\xbf]"}  # in UTF-8
_BAD = rb"[\xc0\xc1\xf5-\xff]|" + b"|".join([b"\\x%02x%b" % pair for pair in _BAD_PAIRS.items()])
_NOT_UTF8 = re.compile(_BAD)
_NOT_JSON = re.compile(_BAD + rb"|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_NOT_IN_STRINGS = re.compile(_BAD + rb"|[\x00-\x1f]")  # JSON can do without \t, \n and \r between values
_NEVER = {
    "json_schema": _NOT_IN_STRINGS,
    "json_object": _NOT_JSON,  # its strings have neither
    "regex": _NOT_UTF8,
    "ebnf": _NOT_UTF8,
    "structural_tag": _NOT_JSON,  # has text around its JSON
}


class Vocabulary(msgspec.Struct, tag=True, frozen=True, eq=False, dict=True):
    """A tokenizer as xgrammar wants it. Does not change. The compiler's process reads it and sends it to the worker."""

    serialised: bytes  # xgrammar's part
    size: int  # rows of the embedding: more than the tokenizer has tokens where it is padded
    control: dict[int, str]  # control token |-> its text
    never: dict[str, list[int]]  # kind of grammar |-> tokens that no such answer holds
    not_behind: dict[int, list[int]]  # token that ends within a character |-> tokens with which it would be none

    @cached_property
    def info(self) -> TokenizerInfo:
        """Takes 0.1 s for 128k tokens, once."""
        info: TokenizerInfo = core.TokenizerInfo.deserialize_json(self.serialised.decode())
        return info

    def text_mask(self, kind: str, text: str) -> NDArray[np.int32]:
        """[ceil(size / 32)]: the tokens that an answer may hold, of a grammar that reads `text`; stop tokens aside."""
        text = text.replace('\\"', '"')  # in JSON and EBNF: <|"|> is a control token
        bits = np.zeros(-(-self.size // 32) * 32, np.bool_)
        bits[: self.size] = True
        bits[self.never[kind]] = False
        bits[[token for token, name in self.control.items() if not name or name not in text]] = False
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)


class _Added(msgspec.Struct):
    content: str
    id: int = -1
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    """The fields of a tokenizer.json that are read."""

    model: _Model
    added_tokens: list[_Added] = []
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Reads the tokenizer in a checkpoint folder; `size` is the model's, padding included.

    Takes 0.2 s for 128k tokens; seconds where there is no tokenizer.json. Raises OSError or ValueError.
    """
    path, settings = folder / TOKENIZER, folder / "tokenizer_config.json"
    with named(path):
        file = msgspec.json.decode(read_text(path) if path.exists() else _convert(folder), type=_TokenizerFile)
    config = _read_object(folder / "special_tokens_map.json") | _read_object(settings)
    with named(settings):
        added = [*_read_added(config.get("added_tokens_decoder") or {}), *file.added_tokens]
    vocab = file.model.vocab
    pieces = vocab if isinstance(vocab, dict) else {piece: token for token, (piece, _score) in enumerate(vocab)}
    ids = {one.content: one.id for one in added} | pieces | {one.content: one.id for one in file.added_tokens}
    ids = {text: token for text, token in ids.items() if 0 <= token < size}
    special = {one.content for one in added if one.special} | set(_named_special(config))

    without_vocabulary = {name: getattr(file, name) for name in ("normalizer", "pre_tokenizer", "decoder")}
    detected = core.TokenizerInfo._detect_metadata_from_hf(msgspec.json.encode(without_vocabulary).decode())
    encoding = msgspec.json.decode(str(detected))
    tokens = [""] * size
    for text, token in ids.items():
        tokens[token] = text
    control = {ids[text]: text for text in sorted(special & ids.keys(), key=ids.__getitem__)}
    ends = [ids[text] for text in _texts(config.get("eos_token")) if text in ids]
    # Without ends xgrammar finds stop tokens by their names.
    kind, has_space = encoding["vocab_type"], encoding["add_prefix_space"]
    info: TokenizerInfo = core.TokenizerInfo(tokens, kind, size, ends or None, has_space)
    texts = list(info.decoded_vocab())
    spoiled = {one: [token for token, text in enumerate(texts) if one.search(text)] for one in set(_NEVER.values())}
    behind = {
        lead: [token for token, text in enumerate(texts) if re.match(one, text)] for lead, one in _BAD_PAIRS.items()
    }
    not_behind = {token: behind[text[-1]] for token, text in enumerate(texts) if text and text[-1] in behind}
    serialised = info.serialize_json().encode()
    return Vocabulary(
        serialised, size, control, {kind: spoiled[pattern] for kind, pattern in _NEVER.items()}, not_behind
    )


def _read_added(given: object) -> Iterator[_Added]:
    for token, one in msgspec.convert(given, dict[int, dict[str, Any]], strict=False).items():
        yield msgspec.convert({**one, "id": token}, _Added)


def _convert(folder: Path) -> str:
    """The tokenizer.json of a folder without one."""
    from transformers import PreTrainedTokenizerFast

    with blamed_tokenizer(folder):
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        return str(tokenizer.backend_tokenizer.to_str())


def _read_object(path: Path) -> dict[str, Any]:
    return dict(read_json_object(path)) if path.exists() else {}


def _named_special(config: Mapping[str, Any]) -> Iterator[str]:
    """Texts of `eos_token` and the like, which are special whatever else is said of them."""
    for key, value in config.items():
        if key.endswith("_token") or key in ("additional_special_tokens", "extra_special_tokens"):
            yield from _texts(value)


def _texts(value: object) -> list[str]:
    """Texts of a token, or of a list of them; each is a text or an object."""
    match value:
        case str():
            return [value]
        case {"content": str(text)}:
            return [text]
        case list():
            return [text for one in value for text in _texts(one)]
    return []
