"""Which of the requests that wait is next. Pure.

    retries            answers that have begun, and requests whose worker failed; the client silent for longest first
    the oldest         of the others, once those behind it got TURNS times the tokens that it will take
    the rest           by priority, then of the owner that was served least, then by arrival

So nothing starves: when a request is placed, new ones behind it got at most TURNS times the tokens of it and of all
those that arrived before it.

Served are tokens: those computed of prompts, and those of answers. An owner that comes, or comes back, starts where the
one placed last stood (start-time fair queueing): shares are of the time in which requests wait.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import chain, pairwise
from typing import Generic, Protocol, TypeVar

from gateway.router.request import Request

TURNS = 8
MAX_IDLE = 4096  # owners remembered that were served more than others and ask for nothing now


class Waiting(Protocol):
    """An entry of Order: a request that waits."""

    request: Request


W = TypeVar("W", bound=Waiting)


@dataclass(slots=True)
class _Owner:
    served: float  # tokens
    num_requests: int = 0  # that wait or have places


class Order(Generic[W]):
    """Owns the waiting requests."""

    def __init__(self, expect_tokens: Callable[[Request], float]) -> None:
        """`expect_tokens`: that a request will probably take."""
        self._expect_tokens = expect_tokens
        self._retries: list[W] = []
        self._groups: dict[tuple[int, str], deque[W]] = {}  # (priority, owner) |-> by arrival; none is empty
        self._owners: dict[str, _Owner] = {}
        self._clock = 0.0  # `served` of the owner placed last, when it was
        self._passed = 0.0  # tokens of those placed since the oldest was

    def __iter__(self) -> Iterator[W]:
        """All that wait, in no particular order."""
        return chain(self._retries, *self._groups.values())

    def __len__(self) -> int:
        return len(self._retries) + sum(map(len, self._groups.values()))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def add(self, waiter: W) -> None:
        request = waiter.request
        owner = self._owners.setdefault(request.wanted.owner, _Owner(self._clock))
        if not owner.num_requests:
            owner.served = max(owner.served, self._clock)
        owner.num_requests += 1
        if request.is_retry:
            insort(self._retries, waiter, key=_silence)
        else:
            group = self._groups.setdefault((request.wanted.priority, request.wanted.owner), deque())
            insort(group, waiter, key=_silence)

    def remove(self, waiter: W) -> None:
        """Remove one that waits no more, and gets no place."""
        self._take(waiter)
        self._leave(waiter.request.wanted.owner)

    def _take(self, waiter: W) -> None:
        key = (waiter.request.wanted.priority, waiter.request.wanted.owner)
        group = self._groups.get(key)
        if group is None or waiter not in group:
            self._retries.remove(waiter)
            return
        group.remove(waiter)
        if not group:
            del self._groups[key]

    def walk(self) -> Iterator[W]:
        """All, the next one first. The caller may place or remove each that it gets before it asks for another."""
        yield from list(self._retries)
        seen: W | None = None
        if self._groups and self._passed >= TURNS * self._expect_tokens((oldest := self._find_oldest()).request):
            seen = oldest
            yield oldest
        rest = {key: iter(list(group)) for key, group in self._groups.items()}
        heads = [(key, next(group)) for key, group in rest.items()]
        heap = [(self._turn(key, waiter), index, key, waiter) for index, (key, waiter) in enumerate(heads)]
        heapify(heap)
        while heap:
            turn, index, key, waiter = heappop(heap)
            if (now := self._turn(key, waiter)) != turn:  # its owner got a place meanwhile
                heappush(heap, (now, index, key, waiter))
                continue
            if waiter is not seen:
                yield waiter
            if (after := next(rest[key], None)) is not None:
                heappush(heap, (self._turn(key, after), index, key, after))

    def _find_oldest(self) -> W:
        return min((group[0] for group in self._groups.values()), key=_silence)

    def _turn(self, key: tuple[int, str], waiter: W) -> tuple[int, float, float]:
        priority, owner = key
        known = self._owners.get(owner)
        return priority, known.served if known else 0.0, waiter.request.silent_since

    def count_before(self, request: Request) -> int:
        """How many of those that wait will probably be placed before a new request that comes now."""
        own, owner = request.wanted.priority, request.wanted.owner
        urgent = len(self._retries) + sum(len(group) for (one, _), group in self._groups.items() if one < own)
        equal = {name: len(group) for (one, name), group in self._groups.items() if one == own}
        rounds = equal.pop(owner, 0)
        num_before = urgent + rounds + sum(min(count, rounds + 1) for count in equal.values())
        return min(num_before + num_before // TURNS, len(self))

    # -- places ------------------------------------------------------------------------------------------------------

    def place(self, waiter: W, num_tokens: float) -> None:
        """Note that it has places, and will probably take `num_tokens` tokens."""
        request = waiter.request
        if not request.is_retry:
            self._passed = 0.0 if waiter is self._find_oldest() else self._passed + num_tokens
        self._take(waiter)
        owner = self._owners[request.wanted.owner]
        self._clock = max(self._clock, owner.served)
        owner.served += num_tokens

    def leave_place(self, request: Request, num_more: float) -> None:
        """Note the end of a request that took `num_more` tokens beyond those of `place`; negative: fewer."""
        self._owners[request.wanted.owner].served += num_more
        self._passed += num_more
        self._leave(request.wanted.owner)

    def _leave(self, name: str) -> None:
        owner = self._owners[name]
        owner.num_requests -= 1
        if not owner.num_requests and owner.served <= self._clock:
            del self._owners[name]
        if len(self._owners) > MAX_IDLE + len(self):
            idle = [name for name, one in self._owners.items() if not one.num_requests]
            for name in idle[: len(idle) // 2]:
                del self._owners[name]

    def check(self, num_placed: int = 0) -> None:
        """Raises AssertionError where requests are out of turn or owners are miscounted."""
        for waiting in (self._retries, *self._groups.values()):
            assert all(_silence(one) <= _silence(after) for one, after in pairwise(waiting)), "out of turn"
        assert all(waiter.request.is_retry for waiter in self._retries) and all(self._groups.values())
        assert sum(owner.num_requests for owner in self._owners.values()) == len(self) + num_placed


def _silence(waiter: Waiting) -> float:
    return waiter.request.silent_since
