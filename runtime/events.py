"""What a process tells the one that started it, as JSON lines on a pipe (lifecycle.py). Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Loading:
    """The process gets ready."""

    done: int
    total: int
    what: str = "weights"  # that are read, in bytes, or "graphs" that are captured


@dataclass(frozen=True, slots=True)
class Ready:
    """The process takes requests from now on."""

    role: str  # "gateway", "prefill" or "decode"
    address: str  # host:port, as others reach it; of the gateway, its REST API
    metrics_address: str  # host:port of /metrics
    pid: int
    incarnation: str
    detail: Mapping[str, str] = field(default_factory=dict)  # for people, such as device or transport


def parse_event(line: str) -> Loading | Ready:
    """What a line on the pipe says. Raises ValueError for anything else."""
    try:
        fields = json.loads(line)
        kind = fields.pop("event")
        if kind == "ready":
            return Ready(**fields)
        if kind == "loading":
            return Loading(**fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not JSON of a known event: {line[:200]!r}") from error
    raise ValueError(f"unknown event {kind!r}: {line[:200]!r}")
