"""Connections between processes that are slow, cut, lossy or dead. Rows 2, 6 and 11 of the fault list."""

import re

import pytest

from tests.faults.conftest import Linked
from tests.support.asking import Asking
from tests.support.fault_answers import Truth, ask, failed_attempts, find_busy, is_alive
from tests.support.fleet import Process
from tests.support.live import wait_until

LEASE_S = 4.0
SLACK_S = 20.0  # for a loaded machine
LINKS = ["gateway-prefill", "gateway-decode", "prefill-decode", "decode-prefill"]
# Chance that a chunk costs its connection: a token stream has many chunks, the other connections few.
LOSS = {"gateway-prefill": 0.1, "gateway-decode": 0.02, "prefill-decode": 0.2, "decode-prefill": 0.1}
MIN_LOST = 3  # connections
MIN_ATTEMPTS = 3  # in a row, before a request fails
LOSSY_S = 120.0  # for that many losses: mostly the first three requests are enough


def test_row_01_client_that_leaves_during_a_transfer(linked: Linked, truth: Truth) -> None:
    """The pages' transfer takes seconds."""
    truth.check_crowd(linked.fleet)  # makes the workers shake hands
    linked.links["decode-prefill"].set_delay(1.0)
    prefill, decode = linked.fleet["prefill-0"], linked.fleet["decode-0"]
    offered, cancelled = prefill.metric("offers_sent_total"), prefill.metric("cancelled_total")
    receiving = decode.metric("cancelled_total", {"phase": "receiving"})
    stream = ask(linked.fleet, num_prompt=1000)
    wait_until(lambda: prefill.metric("offers_sent_total") > offered)
    stream.cancel()
    seconds = linked.fleet.wait_until_unused()
    print(f"row 1, transfer: pages free after {seconds:.2f} s, at 1 s a piece on the way")
    wait_until(lambda: prefill.metric("cancelled_total") == cancelled + 1)
    assert decode.metric("cancelled_total", {"phase": "receiving"}) == receiving + 1


def test_row_02_client_that_leaves_before_decode_knows_of_its_pages(linked: Linked, truth: Truth) -> None:
    """Neither the offer nor the cancellation arrives: prefill frees its pages when the lease ends."""
    truth.check_crowd(linked.fleet)  # makes the workers shake hands
    prefill = linked.fleet["prefill-0"]
    offered = prefill.metric("offers_sent_total")
    linked.links["prefill-decode"].hold()
    stream = ask(linked.fleet, num_prompt=1000)
    find_busy(linked.fleet, "prefill")
    linked.links["gateway-prefill"].hold()
    stream.cancel()
    seconds = wait_until(lambda: not prefill.metric("kv_cache_used_pages"), LEASE_S + SLACK_S)
    print(
        f"row 2: prefill's pages free after {seconds:.2f} s; {prefill.metric('offers_sent_total') - offered:.0f} offers"
    )


def test_row_06_prefill_that_sleeps_through_its_lease_is_not_believed(linked: Linked, truth: Truth) -> None:
    """It is stopped with an offer in flight, which arrives long after its session has ended."""
    truth.check_crowd(linked.fleet)  # makes the workers shake hands
    prefill, decode = linked.fleet["prefill-0"], linked.fleet["decode-0"]
    offered, refused = prefill.metric("offers_sent_total"), _refused(decode)
    linked.links["prefill-decode"].hold()
    stream = ask(linked.fleet, num_prompt=3500, num_tokens=20)
    wait_until(lambda: prefill.metric("offers_sent_total") > offered)
    prefill.stop()
    linked.links["gateway-prefill"].hold()  # it does not learn of the cancellation
    truth.check(stream)  # by another route than this worker
    canaries = [ask(linked.fleet, num_prompt=300, num_tokens=200, seed=seed) for seed in (5, 6)]
    canaries[0].wait_for_tokens(1)
    linked.links["prefill-decode"].release()
    wait_until(lambda: _refused(decode) > refused, SLACK_S)
    prefill.resume()
    wait_until(lambda: not prefill.metric("kv_cache_used_pages"), LEASE_S + SLACK_S)
    for canary in canaries:
        truth.check(canary)
    print(f"row 6: {_refused(decode) - refused:.0f} late offers refused for their session or attempt")


def _refused(decode: Process) -> float:
    """Offers for a session or an attempt that is over."""
    return sum(decode.metric("offers_refused_total", {"reason": reason}) for reason in ("session", "attempt"))


@pytest.mark.parametrize("link", LINKS)
def test_row_11_slow_ways_only_take_longer(linked: Linked, truth: Truth, link: str) -> None:
    linked.links[link].set_delay(0.2)
    stream = ask(linked.fleet, num_prompt=600, num_tokens=30)
    truth.check(stream)
    print(f"row 11, 200 ms on {link}: {stream.seconds:.2f} s")


@pytest.mark.parametrize("link", LINKS)
def test_row_11_lossy_ways_lose_no_tokens(linked: Linked, truth: Truth, link: str) -> None:
    """TCP turns heavy loss into lost connections: every answer is right, or ends with a clear error.

    An error comes only after several failed attempts.
    """
    proxy, gateway = linked.links[link], linked.fleet.gateway
    truth.check_crowd(linked.fleet)  # makes the workers shake hands
    lost, failed = proxy.num_lost, len(failed_attempts(gateway.read_log()))
    proxy.set_loss(LOSS[link])
    streams = list[Asking]()

    def has_lost_enough() -> bool:
        """Enough connections, and attempts with them."""
        asked = [ask(linked.fleet, num_prompt=600, num_tokens=60, seed=seed) for seed in (1, 2, 3)]
        for stream in asked:
            truth.check_clean(stream)
        streams.extend(asked)
        return proxy.num_lost - lost >= MIN_LOST and len(failed_attempts(gateway.read_log())) > failed

    wait_until(has_lost_enough, LOSSY_S, lambda: f"{proxy.num_lost - lost} connections lost")
    reasons = failed_attempts(gateway.read_log())[failed:]
    num_answered = sum(stream.code is None for stream in streams)
    print(
        f"row 11, loss on {link}: {proxy.num_lost - lost} connections lost, {len(reasons)} attempts failed, "
        f"{num_answered} of {len(streams)} answered"
    )
    assert num_answered > 0 and all(map(_was_tried, streams)), [stream.detail for stream in streams]
    proxy.heal()
    linked.fleet.wait_until_whole()
    truth.check_canary(linked.fleet)


def _was_tried(stream: Asking) -> bool:
    """It was answered, or ended after the promised number of attempts or time."""
    found = re.search(r"gave up after (\d+) attempts", stream.detail)
    is_late = "no decode worker is alive" in stream.detail or "found no worker for" in stream.detail
    return stream.code is None or is_late or (found is not None and int(found[1]) >= MIN_ATTEMPTS)


@pytest.mark.parametrize("link", LINKS)
def test_row_11_partitions_are_noticed_and_end(linked: Linked, truth: Truth, link: str) -> None:
    decode = linked.fleet["decode-0"]
    truth.check_crowd(linked.fleet)  # makes the workers shake hands
    if link != "gateway-decode":
        linked.links["decode-prefill"].set_delay(0.5)  # so that prefill holds the pages for a while
    stream = ask(linked.fleet, num_prompt=1500, num_tokens=250)
    if link == "gateway-decode":
        stream.wait_for_tokens(20)
        linked.links[link].hold()
        wait_until(lambda: not is_alive(linked.fleet, decode))
        linked.links[link].release()
    else:
        find_busy(linked.fleet, "prefill")
        linked.links[link].hold()
        linked.links["decode-prefill"].set_delay(0.0)
    truth.check_clean(stream)
    assert stream.code is None or link == "gateway-decode", stream.detail
    print(f"row 11, partition of {link}: {stream.seconds:.2f} s, {stream.code or 'answered'}")
    linked.links[link].release()
    linked.fleet.wait_until_whole()
    truth.check_canary(linked.fleet)
