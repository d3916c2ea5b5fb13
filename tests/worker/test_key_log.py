"""Reports of keys: a follower that gets some of them knows what the cache has, or asks for all."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.router.worker_keys import ReportedKeys, WorkerKeys
from protos import kv_pb2, worker_pb2
from wire.page_keys import SENT_KEY_BYTES, PageKey
from worker.prefix_cache import PrefixCache
from worker.tiers.key_log import KeyLog

MAX_LOST = 4
NAMES = ["gain", "lose", "answered", "lost", "twice", "late", "restart"]


def key(number: int) -> PageKey:
    return number.to_bytes(SENT_KEY_BYTES, "big") + b"the rest"


def sent(*numbers: int) -> list[bytes]:
    return [key(number)[:SENT_KEY_BYTES] for number in numbers]


def test_a_report_has_what_changed_since_the_one_before() -> None:
    log = KeyLog(max_lost=2)
    for number in (1, 2, 3):
        log.gain(key(number))
    log.lose(key(2))
    first = log.report(0)
    assert tuple(first) == (0, 4, sent(1, 3), [])
    log.gain(key(4))
    log.gain(key(2))
    log.lose(key(1))
    log.lose(key(9))
    changed = log.report(first.number)
    assert tuple(changed) == (4, 7, sent(4, 2), sent(1))
    assert log.report(changed.number) == (7, 7, [], []) and log.report(8).since == 0, "of another incarnation"
    for number in (2, 3, 4):
        log.lose(key(number))
    assert log.report(changed.number) == (0, 10, [], []), "one of the losses is forgotten"
    assert log.report(8) == (8, 10, [], sent(3, 4))


def test_keys_beyond_the_bound_are_not_reported_and_the_first_of_chains_stay() -> None:
    log = KeyLog(max_keys=2)
    for number in (1, 2, 3):
        log.gain(key(number))
    log.lose(key(3))
    assert log.report(0).gained == sent(1, 2)
    log.lose(key(1))
    log.gain(key(4))
    assert log.report(2) == (2, 4, sent(4), sent(1))


def test_a_cache_reports_what_is_found_in_it() -> None:
    cache, log = PrefixCache(2, [0, 0]), KeyLog()
    cache.watchers.append(log)
    pages = cache.allocate(2)
    cache.name(pages[0], key(1))
    cache.name(pages[1], key(1))  # another page has it
    assert log.report(0).gained == sent(1)
    cache.release(pages)
    cache.allocate(2)
    assert log.report(1) == (1, 2, [], sent(1))


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 6)), max_size=60))
def test_a_follower_never_mistakes_a_report_for_the_next_one(steps: Sequence[tuple[str, int]]) -> None:
    """Whatever is lost, comes twice or late: after each answer to its own question it knows what is there."""
    log, there, follower = KeyLog(max_lost=MAX_LOST), set[int](), ReportedKeys()
    old: list[worker_pb2.KeyReport] = []
    for name, number in steps:
        if name == "gain":
            log.gain(key(number))
            there.add(number)
        elif name == "lose":
            log.lose(key(number))
            there.discard(number)
        elif name == "restart":
            log, there, follower, old = KeyLog(max_lost=MAX_LOST), set(), ReportedKeys(), []
        elif name == "late" and old:
            follower.learn(old[number % len(old)])
            if follower.number == 0:
                continue  # it asks for all
        else:
            report = log.pack(follower.number)
            old = [*old, report] if report.since else old  # all keys, late, are what was there
            for _ in range({"lost": 0, "twice": 2}.get(name, 1)):
                follower.learn(report)
            if name == "answered":
                assert follower.keys == set(sent(*there)), (name, number)


def answer(incarnation: str, report: worker_pb2.KeyReport) -> worker_pb2.WorkerStatus:
    return worker_pb2.WorkerStatus(peer=kv_pb2.Peer(incarnation=incarnation), keys=report)


@pytest.mark.parametrize("is_reported", [False, True])
def test_what_a_request_left_counts_until_an_answer_to_a_later_question(is_reported: bool) -> None:
    log, keys, chain = KeyLog(), WorkerKeys(), [key(1), key(2)]
    keys.learn(answer("D1", log.pack(keys.ask().keys_since)))
    asked = keys.ask()
    keys.expect(chain)
    if is_reported:
        for one in chain:
            log.gain(one)
    keys.learn(answer("D1", KeyLog().pack(asked.keys_since)))
    assert keys.count(chain) == 2, "the question was asked before"
    assert (asked.incarnation, asked.keys_since) == ("D1", 0)
    keys.ask()
    assert keys.count(chain) == 2
    keys.ask()  # the one before was not answered
    keys.learn(answer("D1", log.pack(keys.pool.number)))
    assert keys.count(chain) == (2 if is_reported else 0)
    keys.correct(chain[1:])
    assert keys.count(chain) == (1 if is_reported else 0)
    keys.learn(answer("D2", KeyLog().pack(0)))
    assert keys.count(chain) == 0 and keys.ask().incarnation == "D2"


def test_a_worker_that_reports_no_keys_has_what_requests_left() -> None:
    keys = WorkerKeys()
    keys.learn(worker_pb2.WorkerStatus(peer=kv_pb2.Peer(incarnation="D1")))
    keys.expect([key(1)])
    for _ in range(3):
        keys.ask()
        keys.learn(worker_pb2.WorkerStatus(peer=kv_pb2.Peer(incarnation="D1")))
    assert keys.count([key(1)]) == 1
