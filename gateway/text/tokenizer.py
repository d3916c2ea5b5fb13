"""The model's tokenizer and chat template: text to token ids and back, as tokens arrive.

The only file of the gateway that imports transformers.
"""

import codecs
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from wire.sampling import SamplingParams

_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>\Z")  # how sentencepiece writes a byte that has no piece
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
_DEFAULT_CONTEXTS = {"gemma3_text": 131_072}  # of files that leave it out
# Prompts for the page, of which each model that follows instructions can answer some. A folder may bring its own.
_EXAMPLES = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me three names for a small grey cat.",
)
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # in generation_config.json
_PROBE = "a text"
_WORD_MARK = "\u2581"  # how sentencepiece writes a space


class TemplateRefusalError(Exception):
    """The chat template cannot render these messages; the text says why."""


class Tokenizer:
    """Tokenizer of one checkpoint folder. Thread-safe: only a cache changes after construction."""

    def __init__(self, folder: Path, max_context_tokens: int | None = None) -> None:
        """Reads only the folder, never the network. `max_context_tokens` lowers config.json's limit.

        Raises ValueError saying what is wrong.
        """
        self.folder = folder
        self.config, generation = (_read_object(folder / name) for name in ("config.json", "generation_config.json"))
        config = self.config.get("text_config") or self.config  # multimodal checkpoints nest the language model
        context_tokens = _context_tokens(config, folder)
        self.context_tokens = min(context_tokens, max_context_tokens or context_tokens)
        given = {name: generation[name] for name in _DEFAULTED if generation.get(name) is not None}
        self.sampling_defaults = SamplingParams(**given)  # for parameters that a request does not set
        path = folder / "examples.json"
        self.examples: Sequence[str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else _EXAMPLES
        if not all(isinstance(one, str) for one in self.examples):
            raise ValueError(f"{path} must hold a list of texts")
        self._hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        if template := _read_object(folder / "chat_template.json").get("chat_template"):
            self._hf.chat_template = template  # where processors had theirs
        backend = getattr(self._hf, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{folder} has no fast tokenizer: save it with a tokenizer.json first")
        self._backend: Any = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._silent_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._control_texts = [str(self._backend.id_to_token(token_id)) for token_id in self._silent_ids]
        self.raw_bytes = _bytes_of_pieces(self._backend)  # of a token; None if its text depends on the token before
        self.vocab_size: int = config.get("vocab_size") or self._backend.get_vocab_size()  # rows of the embedding
        eos = generation.get("eos_token_id", config.get("eos_token_id"))
        listed: Sequence[int | None] = eos if isinstance(eos, list) else [eos]
        self.eos_token_ids = frozenset(one for one in (*listed, self._hf.eos_token_id) if one is not None)
        self._wants_parts = False
        self._wants_parts = "vision_config" in self.config and not self._prints_texts()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. `add_special_tokens`: with the model's start token, if it has one.

        Names of control tokens in the text become these tokens. Releases the GIL (the backend's `encode` does not).
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """The same of several texts."""
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [one.ids for one in encoded]

    @property
    def added_tokens(self) -> list[AddedToken]:
        """The tokens that are taken out of a text before it is normalised and split, and their rules."""
        return list(self._backend.get_added_tokens_decoder().values())

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has a token with this name."""
        return self._backend.token_to_id(text) is not None

    @property
    def chat_templates(self) -> str:
        """Sources of all chat templates; empty if there is none."""
        return str(self._hf.chat_template or "")

    def _prints_texts(self) -> bool:
        """Whether the chat template prints contents that are texts, not lists of parts as those of images are."""
        try:
            return _PROBE in self.render_chat([{"role": "user", "content": _PROBE}])
        except TemplateRefusalError:
            return False

    @property
    def tool_template(self) -> str:
        """Source of the chat template that is used with tools; empty if there is none."""
        try:
            return str(self._hf.get_chat_template(tools=[{}]))
        except ValueError:
            return ""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        options: Mapping[str, str | int | float | bool | None] = {},
        add_generation_prompt: bool = True,
        is_open: bool = False,
    ) -> str:
        """Text of a conversation up to the start of the answer. Runs the template in a sandbox.

        A content is a text, or a list of texts and images; anything but a text is one.

        `options`: variables from tools/template_options.py; the template gets those that it names. Without
        `add_generation_prompt` the text ends with the last message. `is_open`: it ends inside the last message, an
        assistant's, without trailing space if the template trims messages. Raises TemplateRefusalError.
        """
        if is_open and not messages[-1]["content"].strip():  # no text to continue
            messages, add_generation_prompt, is_open = messages[:-1], True, False
        known = [dict(message) for message in messages]
        for message in known:
            if message["role"] == "developer" and "developer" not in self.chat_templates:
                message["role"] = "system"
            if self._wants_parts or not isinstance(message["content"], str):
                message["content"] = _template_parts(message["content"])
        try:
            rendered = self._hf.apply_chat_template(
                known,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not is_open,
                continue_final_message=is_open,
                **{name: value for name, value in options.items() if name in self.chat_templates},
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            reason = str(error) or type(error).__name__
            if reason.startswith("continue_final_message"):  # transformers' check, which quotes the prompt
                reason = "it drops or changes the text of the last message, so that no answer can go on with it"
            raise TemplateRefusalError(reason) from error
        return str(rendered)

    def detokenizer(self, shown: Collection[str] = (), before: Sequence[int] = ()) -> "IncrementalDetokenizer":
        """A detokenizer for one answer. `shown`: names of control tokens to show; `before`: as in its constructor."""
        ids = {self._backend.token_to_id(text): text.encode() for text in shown}
        return IncrementalDetokenizer(self, before, {id: text for id, text in ids.items() if id in self._silent_ids})

    def last_with_text(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The last two tokens with text, the context of the next token. Two, as the last one alone may have no text."""
        backwards = (token_id for token_id in reversed(token_ids) if not self.is_silent(token_id))
        return tuple(islice(backwards, 2))[::-1]

    def control_tokens_in(self, text: str) -> frozenset[str]:
        """Names of control tokens that occur in the text."""
        return frozenset(written for written in self._control_texts if written in text)

    def decode(self, token_ids: Sequence[int], *, with_control_tokens: bool = False) -> str:
        """Text of the tokens. Releases the GIL (the backend's `decode` does not)."""
        texts: list[str] = self._backend.decode_batch([list(token_ids)], skip_special_tokens=not with_control_tokens)
        return texts[0]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The name of each token in the vocabulary; empty for ids without a token."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def is_silent(self, token_id: int) -> bool:
        """True for control tokens and for ids of the embedding without a token."""
        return token_id in self._silent_ids or self._backend.id_to_token(token_id) is None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token alone: the name of a control token, b"" for ids without a token."""
        if token_id in self._silent_ids:
            return str(self._backend.id_to_token(token_id)).encode()
        if self.is_silent(token_id):
            return b""
        raw = self.raw_bytes(token_id)
        return str(self._backend.id_to_token(token_id)).replace(_WORD_MARK, " ").encode() if raw is None else raw


class IncrementalDetokenizer:
    """Turns the tokens of an answer into text, in whole characters.

    A token has fixed bytes (all of a byte-level vocabulary, sentencepiece's `<0xE2>`), or its text depends on its
    context. All results of `push` and of a last `flush` form the full text; each has whole characters only.

    Fixed bytes go through an incremental UTF-8 decoder, which holds back at most 3. Other tokens are decoded after
    their context, the last one or two tokens with text, whose text is then removed: O(1) per token. Each maximal
    subpart of ill-formed bytes becomes one U+FFFD. (A sentencepiece decoder also replaces the well-formed bytes around
    them; these may already be sent.)
    """

    def __init__(self, tokenizer: Tokenizer, before: Iterable[int] = (), shown: Mapping[int, bytes] = {}) -> None:
        """`before`: `Tokenizer.last_with_text` of the tokens before the pushed ones; empty at the start of a text.

        If `before` ends with an incomplete character, its bytes are dropped. `shown`: control tokens |-> their text.
        """
        self._tokenizer = tokenizer
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []  # decodes to text that is not empty, or holds all tokens so far
        self.push(before)
        self._utf8.reset()

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete."""
        return "".join([text for token_id in token_ids for text in self.push_token(token_id)])

    def push_token(self, token_id: int) -> tuple[str, str]:
        """Returns (U+FFFD if this token breaks off a character before it, the text that this token completes)."""
        raw = self._shown.get(token_id)
        if raw is None and self._tokenizer.is_silent(token_id):
            return "", ""
        raw = raw or self._tokenizer.raw_bytes(token_id)
        if raw is None:
            return self.flush(), self._text_after_context(token_id)
        self._context = [token_id]
        held, _flags = self._utf8.getstate()
        is_cut_off = held and len((held + raw[:1]).decode(errors="replace")) > 1
        return self.flush() if is_cut_off else "", self._utf8.decode(raw)

    def flush(self) -> str:
        """Returns U+FFFD for an incomplete last character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _text_after_context(self, token_id: int) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, token_id])
        can_stand_alone = bool(self._tokenizer.decode([token_id]))
        self._context = [token_id] if can_stand_alone else [*self._context[-1:], token_id]
        return text[len(before) :]


def _bytes_of_pieces(backend: Any) -> Callable[[int], bytes | None]:
    """Returns a cached function: id of an existing token |-> its fixed bytes, or None."""
    state = msgspec.json.decode(backend.decoder.__getstate__()) if backend.decoder else {"decoders": []}
    kinds = [step["type"] for step in state.get("decoders", [state])]

    @cache
    def byte_level(token_id: int) -> bytes:
        piece: str = backend.id_to_token(token_id)
        if all(char in _BYTE_OF_CHAR for char in piece):
            return bytes(_BYTE_OF_CHAR[char] for char in piece)
        return piece.encode()  # an added token, stored as plain text

    @cache
    def byte_fallback(token_id: int) -> bytes | None:
        match = _BYTE_PIECE.match(backend.id_to_token(token_id))
        return bytes.fromhex(match[1]) if match else None

    if kinds == ["ByteLevel"]:
        return byte_level
    return byte_fallback if "ByteFallback" in kinds else lambda token_id: None


def _template_parts(content: str | Sequence[object]) -> list[dict[str, str]]:
    parts = [content] if isinstance(content, str) else content
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in parts]


def _context_tokens(config: Mapping[str, Any], folder: Path) -> int:
    """Most tokens of prompt and answer together.

    With yarn it is longer: recipes that add it leave max_position_embeddings at the original.
    """
    context = next((config[key] for key in _CONTEXT_KEYS if key in config), None)
    context = context or _DEFAULT_CONTEXTS.get(str(config.get("model_type")))
    if not isinstance(context, int) or context < 2:
        raise ValueError(f"{folder / 'config.json'} must give max_position_embeddings as an integer of at least 2")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return context
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = rope.get("factor")
    is_sane = isinstance(original, int) and isinstance(factor, int | float) and 0 < factor < 2**53
    return max(context, int(original * factor)) if is_sane else context  # the workers report the error


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value
