"""New requests and revisions: shares, complete revisions, pairs of one revision, conversations that stay."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policies.rollout import Rollout
from gateway.router.placement import Need, Placement, choose_placement
from gateway.router.readiness import Unready, find_no_prefill
from gateway.router.worker_view import WorkerView
from runtime.config_parts import check_shares
from tests.gateway.router.test_requests import answer, check_error
from tests.support.virtual_fleet import VirtualFleet, virtual_fleet, wanted
from tests.support.worker_views import DECODE, DECODE_2, PREFILL, PREFILL_2

DEAD: dict[str, Any] = {"is_alive": False, "trouble": "does not answer"}
OLD = [replace(PREFILL, revision="old"), replace(DECODE, revision="old")]
NEW = [replace(PREFILL_2, revision="new"), replace(DECODE_2, revision="new")]
THIRD = [
    replace(view, revision="third", address=f"{view.address}9", incarnation=f"{view.incarnation}9") for view in OLD
]
KEYS = [f"session-{number}" for number in range(2000)]


def chosen(shares: Mapping[str, float], workers: Sequence[WorkerView], key: str = "s") -> set[str]:
    return {view.revision for view in Rollout(shares).choose(workers, key)}


@pytest.mark.parametrize(
    ("case", "shares", "workers", "expected"),
    [
        ("one revision", {}, OLD, {"old"}),
        ("no shares: all, by load", {}, [*OLD, *NEW], {"old", "new"}),
        ("its prefill worker is not there yet", {}, [*OLD, NEW[1]], {"old"}),
        ("nor its decode worker", {}, [*OLD, NEW[0]], {"old"}),
        ("one that is dead does not count", {}, [*OLD, replace(NEW[0], **DEAD), NEW[1]], {"old"}),
        ("no prefill workers at all", {}, [OLD[1], NEW[1]], {"old", "new"}),
        ("without any that is complete, those that decode", {}, [replace(OLD[0], **DEAD), OLD[1]], {"old"}),
        ("all to the new one", {"new": 1.0}, [*OLD, *NEW], {"new"}),
        ("none to the old one", {"old": 0.0}, [*OLD, *NEW], {"new"}),
        ("a share for one that is not complete", {"new": 1.0}, [*OLD, NEW[0]], set()),
        ("what is left is for the others", {"new": 0.0}, [*OLD, *NEW, *THIRD], {"old", "third"}),
    ],
)
def test_new_requests_go_to_complete_revisions_that_have_a_share(
    case: str, shares: Mapping[str, float], workers: Sequence[WorkerView], expected: set[str]
) -> None:
    assert chosen(shares, workers) == expected, case


def test_shares_are_kept_and_sessions_move_only_to_the_growing_revision() -> None:
    workers = [*OLD, *NEW]
    before = dict.fromkeys(KEYS, "old")
    for share in (0.1, 0.3, 0.5, 1.0):
        now = {key: chosen({"new": share}, workers, key).pop() for key in KEYS}
        assert Counter(now.values())["new"] / len(KEYS) == pytest.approx(share, abs=0.03)
        assert not any(before[key] == "new" and now[key] == "old" for key in KEYS)
        before = now


def test_shares_of_one_model_leave_the_others_alone() -> None:
    """{"new": 1} for one model, of which `third` is none: the other model's workers have no revision with a share."""
    both = Rollout({"new": 0.5, "third": 0.5}, is_for_several=True)
    drawn = {view.revision for key in KEYS[:50] for view in both.choose([*OLD, *NEW], key)}
    assert drawn == {"old", "new"}, "half of its requests go to `new`, the rest to its old one"
    for shares in ({"new": 1.0}, {"new": 0.0}):
        several = Rollout(shares, is_for_several=True)
        assert {view.revision for view in several.choose([*OLD, *THIRD], "s")} == {"old", "third"}
        dead = [replace(view, **DEAD) for view in NEW]
        found = {view.revision for view in several.choose([*OLD, *dead], "s")}
        assert found == (set() if shares["new"] else {"old"}), "known and dead: the operator's wish counts"


@given(st.dictionaries(st.sampled_from(["old", "new", "third"]), st.floats(0, 1), max_size=3), st.text(max_size=9))
def test_a_choice_is_one_revision_with_a_share_or_all_without(shares: dict[str, float], key: str) -> None:
    if check_shares(shares) is not None:
        return
    found = chosen(shares, [*OLD, *NEW, *THIRD], key)
    assert all(shares.get(name, 1.0) > 0 for name in found)
    assert len(found) == 1 if found & shares.keys() else found <= {"old", "new", "third"} - shares.keys()
    assert found or sum(shares.values()) <= 1e-9 or sum(shares.values()) >= 1 - 1e-9


def test_a_request_is_prefilled_by_the_revision_that_decodes_it() -> None:
    """Even where pages would fit: two revisions may have the same weights."""
    busy = replace(OLD[0], num_mine=3)
    choice = choose_placement([busy, OLD[1], NEW[0]], Need(1000))
    assert isinstance(choice, Placement) and choice.prefill == busy
    alone = choose_placement([OLD[1], NEW[0]], Need(1000))
    assert isinstance(alone, Placement) and alone.prefill is None
    assert find_no_prefill([OLD[1], NEW[0]]) is not None and find_no_prefill([*OLD, NEW[0]]) is None
    assert isinstance(choose_placement([OLD[1], NEW[0]], Need(1000, no_prefill="wait")), Unready)


def test_what_was_lent_by_another_revision_is_read_all_the_same() -> None:
    lent = choose_placement([*OLD, *NEW], Need(1000, cached={"D2": 992, "P1": 0}, avoid=frozenset({"D2"})))
    assert isinstance(lent, Placement) and lent.decode == OLD[1] and lent.lender == NEW[1]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"new": 1.5}, "from 0 to 1"),
        ({"new": -0.1}, "from 0 to 1"),
        ({"new": float("nan")}, "from 0 to 1"),
        ({"new": 0.6, "old": 0.6}, "add up to 1.2"),
        ({"": 0.5}, "no name"),
    ],
)
def test_wrong_shares_are_named(shares: Mapping[str, float], said: str) -> None:
    assert said in (check_shares(shares) or "")
    assert check_shares({"new": 0.4, "old": 0.6}) is None


def test_a_refusal_names_shares_and_what_is_alive() -> None:
    said = Rollout({"new": 1.0}).explain([*OLD, NEW[0]])
    assert "new=1" in said and "alive are: old" in said and "baton rollout" in said


# -- the real router -------------------------------------------------------------------------------------------------


@contextmanager
def two_revisions(shares: Mapping[str, float], **fields: Any) -> Iterator[VirtualFleet]:
    """D1 and P1 are of revision old, D2 and P2 of new."""
    with virtual_fleet(decode=2, prefill=2, is_started=False, **fields) as fleet:
        for old, new in (fleet.decodes, fleet.prefills):
            old.peer.revision, new.peer.revision = "old", "new"
        fleet.rollout.shares = shares
        fleet.start()
        yield fleet


def drawn(revision: str, count: int, shares: Mapping[str, float]) -> list[str]:
    """Names of requests that go there."""
    names = (f"r{number}" for number in range(1000))
    return [name for name in names if chosen(shares, [*OLD, *NEW], name) == {revision}][:count]


def test_a_request_whose_revision_is_busy_does_not_hold_up_those_of_another() -> None:
    shares = {"new": 0.5}
    with two_revisions(shares, max_running=1) as fleet:
        old, new = fleet.decodes
        first, waiting = (fleet.ask(name) for name in drawn("old", 2, shares))
        (other,) = (fleet.ask(name) for name in drawn("new", 1, shares))
        assert (len(old.sessions), len(new.sessions)) == (1, 1) and fleet.router.admission.num_waiting == 1
        assert {run.request_id for run in fleet.prefills[1].runs} == {other.name}
        for session in (new.sessions[0], old.sessions[0]):
            session.emit(4, "length")
        fleet.run(0.1)
        assert [one.request.request_id for one in old.sessions] == [first.name, waiting.name]
        old.sessions[1].emit(4, "length")
        fleet.run()
        assert waiting.tokens == answer(4)


def test_of_those_that_wait_for_a_busy_revision_only_the_first_looks_for_a_place() -> None:
    """A look at a queue of thousands costs no choice for each."""
    shares = {"new": 0.5}
    with two_revisions(shares, max_running=1, max_queue=50) as fleet:
        waiting = [fleet.ask(name) for name in drawn("old", 12, shares)]
        with mock.patch.object(fleet.placer, "choose", side_effect=fleet.placer.choose) as choose:
            (other,) = (fleet.ask(name) for name in drawn("new", 1, shares))
            assert choose.call_count < 5, "twice of the first that waits, and of the other"
        for session in (one for _ in range(13) for worker in fleet.decodes for one in worker.sessions):
            if not session.is_over:
                session.emit(4, "length")
            fleet.run(0.1)
        assert [one.tokens for one in (*waiting, other)] == [answer(4)] * 13


def test_all_answers_to_a_request_go_to_one_revision() -> None:
    with two_revisions({"new": 0.5}, max_running=8) as fleet:
        for number in range(12):
            before = [len(one.sessions) for one in fleet.decodes]
            first, second = (wanted(f"call-{number}-{at}", call=f"call-{number}") for at in range(2))
            client = fleet.ask(first, second)
            placed = [len(one.sessions) - num for one, num in zip(fleet.decodes, before, strict=True)]
            assert sorted(placed) == [0, 2]
            for session in [one for worker in fleet.decodes for one in worker.sessions if not one.is_over]:
                session.emit(4, "length")
            fleet.run()
            assert client.tokens == answer(4)
        assert all(one.sessions for one in fleet.decodes)


def test_shares_that_add_up_to_one_leave_nothing_for_others() -> None:
    assert sum((0.7, 0.2, 0.1)) < 1
    assert chosen({"new": 0.7, "a": 0.2, "b": 0.1}, OLD) == set()


def test_an_answer_runs_to_its_end_where_it_began_and_a_new_request_goes_to_the_new_revision() -> None:
    with two_revisions({}) as fleet:
        old, new = fleet.decodes
        begun = fleet.ask("begun")
        (session,) = [*old.sessions, *new.sessions]
        other = "new" if session in old.sessions else "old"
        session.emit(2)
        fleet.rollout.shares = {other: 1.0}
        later = fleet.ask("later")
        (after,) = new.sessions if other == "new" else old.sessions
        session.emit(2, "length")
        after.emit(4, "length")
        fleet.run()
        assert begun.tokens == later.tokens == answer(4)


def test_an_answer_goes_on_at_another_revision_of_the_same_weights_only() -> None:
    for weights in ("w", "other"):
        with two_revisions({"old": 1.0}, patience_s=5.0) as fleet:
            old, new = fleet.decodes
            new.peer.layout.weights = weights
            fleet.run(2.0)
            client = fleet.ask("r")
            old.sessions[0].emit(2)
            fleet.run()
            fleet.kill(old)
            fleet.run(20.0)
            if weights == "w":
                new.sessions[0].emit(2, "length")
                fleet.run()
                assert client.tokens == answer(4)
            else:
                check_error(
                    client, 503, "the answer began with the weights w, which no decode worker that is alive has"
                )


def test_a_request_is_refused_by_name_where_no_revision_with_a_share_comes_in_time() -> None:
    with two_revisions({"next": 1.0}, patience_s=5.0) as fleet:
        client = fleet.ask()
        fleet.run(4.0)
        assert client.error is None
        fleet.run(2.0)
        check_error(
            client, 503, "new requests go to next=1, of which no decode worker is alive, and alive are: new, old"
        )
        waiting = fleet.ask("waiting")
        fleet.run(1.0)
        fleet.rollout.shares = {"new": 1.0}
        fleet.run(2.0)
        fleet.decodes[1].sessions[0].emit(4, "length")
        fleet.run()
        assert waiting.tokens == answer(4)
