"""Which pages a worker has, by the keys that it reports, and those that a request just left there. Pure.

Reports are late, and may be lost: the worker's own answer is right, and what is wrong here costs a worse choice. What a
request of this gateway left there counts until the answer to the next question, which has it or knows better.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice

from protos import worker_pb2
from wire.page_keys import SENT_KEY_BYTES, PageKey

MAX_EXPECTED = 1 << 16  # keys; a worker that reports none has as many remembered
SAMPLED = 16  # of so many keys the index has one: a sixteenth of the memory, and 256 tokens of error in pages of 16


class KeyIndex:
    """Which workers have a key, of some keys: finds those that have most of a prompt without a look at all."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[WorkerKeys]] = {}  # none is empty

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: "WorkerKeys", keys: Iterable[bytes]) -> None:
        for key in keys:
            if not key[0] % SAMPLED:
                self._holders.setdefault(key, set()).add(holder)

    def remove(self, holder: "WorkerKeys", keys: Iterable[bytes]) -> None:
        for key in keys:
            if not key[0] % SAMPLED and (holders := self._holders.get(key)):
                holders.discard(holder)
                if not holders:
                    del self._holders[key]

    def find(self, keys: Sequence[PageKey], most: int) -> "set[WorkerKeys]":
        """Up to `most`: first those that have the longest part of a chain, then those that have at least half of it."""
        sampled = [key[:SENT_KEY_BYTES] for key in keys if not key[0] % SAMPLED]
        count = bisect_left(sampled, True, key=lambda sent: sent not in self._holders)
        found: set[WorkerKeys] = set()
        while count and len(found) < most:
            found.update(islice(self._holders.get(sampled[count - 1], ()), most - len(found)))
            count //= 2
        return found


class ReportedKeys:
    """Follows the keys of one cache of a worker, report by report."""

    def __init__(self) -> None:
        self.number = 0  # of the last report; 0: the next one is to have all keys
        self.keys: set[bytes] = set()  # their first bytes

    def learn(self, report: worker_pb2.KeyReport) -> tuple[list[bytes], list[bytes]]:
        """Returns (keys lost, keys gained). A report that does not follow the last changes only the next question."""
        if report.since and report.since != self.number:
            self.number = 0
            return [], []
        lost, gained = _split(report.lost), _split(report.gained)
        if not report.since:
            lost, self.keys = list(self.keys.difference(gained)), set()
        self.keys.difference_update(lost)
        self.keys.update(gained)
        self.number = report.number
        return lost, gained


class WorkerKeys:
    """The page keys of one incarnation of a worker: in its pool, and in its files."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.index = KeyIndex()  # set where workers have one together
        self.pool, self.files = ReportedKeys(), ReportedKeys()
        self._expected: set[bytes] = set()  # since the last question
        self._asked: set[bytes] = set()  # before that, and after the last answer
        self.reset()

    def reset(self, incarnation: str = "") -> None:
        """Start with another incarnation, of which nothing is known."""
        for keys in (self.pool.keys, self.files.keys, self._expected, self._asked):
            self.index.remove(self, keys)
        self.incarnation = incarnation
        self.pool, self.files = ReportedKeys(), ReportedKeys()
        self._expected, self._asked = set(), set()

    def ask(self) -> worker_pb2.StatusRequest:
        """Build the question that is sent now."""
        self._asked |= self._expected
        self._expected = set()
        if len(self._asked) > MAX_EXPECTED:
            self._forget_asked()
        return worker_pb2.StatusRequest(
            wants_keys=True, incarnation=self.incarnation, keys_since=self.pool.number,
            saved_keys_since=self.files.number,
        )  # fmt: skip

    def learn(self, status: worker_pb2.WorkerStatus) -> None:
        """Take the answer to the last question."""
        if status.peer.incarnation != self.incarnation:
            self.reset(status.peer.incarnation)
        if status.HasField("saved_keys"):
            self._note(*self.files.learn(status.saved_keys))
        if status.HasField("keys"):
            self._note(*self.pool.learn(status.keys))
            self._forget_asked()

    def _forget_asked(self) -> None:
        asked, self._asked = self._asked, set()
        self._note(asked, ())

    def _note(self, lost: Iterable[bytes], gained: Iterable[bytes]) -> None:
        """Tell the index what has changed."""
        places = self.pool.keys, self.files.keys, self._expected, self._asked
        self.index.remove(self, [key for key in lost if not any(key in place for place in places)])
        self.index.add(self, gained)

    def expect(self, keys: Sequence[PageKey]) -> None:
        """Note that the worker has these pages now, or is about to."""
        sent = [key[:SENT_KEY_BYTES] for key in keys]
        self._expected.update(sent)
        self.index.add(self, sent)

    def correct(self, keys: Sequence[PageKey]) -> None:
        """Note that the worker has none of these."""
        sent = [key[:SENT_KEY_BYTES] for key in keys]
        self._expected.difference_update(sent)
        self._asked.difference_update(sent)
        self.pool.keys.difference_update(sent)
        self.files.keys.difference_update(sent)
        self.index.remove(self, sent)

    def count(self, keys: Sequence[PageKey]) -> int:
        """How many keys at a chain's beginning are in the pool, by all that is known."""
        return count_known(keys, [one for one in (self.pool.keys, self._expected, self._asked) if one])


def count_known(keys: Sequence[PageKey], places: Sequence[set[bytes]]) -> int:
    """How many keys at a chain's beginning one of these has. Holes are not seen: a chain is evicted from its end."""

    def is_missing(key: PageKey) -> bool:
        sent = key[:SENT_KEY_BYTES]
        for one in places:  # noqa: SIM110, a third of the time of `any`
            if sent in one:
                return False
        return True

    return 0 if not keys or is_missing(keys[0]) else bisect_left(keys, True, key=is_missing)


def _split(sent: bytes) -> list[bytes]:
    return [sent[at : at + SENT_KEY_BYTES] for at in range(0, len(sent), SENT_KEY_BYTES)]
