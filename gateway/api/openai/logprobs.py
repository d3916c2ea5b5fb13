"""Log-probabilities in answers of OpenAI's chats and completions.

A token's are encoded when it arrives, never a whole answer's at once.
"""

from collections.abc import Callable, Iterable

import msgspec

from gateway.answer.choice_text import ShownToken
from gateway.api.http.answer import encode

_LOWEST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks

TokenBytes = Callable[[int], bytes]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's choice or chunk."""

    content: list[msgspec.Raw] = msgspec.field(default_factory=list)
    refusal: None = None

    def extend(self, tokens: Iterable[ShownToken], token_bytes: TokenBytes) -> None:
        """Adds tokens of an answer. Their text has U+FFFD for incomplete characters; `bytes` is exact."""
        for token in tokens:
            pairs = _likely(token)
            named = [_named(token_bytes(token_id), logprob) for token_id, logprob in pairs]
            self.content.append(msgspec.Raw(encode({**named.pop(), "top_logprobs": named})))


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
            by_name: dict[str, float] = {}
            for token_id, logprob in _likely(token) if token.logprobs else ():
                by_name.setdefault(_text_name(token_bytes(token_id)), max(logprob, _LOWEST))
            self.tokens.append(_text_name(token_bytes(token.token_id)))
            self.token_logprobs.append(max(token.logprobs.logprob, _LOWEST) if token.logprobs else None)
            self.top_logprobs.append(msgspec.Raw(encode(by_name)) if token.logprobs else None)
            self.text_offset.append(token.offset)


def prompt_logprob(token: ShownToken, token_bytes: TokenBytes) -> msgspec.Raw:
    """One position of `prompt_logprobs`, as in vLLM; null for the prompt's first token.

    Token id |-> its log-probability and rank (1: most likely; null: not among the most likely requested).
    """
    if token.logprobs is None:
        return msgspec.Raw(b"null")
    by_id: dict[int, dict[str, object]] = {}
    for rank, (token_id, logprob) in enumerate(_likely(token), 1):
        place = rank if rank <= len(token.logprobs.top_ids) else None
        text = token_bytes(token_id).decode(errors="replace")
        by_id.setdefault(token_id, {"logprob": max(logprob, _LOWEST), "rank": place, "decoded_token": text})
    return msgspec.Raw(encode(by_id))


def _likely(token: ShownToken) -> list[tuple[int, float]]:
    """The most likely tokens at a position and, last, the token itself, with their log-probabilities."""
    if token.logprobs is None:
        raise ValueError("only a prompt's first token has no log-probabilities")
    likely = zip(token.logprobs.top_ids, token.logprobs.top_logprobs, strict=True)
    return [*likely, (token.token_id, token.logprobs.logprob)]


def _named(token: bytes, logprob: float) -> dict[str, object]:
    return {"token": token.decode(errors="replace"), "logprob": max(logprob, _LOWEST), "bytes": list(token)}


def _text_name(token: bytes) -> str:
    """The token's text, or its bytes if they are not whole characters: `bytes:\\xe2\\x80`."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
