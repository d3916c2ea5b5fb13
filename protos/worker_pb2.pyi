from protos import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseRequest(_message.Message):
    __slots__ = ("for_s", "ends")
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    for_s: float
    ends: bool
    def __init__(self, for_s: _Optional[float] = ..., ends: _Optional[bool] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("num_left",)
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    def __init__(self, num_left: _Optional[int] = ...) -> None: ...

class SetWeightsRequest(_message.Message):
    __slots__ = ("path", "weights", "revision", "wait_s")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    path: str
    weights: str
    revision: str
    wait_s: float
    def __init__(self, path: _Optional[str] = ..., weights: _Optional[str] = ..., revision: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class SetWeightsResponse(_message.Message):
    __slots__ = ("weights", "still_s")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STILL_S_FIELD_NUMBER: _ClassVar[int]
    weights: str
    still_s: float
    def __init__(self, weights: _Optional[str] = ..., still_s: _Optional[float] = ...) -> None: ...

class SetRolesRequest(_message.Message):
    __slots__ = ("roles", "caller")
    ROLES_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    caller: str
    def __init__(self, roles: _Optional[_Iterable[str]] = ..., caller: _Optional[str] = ...) -> None: ...

class SetRolesResponse(_message.Message):
    __slots__ = ("num_left",)
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    def __init__(self, num_left: _Optional[int] = ...) -> None: ...

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

class StatusRequest(_message.Message):
    __slots__ = ("incarnation", "keys_since", "saved_keys_since", "wants_keys")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KEYS_SINCE_FIELD_NUMBER: _ClassVar[int]
    SAVED_KEYS_SINCE_FIELD_NUMBER: _ClassVar[int]
    WANTS_KEYS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    keys_since: int
    saved_keys_since: int
    wants_keys: bool
    def __init__(self, incarnation: _Optional[str] = ..., keys_since: _Optional[int] = ..., saved_keys_since: _Optional[int] = ..., wants_keys: _Optional[bool] = ...) -> None: ...

class KeyReport(_message.Message):
    __slots__ = ("since", "number", "gained", "lost")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GAINED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    since: int
    number: int
    gained: bytes
    lost: bytes
    def __init__(self, since: _Optional[int] = ..., number: _Optional[int] = ..., gained: _Optional[bytes] = ..., lost: _Optional[bytes] = ...) -> None: ...

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

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChunkCosts(_message.Message):
    __slots__ = ("quiet_seconds", "fixed_seconds", "token_seconds", "tokens", "read_token_seconds")
    QUIET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIXED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    READ_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    quiet_seconds: float
    fixed_seconds: float
    token_seconds: float
    tokens: int
    read_token_seconds: float
    def __init__(self, quiet_seconds: _Optional[float] = ..., fixed_seconds: _Optional[float] = ..., token_seconds: _Optional[float] = ..., tokens: _Optional[int] = ..., read_token_seconds: _Optional[float] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("peer", "context_tokens", "free_pages", "used_pages", "num_running", "max_running", "steps", "step_age_s", "draining", "transports", "cached_pages", "prefix_queries", "prefix_hits", "threads", "cores", "prompt_tokens_waiting", "prompt_tokens_per_second", "step_predicted_s", "chunk_costs", "free_slots", "used_slots", "cached_slots", "weaknesses", "adapters", "max_loras", "goal_answers", "kv_store", "saved_bytes", "restored_tokens", "takes_images", "cpus", "cpu_group", "read_tokens", "kv_token_bytes", "head_token_bytes", "keys", "saved_keys", "key_tokens_after", "roles", "pause", "embeds")
    class TransportsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WeaknessesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class AdaptersEntry(_message.Message):
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
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_WAITING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_PREDICTED_S_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COSTS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    USED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    WEAKNESSES_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    GOAL_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_FIELD_NUMBER: _ClassVar[int]
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TAKES_IMAGES_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    CPU_GROUP_FIELD_NUMBER: _ClassVar[int]
    READ_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SAVED_KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_TOKENS_AFTER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.Peer
    context_tokens: int
    free_pages: int
    used_pages: int
    num_running: int
    max_running: int
    steps: int
    step_age_s: float
    draining: bool
    transports: _containers.ScalarMap[str, str]
    cached_pages: int
    prefix_queries: int
    prefix_hits: int
    threads: int
    cores: int
    prompt_tokens_waiting: int
    prompt_tokens_per_second: float
    step_predicted_s: float
    chunk_costs: ChunkCosts
    free_slots: int
    used_slots: int
    cached_slots: int
    weaknesses: _containers.ScalarMap[str, str]
    adapters: _containers.ScalarMap[str, str]
    max_loras: int
    goal_answers: int
    kv_store: str
    saved_bytes: int
    restored_tokens: int
    takes_images: bool
    cpus: _containers.RepeatedScalarFieldContainer[int]
    cpu_group: int
    read_tokens: _kv_pb2.ReadTokens
    kv_token_bytes: int
    head_token_bytes: int
    keys: KeyReport
    saved_keys: KeyReport
    key_tokens_after: int
    roles: _containers.RepeatedScalarFieldContainer[str]
    pause: str
    embeds: bool
    def __init__(self, peer: _Optional[_Union[_kv_pb2.Peer, _Mapping]] = ..., context_tokens: _Optional[int] = ..., free_pages: _Optional[int] = ..., used_pages: _Optional[int] = ..., num_running: _Optional[int] = ..., max_running: _Optional[int] = ..., steps: _Optional[int] = ..., step_age_s: _Optional[float] = ..., draining: _Optional[bool] = ..., transports: _Optional[_Mapping[str, str]] = ..., cached_pages: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., threads: _Optional[int] = ..., cores: _Optional[int] = ..., prompt_tokens_waiting: _Optional[int] = ..., prompt_tokens_per_second: _Optional[float] = ..., step_predicted_s: _Optional[float] = ..., chunk_costs: _Optional[_Union[ChunkCosts, _Mapping]] = ..., free_slots: _Optional[int] = ..., used_slots: _Optional[int] = ..., cached_slots: _Optional[int] = ..., weaknesses: _Optional[_Mapping[str, str]] = ..., adapters: _Optional[_Mapping[str, str]] = ..., max_loras: _Optional[int] = ..., goal_answers: _Optional[int] = ..., kv_store: _Optional[str] = ..., saved_bytes: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., takes_images: _Optional[bool] = ..., cpus: _Optional[_Iterable[int]] = ..., cpu_group: _Optional[int] = ..., read_tokens: _Optional[_Union[_kv_pb2.ReadTokens, _Mapping]] = ..., kv_token_bytes: _Optional[int] = ..., head_token_bytes: _Optional[int] = ..., keys: _Optional[_Union[KeyReport, _Mapping]] = ..., saved_keys: _Optional[_Union[KeyReport, _Mapping]] = ..., key_tokens_after: _Optional[int] = ..., roles: _Optional[_Iterable[str]] = ..., pause: _Optional[str] = ..., embeds: _Optional[bool] = ...) -> None: ...
