"""Messages between a process and the one that started it, as JSON lines on a socket (lifecycle.py). Pure."""

from typing import Literal

import msgspec

NO_HAND_OFF = "no_hand_off"  # key of a gateway's detail: why prompts are not handed off, or empty


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="event"):
    done: int
    total: int
    what: str = "weights"  # read, in bytes, or "graphs" captured


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event"):
    """The process accepts requests from now on."""

    role: str  # "gateway", "prefill", "decode" or "worker", which has both
    address: str  # host:port where others reach it; for the gateway, its REST API
    ops_address: str  # host:port of /live, /ready and /metrics
    pid: int
    incarnation: str
    detail: dict[str, str] = {}  # for users, such as device or transport


class SetAwake(msgspec.Struct, frozen=True, tag="set_awake", tag_field="event"):
    """A gateway asks for a model's workers to be started, or stopped. `ModelState` is the answer."""

    model: str
    is_awake: bool


class ModelState(msgspec.Struct, frozen=True, tag="model", tag_field="event"):
    """Tells a gateway the state of a model's workers."""

    model: str
    state: Literal["awake", "waking", "asleep", "failed"]
    percent: int = 0  # of the weights that they have read, while waking
    reason: str = ""  # why they could not be started
    prefill: tuple[str, ...] = ()  # addresses, when awake
    decode: tuple[str, ...] = ()


Event = Loading | Ready | SetAwake | ModelState
_decoder = msgspec.json.Decoder(Event)


def parse_event(line: str | bytes) -> Event:
    """The event in a line. Raises ValueError for any other line."""
    try:
        event: Event = _decoder.decode(line)
        return event
    except ValueError as error:
        raise ValueError(f"not JSON of a known event: {line[:200]!r}") from error
