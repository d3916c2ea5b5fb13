"""The one queue where requests wait: first come, first served, bounded. Lives on the asyncio thread.

Started answers go before new requests, and among them who has been silent for longest: else those that move from one
dying worker to the next would always stand behind those that were already there.
"""

import asyncio
import time
from bisect import insort
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from gateway.errors import not_ready, overloaded
from gateway.ring.decode_link import DecodeLink
from gateway.ring.fleet import Fleet
from gateway.ring.policy import Placement, Unready, Wait, WaitBeside, choose_beside, choose_placement, find_unready
from gateway.ring.worker_link import PrefillLink, WorkerLink


class Places:
    """A place on a decode worker and perhaps one on a prefill worker, held until released."""

    def __init__(self, decode: DecodeLink, prefill: PrefillLink | None) -> None:
        self.decode = decode
        self.prefill = prefill
        self._held: list[WorkerLink] = [decode, prefill] if prefill else [decode]
        for link in self._held:
            link.num_mine += 1

    def release(self, link: WorkerLink) -> None:
        """Give one place back early. Idempotent."""
        if link in self._held:
            self._held.remove(link)
            link.leave()

    def give_back_refused(self, link: WorkerLink) -> None:
        """Give back a place that the worker refused: it is full, and gets nothing until it has news. Idempotent."""
        if link in self._held:
            self._held.remove(link)
            link.refuse()

    def release_all(self) -> None:
        for link in list(self._held):
            self.release(link)


@dataclass(slots=True, eq=False)
class Expected:
    """Requests that were admitted with another one and are yet to come."""

    count: int


@dataclass(slots=True, eq=False)
class _Waiter:
    num_missing: int
    avoid: frozenset[str]
    is_retry: bool
    silent_since: float
    beside: str | None  # incarnation of the decode worker on which it shares a session's prompt
    decided: asyncio.Future[None]
    places: Places | None = None


class Admission:
    """Places requests on workers as these get room."""

    def __init__(self, fleet: Fleet, max_queue: int, local_prefill_max_tokens: int, patience_s: float) -> None:
        """`patience_s`: how long requests wait while nobody can serve, counted from when somebody last could."""
        self._fleet = fleet
        self._max_queue = max_queue
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._patience_s = patience_s
        self._could_serve = -float("inf")  # when somebody last could
        self._waiting: deque[_Waiter] = deque()
        self._num_apart = 0  # admitted and neither in the queue nor placed
        fleet.subscribe(self._pump)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that were admitted and will come into it."""
        return len(self._waiting) + self._num_apart

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Expected]:
        """Let a request in, and at once those that will come with it, for all their attempts: they count as waiting.

        Any number where nobody waits, so that none is refused for ever. Raises ApiError, 429, when they exceed the
        queue's limit. At the end of the block no further one is expected.
        """
        num_waiting = self.num_waiting
        if num_waiting and num_waiting + num_choices > self._max_queue:
            if num_choices == 1:
                raise overloaded(f"{num_waiting} requests are waiting, the most allowed by --max-queue; try again")
            limit = f"--max-queue, which is {self._max_queue}"
            raise overloaded(f"{num_waiting} requests are waiting, and {num_choices} more exceed {limit}; try again")
        expected = Expected(num_choices - 1)
        self._num_apart += expected.count
        try:
            yield expected
        finally:
            self._num_apart -= expected.count
            expected.count = 0

    def come(self, expected: Expected) -> None:
        """One of those expected is here."""
        if expected.count:
            expected.count -= 1
            self._num_apart -= 1

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A request that was admitted waits for something else, and counts as if it were in the queue."""
        self._num_apart += 1
        try:
            yield
        finally:
            self._num_apart -= 1

    @asynccontextmanager
    async def place(
        self,
        num_missing: int,
        avoid: frozenset[str],
        is_retry: bool,
        silent_since: float,
        timeout_s: float,
        beside: str | None = None,
    ) -> AsyncIterator[Places]:
        """Wait for places, and hold them until the end of the block. For who was admitted.

        `beside`: a decode worker's incarnation, to be placed there and nowhere else as long as it is alive.
        A retry goes before new requests, and before retries whose clients got news later. Raises ApiError, 503, when
        nobody has been able to serve for too long or no place got free within `timeout_s`.
        """
        decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(num_missing, avoid, is_retry, silent_since, beside, decided)
        insort(self._waiting, waiter, key=lambda other: (not other.is_retry, other.silent_since))
        self._pump()
        try:
            try:
                # not wait_for, which before Python 3.12 swallows a cancellation that comes with the decision
                async with asyncio.timeout(timeout_s):
                    await waiter.decided
            except TimeoutError:
                raise not_ready(f"no worker had room within {timeout_s:.0f} s") from None
            assert waiter.places is not None
            yield waiter.places
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if waiter.places is not None:
                waiter.places.release_all()

    def _pump(self) -> None:
        """Decide on what waits. Called at each change, and at each answer or silence of a worker: so time counts."""
        now = time.monotonic()
        reason = find_unready(self._fleet.views())
        if reason is None:
            self._could_serve = now
            self._place_all()
        elif now - self._could_serve >= self._patience_s:
            self._refuse_all(reason)

    def _place_all(self) -> None:
        """As many as have room, in order. Nobody who waits lets others pass, but to workers that he cannot use."""
        full = set[str]()  # incarnations beside a session of which somebody waits
        left: frozenset[str] | None = None  # incarnations that nobody who waits can use; None: nobody waits
        for waiter in list(self._waiting):
            if waiter.beside in full:
                continue
            choice = self._choose(waiter, left)
            if isinstance(choice, Placement):
                self._waiting.remove(waiter)
                self._decide(waiter, choice)
            elif isinstance(choice, WaitBeside):
                full.add(choice.incarnation)
            else:
                left = waiter.avoid if left is None else left & waiter.avoid
                if not left:
                    return

    def _choose(self, waiter: _Waiter, left: frozenset[str] | None) -> Placement | Wait | WaitBeside | Unready:
        """`left`: the decode workers among which to choose; None: all. They matter not to who has one certain place."""
        views = self._fleet.views()
        if waiter.beside is not None:
            choice = choose_beside(views, waiter.beside)
            if not isinstance(choice, Unready):
                return choice
        if left is not None:
            views = [view for view in views if view.role == "prefill" or view.incarnation in left]
        return choose_placement(views, waiter.num_missing, self._local_prefill_max_tokens, waiter.avoid)

    def _refuse_all(self, reason: str) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.decided.done():
                waiter.decided.set_exception(not_ready(reason))

    def _decide(self, waiter: _Waiter, choice: Placement) -> None:
        if waiter.decided.done():  # its request was cancelled this very moment
            return
        prefill = self._fleet.prefill[choice.prefill.address] if choice.prefill else None
        waiter.places = Places(self._fleet.decode[choice.decode.address], prefill)
        waiter.decided.set_result(None)
