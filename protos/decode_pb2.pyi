from protos import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "gateway", "prompt_ids", "max_tokens", "sampling", "stop_token_ids", "local_prefill_max_tokens", "handle")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    gateway: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    local_prefill_max_tokens: int
    handle: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., gateway: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., local_prefill_max_tokens: _Optional[int] = ..., handle: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket", "needs_prefill")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    NEEDS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    ticket: _kv_pb2.Ticket
    needs_prefill: bool
    def __init__(self, ticket: _Optional[_Union[_kv_pb2.Ticket, _Mapping]] = ..., needs_prefill: _Optional[bool] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("gateway",)
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    def __init__(self, gateway: _Optional[str] = ...) -> None: ...

class StepEvents(_message.Message):
    __slots__ = ("incarnation", "step", "deltas")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    step: int
    deltas: _containers.RepeatedCompositeFieldContainer[SequenceDelta]
    def __init__(self, incarnation: _Optional[str] = ..., step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[SequenceDelta, _Mapping]]] = ...) -> None: ...

class SequenceDelta(_message.Message):
    __slots__ = ("handle", "attempt", "token_ids", "finish_reason", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    error: str
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("gateway", "handles")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, gateway: _Optional[str] = ..., handles: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("peer",)
    PEER_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.Peer
    def __init__(self, peer: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("peer", "transport")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.Peer
    transport: str
    def __init__(self, peer: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ..., transport: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _kv_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_kv_pb2.Ticket, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_left", "drain_s")
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_S_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    drain_s: float
    def __init__(self, num_left: _Optional[int] = ..., drain_s: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("peer", "context_tokens", "free_pages", "used_pages", "num_running", "num_waiting", "max_running", "steps", "step_age_s", "draining", "transports")
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PEER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.Peer
    context_tokens: int
    free_pages: int
    used_pages: int
    num_running: int
    num_waiting: int
    max_running: int
    steps: int
    step_age_s: float
    draining: bool
    transports: _containers.ScalarMap[str, str]
    def __init__(self, peer: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ..., context_tokens: _Optional[int] = ..., free_pages: _Optional[int] = ..., used_pages: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_running: _Optional[int] = ..., steps: _Optional[int] = ..., step_age_s: _Optional[float] = ..., draining: _Optional[bool] = ..., transports: _Optional[_Mapping[str, str]] = ...) -> None: ...
