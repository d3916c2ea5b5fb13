"""Requests wait for what another one computes of a long part of their prompt. Pure."""

from dataclasses import replace

from gateway.router.coming import LEAST_SHARED, MARK_TOKENS, ComingIndex
from gateway.router.placement import Placement
from gateway.router.placer import Held, Placer
from gateway.router.request import Request
from tests.gateway.router.test_placer import nothing_is_known, placed, request
from tests.support.virtual_fleet import wanted
from tests.support.worker_views import ALL, DECODE, DECODE_2, PREFILL, PREFILL_2

PAGE = DECODE.page_tokens
__all__ = ["nothing_is_known"]  # a fixture


def prompt(*parts: tuple[str, int]) -> Request:
    """So many tokens of each name, which differ from another name's."""
    return request(wanted(prompt=tuple(token for name, count in parts for token in [ord(name)] * count)))


def test_the_shared_part_of_chains_is_found_to_a_mark() -> None:
    chains = [prompt(("s", 160), ("a", 900)), prompt(("s", 160), ("a", 300), ("b", 600)), prompt(("c", 40))]
    index = ComingIndex()
    coming = [index.begin(one.page_keys(DECODE), PAGE, f"D{at}", 0) for at, one in enumerate(chains)]

    def find(*parts: tuple[str, int]) -> tuple[int, set[str]]:
        found = index.find(prompt(*parts).page_keys(DECODE), PAGE)
        return found.num_tokens, {one.incarnation for one in found.coming}

    assert find(("s", 160), ("a", 900)) == (1056, {"D0"}), "all whole pages"
    assert find(("s", 160), ("a", 500), ("x", 9)) == (640, {"D0"})
    assert find(("s", 160), ("a", 310), ("x", 99)) == (448, {"D0", "D1"})
    assert find(("s", 160), ("x", 99)) == (2 * MARK_TOKENS, {"D0", "D1"})
    assert find(("c", 40), ("c", 1)) == (32, {"D2"}) and find(("x", 900)) == find() == (0, set())
    for one in coming:
        index.end(one)
    assert not index and find(("s", 160), ("a", 900)) == (0, set())


def test_a_request_is_held_while_a_long_part_of_its_prompt_is_computed_wherever_it_would_go() -> None:
    placer, shared = Placer(), ("s", LEAST_SHARED + PAGE)
    first = prompt(shared, ("a", 400))
    choice = placer.choose(ALL, first)
    assert isinstance(choice, Placement) and choice.decode == DECODE
    coming = placer.begin(first, choice, ALL)
    assert coming is not None
    second = prompt(shared, ("b", 3000))
    assert isinstance(placer.choose(ALL, second), Held)
    busy = [PREFILL, PREFILL_2, replace(DECODE, num_mine=3), DECODE_2]
    assert isinstance(placer.choose(busy, second), Held), "the other workers would compute it again"
    assert placed(placer, [PREFILL, DECODE_2], second) == ("D2", "P1"), "the first one's worker is of no use to it"
    short = prompt(("s", LEAST_SHARED - PAGE), ("b", 900))
    assert isinstance(placer.choose(ALL, short), Placement)
    placer.end(coming)
    assert isinstance(placer.choose(ALL, second), Placement), "it is there, or will never be"


def test_a_request_waits_for_at_most_twice_what_it_would_compute_and_for_nothing_that_is_cached() -> None:
    placer, shared = Placer(), ("s", 1024)
    long = prompt(shared, ("a", 1100))
    placer.begin(long, Placement(DECODE, PREFILL, 0), ALL)
    assert isinstance(placer.choose(ALL, prompt(shared, ("b", 8))), Placement), "most of the other's work is its own"
    after = prompt(shared, ("a", 700), ("b", 8))
    assert isinstance(placer.choose(ALL, after), Held)
    placer.remember(PREFILL, prompt(shared, ("a", 300)))
    assert isinstance(placer.choose(ALL, after), Held), "or each that waits would compute the rest"
    placer.remember(PREFILL, prompt(shared, ("a", 700)))
    assert isinstance(placer.choose(ALL, prompt(shared, ("a", 500), ("b", 8))), Placement), "its part is there"
    assert isinstance(placer.choose(ALL, prompt(shared, ("a", 690), ("b", 8))), Held), "almost"
    placer.begin(prompt(shared, ("a", 300), ("c", 1000)), Placement(DECODE_2, PREFILL, 0), ALL)
    fork = prompt(shared, ("a", 300), ("c", 600), ("d", 9))
    assert isinstance(placer.choose(ALL, fork), Held), "half of what was computed of it, not of all its tokens"
