"""When a worker that ended is started again. Pure: an exit status and ages in, a delay out."""

import signal
from dataclasses import dataclass

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
MOST_DOUBLINGS = 6  # 0.5 s * 2^6 = 32 s
CALM_S = 60.0  # a worker that served this long starts with the first delay again
ASKED = (0, -signal.SIGTERM, -signal.SIGINT)  # ends that somebody asked for: a drain, or a signal while it drained


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s`; it is the `streak`-th time in a row."""

    delay_s: float
    streak: int


def plan_restart(code: int, served_s: float, streak: int) -> Restart | None:
    """What to do after exit status `code`, negative for a signal; None leaves the worker ended, as it was asked to.

    `served_s`: how long it took requests, 0 when it never did; `streak`: how often it was restarted without a
    calm minute in between.
    """
    if code in ASKED:
        return None
    streak = 0 if served_s >= CALM_S else streak
    return Restart(min(FIRST_DELAY_S * 2 ** min(streak, MOST_DOUBLINGS), MOST_DELAY_S), streak + 1)
