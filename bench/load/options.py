"""The options of `baton bench serve`, checked at creation, and the runs that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bench.load.arrivals import parse_arrivals
from bench.load.metrics import TARGETS
from runtime.settings import ConfigError

DEFAULT_CONCURRENCY = "1,4,8,16"
REQUESTS_A_STREAM, LEAST_REQUESTS = 4, 8


@dataclass(frozen=True, slots=True)
class Level:
    """One run: a number of concurrent requests, or a rate per second."""

    concurrency: int = 0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server that a command asks."""

    url: Annotated[str, Parameter(env_var="BATON_URL")] = "http://127.0.0.1:8000"
    """Base URL of the server."""
    api_key: Annotated[str, Parameter(env_var="BATON_API_KEY")] = field(default="", repr=False)
    """API key of the server."""
    model: str = ""
    """Name of the model in requests; if empty, the first that the server lists."""

    def require(self, least: int, *names: str) -> None:
        """Raises ConfigError."""
        for name in names:
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} cannot be used: {least} or more")


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Target):
    """One call of `baton bench serve`."""

    dataset: str = "synthetic"
    """synthetic (32 to 1024 tokens in, 16 to 256 out), lengths:IN,OUT, or sharegpt:FILE."""
    concurrency: str = ""
    """Closed loop: concurrent requests, one run for each number; the default is 1,4,8,16."""
    rate: str = ""
    """Open loop: requests per second, one run for each number, such as 1,2,4; inf sends all at once."""
    arrivals: str = "poisson"
    """With --rate: poisson, gamma:CV (coefficient of variation of the gaps), or burst:N (N together)."""
    num_requests: int = 0
    """Requests per run; 0: 4 per stream, at least 8."""
    warm_up: int = 2
    """Requests before the first run; not counted."""
    goodput: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    """Limits of a good request in ms, as in vLLM: ttft:500 tpot:50 itl:100 e2el:9000; itl holds for every gap."""
    shared_prefix: int = 0
    """Tokens at the start of every prompt that all prompts of a run share, to measure prefix caches."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    """Seed of lengths, contents and send times. Runs never share the start of a prompt, so caches do not help."""
    text: bool = False
    """Send prompts as text even if the server accepts token ids."""
    label: str = ""
    """Name in tables and plots; if empty, the kind of server."""
    save: Path | None = None
    """Write the figures here, as JSON."""
    plot: Path | None = None
    """Plot them here, as PNG or SVG; needs matplotlib (pip install 'baton[bench]')."""
    checkpoint: Path | None = None
    """Folder of the served model, whose size is needed for MBU and MFU."""
    peak_gbs: float = 0.0
    """The machine's memory bandwidth in GB/s, for MBU; 0 with --checkpoint: measured here before the runs."""
    peak_tflops: float = 0.0
    """The machine's bf16 TFLOP/s, for MFU; 0 with --checkpoint: measured here before the runs."""

    def __post_init__(self) -> None:
        if self.concurrency and self.rate:
            raise ConfigError("concurrency and rate exclude each other: give --concurrency or --rate")
        self.levels()
        self.targets()
        parse_arrivals(self.arrivals)
        self.require(0, "num_requests", "warm_up", "shared_prefix", "seed")

    def levels(self) -> list[Level]:
        """The runs, in order."""
        if self.rate:
            return [Level(rate=number) for number in parse_numbers("rate", self.rate)]
        counts = parse_numbers("concurrency", self.concurrency or DEFAULT_CONCURRENCY)
        if any(count != int(count) for count in counts if count < 1e6) or max(counts) >= 1e6:
            raise ConfigError(f"concurrency={self.concurrency!r} cannot be used: whole numbers such as 1,4,8")
        return [Level(concurrency=int(count)) for count in counts]

    def targets(self) -> dict[str, float]:
        """`--goodput`: name |-> ms."""
        return parse_targets(self.goodput)

    def count_requests(self, level: Level) -> int:
        return self.num_requests or max(LEAST_REQUESTS, REQUESTS_A_STREAM * level.concurrency)


def parse_numbers(name: str, text: str) -> list[float]:
    """Positive numbers, separated by commas. Raises ConfigError."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(number > 0 for number in numbers):
        raise ConfigError(f"{name}={text!r} cannot be used: --{name} needs positive numbers such as 1,2,4")
    return numbers


def parse_targets(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:500 itl:50`, in ms. Raises ConfigError."""
    targets: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            targets[name] = float(value)
        except ValueError:
            name = ""
        if name not in TARGETS or not targets[name] > 0:
            known = ", ".join(TARGETS)
            raise ConfigError(f"goodput={pair!r} cannot be used: --goodput needs NAME:MS, such as ttft:500, of {known}")
    return targets
