from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvLayout(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "weights", "dtype", "num_layers", "num_kv_heads", "page_tokens", "head_dim", "draft_weights")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    weights: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    page_tokens: int
    head_dim: int
    draft_weights: str
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., weights: _Optional[str] = ..., dtype: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., page_tokens: _Optional[int] = ..., head_dim: _Optional[int] = ..., draft_weights: _Optional[str] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("role", "address", "incarnation", "pid", "host", "layout", "num_pages", "pool_fd", "pages_offset", "ranks", "states", "model", "revision", "stages")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    POOL_FD_FIELD_NUMBER: _ClassVar[int]
    PAGES_OFFSET_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    incarnation: str
    pid: int
    host: str
    layout: KvLayout
    num_pages: int
    pool_fd: int
    pages_offset: int
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    states: Peer
    model: str
    revision: str
    stages: int
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., num_pages: _Optional[int] = ..., pool_fd: _Optional[int] = ..., pages_offset: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., states: _Optional[_Union[Peer, _Mapping]] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ..., stages: _Optional[int] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("address", "pid", "transports", "host")
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    address: str
    pid: int
    transports: _containers.ScalarMap[str, bytes]
    host: str
    def __init__(self, address: _Optional[str] = ..., pid: _Optional[int] = ..., transports: _Optional[_Mapping[str, bytes]] = ..., host: _Optional[str] = ...) -> None: ...

class Ticket(_message.Message):
    __slots__ = ("address", "incarnation", "session", "attempt", "begin", "end", "adapter")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    session: int
    attempt: int
    begin: int
    end: int
    adapter: str
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., session: _Optional[int] = ..., attempt: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class PageSource(_message.Message):
    __slots__ = ("address", "incarnation", "tokens", "least")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    tokens: int
    least: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., tokens: _Optional[int] = ..., least: _Optional[int] = ...) -> None: ...

class ReadTokens(_message.Message):
    __slots__ = ("files", "prefill", "decode")
    FILES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    files: int
    prefill: int
    decode: int
    def __init__(self, files: _Optional[int] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("begin", "end", "digest", "rows", "columns", "data")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    digest: bytes
    rows: int
    columns: int
    data: bytes
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., digest: _Optional[bytes] = ..., rows: _Optional[int] = ..., columns: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PageRef(_message.Message):
    __slots__ = ("page", "generation")
    PAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    page: int
    generation: int
    def __init__(self, page: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("ticket", "incarnation", "begin", "end", "pages", "request_id", "checksums", "slots", "slot_checksums")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SLOT_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    ticket: Ticket
    incarnation: str
    begin: int
    end: int
    pages: _containers.RepeatedCompositeFieldContainer[PageRef]
    request_id: str
    checksums: _containers.RepeatedScalarFieldContainer[int]
    slots: _containers.RepeatedCompositeFieldContainer[PageRef]
    slot_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ticket: _Optional[_Union[Ticket, _Mapping]] = ..., incarnation: _Optional[str] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[PageRef, _Mapping]]] = ..., request_id: _Optional[str] = ..., checksums: _Optional[_Iterable[int]] = ..., slots: _Optional[_Iterable[_Union[PageRef, _Mapping]]] = ..., slot_checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("accepted", "reason", "detail", "bytes", "seconds")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    detail: str
    bytes: int
    seconds: float
    def __init__(self, accepted: _Optional[bool] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReadPagesRequest(_message.Message):
    __slots__ = ("incarnation", "pages", "begin", "num_bytes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    pages: _containers.RepeatedScalarFieldContainer[int]
    begin: int
    num_bytes: int
    def __init__(self, incarnation: _Optional[str] = ..., pages: _Optional[_Iterable[int]] = ..., begin: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ReadPagesResponse(_message.Message):
    __slots__ = ("data", "generations")
    DATA_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("owner", "parts")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    parts: _containers.RepeatedCompositeFieldContainer[KeptPart]
    def __init__(self, owner: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[KeptPart, _Mapping]]] = ...) -> None: ...

class KeptPart(_message.Message):
    __slots__ = ("tokens", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    seconds: float
    def __init__(self, tokens: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
