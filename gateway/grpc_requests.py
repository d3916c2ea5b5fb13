"""From protobuf messages to raw requests, or a 400 that names the field. Must not know calls or what values mean."""

from dataclasses import replace
from typing import Any

from gateway.counting import TextToCount
from gateway.errors import bad_request
from gateway.grpc_conversations import chat_prompt, raw_tools
from gateway.raw_request import AnswerForm, Prompt, RawRequest
from protos import inference_pb2

_OPTIONAL_FIELDS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "seed", "n", "speculation", "max_draft_tokens",
)  # fmt: skip


def generate_request(request: inference_pb2.GenerateRequest) -> RawRequest:
    """Raises ApiError when it has no prompt."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise bad_request("the request has no prompt; set text or token_ids", "prompt", "missing_field")
    return _raw_request(request, Prompt(request.text if kind == "text" else tuple(request.token_ids.ids), kind))


def chat_request(request: inference_pb2.ChatRequest) -> RawRequest:
    """Raises ApiError where a message or a tool is none."""
    return replace(_raw_request(request, chat_prompt(request.messages)), tools=raw_tools(request))


def tokenize_request(request: inference_pb2.TokenizeRequest) -> TextToCount:
    """Raises ApiError when text and conversation are both given, or fields of the one with the other."""
    if request.messages and request.text:
        raise bad_request("text and messages are both given; drop one", "text")
    if request.messages and request.add_special_tokens:
        message = "add_special_tokens is for text; the chat template writes those of a conversation"
        raise bad_request(message, "add_special_tokens")
    if request.tools and not request.messages:
        raise bad_request("tools go into a conversation; send messages, too", "tools")
    prompt = chat_prompt(request.messages) if request.messages else Prompt(request.text, "text")
    add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else None
    return TextToCount(request.model or None, prompt, raw_tools(request), add_special_tokens)


def _raw_request(request: "inference_pb2.GenerateRequest | inference_pb2.ChatRequest", prompt: Prompt) -> RawRequest:
    """Fields 4 to 23, which both have."""
    given: dict[str, Any] = {name: getattr(request, name) for name in _OPTIONAL_FIELDS if request.HasField(name)}
    return RawRequest(
        model=request.model or None,
        prompts=[prompt],
        prompts_param=prompt.param,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logit_bias=dict(request.logit_bias),
        num_logprobs=request.logprobs if request.HasField("logprobs") else None,
        form=_form(request.response_format) if request.HasField("response_format") else None,
        with_timing=request.include_timing,
        **given,
    )


def _form(given: inference_pb2.ResponseFormat) -> AnswerForm | None:
    kind = given.WhichOneof("form")
    if kind is None:
        raise bad_request("response_format has no form; set one of its fields", "response_format", "missing_field")
    if kind == "json_object":
        return AnswerForm(kind, None, "response_format.json_object") if given.json_object else None
    value = tuple(given.choice.texts) if kind == "choice" else getattr(given, kind)
    return AnswerForm(kind, value, f"response_format.{kind}")
