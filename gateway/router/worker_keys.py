"""Which pages a worker has, by the keys that it reports, and those that a request just left there. Pure.

Reports are late, and may be lost: the worker's own answer is right, and what is wrong here costs a worse choice. What a
request of this gateway left there counts until the answer to the next question, which has it or knows better.
"""

from bisect import bisect_left
from collections.abc import Sequence

from protos import worker_pb2
from wire.page_keys import SENT_KEY_BYTES, PageKey

MAX_EXPECTED = 1 << 16  # keys; a worker that reports none has as many remembered


class ReportedKeys:
    """Follows the keys of one cache of a worker, report by report."""

    def __init__(self) -> None:
        self.number = 0  # of the last report; 0: the next one is to have all keys
        self.keys: set[bytes] = set()  # their first bytes

    def learn(self, report: worker_pb2.KeyReport) -> None:
        """One that does not follow the last one changes nothing but what is asked next: all keys."""
        if report.since and report.since != self.number:
            self.number = 0
            return
        if not report.since:
            self.keys.clear()
        self.keys.difference_update(_split(report.lost))
        self.keys.update(_split(report.gained))
        self.number = report.number


class WorkerKeys:
    """Those of one incarnation of a worker: in its pool, and in its files."""

    def __init__(self) -> None:
        self._incarnation = ""
        self.reset()

    def reset(self, incarnation: str = "") -> None:
        """Nothing is known of this incarnation."""
        self._incarnation = incarnation
        self.pool, self.files = ReportedKeys(), ReportedKeys()
        self._expected: set[bytes] = set()  # since the last question
        self._asked: set[bytes] = set()  # before that, and after the last answer

    def ask(self) -> worker_pb2.StatusRequest:
        """The question that is sent now."""
        self._asked |= self._expected
        self._expected = set()
        if len(self._asked) > MAX_EXPECTED:
            self._asked.clear()
        return worker_pb2.StatusRequest(
            wants_keys=True, incarnation=self._incarnation, keys_since=self.pool.number,
            saved_keys_since=self.files.number,
        )  # fmt: skip

    def learn(self, status: worker_pb2.WorkerStatus) -> None:
        """The answer to the last question."""
        if status.peer.incarnation != self._incarnation:
            self.reset(status.peer.incarnation)
        if status.HasField("saved_keys"):
            self.files.learn(status.saved_keys)
        if status.HasField("keys"):
            self.pool.learn(status.keys)
            self._asked.clear()

    def expect(self, keys: Sequence[PageKey]) -> None:
        """The worker has these pages now, or is about to."""
        self._expected.update(key[:SENT_KEY_BYTES] for key in keys)

    def correct(self, keys: Sequence[PageKey]) -> None:
        """It has none of these."""
        sent = [key[:SENT_KEY_BYTES] for key in keys]
        self._expected.difference_update(sent)
        self._asked.difference_update(sent)
        self.pool.keys.difference_update(sent)
        self.files.keys.difference_update(sent)

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
