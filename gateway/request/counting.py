"""Turns text into token ids and back, for clients that request only that. Must not know HTTP or gRPC."""

from collections.abc import Sequence

from gateway.errors import bad_request
from gateway.request.prepare import ServedModel
from gateway.request.rules import check_vocabulary
from gateway.request.types import GenerateRequest
from gateway.tools.request import check_tools

_DECODE_COST = 4  # detokenising a token costs as much as tokenising this many characters


async def tokenize(served: ServedModel, raw: GenerateRequest) -> tuple[int, ...]:
    """Returns the token ids of its one prompt, possibly more than the context holds. Raises ApiError."""
    served.names.check(raw.model)
    tools = check_tools(raw.tools, served.tool_format)
    return await served.tokenize(raw.prompts[0], tools, add_special_tokens=raw.add_special_tokens)


async def detokenize(
    served: ServedModel, model: str | None, token_ids: Sequence[int], param: str, *, with_control_tokens: bool
) -> str:
    """Returns the text of at most `context_tokens` tokens. Raises ApiError naming `param`."""
    served.names.check(model)
    context_tokens = served.tokenizer.context_tokens
    if len(token_ids) > context_tokens:
        message = f"{param} has {len(token_ids)} ids; at most {context_tokens} are turned into text at once"
        raise bad_request(message, param, "context_length_exceeded")
    check_vocabulary(token_ids, param, served.tokenizer.vocab_size)
    return await served.offload.run(
        _DECODE_COST * len(token_ids),
        lambda: served.tokenizer.decode(token_ids, with_control_tokens=with_control_tokens),
    )
