from protos import decode_pb2 as _decode_pb2
from protos import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmbedPromptRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "cache_salt", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: bytes
    cache_salt: str
    adapter: str
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ...) -> None: ...

class EmbedPromptResponse(_message.Message):
    __slots__ = ("vector", "queue_seconds", "prefill_seconds", "cached_tokens")
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    vector: bytes
    queue_seconds: float
    prefill_seconds: float
    cached_tokens: int
    def __init__(self, vector: _Optional[bytes] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "cache_salt", "ticket", "num_prompt_logprobs", "source", "images", "retention")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: bytes
    cache_salt: str
    ticket: _kv_pb2.Ticket
    num_prompt_logprobs: int
    source: _kv_pb2.PageSource
    images: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Image]
    retention: _kv_pb2.Retention
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., ticket: _Optional[_Union[_kv_pb2.Ticket, _Mapping]] = ..., num_prompt_logprobs: _Optional[int] = ..., source: _Optional[_Union[_kv_pb2.PageSource, _Mapping]] = ..., images: _Optional[_Iterable[_Union[_kv_pb2.Image, _Mapping]]] = ..., retention: _Optional[_Union[_kv_pb2.Retention, _Mapping]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "transfer_seconds", "transfer_bytes", "transport", "prompt_logprobs", "cached_tokens", "read_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    transport: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_decode_pb2.TokenLogprobs]
    cached_tokens: int
    read_tokens: _kv_pb2.ReadTokens
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_decode_pb2.TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., read_tokens: _Optional[_Union[_kv_pb2.ReadTokens, _Mapping]] = ...) -> None: ...
