"""Routing decisions: a table of cases, and properties over random fleets."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.policies.homes import Homes
from gateway.policies.local_prefill import MeasuredLocalPrefill, choose_local_prefill
from gateway.router.placement import (
    BUSY_TOKENS,
    LEAST_LENT,
    NO_LIMIT,
    READ_SHARE,
    Need,
    Placement,
    Wait,
    choose_placement,
)
from gateway.router.policies import LocalPrefill
from gateway.router.readiness import Unready, find_unready
from gateway.router.worker_view import ChunkCosts, WorkerView
from runtime.config_parts import NoPrefill
from tests.support.combinations import examples
from tests.support.worker_views import DECODE, DECODE_2, FULL, PREFILL, PREFILL_2

DEAD: dict[str, Any] = {"is_alive": False, "trouble": "does not answer"}
DRAINING: dict[str, Any] = DEAD | {"is_draining": True}
OTHER: dict[str, Any] = {"layout": b"other"}
BOTH = replace(PREFILL, address=DECODE.address, incarnation=DECODE.incarnation)  # DECODE in its other role
LEAVING = replace(DECODE_2, **DRAINING)


def names(choice: Placement | Wait | Unready) -> object:
    """A choice in short: ("D1", "P1"), ("D1", None), Wait or Unready."""
    if isinstance(choice, Placement):
        return choice.decode.incarnation, choice.prefill.incarnation if choice.prefill else None
    return type(choice)


@pytest.mark.parametrize(
    ("case", "workers", "expected"),
    [
        ("a pair", [PREFILL, DECODE], ("D1", "P1")),
        ("a worker of both roles that is best for both", [BOTH, DECODE], ("D1", None)),
        ("a busy worker of both roles hands off", [replace(BOTH, num_mine=3), PREFILL, DECODE], ("D1", "P1")),
        ("another one's prompts", [BOTH, replace(DECODE, **FULL), DECODE_2], ("D2", "D1")),
        ("no worker", [], Unready),
        ("no decode worker", [PREFILL], Unready),
        ("the only decode worker is dead", [PREFILL, replace(DECODE, **DEAD)], Unready),
        ("no prefill worker: decode prefills", [DECODE], ("D1", None)),
        ("the only prefill worker is dead: decode prefills", [replace(PREFILL, **DEAD), DECODE], ("D1", None)),
        ("the only prefill worker is incompatible", [replace(PREFILL, **OTHER), DECODE], ("D1", None)),
        ("a full prefill worker is waited for", [replace(PREFILL, **FULL), DECODE], Wait),
        ("a refusing prefill worker is waited for", [replace(PREFILL, is_full=True), DECODE], Wait),
        ("a full decode worker is waited for", [PREFILL, replace(DECODE, **FULL)], Wait),
        ("a refusing decode worker is waited for", [PREFILL, replace(DECODE, is_full=True)], Wait),
        ("the idler decode worker", [PREFILL, replace(DECODE, num_mine=1), DECODE_2], ("D2", "P1")),
        ("the idler prefill worker", [replace(PREFILL, num_mine=1), PREFILL_2, DECODE], ("D1", "P2")),
        (
            "load is a share of what a worker takes",
            [PREFILL, replace(DECODE, num_mine=2, max_running=100), replace(DECODE_2, num_mine=1)],
            ("D1", "P1"),
        ),
        ("other gateways' requests count", [PREFILL, replace(DECODE, num_others=1), DECODE_2], ("D2", "P1")),
        ("at equal load fewer tokens waiting", [replace(PREFILL, tokens_waiting=9), PREFILL_2, DECODE], ("D1", "P2")),
        ("at equal load more free pages", [PREFILL, DECODE, replace(DECODE_2, free_pages=11)], ("D2", "P1")),
        ("then more pages without KV", [PREFILL, DECODE, replace(DECODE_2, empty_pages=4)], ("D2", "P1")),
        (
            "the idler decode worker has no compatible prefill worker with room",
            [replace(PREFILL, **FULL), replace(PREFILL_2, **OTHER), DECODE, replace(DECODE_2, num_mine=1, **OTHER)],
            ("D2", "P2"),
        ),
    ],
)
def test_placement(case: str, workers: Sequence[WorkerView], expected: object) -> None:
    assert names(choose_placement(workers, Need(100))) == expected, case


def test_workers_that_are_equal_in_all_get_about_as_many_requests() -> None:
    workers = [PREFILL, *(replace(DECODE, incarnation=f"d-{number}") for number in range(8))]
    choices = [choose_placement(workers, Need(100, draw=blake2b_int(number))) for number in range(800)]
    counts = Counter(choice.decode.incarnation for choice in choices if isinstance(choice, Placement))
    assert len(counts) == 8 and max(counts.values()) < 2.5 * min(counts.values()), counts


def blake2b_int(number: int) -> int:
    """As the beginning of a key."""
    return int.from_bytes(blake2b(str(number).encode(), digest_size=4).digest())


SEES: dict[str, Any] = {"takes_images": True}


@pytest.mark.parametrize(
    ("case", "workers", "expected"),
    [
        ("nobody sees", [PREFILL, DECODE], Unready),
        ("who sees is dead", [replace(PREFILL, **SEES, **DEAD), DECODE], Unready),
        ("a prefill worker sees", [replace(PREFILL, num_mine=2, **SEES), PREFILL_2, DECODE], ("D1", "P1")),
        ("one that sees is waited for", [replace(PREFILL, **SEES, **FULL), PREFILL_2, DECODE], Wait),
        ("only a decode worker sees", [PREFILL, replace(DECODE, num_mine=2, **SEES), DECODE_2], ("D1", None)),
        ("one that sees does not match", [replace(PREFILL, **SEES, **OTHER), DECODE], Unready),
    ],
)
def test_placement_of_prompts_with_images(case: str, workers: Sequence[WorkerView], expected: object) -> None:
    assert names(choose_placement(workers, Need(100, has_images=True))) == expected, case
    assert isinstance(choose_placement(workers, Need(100)), Placement), case


@pytest.mark.parametrize(
    ("case", "workers", "cached", "expected"),
    [
        ("a beginning of the prompt", [PREFILL, DECODE, DECODE_2], {"D2": 160}, ("D2", "P1")),
        ("the longest one", [PREFILL, DECODE, DECODE_2], {"D1": 176, "D2": 160}, ("D1", "P1")),
        ("on prefill workers too", [PREFILL, PREFILL_2, DECODE], {"P2": 160}, ("D1", "P2")),
        ("each role by itself", [PREFILL, PREFILL_2, DECODE, DECODE_2], {"P2": 160, "D2": 16}, ("D2", "P2")),
        ("more free pages count less", [PREFILL, replace(DECODE, free_pages=99), DECODE_2], {"D2": 16}, ("D2", "P1")),
        ("not where it failed before", [PREFILL, DECODE, replace(DECODE_2, **DEAD)], {"D2": 992}, ("D1", "P1")),
        ("nor where no room is", [PREFILL, DECODE, replace(DECODE_2, **FULL)], {"D2": 492}, ("D1", "P1")),
        ("all of it: no prefill worker", [PREFILL, DECODE, DECODE_2], {"D2": 1000}, ("D2", None)),
        ("all but less than a page", [PREFILL, DECODE, DECODE_2], {"D2": 985}, ("D2", None)),
        ("all but a page", [PREFILL, DECODE, DECODE_2], {"D2": 984}, ("D2", "P1")),
        ("that prefill has it saves decode nothing", [PREFILL, DECODE], {"P1": 1000}, ("D1", "P1")),
        ("without a prefill worker", [DECODE, DECODE_2], {"D2": 160}, ("D2", None)),
    ],
)
def test_workers_that_probably_have_more_are_preferred(
    case: str, workers: Sequence[WorkerView], cached: Mapping[str, int], expected: object
) -> None:
    assert names(choose_placement(workers, Need(1000, cached=cached))) == expected, case


@pytest.mark.parametrize(
    ("role", "cached_one", "idle_one"), [("decode", DECODE, DECODE_2), ("prefill", PREFILL, PREFILL_2)]
)
def test_a_prefix_saves_as_much_load_as_its_tokens_are_worth(
    role: str, cached_one: WorkerView, idle_one: WorkerView
) -> None:
    """A hot prefix does not pile up on one worker: each request there makes the idle worker more attractive.

    What a prefill worker has, another one reads.
    """
    other = PREFILL if role == "decode" else DECODE
    max_running, num_cached = 64, 1500
    saved = num_cached * (READ_SHARE if role == "prefill" else 1)
    for num_mine in range(max_running):
        busy = replace(cached_one, num_mine=num_mine, max_running=max_running)
        choice = choose_placement([other, busy, idle_one], Need(2000, cached={busy.incarnation: num_cached}))
        assert isinstance(choice, Placement)
        chosen = choice.decode if role == "decode" else choice.prefill
        is_worth_it = num_mine * BUSY_TOKENS / max_running < saved
        assert (chosen == busy) == is_worth_it, num_mine
    assert not is_worth_it


@pytest.mark.parametrize(
    ("case", "changed", "cached", "stored", "expected"),
    [
        ("the idler one reads from the other", {}, {"P1": 800}, {}, ("P2", "P1", 800)),
        ("if it has evicted that itself", {}, {"P1": 800, "P2": 800}, {}, ("P2", "P1", 800)),
        ("or its files do not have it", {}, {"P1": 800}, {"P2": 800}, ("P2", "P1", 800)),
        ("not a little", {}, {"P1": LEAST_LENT - 1}, {}, ("P2", None, 0)),
        ("but enough", {}, {"P1": LEAST_LENT}, {}, ("P2", "P1", LEAST_LENT)),
        ("nor from the dead", DEAD, {"P1": 800}, {}, ("P2", None, 0)),
        ("nor from another layout", OTHER, {"P1": 800}, {}, ("P2", None, 0)),
        ("from a full one", FULL | {"max_running": 4}, {"P1": 800}, {}, ("P2", "P1", 800)),
        ("and from a decode worker", {}, {"D1": 800}, {}, ("P2", "D1", 800)),
        ("whoever has more", {}, {"P1": 700, "D1": 800}, {}, ("P2", "D1", 800)),
        ("a page more is not worth it", {}, {"P1": 784, "D1": 800}, {}, ("P2", "P1", 784)),
        ("two are", {}, {"P1": 768, "D1": 800}, {}, ("P2", "D1", 800)),
        ("if both have as much, from a prefill worker", {}, {"P1": 800, "D1": 800}, {}, ("P2", "P1", 800)),
        ("and while it drains", DRAINING, {"P1": 800}, {}, ("P2", "P1", 800)),
    ],
)
def test_a_prefill_worker_reads_from_another_one_that_has_clearly_more(
    case: str, changed: dict[str, Any], cached: Mapping[str, int], stored: Mapping[str, int],
    expected: tuple[str, str | None, int],
) -> None:  # fmt: skip
    busy = replace(PREFILL, **{"num_mine": 3, "max_running": 64, **changed})  # that costs 384 tokens
    choice = choose_placement([busy, PREFILL_2, DECODE], Need(1000, cached=cached, stored=stored))
    assert isinstance(choice, Placement) and choice.prefill is not None
    lender = choice.lender.incarnation if choice.lender else None
    assert (choice.prefill.incarnation, lender) == expected[:2], case
    assert lender is None or choice.num_lent == expected[2]


@pytest.mark.parametrize(
    ("case", "workers", "cached", "expected"),
    [
        ("an answer that moved", [PREFILL, DECODE, LEAVING], {"D2": 992}, ("D1", None, "D2")),
        ("the rest takes a prefill worker", [PREFILL, DECODE, LEAVING], {"D2": 800}, ("D1", "P1", "D2")),
        ("no prefill worker is alive", [DECODE, LEAVING], {"D2": 800}, ("D1", None, "D2")),
        ("for a little nothing is asked", [DECODE, LEAVING], {"D1": 700, "D2": 800}, ("D1", None, None)),
        ("a prefill worker hands over what it has", [PREFILL, DECODE, LEAVING], {"P1": 992}, ("D1", "P1", None)),
        ("nor is what comes lent", [PREFILL, DECODE, DECODE_2], {"D2": 992}, ("D1", "P1", None)),
    ],
)
def test_a_decode_worker_reads_what_another_one_has_where_it_computes_the_rest(
    case: str, workers: Sequence[WorkerView], cached: Mapping[str, int], expected: object
) -> None:
    full = replace(DECODE_2, **FULL)
    workers = [full if view is DECODE_2 else view for view in workers]
    need = Need(1000, cached=cached, coming=frozenset(["D2"] if full in workers else ()))
    choice = choose_placement(workers, need)
    assert isinstance(choice, Placement)
    lender = choice.lender.incarnation if choice.lender else None
    assert (*names(choice), lender) == expected, case  # type: ignore[misc]


@pytest.mark.parametrize(
    ("missing", "limit", "expected"),
    [
        (0, 0, ("D1", None)),
        (1, 0, ("D1", "P1")),
        (8, 8, ("D1", None)),
        (9, 8, ("D1", "P1")),
        (9999, NO_LIMIT, ("D1", None)),
    ],
)
def test_short_prompts_are_prefilled_by_decode(missing: int, limit: int, expected: object) -> None:
    assert names(choose_placement([PREFILL, DECODE], Need(missing, LocalPrefill(limit)))) == expected


@pytest.mark.parametrize(
    ("avoid", "workers", "expected"),
    [
        ({"D1"}, [PREFILL, DECODE, replace(DECODE_2, num_mine=3)], ("D2", "P1")),
        ({"D1"}, [PREFILL, DECODE], ("D1", "P1")),
        ({"D1"}, [PREFILL, DECODE, replace(DECODE_2, **DEAD)], ("D1", "P1")),
        ({"D1"}, [PREFILL, DECODE, replace(DECODE_2, **FULL)], Wait),
        ({"P1"}, [PREFILL, replace(PREFILL_2, num_mine=3), DECODE], ("D1", "P2")),
        ({"P1"}, [PREFILL, DECODE], ("D1", None)),
        ({"D1", "D2"}, [PREFILL, DECODE, DECODE_2], ("D1", "P1")),
        ({"D1", "P1"}, [PREFILL, DECODE], ("D1", None)),
        ({"D1", "P1"}, [PREFILL, PREFILL_2, DECODE], ("D1", "P2")),
        ({"gone"}, [PREFILL, DECODE], ("D1", "P1")),
    ],
)
def test_workers_that_failed_are_asked_last(avoid: set[str], workers: Sequence[WorkerView], expected: object) -> None:
    assert names(choose_placement(workers, Need(100, LocalPrefill(), frozenset(avoid)))) == expected


@pytest.mark.parametrize(
    ("case", "workers", "missing", "avoid", "expected"),
    [
        ("one is alive", [PREFILL, DECODE], 100, set(), ("D1", "P1")),
        ("none is alive", [replace(PREFILL, **DEAD), DECODE], 100, set(), Unready),
        ("none matches", [replace(PREFILL, **OTHER), DECODE], 100, set(), Unready),
        ("what decode may prefill anyway needs none", [replace(PREFILL, **DEAD), DECODE], 8, set(), ("D1", None)),
        ("none has room", [replace(PREFILL, **FULL), DECODE], 100, set(), Wait),
        ("no decode worker has room", [replace(PREFILL, **DEAD), replace(DECODE, **FULL)], 100, set(), Wait),
        ("one that failed is asked again", [PREFILL, DECODE], 100, {"P1"}, ("D1", "P1")),
        ("but last", [PREFILL, replace(PREFILL_2, num_mine=3), DECODE], 100, {"P1"}, ("D1", "P2")),
        (
            "the idler decode worker has none, the other has one",
            [PREFILL, replace(DECODE, num_mine=1), replace(DECODE_2, **OTHER)], 100, set(), ("D1", "P1"),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("no_prefill", ["wait", "fail"])
def test_decode_does_not_stand_in_for_prefill_where_it_must_not(
    case: str, workers: Sequence[WorkerView], missing: int, avoid: set[str], expected: object, no_prefill: NoPrefill
) -> None:
    choice = choose_placement(workers, Need(missing, LocalPrefill(8), frozenset(avoid), no_prefill=no_prefill))
    assert names(choice) == expected, case
    if isinstance(choice, Unready):
        assert choice.role == "prefill" and choice.detail.startswith("no prefill worker")
        standing_in = choose_placement(workers, Need(missing, LocalPrefill(8), frozenset(avoid)))
        assert isinstance(standing_in, Placement) and standing_in.is_fallback


def test_standing_in_is_for_what_decode_would_not_prefill_anyway() -> None:
    for workers, missing, is_fallback in (
        ([DECODE], 100, True),
        ([PREFILL, DECODE], 8, False),
        ([replace(PREFILL, **DEAD), DECODE], 8, False),
        ([replace(PREFILL, **DEAD), DECODE], 9, True),
    ):
        choice = choose_placement(workers, Need(missing, LocalPrefill(8)))
        assert isinstance(choice, Placement) and choice.is_fallback is is_fallback


def test_unready_names_every_decode_worker_and_its_trouble() -> None:
    unknown = "no decode worker is known: name one with --decode; the log says which names DNS does not know"
    assert find_unready([PREFILL]) == Unready(unknown)
    dead = [replace(DECODE, **DEAD), replace(DECODE_2, is_alive=False, trouble="is draining")]
    assert find_unready(dead) == Unready("no decode worker is alive: d:1 does not answer; d:2 is draining")
    assert find_unready([*dead, replace(DECODE, address="d:3")]) is None


def on_cpus(
    view: WorkerView, num_threads: int, *cpus: int, host: str = "h", quota: int = 0, group: int = 0
) -> WorkerView:
    num_cores = quota or len(cpus)
    return replace(view, host=host, num_threads=num_threads, cpus=frozenset(cpus), num_cores=num_cores, cpu_group=group)


@pytest.mark.parametrize(
    ("decode", "prefill", "is_local"),
    [
        (on_cpus(DECODE, 2, 0, 1), on_cpus(PREFILL, 2, 0, 1), True),
        (on_cpus(DECODE, 1, 0, 1), on_cpus(PREFILL, 1, 0, 1), False),  # one core each
        (on_cpus(DECODE, 2, 0, 1, 2), on_cpus(PREFILL, 2, 0, 1, 2), True),
        (on_cpus(DECODE, 2, 0, 1), on_cpus(PREFILL, 2, 0, 1, host="other"), False),
        (on_cpus(DECODE, 0, 0, 1), on_cpus(PREFILL, 2, 0, 1), False),  # decode computes on a GPU
        (on_cpus(DECODE, 1, 0), on_cpus(PREFILL, 1, 1), False),  # pinned to cores of their own
        (on_cpus(DECODE, 2, 0), on_cpus(PREFILL, 2, 1), False),  # each too many, but not for the other
        (on_cpus(DECODE, 2, 0, 1), on_cpus(PREFILL, 2, 1, 2), True),
        (on_cpus(DECODE, 2, 0, 1), on_cpus(PREFILL, 2, 1, 2, 3), False),
        (on_cpus(DECODE, 1, 0), on_cpus(PREFILL, 4, 0, 1, 2, 3), True),
        # containers with a quota each, and one container for both
        (on_cpus(DECODE, 2, *range(8), quota=2, group=5), on_cpus(PREFILL, 2, *range(8), quota=2, group=6), False),
        (on_cpus(DECODE, 2, *range(8), quota=2, group=5), on_cpus(PREFILL, 2, *range(8), quota=2, group=5), True),
        (on_cpus(DECODE, 1, 0, quota=1, group=5), on_cpus(PREFILL, 1, 1, quota=1, group=5), True),
        (on_cpus(DECODE, 2, 0, 1, quota=1, group=5), on_cpus(PREFILL, 1, 0, 1), True),
    ],
)
def test_decode_prefills_where_both_roles_want_the_same_cores(
    decode: WorkerView, prefill: WorkerView, is_local: bool
) -> None:
    views = [decode, prefill]
    choice = choose_placement(views, Need(1000, MeasuredLocalPrefill()))
    assert isinstance(choice, Placement) and (choice.prefill is None) is is_local
    assert choice.local_prefill_max_tokens == (NO_LIMIT if is_local else 0)
    assert ("--local-prefill-max-tokens 0" in MeasuredLocalPrefill().explain(views)) is is_local
    assert MeasuredLocalPrefill().explain(views[:1]) == LocalPrefill().explain(views) == ""
    forced = choose_placement(views, Need(1000))
    assert isinstance(forced, Placement) and forced.prefill is not None
    elsewhere = on_cpus(PREFILL_2, 4, *range(4), host="h2")
    handed = choose_placement([*views, elsewhere], Need(1000, MeasuredLocalPrefill()))
    assert isinstance(handed, Placement) and handed.prefill is not None  # one of them uses no cores
    assert MeasuredLocalPrefill().explain([*views, elsewhere]) == ""


COSTS = ChunkCosts(0.0028, 0.0024, 2e-5, 256, 1e-6)


@pytest.mark.parametrize(
    ("setting", "missing", "decode_has", "prefill_has", "limit", "why"),
    [
        (None, 200, {}, {}, 200, "200 tokens cost 9 ms on the decode worker beside 0 answers, 10 ms by hand-off"),
        (None, 1000, {}, {}, None, "1000 tokens cost 41 ms on the decode worker beside 0 answers, 31 ms by hand-off"),
        (None, 200, {"num_mine": 3}, {}, None, "200 tokens cost 28 ms on the decode worker beside 3 answers"),
        (None, 200, {}, {"num_threads": 4, "cpus": frozenset(range(4))}, None, ""),
        (None, 200, {"costs": ChunkCosts()}, {}, None, ""),
        (None, 200, {}, {"tokens_per_s": 0.0}, None, ""),
        (None, 200, {"num_mine": 3}, {"tokens_waiting": 8000}, 200, "beside 3 answers, 210 ms by hand-off"),
        (None, 200, {}, {"is_alive": False}, NO_LIMIT, "no prefill worker is alive"),
        (0, 200, {}, {"tokens_waiting": 8000}, None, ""),
        (512, 500, {"num_mine": 3}, {}, 512, "within --local-prefill-max-tokens"),
    ],
)
def test_short_prompts_are_computed_where_that_costs_less_time(
    setting: int | None, missing: int, decode_has: dict[str, Any], prefill_has: dict[str, Any], limit: int | None,
    why: str,
) -> None:  # fmt: skip
    decode = replace(DECODE, **{"costs": COSTS, **decode_has})
    prefill = replace(PREFILL, **{"tokens_per_s": 40_000.0, **prefill_has})
    choice = choose_placement([prefill, decode], Need(missing, choose_local_prefill(setting)))
    assert isinstance(choice, Placement) and (choice.prefill is None) is (limit is not None)
    assert choice.local_prefill_max_tokens == (setting or 0 if limit is None else limit)
    assert why in choice.why and bool(why) is bool(choice.why)


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerView]:
    views = []
    for number in range(draw(st.integers(0, 5))):
        is_alive, max_running = draw(st.booleans()), draw(st.integers(1, 3))
        one = draw(st.sampled_from([PREFILL, DECODE]))
        changes: dict[str, Any] = {"address": f"host:{number}", "incarnation": f"I{number}", "max_running": max_running}
        changes |= {"is_alive": is_alive, "num_mine": draw(st.integers(0, max_running)), "is_full": draw(st.booleans())}
        changes |= {"layout": draw(st.sampled_from([b"a", b"b"])), "page_tokens": draw(st.sampled_from([1, 4]))}
        views.append(replace(one, free_pages=draw(st.integers(0, 3)), **changes))
    return views


@settings(max_examples=examples(100))
@given(fleet=fleets())
def test_a_worker_with_room_is_always_found(fleet: list[WorkerView]) -> None:
    """With local prefill for all, waiting means that every living decode worker is full."""
    choice = choose_placement(fleet, Need(1, LocalPrefill(NO_LIMIT)))
    decodes = [view for view in fleet if view.role == "decode" and view.is_alive and not view.is_full]
    open_decodes = [view for view in decodes if view.num_mine < view.max_running]
    assert isinstance(choice, Placement) == bool(open_decodes)
    if isinstance(choice, Placement):
        assert choice.decode in open_decodes
        least = min(view.num_mine / view.max_running for view in open_decodes)
        assert choice.decode.num_mine / choice.decode.max_running == least


def test_a_session_goes_home_unless_that_is_busy_or_more_is_cached_elsewhere() -> None:
    workers = [replace(view, max_running=64) for view in (PREFILL, PREFILL_2, DECODE, DECODE_2)]
    home = Need(1000, homes=frozenset({"D2", "P2"}))
    assert names(choose_placement(workers, home)) == ("D2", "P2")
    (_, _, one, two) = workers
    assert names(choose_placement([*workers[:3], replace(two, num_mine=3)], home)) == ("D2", "P2")
    assert names(choose_placement([*workers[:3], replace(two, num_mine=5)], home)) == ("D1", "P2"), "busy"
    assert names(choose_placement(workers, replace(home, cached={"D1": 496}))) == ("D2", "P2")
    assert names(choose_placement(workers, replace(home, cached={"D1": 528}))) == ("D1", "P2"), "more is there"
    assert names(choose_placement([PREFILL, one], home)) == ("D1", "P1"), "it is gone"


def test_every_gateway_finds_the_same_homes_which_spread_and_stay_when_others_come_and_go() -> None:
    workers = [replace(DECODE, incarnation=f"D{number}") for number in range(8)]
    workers += [replace(PREFILL, incarnation=f"P{number}") for number in range(4)]
    sessions = [f"session {number}" for number in range(400)]
    ring = Homes()
    homes = {one: ring.find(one, workers) for one in sessions}
    assert all(Homes().find(one, workers[::-1]) == home for one, home in homes.items()), "in any order"
    assert all(sorted(name[0] for name in home) == ["D", "P"] for home in homes.values())
    for view in workers:
        fair = len(sessions) / sum(other.role == view.role for other in workers)
        assert fair / 2 < sum(view.incarnation in home for home in homes.values()) < fair * 2
    left = [replace(workers[0], **DEAD), *workers[1:]]
    assert all(
        ring.find(one, left) == Homes().find(one, left) == home for one, home in homes.items() if "D0" not in home
    )
    assert not ring.find("", workers) and not ring.find("s", [])
    both = [replace(view, incarnation="B") for view in (DECODE, PREFILL)]
    assert ring.find("s", both) == {"B"}, "one worker of both roles"
    found = {ring.find(one, [*both, DECODE]) for one in sessions}
    assert found == {frozenset("B"), frozenset({"B", "D1"})}


def test_the_ring_forgets_workers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.policies.homes.MAX_GONE", 8)
    ring, first = Homes(), replace(DECODE, incarnation="first")
    home = ring.find("s", [first, PREFILL])
    for number in range(30):
        assert ring.find("s", [replace(DECODE, incarnation=f"D{number}")]) == {f"D{number}"}
        assert len(ring._names) < 12
    assert ring.find("s", [first, PREFILL]) == home == {"first", "P1"}, "they are back"
