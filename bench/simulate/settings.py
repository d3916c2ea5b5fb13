"""The simulation's settings on the command line: workers as in `baton serve`. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from runtime.config import ServeConfig
from runtime.settings import Seconds, SecondsOrZero, Settings

Lengths = Literal["fixed", "lognormal"]
Roles = Literal["fixed", "auto"]


@dataclass(frozen=True, kw_only=True)
class Workload(Settings):
    """Requests and their lengths."""

    num_requests: int = 1000
    """Total requests, including turns of conversations."""
    rate: float = 4.0
    """Requests per second, at random times (Poisson)."""
    input_tokens: int = 1000
    """Mean new tokens of a prompt, excluding a shared prefix and earlier turns."""
    output_tokens: int = 200
    """Mean tokens of an answer."""
    change_s: SecondsOrZero = 0.0
    """Seconds after which lengths and rate are the next ones, then the first again, and so on; 0: they stay."""
    then_input_tokens: int = 200
    """The next mean of new tokens of a prompt."""
    then_output_tokens: int = 800
    """The next mean of tokens of an answer."""
    then_rate: float = 4.0
    """The next requests per second."""
    lengths: Lengths = "lognormal"
    """How lengths vary: not at all, or lognormally with a sigma of 0.6."""
    num_prefixes: int = 0
    """Number of different shared prefixes, like system prompts; 0: prompts share nothing."""
    prefix_tokens: int = 0
    """Tokens of each prefix."""
    turns: int = 1
    """Requests per conversation; each prompt is everything before it plus new tokens."""
    think_s: SecondsOrZero = 5.0
    """Mean seconds between an answer's end and the next turn."""
    seed: int = 0
    """The same seed gives the same requests."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "num_requests",
            "input_tokens",
            "output_tokens",
            "then_input_tokens",
            "then_output_tokens",
            "turns",
        ):
            self.require_count(name, 1)
        for name in ("num_prefixes", "prefix_tokens", "seed"):
            self.require_count(name, 0)
        for name in ("rate", "then_rate"):
            self.require(name, getattr(self, name) > 0, "a number above 0")


@dataclass(frozen=True, kw_only=True)
class FleetSettings(Settings):
    """Workers and their limits."""

    prefill_workers: int = 1
    """Prefill workers; with 0, decode workers compute prompts."""
    decode_workers: int = 1
    """Decode workers."""
    prefill_tp: int = 1
    """GPUs of a prefill worker."""
    decode_tp: int = 1
    """GPUs of a decode worker."""
    chunk_tokens: int = 512
    """Most prompt tokens in a step of a prefill worker."""
    prefill_max_running: int = 16
    """Most concurrent prompts on a prefill worker."""
    roles: Roles = "fixed"
    """auto: all have both roles, and the gateway says by load which takes which."""
    decode_max_running: int = 64
    """Most concurrent sessions on a decode worker."""
    local_prefill_chunk_tokens: int = 256
    """Most prompt tokens in a step of a decode worker."""
    local_prefill_max_tokens: int = 0
    """A decode worker prefills by itself if at most this many tokens are missing."""
    cache_routing: bool = ServeConfig.cache_routing
    """Prefer workers that probably have cached the start of a prompt."""
    page_tokens: int = ServeConfig.page_tokens
    """Tokens in a KV page."""
    kv_tokens: int = 0
    """Tokens in a worker's pool; 0: what fits after the weights."""
    deaths_per_hour: float = 0.0
    """Deaths of each worker in an hour, at random times: with 0.01 one of a hundred dies."""
    restart_s: Seconds = 60.0
    """Seconds until a worker that has died or drained is there again."""
    rollout_at_s: SecondsOrZero = 0.0
    """When a rollout begins: a twentieth of the workers at a time drain and come back as another revision; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("deaths_per_hour", self.deaths_per_hour >= 0, "a number of at least 0")
        for name in ("prefill_workers", "local_prefill_max_tokens", "kv_tokens"):
            self.require_count(name, 0)
        counts = (
            "decode_workers",
            "prefill_tp",
            "decode_tp",
            "prefill_max_running",
            "decode_max_running",
            "page_tokens",
        )
        for name in (*counts, "chunk_tokens", "local_prefill_chunk_tokens"):
            self.require_count(name, 1)
