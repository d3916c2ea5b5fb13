"""Answers of OpenAI's chats and completions, and of vLLM's /tokenize and /detokenize.

Log-probabilities of a token are encoded when it arrives, never a whole answer's at once.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.answer.choice_text import Ending, ShownToken
from gateway.answer.choices import Totals
from gateway.api.http.answer import encode
from runtime.hardware import OWN_VERSION

SYSTEM_FINGERPRINT = f"baton-{OWN_VERSION}"
_LOWEST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks

TokenBytes = Callable[[int], bytes]


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position of a chat's answer."""

    token: str  # U+FFFD for incomplete characters; `bytes` is exact
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's choice or chunk."""

    content: list[msgspec.Raw] = msgspec.field(default_factory=list)  # TokenLogprob
    refusal: None = None

    def extend(self, tokens: Iterable[ShownToken], token_bytes: TokenBytes) -> None:
        """Adds tokens of an answer."""
        for token in tokens:
            names = [(token_bytes(token_id), logprob) for token_id, logprob in _ranked(token)]
            own, *top = [TopLogprob(name.decode(errors="replace"), logprob, list(name)) for name, logprob in names]
            self.content.append(msgspec.Raw(encode(TokenLogprob(own.token, own.logprob, own.bytes, top))))


class TextLogprobs(msgspec.Struct):
    """Log-probabilities of a completion's choice or chunk: lists of equal length."""

    tokens: list[str] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)  # null for a prompt's first token
    # token |-> log-probability, including the token itself
    top_logprobs: list[msgspec.Raw | None] = msgspec.field(default_factory=list)
    text_offset: list[int] = msgspec.field(default_factory=list)

    def extend(self, tokens: Iterable[ShownToken], token_bytes: TokenBytes) -> None:
        """Adds tokens of a prompt or an answer."""
        for token in tokens:
            self.tokens.append(_text_name(token_bytes(token.token_id)))
            self.text_offset.append(token.offset)
            if token.logprobs is None:
                self.token_logprobs.append(None)
                self.top_logprobs.append(None)
                continue
            own, *top = _ranked(token)
            by_name: dict[str, float] = {}
            for token_id, logprob in (*top, own):
                by_name.setdefault(_text_name(token_bytes(token_id)), logprob)
            self.token_logprobs.append(own[1])
            self.top_logprobs.append(msgspec.Raw(encode(by_name)))


class PromptLogprob(msgspec.Struct):
    """How likely a token was at a position of the prompt, as in vLLM."""

    logprob: float
    rank: int | None  # 1: most likely; null: not among the most likely requested
    decoded_token: str


class PromptDetails(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Details of the answer's tokens."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET  # if the model reasons


class TimingBody(msgspec.Struct):
    """Where one choice's time went, in seconds; see wire.timing.Timing."""

    queue_seconds: float
    grammar_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    transport: str
    first_step_seconds: float
    decode_seconds: float
    cached_tokens: int
    file_tokens: int
    prefill_lent_tokens: int
    decode_lent_tokens: int
    draft_tokens: int
    accepted_tokens: int
    attempts: int
    prefill_reason: str
    wake_seconds: float | UnsetType = UNSET  # if its model was asleep


class FunctionBody(msgspec.Struct):
    """The called function and its arguments."""

    name: str
    arguments: str


class ToolCallBody(msgspec.Struct):
    """A whole call."""

    id: str
    function: FunctionBody
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """The whole answer to a chat."""

    content: str | None  # null if there are calls and no text
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallBody] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # if the answer has reasoning


class ChunkChoice(msgspec.Struct):
    """The part of one choice of a chat that a chunk adds."""

    index: int
    delta: dict[str, object]
    finish_reason: Ending | None = None
    logprobs: ChatLogprobs | None = None
    timing: TimingBody | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET  # as in ChatChoice; comes with the finish reason
    token_ids: Sequence[int] | UnsetType = UNSET  # since the last chunk, if requested


class ChatChoice(msgspec.Struct):
    """One whole choice of a chat."""

    index: int
    message: AssistantMessage
    finish_reason: Ending | None
    logprobs: ChatLogprobs | None = None
    timing: TimingBody | UnsetType = UNSET
    stop_reason: str | int | None = None  # the request's stop string or token id that ended it
    token_ids: Sequence[int] | UnsetType = UNSET  # if requested


class TextChoice(msgspec.Struct):
    """One choice of a completion, or what a chunk adds to it."""

    index: int
    text: str
    finish_reason: Ending | None = None
    logprobs: TextLogprobs | None = None
    timing: TimingBody | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET  # as in ChatChoice; comes with the finish reason
    token_ids: Sequence[int] | UnsetType = UNSET  # if requested
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # if requested, with the choice's first tokens
    prompt_logprobs: Sequence[msgspec.Raw] | UnsetType = UNSET  # if requested


Choice = ChunkChoice | ChatChoice | TextChoice
ObjectKind = Literal["chat.completion", "chat.completion.chunk", "text_completion"]


class Envelope(msgspec.Struct):
    """A chunk or a whole answer."""

    id: str
    object: ObjectKind
    created: int
    model: str
    choices: Sequence[Choice | msgspec.Raw]
    usage: Usage | UnsetType | None = UNSET  # null in the chunks before a stream's last, if that has it
    system_fingerprint: str = SYSTEM_FINGERPRINT
    prompt_token_ids: Sequence[int] | UnsetType = UNSET  # of a chat, if requested; streams: in the first chunk
    prompt_logprobs: Sequence[msgspec.Raw] | UnsetType = UNSET  # of a chat, if requested


class ModelCard(msgspec.Struct):
    """A model served."""

    id: str
    created: int
    max_model_len: int
    root: str  # the base model, as in vLLM; of an adapter, its path
    object: str = "model"
    owned_by: str = "baton"
    parent: str | UnsetType = UNSET  # the base model of an adapter
    input_modalities: Sequence[str] | UnsetType = UNSET  # if it takes more than text
    tool_format: str | None = None  # how it writes calls; None: it knows no tools
    tool_format_reason: str = ""  # why that is believed
    reasoning_format: str | None = None  # how it reasons; None: it does not
    task: str = "generate"  # or "embed", "score" (pairs of texts), "classify": what else it makes of prompts


class ModelList(msgspec.Struct):
    """All models served."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeAnswer(msgspec.Struct):
    """The answer of /tokenize: the tokens."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeAnswer(msgspec.Struct):
    """The answer of /detokenize: the text."""

    prompt: str


def usage_of(totals: Totals) -> Usage:
    num_prompt, num_completion = totals.num_prompt, totals.num_completion
    details = CompletionDetails(totals.num_reasoning) if totals.job.reasoning else UNSET
    return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptDetails(totals.num_cached), details)


def prompt_logprob(token: ShownToken, token_bytes: TokenBytes) -> msgspec.Raw:
    """One position of `prompt_logprobs`: token id |-> PromptLogprob; null for the prompt's first token."""
    if token.logprobs is None:
        return msgspec.Raw(b"null")
    own, *top = _ranked(token)
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
    by_id: dict[int, PromptLogprob] = {}
    for token_id, logprob in (*top, own):
        name = token_bytes(token_id).decode(errors="replace")
        by_id.setdefault(token_id, PromptLogprob(logprob, ranks.get(token_id), name))
    return msgspec.Raw(encode(by_id))


def _ranked(token: ShownToken) -> list[tuple[int, float]]:
    """(token id, log-probability) of the token itself, then of the most likely ones."""
    given = token.logprobs
    if given is None:
        raise ValueError("every token of an answer has log-probabilities")
    pairs = [(token.token_id, given.logprob), *zip(given.top_ids, given.top_logprobs, strict=True)]
    return [(token_id, max(logprob, _LOWEST)) for token_id, logprob in pairs]


def _text_name(token: bytes) -> str:
    """The token's text, or its bytes if they are not whole characters: `bytes:\\xe2\\x80`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
