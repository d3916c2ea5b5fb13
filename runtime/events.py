"""What a process reports to the one that started it, as JSON lines on a pipe (lifecycle.py). Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_HAND_OFF = "no_hand_off"  # key of a gateway's detail: why prompts are not handed off, or empty


@dataclass(frozen=True, slots=True)
class Loading:
    done: int
    total: int
    what: str = "weights"  # read, in bytes, or "graphs" captured


@dataclass(frozen=True, slots=True)
class Ready:
    """The process accepts requests from now on."""

    role: str  # "gateway", "prefill" or "decode"
    address: str  # host:port where others reach it; for the gateway, its REST API
    ops_address: str  # host:port of /live, /ready and /metrics
    pid: int
    incarnation: str
    detail: Mapping[str, str] = field(default_factory=dict)  # for users, such as device or transport


_EVENTS: Mapping[str, type[Loading | Ready]] = {"loading": Loading, "ready": Ready}


def parse_event(line: str) -> Loading | Ready:
    """The event in a line from the pipe. Raises ValueError for any other line."""
    try:
        fields = json.loads(line)
        return _EVENTS[fields.pop("event")](**fields)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not JSON of a known event: {line[:200]!r}") from error
