"""The settings of each process: the parts that it shares with others, and its own."""

from dataclasses import dataclass
from typing import Annotated

from runtime.addresses import bracketed
from runtime.config_parts import (
    MAX_TP,
    DecodingConfig,
    HeartbeatConfig,
    PublicConfig,
    WorkerConfig,
    at_least_a_page,
)
from runtime.settings import MAX_PORT, ConfigError, Positive, Seconds, count, flag

MAX_WORKERS = 1024  # processes of a role on one machine


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(HeartbeatConfig, WorkerConfig):
    """One prefill worker."""

    chunk_tokens: Annotated[int, at_least_a_page] = 512
    """Most prompt tokens in one step."""
    max_running: Positive = 16
    """Most prompts running at once."""


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(DecodingConfig, WorkerConfig):
    """One decode worker."""

    max_running: Positive = 64
    """Most sessions at once."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(PublicConfig, HeartbeatConfig):
    """The gateway. `model` is read for its tokenizer and configuration only."""

    prefill: tuple[str, ...] = ()
    """host:port of a prefill worker; repeat for several."""
    decode: tuple[str, ...]
    """host:port of a decode worker; repeat for several."""
    max_context_tokens: Annotated[int, count(0)] = 0
    """Most tokens in prompt and answer together; 0 is the model's limit. The same as the workers'."""
    ready_fd: int | None = None
    """File descriptor on which to report progress, given by `baton serve`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prefill", "decode"):
            for address in getattr(self, name):
                _require_address(name, address)
        self.require("decode", bool(self.decode), "at least one host:port, such as --decode 127.0.0.1:9001")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(PublicConfig, DecodingConfig, HeartbeatConfig):
    """A whole service on one machine."""

    prefill_workers: Annotated[int, count(0, MAX_WORKERS)] = 1
    """Prefill processes; with 0, decode workers prefill by themselves."""
    decode_workers: Annotated[int, count(1, MAX_WORKERS)] = 1
    """Decode processes."""
    prefill_tp: Annotated[int, count(1, MAX_TP)] = 1
    """Tensor-parallel ranks of each prefill worker; see --tp of `baton prefill`."""
    decode_tp: Annotated[int, count(1, MAX_TP)] = 1
    """Tensor-parallel ranks of each decode worker; may differ from --prefill-tp."""
    chunk_tokens: Annotated[int, at_least_a_page] = PrefillConfig.chunk_tokens
    """Most prompt tokens in one step of a prefill worker."""
    prefill_max_running: Positive = PrefillConfig.max_running
    """Most prompts running at once on one prefill worker."""
    decode_max_running: Positive = DecodeConfig.max_running
    """Most sessions at once on one decode worker."""
    start_timeout_s: Seconds = 1800.0
    """Longest time that loading may take; then the start is given up."""


def _require_address(name: str, address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or host != bracketed(host) or not port.isdecimal() or not 0 < int(port) <= MAX_PORT:
        examples = "127.0.0.1:9001 or [::1]:9001"
        raise ConfigError(f"{name}={address!r} cannot be used: {flag(name)} needs host:port, such as {examples}")
