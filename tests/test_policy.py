"""Where requests go: a table of cases, and properties over random fleets."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ring.policy import (
    NO_LIMIT,
    Placement,
    Unready,
    Wait,
    WaitBeside,
    WorkerView,
    choose_beside,
    choose_placement,
    find_unready,
)

DECODE = WorkerView(
    role="decode",
    address="d:1",
    incarnation="D1",
    layout=b"layout",
    is_alive=True,
    trouble="",
    max_running=4,
    num_mine=0,
    is_full=False,
    free_pages=10,
)
PREFILL = replace(DECODE, role="prefill", address="p:1", incarnation="P1")
DECODE_2 = replace(DECODE, address="d:2", incarnation="D2")
PREFILL_2 = replace(PREFILL, address="p:2", incarnation="P2")
DEAD: dict[str, Any] = {"is_alive": False, "trouble": "does not answer"}
FULL: dict[str, Any] = {"num_mine": 4}
OTHER: dict[str, Any] = {"layout": b"other"}


def names(choice: Placement | Wait | WaitBeside | Unready) -> object:
    """A choice in short: ("D1", "P1"), ("D1", None), Wait, WaitBeside or Unready."""
    if isinstance(choice, Placement):
        return choice.decode.incarnation, choice.prefill.incarnation if choice.prefill else None
    return type(choice)


@pytest.mark.parametrize(
    ("case", "workers", "expected"),
    [
        ("a pair", [PREFILL, DECODE], ("D1", "P1")),
        ("nobody", [], Unready),
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
        ("at equal load more free pages", [PREFILL, DECODE, replace(DECODE_2, free_pages=11)], ("D2", "P1")),
        (
            "the idler decode worker has no compatible prefill worker with room",
            [replace(PREFILL, **FULL), replace(PREFILL_2, **OTHER), DECODE, replace(DECODE_2, num_mine=1, **OTHER)],
            ("D2", "P2"),
        ),
    ],
)
def test_placement(case: str, workers: Sequence[WorkerView], expected: object) -> None:
    assert names(choose_placement(workers, 100, 0)) == expected, case


@pytest.mark.parametrize(
    ("case", "workers", "expected"),
    [
        (
            "the one with the session, though another is idler",
            [PREFILL, replace(DECODE, num_mine=3), DECODE_2],
            ("D1", None),
        ),
        ("a full one is waited for, though another has room", [PREFILL, replace(DECODE, **FULL), DECODE_2], WaitBeside),
        ("so is one that refused", [replace(DECODE, is_full=True), DECODE_2], WaitBeside),
        ("it is dead", [replace(DECODE, **DEAD), DECODE_2], Unready),
        ("it came back without the session", [replace(DECODE, incarnation="D1 again"), DECODE_2], Unready),
        ("it is gone", [PREFILL], Unready),
        ("a prefill worker is no place for it", [replace(PREFILL, incarnation="D1")], Unready),
    ],
)
def test_place_beside_a_session(case: str, workers: Sequence[WorkerView], expected: object) -> None:
    assert names(choose_beside(workers, "D1")) == expected, case


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
    assert names(choose_placement([PREFILL, DECODE], missing, limit)) == expected


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
    assert names(choose_placement(workers, 100, 0, frozenset(avoid))) == expected


def test_unready_names_every_decode_worker_and_its_trouble() -> None:
    assert find_unready([PREFILL]) == "no decode worker is configured; name one with --decode"
    dead = [replace(DECODE, **DEAD), replace(DECODE_2, is_alive=False, trouble="is draining")]
    assert find_unready(dead) == "no decode worker is alive: d:1 does not answer; d:2 is draining"
    assert find_unready([*dead, replace(DECODE, address="d:3")]) is None


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerView]:
    views = []
    for number in range(draw(st.integers(0, 5))):
        is_alive, max_running = draw(st.booleans()), draw(st.integers(1, 3))
        views.append(
            WorkerView(
                role=draw(st.sampled_from(["prefill", "decode"])),
                address=f"host:{number}",
                incarnation=f"I{number}",
                layout=draw(st.sampled_from([b"a", b"b"])),
                is_alive=is_alive,
                trouble="" if is_alive else "is dead",
                max_running=max_running,
                num_mine=draw(st.integers(0, max_running)),
                is_full=draw(st.booleans()),
                free_pages=draw(st.integers(0, 3)),
            )
        )
    return views


@settings(max_examples=400)
@given(
    fleet=fleets(), missing=st.integers(0, 9), limit=st.integers(0, 9), avoid=st.frozensets(st.sampled_from("I01234"))
)
def test_a_placement_can_serve(fleet: list[WorkerView], missing: int, limit: int, avoid: frozenset[str]) -> None:
    choice = choose_placement(fleet, missing, limit, frozenset(f"I{name}" for name in avoid))
    decodes = [view for view in fleet if view.role == "decode" and view.is_alive]
    if isinstance(choice, Unready):
        assert not decodes
    elif isinstance(choice, Wait):
        assert decodes
    else:
        chosen = [choice.decode, *([choice.prefill] if choice.prefill else [])]
        assert choice.decode.role == "decode"
        for view in chosen:
            assert view.is_alive and not view.is_full and view.num_mine < view.max_running
        if choice.prefill is not None:
            assert choice.prefill.role == "prefill" and choice.prefill.layout == choice.decode.layout
            assert missing > limit


@settings(max_examples=200)
@given(fleet=fleets())
def test_somebody_with_room_is_always_found(fleet: list[WorkerView]) -> None:
    """With local prefill for all, waiting means that every living decode worker is full."""
    choice = choose_placement(fleet, 1, NO_LIMIT)
    open_decodes = [
        view
        for view in fleet
        if view.role == "decode" and view.is_alive and not view.is_full and view.num_mine < view.max_running
    ]
    assert isinstance(choice, Placement) == bool(open_decodes)
    if isinstance(choice, Placement):
        least = min(view.num_mine / view.max_running for view in open_decodes)
        assert choice.decode.num_mine / choice.decode.max_running == least
