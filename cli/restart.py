"""When a worker that ended is started again. Pure: an exit status and ages in, a delay out."""

import signal
from dataclasses import dataclass

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
MOST_DOUBLINGS = 6  # 0.5 s * 2^6 = 32 s
WORTH_S = 5.0  # a start after which a worker served this long was worth it: the next one is as quick as the first
ASKED = (0, -signal.SIGTERM, -signal.SIGINT)  # ends that somebody asked for: a drain, or a signal while it drained


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s`; it is the `streak`-th time since it last served for a while."""

    delay_s: float
    streak: int


def plan_restart(code: int, served_s: float, streak: int) -> Restart | None:
    """What to do after exit status `code`, negative for a signal; None leaves the worker ended, as it was asked to.

    `served_s`: how long it took requests, 0 when it never did; `streak`: how often in a row its start was not worth
    it. Only a worker that ends at its start, or soon after, is waited for longer and longer.
    """
    if code in ASKED:
        return None
    streak = 0 if served_s >= WORTH_S else streak
    return Restart(min(FIRST_DELAY_S * 2 ** min(streak, MOST_DOUBLINGS), MOST_DELAY_S), streak + 1)
