"""How roles follow the load: by example, and over random courses."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.router.worker_view import Role, WorkerView
from gateway.scaling.roles import HOLD_S, REST_S, ROLES, Change, RoleBalance, Seen
from tests.support.combinations import examples
from tests.support.worker_views import DECODE, PREFILL

PREFILLS: tuple[Role, ...] = ("prefill",)
DECODES: tuple[Role, ...] = ("decode",)
SPEED = 1000.0  # prompt tokens that a worker computes a second


class Workers:
    """Workers of both roles: name |-> its open roles."""

    def __init__(self, *roles: Iterable[Role]) -> None:
        self.open = {f"W{number}": tuple(some) for number, some in enumerate(roles)}
        self.dead = set[str]()
        self.running: dict[str, int] = {}
        self.used_pages = 90  # of 100, of each
        self.revisions: dict[str, str] = {}

    def views(self) -> list[WorkerView]:
        return [
            replace(
                view, address=name, incarnation=name, is_alive=name not in self.dead and view.role in some,
                is_closed=view.role not in some, tokens_per_s=SPEED, num_mine=self.running.get(name, 0),
                max_running=10, free_pages=100 - self.used_pages, revision=self.revisions.get(name, ""),
            )
            for name, some in self.open.items()
            for view in (PREFILL, DECODE)
        ]  # fmt: skip

    def count(self, role: Role) -> int:
        return sum(role in some for name, some in self.open.items() if name not in self.dead)


def follow(
    workers: Workers, balance: RoleBalance, seconds: int, tokens_per_s: float, num_answering: int, begin: int = 0,
    num_waiting: int = 0,
) -> list[tuple[int, Change]]:  # fmt: skip
    """The changes under a steady load, when they came."""
    changes = []
    for now in range(begin, begin + seconds):
        seen = Seen(now * tokens_per_s, num_answering, 0, num_waiting)
        for change in balance.look(workers.views(), seen, float(now)):
            workers.open[change.incarnation] = change.roles
            changes.append((now, change))
    return changes


def test_workers_are_divided_like_the_demand_one_at_a_time() -> None:
    workers, balance = Workers(["prefill"], ["decode"], ["decode"], ["decode"]), RoleBalance()
    changes = follow(workers, balance, 60, 2700.0, 3)  # 2.7 workers of prompts, 0.3 of answers
    assert workers.count("prefill") == 3 and workers.count("decode") == 1
    times = [now for now, _ in changes]
    assert len(times) == 2 and times[0] >= HOLD_S and times[1] - times[0] >= REST_S
    assert follow(workers, balance, 60, 2700.0, 3, 60) == []
    follow(workers, balance, 120, 100.0, 28, 120)
    assert workers.count("prefill") == 1 and workers.count("decode") == 3


def test_of_those_that_could_change_the_one_with_least_to_do_does() -> None:
    workers = Workers(["prefill"], ["decode"], ["decode"], ["decode"])
    workers.running = {"W1": 3, "W2": 1, "W3": 2}
    assert follow(workers, RoleBalance(), 60, 2700.0, 3)[0][1] == Change("W2", ("prefill",))


def test_an_idle_fleet_stays_as_it_is() -> None:
    assert follow(Workers(["prefill"], ["decode"], ["decode"]), RoleBalance(), 60, 50.0, 0) == []


def test_workers_that_take_both_without_load_are_divided_evenly() -> None:
    workers = Workers(*[ROLES] * 8)
    follow(workers, RoleBalance(), 20, 0.0, 0)
    assert workers.count("prefill") == workers.count("decode") == 4


def test_requests_that_wait_for_answers_places_get_them_from_idle_workers() -> None:
    workers = Workers(DECODES, *[PREFILLS] * 9)
    workers.running = {"W0": 10}
    assert follow(workers, RoleBalance(), 60, 100.0, 10) == [], "nobody waits"
    follow(workers, RoleBalance(), 60, 100.0, 10, num_waiting=30)
    assert workers.count("decode") == 2, "with which none is full"


def test_places_are_those_that_the_pages_hold() -> None:
    """Answers that are long take most pages of few places."""
    workers = Workers(DECODES, *[PREFILLS] * 5)
    workers.running, workers.used_pages = dict.fromkeys(workers.open, 2), 100
    follow(workers, RoleBalance(), 60, 1000.0, 4)  # 1 worker of prompts, 2 of such answers, 0.4 of short ones
    assert workers.count("decode") == 4


def test_of_many_workers_some_change_at_once() -> None:
    workers = Workers(*[PREFILLS] * 150, *[DECODES] * 50)
    changes = follow(workers, RoleBalance(), 120, 50_000.0, 1500)  # 50 workers of prompts, 150 of answers
    assert abs(workers.count("prefill") - 50) <= 10
    at_once = [now for now, _ in changes]
    assert max(map(at_once.count, at_once)) == 10, "a twentieth of them"


def test_the_workers_of_each_revision_take_both_roles() -> None:
    """During a rollout the new ones serve alone."""
    workers = Workers(["prefill"], ["decode"], ["prefill"], ["prefill"])
    workers.revisions = {"W2": "new", "W3": "new"}
    changes = follow(workers, RoleBalance(), 10, 0.0, 0)
    assert [change.roles for _, change in changes] == [ROLES, ("decode",)], "first beside the old role"
    assert {workers.open["W2"], workers.open["W3"]} == {("prefill",), ("decode",)}


def test_a_role_that_nobody_takes_is_taken_beside_the_other_and_given_back() -> None:
    workers = Workers(["prefill"], ["decode"], ["prefill"])
    workers.dead, workers.running = {"W1"}, {"W0": 2}
    assert follow(workers, RoleBalance(), 1, 0.0, 0) == [(0, Change("W2", ROLES))]
    workers.dead = set()
    ((_, change),) = follow(workers, RoleBalance(), 1, 0.0, 5)
    assert change == Change("W2", ("decode",)), "of prefill there is another one, and more decode is needed"


def test_workers_of_one_role_are_not_asked() -> None:
    views = [PREFILL, DECODE, replace(DECODE, address="d:2", incarnation="D2")]
    balance = RoleBalance()
    for now in range(60):
        assert balance.look(views, Seen(now * 1e6, 0, 10**6, 10), float(now)) == []


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5000), st.integers(0, 50), st.sets(st.integers(0, 4))), min_size=1, max_size=5),
    st.integers(2, 5),
)
def test_there_is_one_of_each_role_while_two_live_and_it_comes_to_rest(
    courses: list[tuple[float, int, set[int]]], count: int
) -> None:
    workers, balance, now = Workers(*[ROLES] * count), RoleBalance(), 0
    for tokens_per_s, num_answering, dead in courses:
        workers.dead = {f"W{number}" for number in dead if number < count}
        changes = follow(workers, balance, 100, tokens_per_s, num_answering, now)
        now += 100
        if len(workers.dead) < count:
            assert workers.count("prefill") and workers.count("decode")
        assert all(at < now - 30 for at, _ in changes), "a steady load ends in a steady division"
