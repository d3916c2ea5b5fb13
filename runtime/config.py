"""The settings of each process: the parts that it shares with others, and its own."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from runtime.addresses import find_ip, is_host_port, parse_named
from runtime.config_parts import (
    MAX_TP,
    NO_DRAFT,
    DecodingConfig,
    HeartbeatConfig,
    OnRevisionGone,
    PublicConfig,
    WorkerConfig,
    WorkerRoles,
    at_least_a_page,
    check_shares,
    divides_ranks,
    parse_share,
)
from runtime.settings import ConfigError, Seconds, count, flag

MAX_WORKERS = 1024  # processes of a role on one machine


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(HeartbeatConfig, WorkerConfig):
    """One prefill worker."""

    chunk_tokens: Annotated[int, at_least_a_page] = 0
    """Most prompt tokens in one step; 0 is by device: 512 on a CPU, 512 to 8192 by GPU and model."""
    max_running: Annotated[int, count(0)] = 0
    """Most prompts running at once; 0 is by device: 16 on a CPU, up to 64 on a GPU."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecodingConfig, WorkerConfig):
    """One decode worker."""

    max_running: Annotated[int, count(0)] = 0
    """Most sessions at once; 0 is by device: 64 on a CPU, 16 to 1024 by the memory of a GPU."""


@dataclass(frozen=True, kw_only=True)
class RolesConfig(HeartbeatConfig, DecodeConfig):
    """One worker of both roles. Its --local-prefill-chunk-tokens is by default that of a prefill worker."""

    role: WorkerRoles = "both"
    """Roles that are open at first: prefill, decode or both. `baton role` and the gateway's --roles auto change it."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(PublicConfig, HeartbeatConfig):
    """The gateway. `model` is read for its tokenizer and configuration only."""

    prefill: tuple[str, ...] = ()
    """host:port of a prefill worker; for several dns:NAME:PORT, dns:_SERVICE._PROTO.NAME or file:PATH (a host:port in
    each line); repeat."""
    decode: tuple[str, ...] = ()
    """The same of decode workers; models that make vectors of texts need none."""
    dns_server: str = ""
    """IP:port of the DNS server to ask for such names; empty is the system's."""
    max_context_tokens: Annotated[int, count(0)] = 0
    """Most tokens in prompt and answer together; 0 is the model's limit. The same as the workers'."""
    revision_weight: tuple[str, ...] = ()
    """NAME=SHARE of new requests for the workers with --revision NAME, such as new=0.1; others share the rest; repeat.
    `baton rollout` changes it while serving."""
    on_revision_gone: OnRevisionGone = "fail"
    """When no worker is left of the weights that began an answer: it fails by name; or, if it is not streamed, restart
    begins it once more elsewhere."""
    ready_fd: int | None = None
    """File descriptor on which to report progress, given by `baton serve`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.revision_shares()
        for name in ("prefill", "decode"):
            for address in getattr(self, name):
                _require_address(name, address)
        self.require(
            "decode", bool(self.decode or self.prefill), "at least one host:port, such as --decode 127.0.0.1:9001"
        )
        is_server = is_host_port(self.dns_server) and find_ip(self.dns_server.rpartition(":")[0]) is not None
        self.require("dns_server", not self.dns_server or is_server, "an IP address and port, such as 10.0.0.10:53")
        has_prefill = bool(self.prefill) or self.no_prefill == "fallback"
        self.require("no_prefill", has_prefill, "fallback, or a --prefill worker to wait for")

    def revision_shares(self) -> dict[str, float]:
        """The share of new requests by revision. Raises ConfigError."""
        shares: dict[str, float] = {}
        try:
            shares = dict(map(parse_share, self.revision_weight))
            is_repeated = len(shares) < len(self.revision_weight)
            wrong = "a revision comes twice" if is_repeated else check_shares(shares)
        except ValueError:
            wrong = "NAME=SHARE, such as new=0.1"
        self.require("revision_weight", wrong is None, wrong or "")
        return shares


@dataclass(frozen=True, kw_only=True)
class ServeConfig(PublicConfig, DecodingConfig, HeartbeatConfig):
    """A whole service on one machine."""

    prefill_workers: Annotated[int | None, count(0, MAX_WORKERS)] = None
    """Prefill processes; with 0, decode workers prefill by themselves. Default: 1, or 0 on GPUs of which decode workers
    need all."""
    decode_workers: Annotated[int, count(1, MAX_WORKERS)] = 1
    """Decode processes."""
    prefill_tp: Annotated[int, count(1, MAX_TP)] = 1
    """Tensor-parallel ranks of each prefill worker; see --tp of `baton prefill`."""
    decode_tp: Annotated[int, count(1, MAX_TP)] = 1
    """Tensor-parallel ranks of each decode worker; may differ from --prefill-tp."""
    prefill_pp: Annotated[int, count(1, MAX_TP)] = 1
    """Stages of each prefill worker, of --prefill-tp ranks each; see --pp of `baton prefill`."""
    decode_pp: Annotated[int, count(1, MAX_TP)] = 1
    """Stages of each decode worker; may differ from --prefill-pp."""
    chunk_tokens: Annotated[int, at_least_a_page] = PrefillConfig.chunk_tokens
    """Most prompt tokens in one step of a prefill worker; 0 is by device."""
    prefill_max_running: Annotated[int, count(0)] = PrefillConfig.max_running
    """Most prompts running at once on one prefill worker; 0 is by device."""
    decode_max_running: Annotated[int, count(0)] = DecodeConfig.max_running
    """Most sessions at once on one decode worker; 0 is by device."""
    start_timeout_s: Seconds = 1800.0
    """Longest time that loading may take; then the start is given up."""
    ray: str = ""
    """Address of a Ray cluster, or auto: its nodes run the workers, each with --threads cores (0: one) or GPUs of its
    ranks. Empty: all run on this machine."""
    max_prefill_workers: Annotated[int, count(0, MAX_WORKERS)] = 0
    """With --ray: as many prefill workers as the load needs, from --prefill-workers to this; 0: no more than those."""
    max_decode_workers: Annotated[int, count(0, MAX_WORKERS)] = 0
    """The same of decode workers."""
    prefill_hosts: Annotated[int, count(1, MAX_TP)] = 1
    """With --ray: nodes that share the ranks of each prefill worker evenly."""
    decode_hosts: Annotated[int, count(1, MAX_TP)] = 1
    """The same of each decode worker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        has_prefill = self.prefill_workers != 0 or self.no_prefill == "fallback"
        self.require("no_prefill", has_prefill, "fallback, or a --prefill-workers of 1 or more")
        self.require("ray", not self.ray or find_spec("ray") is not None, "Ray: pip install 'baton[ray]'")
        self.require("ray", not self.ray or len(self.model) == 1, "one --model: with several, start each by itself")
        is_fixed = self.roles == "fixed"
        self.require("roles", is_fixed or not self.ray, "fixed with --ray")
        for name in ("tp", "pp"):
            is_equal = getattr(self, f"decode_{name}") == getattr(self, f"prefill_{name}")
            rule = f"the same as --prefill-{name} where workers change roles"
            self.require(f"decode_{name}", is_fixed or is_equal, rule)
        for name in ("max_prefill_workers", "max_decode_workers"):
            self.require(name, bool(self.ray) or not getattr(self, name), "--ray, which adds workers by load")
        for role in ("prefill", "decode"):
            name, tp, pp = (f"{role}_hosts", *(getattr(self, f"{role}_{ranks}") for ranks in ("tp", "pp")))
            self.require(name, bool(self.ray) or getattr(self, name) == 1, "--ray, which has several hosts")
            self.require(name, *divides_ranks(getattr(self, name), tp, pp, role))
        fits_all = len(self.model) == 1 or self.draft_model in ("auto", NO_DRAFT)
        self.require("draft_model", fits_all, "auto or none with several models")

    def num_ranks_of(self, role: str) -> int:
        """Ranks of one worker of the role, prefill or decode."""
        ranks: int = getattr(self, f"{role}_tp") * getattr(self, f"{role}_pp")
        return ranks


def _require_address(name: str, address: str) -> None:
    try:
        is_known = parse_named(address) is not None or is_host_port(address)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be used: {error}") from error
    if not is_known:
        examples = "127.0.0.1:9001, [::1]:9001, dns:NAME:9001 or file:PATH"
        raise ConfigError(f"{name}={address!r} cannot be used: {flag(name)} needs host:port, such as {examples}")
