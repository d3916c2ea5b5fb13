"""What a process reports to the one that started it, as JSON lines on a pipe (lifecycle.py). Pure."""

import msgspec

NO_HAND_OFF = "no_hand_off"  # key of a gateway's detail: why prompts are not handed off, or empty


class Loading(msgspec.Struct, frozen=True, tag="loading", tag_field="event"):
    done: int
    total: int
    what: str = "weights"  # read, in bytes, or "graphs" captured


class Ready(msgspec.Struct, frozen=True, tag="ready", tag_field="event"):
    """The process accepts requests from now on."""

    role: str  # "gateway", "prefill" or "decode"
    address: str  # host:port where others reach it; for the gateway, its REST API
    ops_address: str  # host:port of /live, /ready and /metrics
    pid: int
    incarnation: str
    detail: dict[str, str] = {}  # for users, such as device or transport


_decoder = msgspec.json.Decoder(Loading | Ready)


def parse_event(line: str) -> Loading | Ready:
    """The event in a line from the pipe. Raises ValueError for any other line."""
    try:
        event: Loading | Ready = _decoder.decode(line)
        return event
    except ValueError as error:
        raise ValueError(f"not JSON of a known event: {line[:200]!r}") from error
