"""How long the KV of a session is worth keeping: by the time between its turns, or of new sessions by others'. Pure."""

from collections import OrderedDict, deque
from dataclasses import dataclass

from gateway.router.policies import KeepTimes

MAX_SESSIONS = 1 << 14  # remembered; the one whose last turn is longest ago is forgotten first
MAX_KEEP_S = 600.0  # recorded agents come back within 11 minutes 99 times of 100
MARGIN = 2.0  # times its longest gap
FADING = 0.9  # of the longest gap, a turn
FIRST_KEEP_S = 5.0  # of a session's first turn, where most come back: after 2 s at the median, as recorded
JUDGED_S = 30.0  # after which a session has come back, or does not
LEARNING = 0.1  # weight of the last session that was judged


@dataclass(slots=True)
class _Last:
    """A session's last turn."""

    call: str
    at: float
    longest_s: float = 0.0  # gap, faded


class SessionGaps(KeepTimes):
    """Remembers when sessions asked."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, _Last] = OrderedDict()
        self._new: deque[tuple[float, _Last]] = deque(maxlen=MAX_SESSIONS)  # when it began, and what is not judged yet
        self._returning = 0.5  # share of sessions that come back

    def expect(self, session: str, call: str, now: float) -> float:
        """A request of the session comes. Seconds within which the next one probably does; 0: not known.

        `call`: equal for the choices of one request.
        """
        if not session:
            return 0.0
        last = self._last.pop(session, None)
        if last is None:
            last = _Last(call, now)
            self._new.append((now, last))
        elif last.call != call:
            last.longest_s = max(now - last.at, FADING * last.longest_s)
            last.call, last.at = call, now
        self._last[session] = last
        if len(self._last) > MAX_SESSIONS:
            self._last.popitem(last=False)
        while self._new and self._new[0][0] <= now - JUDGED_S:
            _, one = self._new.popleft()
            self._returning += LEARNING * ((one.longest_s > 0) - self._returning)
        if not last.longest_s:
            return FIRST_KEEP_S if self._returning >= 0.5 else 0.0
        return min(MARGIN * last.longest_s, MAX_KEEP_S)
