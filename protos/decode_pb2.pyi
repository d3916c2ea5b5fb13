from protos import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Speculation(_message.Message):
    __slots__ = ("drafter", "max_draft_tokens")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    max_draft_tokens: int
    def __init__(self, drafter: _Optional[str] = ..., max_draft_tokens: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "gateway", "prompt", "max_tokens", "sampling", "stop_token_ids", "local_prefill_max_tokens", "handle", "num_emitted", "min_tokens", "num_logprobs", "num_prompt_logprobs", "grammar", "speculation", "cache_salt", "adapter", "images", "source", "retention")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_EMITTED_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    gateway: str
    prompt: bytes
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    local_prefill_max_tokens: int
    handle: int
    num_emitted: int
    min_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    grammar: Grammar
    speculation: Speculation
    cache_salt: str
    adapter: str
    images: _containers.RepeatedCompositeFieldContainer[_kv_pb2.Image]
    source: _kv_pb2.PageSource
    retention: _kv_pb2.Retention
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., gateway: _Optional[str] = ..., prompt: _Optional[bytes] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., local_prefill_max_tokens: _Optional[int] = ..., handle: _Optional[int] = ..., num_emitted: _Optional[int] = ..., min_tokens: _Optional[int] = ..., num_logprobs: _Optional[int] = ..., num_prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., speculation: _Optional[_Union[Speculation, _Mapping]] = ..., cache_salt: _Optional[str] = ..., adapter: _Optional[str] = ..., images: _Optional[_Iterable[_Union[_kv_pb2.Image, _Mapping]]] = ..., source: _Optional[_Union[_kv_pb2.PageSource, _Mapping]] = ..., retention: _Optional[_Union[_kv_pb2.Retention, _Mapping]] = ...) -> None: ...

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
    deltas: _containers.RepeatedCompositeFieldContainer[SessionDelta]
    def __init__(self, incarnation: _Optional[str] = ..., step: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[SessionDelta, _Mapping]]] = ...) -> None: ...

class SessionDelta(_message.Message):
    __slots__ = ("handle", "attempt", "token_ids", "finish_reason", "error", "logprobs", "prompt_logprobs", "timing")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    handle: int
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    error: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    timing: SessionTiming
    def __init__(self, handle: _Optional[int] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., timing: _Optional[_Union[SessionTiming, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class SessionTiming(_message.Message):
    __slots__ = ("kv_seconds", "first_step_seconds", "decode_seconds", "draft_tokens", "accepted_tokens", "steps", "preemptions", "cached_tokens", "grammar_seconds", "read_tokens")
    KV_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kv_seconds: float
    first_step_seconds: float
    decode_seconds: float
    draft_tokens: int
    accepted_tokens: int
    steps: int
    preemptions: int
    cached_tokens: int
    grammar_seconds: float
    read_tokens: _kv_pb2.ReadTokens
    def __init__(self, kv_seconds: _Optional[float] = ..., first_step_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., grammar_seconds: _Optional[float] = ..., read_tokens: _Optional[_Union[_kv_pb2.ReadTokens, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("peer", "transport", "wants_checksums")
    PEER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WANTS_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.Peer
    transport: str
    wants_checksums: bool
    def __init__(self, peer: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ..., transport: _Optional[str] = ..., wants_checksums: _Optional[bool] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: _kv_pb2.Ticket
    def __init__(self, ticket: _Optional[_Union[_kv_pb2.Ticket, _Mapping]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
