"""Where requests wait for a model whose workers do not run now. Lives on the asyncio thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import not_ready
from gateway.router.changes import Changes
from gateway.router.engine_client import State
from gateway.router.interfaces import Gate

UNREADY_S = 30.0  # that the service is not ready after a wake that failed


class ModelGate(Gate):
    """Where the requests of one model wait until it is awake; without `Sleepers` it is always open."""

    def __init__(self, changes: Changes, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.state: State = "awake"
        self.percent = 0  # of the weights that the workers of a waking model have read
        self.reason = ""  # why it could not be woken
        self._changed_at = clock()
        self.is_closed = False  # lets no new requests in, although it is awake: others are to have their turn
        self.num_inside = 0
        self.idle_since = self.awake_since = clock()
        self._changes = changes
        self._clock = clock
        self._failure = ""  # why the last wake failed
        self._wishes: dict[object, float] = {}  # of each request that waits |-> since when, in order

    @property
    def is_open(self) -> bool:
        return self.state == "awake" and not self.is_closed

    @property
    def has_just_failed(self) -> bool:
        """Whether it just failed. Later it is like asleep, or readiness probes would keep requests away for good."""
        return self.state == "failed" and self._clock() - self._changed_at < UNREADY_S

    def describe(self) -> str:
        """The state in words."""
        if self.state == "waking":
            return f"waking {self.percent} %"
        return f"failed: {self.reason}" if self.state == "failed" else self.state

    @property
    def waiting_since(self) -> float | None:
        """When the first of those came that it lets in when it is awake; None: none wait."""
        return next(iter(self._wishes.values()), None)

    async def enter(self, timeout_s: float) -> float:
        """Let one request in, as `inside` needs; returns the seconds that it waited.

        Raises ApiError, 503, where the model does not wake, or not in time.
        """
        began, ends_at, wish = self._clock(), self._clock() + timeout_s, object()
        was_open = self.is_open
        while not self.is_open:
            self._wishes[wish] = began
            self._changes.mark()
            try:
                is_over = await self._changes.until(
                    lambda: self.is_open or wish not in self._wishes, ends_at - self._clock()
                )
                if not is_over:
                    raise not_ready(f"model '{self.name}' was not awake in time: it is {self.describe()}")
                if wish not in self._wishes:
                    raise not_ready(f"model '{self.name}' could not be woken: {self._failure}")
            finally:
                self._wishes.pop(wish, None)
                self._changes.mark()
        self.num_inside += 1
        return 0.0 if was_open else self._clock() - began

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Counts a request that was let in, until the block ends."""
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self.idle_since = self._clock()
                self._changes.mark()

    def change(self, state: State, reason: str = "") -> None:
        """Changes the state; requests that wait then go on, or get the error."""
        if state == "awake" and self.state != "awake":
            self.awake_since = self.idle_since = self._clock()
        self.state, self.percent, self.reason, self._changed_at = state, 0, reason, self._clock()
        if state == "failed":
            self._failure = reason
            self._wishes.clear()
