"""From protobuf messages to raw requests, or a 400 that names the field. Must not know calls or what values mean."""

from typing import Any

from gateway.errors import bad_request
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
