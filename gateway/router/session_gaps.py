"""How long the KV of a session is worth keeping: by the time between its turns. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

MAX_SESSIONS = 1 << 14  # remembered; the one whose last turn is longest ago is forgotten first
MAX_KEEP_S = 600.0  # recorded agents come back within 11 minutes 99 times of 100
MARGIN = 2.0  # times its longest gap
FADING = 0.9  # of the longest gap, a turn


@dataclass(frozen=True, slots=True)
class _Last:
    """A session's last turn."""

    call: str
    at: float
    longest_s: float = 0.0  # gap, faded


class SessionGaps:
    """Remembers when sessions asked."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, _Last] = OrderedDict()

    def expect(self, session: str, call: str, now: float) -> float:
        """A request of the session comes. Seconds within which the next one probably does; 0: not known.

        `call`: equal for the choices of one request.
        """
        if not session:
            return 0.0
        last = self._last.pop(session, None)
        if last is None or last.call != call:
            longest_s = 0.0 if last is None else max(now - last.at, FADING * last.longest_s)
            last = _Last(call, now, longest_s)
        self._last[session] = last
        if len(self._last) > MAX_SESSIONS:
            self._last.popitem(last=False)
        return min(MARGIN * last.longest_s, MAX_KEEP_S)
