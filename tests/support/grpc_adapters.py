"""Requests and outcomes in gRPC's form. See words.py."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from protos import inference_pb2
from tests.support.api_server import WAIT_S, Served
from tests.support.words import NONE, Api, Ask, Call, Outcome

_GRPC_CODES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400, grpc.StatusCode.UNAUTHENTICATED: 401, grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429, grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504, grpc.StatusCode.INTERNAL: 500,
}  # fmt: skip


class Grpc(Api):
    """Always streamed."""

    method: str
    request: type[Message]
    response: type[Message]
    can_be_whole = False

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = _quoted(super().body(ask))
        try:
            json_format.ParseDict(body, self.request())
        except json_format.ParseError as error:
            raise KeyError(f"a message cannot say that: {error}") from error
        return body

    def send(
        self, served: Served, body: Mapping[str, Any], stream: bool = True, headers: Mapping[str, str] = NONE
    ) -> Outcome:
        message = json_format.ParseDict(_quoted(body), self.request())
        call: Any = self._start(served, message, list(headers.items()))
        outcome = Outcome()
        try:
            for part in call:
                assert outcome.usage is None, "something follows the usage"
                self._take(outcome, part)
        except grpc.RpcError as error:
            read_status(outcome, error)
        outcome.headers = dict(call.initial_metadata()) | dict(call.trailing_metadata() or ())
        return outcome

    def leave(self, served: Served, ask: Ask, stream: bool, num_choices: int) -> None:
        call = self._start(served, json_format.ParseDict(self.body(ask), self.request()), [])
        for _ in range(num_choices):
            served.engine.hanging.get(timeout=WAIT_S)
        call.cancel()

    def _start(self, served: Served, message: Message, more: Sequence[tuple[str, str]]) -> Any:
        decode = self.response.FromString
        path = f"/baton.v1.Inference/{self.method}"
        start: Any = served.channel.unary_stream(path, lambda one: one.SerializeToString(), decode)
        return start(message, metadata=(*served.metadata, *more), timeout=WAIT_S)

    def _take(self, outcome: Outcome, part: Any) -> None:
        choice = outcome.choices[part.index]
        assert choice.reason is None, "something follows the finish reason"
        choice.text += part.text
        choice.reasoning += getattr(part, "reasoning", "")
        choice.token_ids += part.token_ids
        if told := part.WhichOneof("stop_reason"):
            choice.stop = getattr(part, told)
        choice.reason = part.finish_reason or None
        for call in getattr(part, "tool_calls", ()):
            choice.calls[len(choice.calls)] = Call(call.id, call.name, call.arguments)
        choice.logprobs += [one.logprob for one in part.logprobs]
        assert not part.logprobs or [one.token_id for one in part.logprobs] == list(part.token_ids)
        if part.HasField("timing"):
            assert choice.timing is None and choice.reason
            timing = json_format.MessageToDict(part.timing, preserving_proto_field_name=True)
            choice.timing = {**timing, "transfer_bytes": int(timing["transfer_bytes"])}  # 64 bits: a string in JSON
        if part.HasField("usage"):
            usage = part.usage
            outcome.usage = usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens

    def _form(self, body: dict[str, Any], value: Any) -> None:
        (kind, content), *others = value.items()
        if others:
            raise KeyError("strict")
        names = {"json_schema": "jsonSchema", "json_object": "jsonObject"}
        content = json.dumps(content, ensure_ascii=False) if kind == "json_schema" else content
        body["responseFormat"] = {names.get(kind, kind): {"texts": content} if kind == "choice" else content}


def _quoted(value: Any) -> Any:
    """As protobuf's JSON writes it: NaN and infinity as strings."""
    if isinstance(value, dict):
        return {name: _quoted(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def read_status(outcome: Outcome, error: grpc.RpcError) -> None:
    """The status of a failed call, with its details."""
    assert isinstance(error, grpc.Call)
    outcome.status, outcome.message = _GRPC_CODES[error.code()], str(error.details())
    trailer = dict(error.trailing_metadata() or ())
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for packed in status_pb2.Status.FromString(trailer["grpc-status-details-bin"]).details:
        for kind in (info, bad, retry):
            packed.Unpack(kind)
    assert not info.reason or (info.domain, info.reason) == ("baton", info.reason.upper())
    outcome.code = info.reason.lower() or None
    outcome.param = bad.field_violations[0].field if bad.field_violations else None
    outcome.retry_after = retry.retry_delay.seconds or None


class Generate(Grpc):
    method, request, response = "Generate", inference_pb2.GenerateRequest, inference_pb2.GenerateResponse

    def _prompt(self, body: dict[str, Any], value: Any) -> None:
        body.pop("text")
        body |= {"text": value} if isinstance(value, str) else {"tokenIds": {"ids": value}}


class Chat(Grpc):
    method, request, response = "Chat", inference_pb2.ChatRequest, inference_pb2.ChatResponse

    def _thinks(self, body: dict[str, Any], value: bool) -> None:
        body["chatTemplateKwargs"] = json.dumps({"enable_thinking": value})

    def _continues(self, body: dict[str, Any], value: bool) -> None:
        body["continueFinalMessage"] = value

    def _system(self, body: dict[str, Any], value: str) -> None:
        body["messages"] = [{"role": "system", "content": value}, *body["messages"]]

    def _messages(self, body: dict[str, Any], value: Any) -> None:
        body["messages"] = [{"toolCalls" if name == "calls" else name: one[name] for name in one} for one in value]

    def _tools(self, body: dict[str, Any], value: Any) -> None:
        body["tools"] = [
            {**tool, "parameters": json.dumps(tool["parameters"])} if "parameters" in tool else tool for tool in value
        ]
