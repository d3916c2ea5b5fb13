"""What REST and gRPC share: the served model, its options, and the way from a raw request to a generation.

Must not know HTTP or gRPC.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import bad_request
from gateway.generation import Generation, Ring
from gateway.metrics import FrontMetrics
from gateway.text.offload import Offload
from gateway.text.tokenizer import TemplateRefusalError, Tokenizer
from gateway.validate import (
    Chat,
    RawRequest,
    check_max_tokens,
    check_model,
    check_prompt_tokens,
    check_sampling,
    check_stop_ids,
    check_stops,
    check_text_bytes,
    check_vocabulary,
    resolve_max_tokens,
)


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """How the public surface behaves; complete, with its defaults."""

    api_keys: tuple[str, ...] = ()  # any of them opens the service; none: no key needed
    cors_origins: tuple[str, ...] = ()  # browsers' origins that may read answers, never with credentials
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0  # for a request's whole body to arrive
    stalled_client_s: float = 60.0  # for a client to take one message before its request is cancelled
    tokenise_timeout_s: float = 30.0
    tokenise_threads: int = 2
    max_waiting_tokenise: int = 64  # long prompts; further ones are refused with 429


@dataclass(frozen=True, slots=True)
class Order:
    """A request after validation: tokens to generate, and the text that ends them early."""

    generation: Generation
    stop_strings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Front:
    """One served model before the ring."""

    ring: Ring
    tokenizer: Tokenizer
    served_name: str
    options: FrontOptions
    metrics: FrontMetrics
    offload: Offload
    created_s: int  # Unix time at which the model came to be served

    async def prepare(self, raw: RawRequest, request_id: str) -> Order:
        """Checks a request, cheap rules before dear ones, and tokenises its prompt. Raises ApiError."""
        model = self.tokenizer
        check_model(raw.model, self.served_name)
        check_max_tokens(raw)
        sampling = check_sampling(raw, model.sampling_defaults, model.vocabulary_size, secrets.randbits(63))
        stop_strings = check_stops(raw)
        stop_ids = check_stop_ids(raw, model.eos_token_ids, model.vocabulary_size)
        prompt_ids = await self._prompt_ids(raw)
        check_prompt_tokens(len(prompt_ids), raw.prompt_param, model.context_tokens)
        max_tokens = resolve_max_tokens(raw, len(prompt_ids), model.context_tokens)
        return Order(Generation(request_id, prompt_ids, max_tokens, sampling, stop_ids), stop_strings)

    async def _prompt_ids(self, raw: RawRequest) -> tuple[int, ...]:
        if isinstance(raw.prompt, Chat):
            return await self._chat_ids(raw.prompt, raw.prompt_param)
        if isinstance(raw.prompt, str):
            return await self._text_ids(raw.prompt, raw.prompt_param)
        check_prompt_tokens(len(raw.prompt), raw.prompt_param, self.tokenizer.context_tokens)
        check_vocabulary(raw.prompt, raw.prompt_param, self.tokenizer.vocabulary_size)
        return tuple(raw.prompt)

    async def _text_ids(self, text: str, param: str) -> tuple[int, ...]:
        check_text_bytes(_num_bytes([text]), param, self.tokenizer.context_tokens)
        return await self.offload.run(len(text), lambda: tuple(self.tokenizer.encode(text, add_special_tokens=True)))

    async def _chat_ids(self, chat: Chat, param: str) -> tuple[int, ...]:
        if not chat.messages:
            raise bad_request("messages is empty; send at least one message", param)
        if not self.tokenizer.has_chat_template:
            raise bad_request("the model has no chat template; send its prompt to /v1/completions instead", param)
        check_text_bytes(_num_bytes([m["content"] for m in chat.messages]), param, self.tokenizer.context_tokens)
        num_chars = sum(len(m["content"]) + 16 for m in chat.messages)  # 16: a role and its markers
        return await self.offload.run(num_chars, lambda: self._render_and_encode(chat, param))

    def _render_and_encode(self, chat: Chat, param: str) -> tuple[int, ...]:
        try:
            text = self.tokenizer.render_chat(chat.messages)
        except TemplateRefusalError as error:
            raise bad_request(f"the model's chat template refuses these messages: {str(error)[:300]}", param) from error
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def _num_bytes(texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts)
