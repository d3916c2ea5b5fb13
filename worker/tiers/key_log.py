"""Which keys a cache gained and lost, numbered, so that a follower is sent only what changed. Pure.

A report from number n on has the keys gained since that are still there, and those lost since. Applied in the order
lost, gained, it takes a follower from the state at n to the present one. Keys are sent by their first bytes: two that
begin alike cost a worse choice.
"""

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import NamedTuple

from protos import worker_pb2
from wire.page_keys import SENT_KEY_BYTES, PageKey

MAX_KEYS = 1 << 17  # two million tokens in pages of 16, 1 MB in a message; further ones are not reported
MAX_LOST = 1 << 16  # remembered; a follower that is further behind gets all keys


class KeyChanges(NamedTuple):
    """Keys that were gained and lost; all keys where `since` is 0."""

    since: int
    number: int
    gained: list[bytes]  # in the order of their naming, so a chain's first page comes first
    lost: list[bytes]


class KeyLog:
    """Follows the keys of one cache, or of files."""

    def __init__(
        self, lock: AbstractContextManager[object] | None = None, max_keys: int = MAX_KEYS, max_lost: int = MAX_LOST
    ) -> None:
        """`lock`: held in each call, where they come from several threads."""
        self._lock = lock or nullcontext()
        self._max_keys, self._max_lost = max_keys, max_lost
        self._gained: dict[bytes, int] = {}  # key |-> number of its gain, ascending
        self._lost: deque[tuple[int, bytes]] = deque()  # numbers ascend
        self._forgotten = 0  # number of the newest loss that is not in `_lost`
        self._number = 0

    def gain(self, key: PageKey, page: int = -1) -> None:
        """It is there, perhaps again; on this page."""
        sent = key[:SENT_KEY_BYTES]
        with self._lock:
            self._gained.pop(sent, None)
            if len(self._gained) < self._max_keys:
                self._number += 1
                self._gained[sent] = self._number

    def lose(self, key: PageKey, page: int = -1) -> None:
        """It is not there any more."""
        sent = key[:SENT_KEY_BYTES]
        with self._lock:
            if self._gained.pop(sent, None) is None:
                return
            self._number += 1
            self._lost.append((self._number, sent))
            if len(self._lost) > self._max_lost:
                self._forgotten, _ = self._lost.popleft()

    def report(self, since: int) -> KeyChanges:
        """Changes since an earlier report with this number; all keys where these are too many, or it is unknown."""
        with self._lock:
            if not since or not self._forgotten <= since <= self._number:
                return KeyChanges(0, self._number, list(self._gained), [])
            gained = [key for key, _ in takewhile(lambda one: one[1] > since, reversed(self._gained.items()))]
            lost = [key for _, key in takewhile(lambda one: one[0] > since, reversed(self._lost))]
            return KeyChanges(since, self._number, gained[::-1], lost[::-1])

    def pack(self, since: int) -> worker_pb2.KeyReport:
        """The report as a message."""
        changes = self.report(since)
        gained, lost = b"".join(changes.gained), b"".join(changes.lost)
        return worker_pb2.KeyReport(since=changes.since, number=changes.number, gained=gained, lost=lost)
