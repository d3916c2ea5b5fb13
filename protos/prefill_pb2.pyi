from protos import decode_pb2 as _decode_pb2
from protos import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunRequest(_message.Message):
    __slots__ = ("request_id", "prompt", "cache_salt", "ticket", "num_prompt_logprobs", "source", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt: bytes
    cache_salt: str
    ticket: _kv_pb2.Ticket
    num_prompt_logprobs: int
    source: PageSource
    images: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Image]
    def __init__(self, request_id: _Optional[str] = ..., prompt: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., ticket: _Optional[_Union[_kv_pb2.Ticket, _Mapping]] = ..., num_prompt_logprobs: _Optional[int] = ..., source: _Optional[_Union[PageSource, _Mapping]] = ..., images: _Optional[_Iterable[_Union[_kv_pb2.Image, _Mapping]]] = ...) -> None: ...

class PageSource(_message.Message):
    __slots__ = ("address", "incarnation", "tokens")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    tokens: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class LendRequest(_message.Message):
    __slots__ = ("incarnation", "keys", "begin", "reader")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    begin: int
    reader: _kv_pb2.Peer
    def __init__(self, incarnation: _Optional[str] = ..., keys: _Optional[_Iterable[bytes]] = ..., begin: _Optional[int] = ..., reader: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ...) -> None: ...

class LendResponse(_message.Message):
    __slots__ = ("peer", "offer", "has_draft")
    PEER_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    HAS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.Peer
    offer: _kv_pb2.OfferRequest
    has_draft: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, peer: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ..., offer: _Optional[_Union[_kv_pb2.OfferRequest, _Mapping]] = ..., has_draft: _Optional[_Iterable[bool]] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "transfer_seconds", "transfer_bytes", "transport", "prompt_logprobs", "cached_tokens")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    transfer_seconds: float
    transfer_bytes: int
    transport: str
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_decode_pb2.TokenLogprobs]
    cached_tokens: int
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., transfer_seconds: _Optional[float] = ..., transfer_bytes: _Optional[int] = ..., transport: _Optional[str] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_decode_pb2.TokenLogprobs, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
