"""Which models' workers are stopped and which are started, where not all are awake at once. Pure.

A model that requests wait for wakes in the order in which they came, as soon as fewer than `max_awake` are awake. Until
then the idle model that was used longest ago goes to sleep. A model with requests is never put to sleep; but where all
are busy and one has waited for TURN_S, the one that has been awake longest lets no new requests in, so that it ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gateway.router.engine_client import State

TURN_S = 10.0  # that a model stays awake while others wait: several times what a small one takes to wake


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model at one moment."""

    name: str
    state: State
    num_inside: int = 0  # requests that its workers have, or get as soon as there is room
    waiting_since: float | None = None  # when the first of those came that it lets in when it is awake; None: none wait
    idle_since: float = 0.0  # when its last request ended, or when it woke if that was later
    awake_since: float = 0.0

    @property
    def is_idle(self) -> bool:
        return self.state == "awake" and not self.num_inside and self.waiting_since is None


class Decision(NamedTuple):
    """The models to put to sleep, to wake and to close now, by name."""

    sleep: tuple[str, ...]
    wake: tuple[str, ...]
    closed: frozenset[str]  # awake, but let no new requests in
    look_again: float | None  # when to decide anew at the latest, if nothing changes; None: never


def decide(models: Sequence[ModelView], max_awake: int, sleep_after_s: float, now: float) -> Decision:
    """`max_awake`: at least 1. `sleep_after_s`: time without a request after which a model sleeps; 0: never."""
    wanted = sorted((one for one in models if _is_wanted(one)), key=lambda one: one.waiting_since or 0.0)
    num_free = max_awake - sum(one.state in ("awake", "falling asleep", "waking") for one in models)
    wake, rest = wanted[: max(num_free, 0)], wanted[max(num_free, 0) :]
    num_lacking = len(rest) - sum(one.state == "falling asleep" for one in models)
    idle = sorted((one for one in models if one.is_idle), key=lambda one: one.idle_since)
    sleep = idle[: max(num_lacking, 0)]
    stay = idle[len(sleep) :]
    if sleep_after_s:
        sleep += [one for one in stay if now >= one.idle_since + sleep_after_s]
    busy = sorted((one for one in models if one.state == "awake" and not one.is_idle), key=lambda one: one.awake_since)
    ends = [max(one.awake_since, late.waiting_since or 0.0) + TURN_S for one, late in zip(busy, rest, strict=False)]
    ends = ends[: max(num_lacking - len(sleep), 0)]  # when turns end, if no model becomes idle before
    closed = [one for one, end in zip(busy, ends, strict=False) if now >= end]
    sleep += [one for one in closed if not one.num_inside]
    times = [one.idle_since + sleep_after_s for one in stay if sleep_after_s] + ends
    return Decision(
        tuple(one.name for one in sleep),
        tuple(one.name for one in wake),
        frozenset(one.name for one in closed),
        min((time for time in times if time > now), default=None),
    )


def _is_wanted(model: ModelView) -> bool:
    return model.state in ("asleep", "failed") and model.waiting_since is not None
