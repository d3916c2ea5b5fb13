"""The model's tokenizer and chat template: text to token ids and back, as tokens arrive.

Beside template.py the only file of the gateway that imports transformers.
"""

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gateway.errors import bad_request
from gateway.text.template import ChatTemplate, Conversation, TemplateRefusalError
from gateway.tools.dialect import PROBE_TOOL, PROBES
from wire.files import TOKENIZER, blamed_tokenizer, named, read_json, read_json_object
from wire.names import MOST_CONTEXT_TOKENS
from wire.pooling import read_pooling
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
GENERATION = "generation_config.json"
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", TOKENIZER)  # objects
_MOST_REASON_CHARS = 300
RENDERED_BYTES_PER_TOKEN = 32  # of a rendered chat: twice what its texts may have (request/rules.py)
LEAST_RENDERED_BYTES = 1 << 16
MOST_PROBE_CHARS = 1 << 14  # of a rendered probe, from its end: instructions and a call have a few thousand
_WORD_MARK = "\u2581"  # how sentencepiece writes a space


class Tried(msgspec.Struct):
    """Results of the chat template on samples, rendered in a fork with limits."""

    prints_texts: bool  # see `Tokenizer.conversation`
    sample: str  # two turns
    probes: list[str] = []  # PROBES of tools/dialect.py with a tool, as far as they are looked at


class Tokenizer:
    """Tokenizer of one checkpoint folder. Thread-safe: only a cache changes after construction."""

    def __init__(self, folder: Path, max_context_tokens: int | None = None, tried: Tried | None = None) -> None:
        """Reads only the folder, never the network. `max_context_tokens` lowers config.json's limit.

        Without `tried` it renders samples itself, without limits. Raises ValueError saying what is wrong.
        """
        self.folder = folder
        self.config, generation = (read_optional(folder / name) for name in ("config.json", GENERATION))
        config = self.config.get("text_config") or self.config  # multimodal checkpoints nest the language model
        if not isinstance(config, dict):
            raise ValueError(f"{folder / 'config.json'} has text_config {config!r}, expected an object")
        context_tokens = _context_tokens(config, folder)
        self.pooling = read_pooling(folder) if (folder / "config.json").exists() else None  # None: the model answers
        if self.pooling is not None:
            context_tokens = self.pooling.max_tokens + 1  # as for a token after the text
        self.context_tokens = min(context_tokens, max_context_tokens or context_tokens)
        self.sampling_defaults = _read_sampling(generation, folder)  # for parameters that a request does not set
        self.examples = _read_examples(folder / "examples.json")
        self._hf: Any = _load(folder)
        with blamed_tokenizer(folder):
            self._backend: Any = self._hf.backend_tokenizer
            self._backend.no_truncation()
            self._backend.no_padding()
            self._silent_ids = frozenset(
                token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
            )
            self._control_texts = [str(self._backend.id_to_token(token_id)) for token_id in self._silent_ids]
            self._controls_of: dict[frozenset[str], frozenset[str]] = {}  # by the markers of a format
            self.raw_bytes = _bytes_of_pieces(self._backend)  # of a token; None if its text depends on those before
            self.template = ChatTemplate(
                self._find_template(),
                self._find_template([{}]),
                self._hf.special_tokens_map,
                RENDERED_BYTES_PER_TOKEN * self.context_tokens + LEAST_RENDERED_BYTES,
            )
            self.chat_templates = str(self._hf.chat_template or "")  # the sources of all; empty if there is none
            own_end: int | None = self._hf.eos_token_id
        vocab_size = config.get("vocab_size") or self._backend.get_vocab_size()
        if not _is_id(vocab_size) or not vocab_size:
            raise ValueError(f"{folder / 'config.json'} has vocab_size {vocab_size!r:.40}, expected a number of tokens")
        self.vocab_size = vocab_size  # rows of the embedding
        name, given = (GENERATION, generation) if "eos_token_id" in generation else ("config.json", config)
        self.eos_token_ids = _read_ends(given.get("eos_token_id"), folder / name)
        if own_end is not None:
            self.eos_token_ids |= {own_end}
        self.tried = tried or self.render_samples()
        self._wants_parts = "vision_config" in self.config and not self.tried.prints_texts

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. `add_special_tokens`: with the model's start token, if it has one.

        Names of control tokens in the text become these tokens. Releases the GIL (the backend's `encode` does not).
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """As `encode`, for several texts. Raises ApiError if a regular expression of the tokenizer gives up."""
        return [one.ids for one in self._encode_batch(texts, add_special_tokens=add_special_tokens)]

    def _encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        try:
            encoded: list[Any] = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except BaseException as error:  # pyo3's PanicException, which cannot be imported, is not an Exception
            if type(error).__name__ != "PanicException":
                raise
            why = f"the model's tokenizer cannot read this text: {error}"
            raise bad_request(why[:_MOST_REASON_CHARS], None) from error
        return encoded

    def encode_cut(self, texts: Sequence[tuple[str, ...]], most: int | None) -> list[list[int]]:
        """Texts, or pairs of texts, with the tokens around them; the last one of each cut so that all are `most`."""
        plain = self._encode_batch([text for one in texts for text in one], add_special_tokens=False)
        parts, found = iter(plain), list[list[int]]()
        for one in texts:
            first, *second = [next(parts) for _ in one]
            if most is not None:
                around = self._backend.num_special_tokens_to_add(bool(second))
                last = second[-1] if second else first
                others = sum(len(part.ids) for part in (first, *second)) - len(last.ids)
                last.truncate(max(most - around - others, 0))
            found.append(self._backend.post_process(first, second[0] if second else None, True).ids)
        return found

    @property
    def added_tokens(self) -> list[AddedToken]:
        """The tokens that are taken out of a text before it is normalised and split, and their rules."""
        return list(self._backend.get_added_tokens_decoder().values())

    def patterns(self) -> list[str]:
        """All texts in the normalizer and the pre-tokenizer, regular expressions included."""
        parts = [part for part in (self._backend.normalizer, self._backend.pre_tokenizer) if part is not None]
        return sorted(set(_texts_in([msgspec.json.decode(part.__getstate__()) for part in parts])))

    def has_token(self, text: str) -> bool:
        """Whether the vocabulary has a token with this name."""
        return self._backend.token_to_id(text) is not None

    def add_ends(self, texts: Iterable[str]) -> None:
        """Tokens that end answers, besides those that the checkpoint names; before the first answer."""
        self.eos_token_ids |= {self._backend.token_to_id(text) for text in texts if self.has_token(text)}

    def _find_template(self, tools: Sequence[Any] = ()) -> str:
        """The source of the chat template; empty if there is none."""
        try:
            return str(self._hf.get_chat_template(tools=tools or None))
        except ValueError:
            return ""

    def render_samples(self) -> Tried:
        """See `Tried`. Without limits of time and memory."""
        self._wants_parts = False
        prints_texts = _PROBE in self._render_if_taken([{"role": "user", "content": _PROBE}])
        self._wants_parts = "vision_config" in self.config and not prints_texts
        turns = [{"role": role, "content": "."} for role in ("user", "assistant", "user")]
        probes = [self._render_if_taken(probe, [PROBE_TOOL])[-MOST_PROBE_CHARS:] for probe in PROBES]
        return Tried(prints_texts, self._render_if_taken(turns), probes)

    def _render_if_taken(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The text of a conversation; empty if the template refuses it, or there is none."""
        try:
            return self.render_chat(messages, tools=tools) if self.chat_templates else ""
        except TemplateRefusalError:
            return ""

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        options: Mapping[str, str | int | float | bool | None] = {},
        add_generation_prompt: bool = True,
        is_open: bool = False,
        shown: Sequence[str] = (),
    ) -> Conversation:
        """Builds the input of the template to render the text of a conversation up to the start of the answer.

        A content is a text, or a list of texts and images; anything but a text is an image.

        `options`: variables from tools/template_options.py; the template gets those that it names. Without
        `add_generation_prompt` the text ends with the last message. `is_open`: it ends inside the last message, an
        assistant's, without trailing space if the template trims messages. `shown`: texts that it must have.
        """
        if is_open and not messages[-1]["content"].strip():  # no text to continue
            messages, add_generation_prompt, is_open = messages[:-1], True, False
        known = [dict(message) for message in messages]
        for message in known:
            if message["role"] == "developer" and "developer" not in self.chat_templates:
                message["role"] = "system"
            if self._wants_parts or not isinstance(message["content"], str):
                message["content"] = _template_parts(message["content"])
        named = {name: value for name, value in options.items() if name in self.chat_templates}
        return Conversation(known, tools, named, add_generation_prompt, is_open, shown)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The text of `conversation`, without limits of time and memory: for templates that were tried, and in forks.

        Raises TemplateRefusalError.
        """
        return self.template.render(self.conversation(messages, **options))

    def detokenizer(
        self, shown: Collection[str] = (), before: Sequence[int] = (), hidden: Collection[str] = ()
    ) -> "IncrementalDetokenizer":
        """A detokenizer for one answer. `shown`: names of control tokens to show, `hidden`: of tokens without text;
        `before`: as in its constructor."""
        ids = {self._backend.token_to_id(text): text.encode() for text in shown}
        texts = {id: text for id, text in ids.items() if id in self._silent_ids}
        texts |= {self._backend.token_to_id(text): b"" for text in hidden if self.has_token(text)}
        return IncrementalDetokenizer(self, before, texts)

    def last_with_text(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The last two tokens with text, the context of the next token. Two, as the last one alone may have no text."""
        backwards = (token_id for token_id in reversed(token_ids) if not self.is_silent(token_id))
        return tuple(islice(backwards, 2))[::-1]

    def control_tokens_in(self, text: str) -> frozenset[str]:
        """Names of control tokens that occur in the text."""
        return frozenset(written for written in self._control_texts if written in text)

    def controls_of(self, markers: frozenset[str]) -> frozenset[str]:
        """Names of control tokens in a format's markers; looked up once, as vocabularies have thousands."""
        if markers not in self._controls_of:
            self._controls_of[markers] = self.control_tokens_in("\n".join(markers))
        return self._controls_of[markers]

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
        if raw == b"" or (raw is None and self._tokenizer.is_silent(token_id)):
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


def _load(folder: Path) -> Any:
    """transformers' fast tokenizer of a folder."""
    for path in sorted(folder.glob("*.json")):
        if path.name in SETTINGS:
            read_json_object(path)
    template = read_optional(folder / "chat_template.json").get("chat_template")
    with blamed_tokenizer(folder):
        found: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        if template:
            found.chat_template = template  # where processors had theirs
    if getattr(found, "backend_tokenizer", None) is None:
        raise ValueError(f"{folder} has no fast tokenizer: save it with a {TOKENIZER} first")
    return found


def _read_sampling(generation: Mapping[str, Any], folder: Path) -> SamplingParams:
    given = {name: generation[name] for name in _DEFAULTED if generation.get(name) is not None}
    with named(folder / GENERATION):
        return SamplingParams(**given)


def _read_examples(path: Path) -> Sequence[str]:
    examples = read_json(path) if path.exists() else list(_EXAMPLES)
    if not isinstance(examples, list) or not all(isinstance(one, str) for one in examples):
        raise ValueError(f"{path} must hold a list of texts")
    return examples


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(one)


def _is_id(value: object) -> TypeGuard[int]:
    """Whether it can be a token's."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _read_ends(ends: object, path: Path) -> frozenset[int]:
    """`eos_token_id`, one or several."""
    listed = [one for one in (ends if isinstance(ends, list) else [ends]) if one is not None]
    found = frozenset(one for one in listed if _is_id(one))
    if len(found) < len({repr(one) for one in listed}):
        raise ValueError(f"{path} has eos_token_id {ends!r:.80}, expected token ids")
    return found


def _context_tokens(config: Mapping[str, Any], folder: Path) -> int:
    """Most tokens of prompt and answer together.

    With yarn it is longer: recipes that add it leave max_position_embeddings at the original.
    """
    path = folder / "config.json"
    context = next((config[key] for key in _CONTEXT_KEYS if key in config), None)
    context = context or _DEFAULT_CONTEXTS.get(str(config.get("model_type")))
    if not isinstance(context, int) or isinstance(context, bool) or not 2 <= context <= MOST_CONTEXT_TOKENS:
        expected = f"as an integer from 2 to {MOST_CONTEXT_TOKENS}, not {context!r:.40}"
        raise ValueError(f"{path} must give max_position_embeddings {expected}")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return context
    original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    factor = rope.get("factor")
    if not isinstance(original, int) or not isinstance(factor, int | float) or not 0 < factor * original < 2**53:
        return context  # the workers report the error
    if (context := max(context, int(original * factor))) > MOST_CONTEXT_TOKENS:
        raise ValueError(f"{path} has a context of {context} tokens with rope_scaling, over {MOST_CONTEXT_TOKENS}")
    return context


def read_optional(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    return read_json_object(path) if path.exists() else {}
