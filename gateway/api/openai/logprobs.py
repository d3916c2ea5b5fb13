"""Log-probabilities in OpenAI's form. Each token is encoded when it arrives, never a whole answer's at once."""

from collections.abc import Callable, Iterable

import msgspec

from gateway.answer.choice_text import ShownToken
from gateway.api.http.answer import encode

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
        self.content += [msgspec.Raw(encode(_chat_token(token, token_bytes))) for token in tokens]


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
            self.token_logprobs.append(None if token.logprobs is None else _finite(token.logprobs.logprob))
            self.top_logprobs.append(_text_top(token, token_bytes))
            self.text_offset.append(token.offset)


class PromptLogprob(msgspec.Struct):
    """How likely a token was at a position of the prompt, as in vLLM."""

    logprob: float
    rank: int | None  # 1: most likely; null: not among the most likely requested
    decoded_token: str


def prompt_logprob(token: ShownToken, token_bytes: TokenBytes) -> msgspec.Raw:
    """One position of `prompt_logprobs`: token id |-> PromptLogprob; null for the prompt's first token."""
    if token.logprobs is None:
        return msgspec.Raw(b"null")
    ranked = enumerate(zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True), 1)
    places: dict[int, tuple[float, int | None]] = {token_id: (logprob, rank) for rank, (token_id, logprob) in ranked}
    places.setdefault(token.token_id, (token.logprobs.logprob, None))
    by_id = {}
    for token_id, (logprob, rank) in places.items():
        by_id[token_id] = PromptLogprob(_finite(logprob), rank, token_bytes(token_id).decode(errors="replace"))
    return msgspec.Raw(encode(by_id))


def _chat_token(token: ShownToken, token_bytes: TokenBytes) -> TokenLogprob:
    if token.logprobs is None:
        raise ValueError("every token of a chat's answer has log-probabilities")
    pairs = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
    top = [TopLogprob(*_chat_fields(token_bytes(token_id), logprob)) for token_id, logprob in pairs]
    return TokenLogprob(*_chat_fields(token_bytes(token.token_id), token.logprobs.logprob), top)


def _chat_fields(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return token.decode(errors="replace"), _finite(logprob), list(token)


def _text_top(token: ShownToken, token_bytes: TokenBytes) -> msgspec.Raw | None:
    if token.logprobs is None:
        return None
    by_name: dict[str, float] = {}
    likely = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
    for token_id, logprob in (*likely, (token.token_id, token.logprobs.logprob)):
        by_name.setdefault(_text_name(token_bytes(token_id)), _finite(logprob))
    return msgspec.Raw(encode(by_name))


def _text_name(token: bytes) -> str:
    """The token's text, or its bytes if they are not whole characters: `bytes:\\xe2\\x80`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
