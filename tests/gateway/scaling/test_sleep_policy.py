"""Which models sleep and which wake, in a world of models whose requests come and end as hypothesis likes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.router.engine_client import State
from gateway.scaling.sleep_policy import TURN_S, Decision, ModelView, decide

Policy = Callable[[Sequence[ModelView], int, float, float], Decision]
LONGEST_S, WAKE_S = 8.0, 2.0  # of a request, of a wake or a fall


@dataclass
class Model:
    """What the gates and the supervisor make of one model."""

    name: str
    state: State
    changes_at: float = 0.0  # when a fall or a wake ends
    inside: list[float] = field(default_factory=list)  # when each request ends
    waiting: list[float] = field(default_factory=list)  # when each came
    idle_since: float = 0.0
    awake_since: float = 0.0
    is_closed: bool = False

    def view(self) -> ModelView:
        since = self.waiting[0] if self.waiting else None
        return ModelView(self.name, self.state, len(self.inside), since, self.idle_since, self.awake_since)


class World:
    """Checks each decision, and that nobody waits for longer than all turns before take."""

    def __init__(self, num_models: int, max_awake: int, sleep_after_s: float, policy: Policy, seed: int) -> None:
        self.models = [Model(str(n), "awake" if n < max_awake else "asleep") for n in range(num_models)]
        self.max_awake, self.sleep_after_s, self.policy = max_awake, sleep_after_s, policy
        self.random, self.now = random.Random(seed), 0.0
        self.most_s = num_models * (TURN_S + LONGEST_S + 2 * WAKE_S) + 1

    def ask(self, index: int, num: int = 1) -> None:
        self.models[index % len(self.models)].waiting += [self.now] * num

    def step(self) -> None:
        self.now += 0.5
        for model in self.models:
            if model.state in ("falling asleep", "waking") and self.now >= model.changes_at:
                is_failed = model.state == "waking" and self.random.random() < 0.1
                model.state = "failed" if is_failed else "awake" if model.state == "waking" else "asleep"
                if is_failed:
                    model.waiting.clear()
                model.idle_since = model.awake_since = self.now
            if model.inside and min(model.inside) <= self.now:
                model.inside = [end for end in model.inside if end > self.now]
                model.idle_since = self.now
        self.apply(self.policy([model.view() for model in self.models], self.max_awake, self.sleep_after_s, self.now))
        for model in self.models:
            if model.state == "awake" and not model.is_closed:
                model.inside += [self.now + self.random.uniform(0.1, LONGEST_S) for _ in model.waiting]
                model.waiting.clear()
            assert not model.waiting or self.now - model.waiting[0] <= self.most_s, f"{model.name} is starved"

    def apply(self, decision: Decision) -> None:
        for model in self.models:
            model.is_closed = model.name in decision.closed
            if model.name in decision.sleep:
                assert model.state == "awake" and not model.inside, "a busy model is put to sleep"
                model.state, model.changes_at, model.is_closed = "falling asleep", self.now + WAKE_S, False
            if model.name in decision.wake:
                assert model.state in ("asleep", "failed") and model.waiting, "it wakes for no request"
                model.state, model.changes_at = "waking", self.now + WAKE_S
        num_resident = sum(model.state in ("awake", "falling asleep", "waking") for model in self.models)
        assert num_resident <= self.max_awake, "too many are awake"
        others_wait = any(model.state in ("asleep", "failed") and model.waiting for model in self.models)
        idle_s = [self.now - model.idle_since for model in self.models if model.view().is_idle]
        if self.sleep_after_s and not others_wait:
            assert all(idle < self.sleep_after_s for idle in idle_s), "an idle model stays awake"
        elif not self.sleep_after_s and not others_wait:
            assert not decision.sleep, "a model sleeps for nobody"


def run_busily(policy: Policy, num_models: int = 4, max_awake: int = 2, sleep_after_s: float = 0.0) -> World:
    """All models are asked without a pause."""
    world = World(num_models, max_awake, sleep_after_s, policy, seed=1)
    for number in range(600):
        world.ask(number)
        world.ask(0)
        world.step()
    return world


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 5), st.sampled_from([0.0, 3.0]), st.integers(), st.data())
def test_all_get_their_turn_and_the_bounds_hold(
    num_models: int, max_awake: int, sleep_after_s: float, seed: int, data: st.DataObject
) -> None:
    world = World(num_models, min(max_awake, num_models), sleep_after_s, decide, seed)
    asked = data.draw(st.lists(st.one_of(st.none(), st.integers(0, num_models - 1)), max_size=300))
    for index in asked:
        if index is not None:
            world.ask(index)
        world.step()


def test_all_models_asked_without_a_pause_take_turns() -> None:
    run_busily(decide)


def test_the_idle_model_used_longest_ago_makes_room_and_no_other() -> None:
    a, b = ModelView("a", "awake", idle_since=5.0), ModelView("b", "awake", idle_since=3.0)
    wanted = ModelView("c", "asleep", waiting_since=8.0)
    assert decide([a, b, wanted], 2, 0.0, 9.0)[:2] == (("b",), ())
    falling = replace(b, state="falling asleep")
    assert decide([a, falling, wanted], 2, 0.0, 9.0)[:2] == ((), ()), "one is enough"
    assert decide([a, replace(b, state="asleep"), wanted], 2, 0.0, 9.0)[:2] == ((), ("c",))
    assert decide([a, b, replace(wanted, state="failed")], 3, 0.0, 9.0).wake == ("c",), "it is tried again"
    assert decide([a, b], 2, 0.0, 9.0) == Decision((), (), frozenset(), None)


def test_when_to_look_again() -> None:
    idle, busy = ModelView("a", "awake", idle_since=5.0), ModelView("b", "awake", 1, awake_since=4.0)
    assert decide([idle, busy], 2, 30.0, 9.0).look_again == 35.0
    wanted = ModelView("c", "asleep", waiting_since=8.0)
    assert decide([busy, wanted], 1, 0.0, 9.0).look_again == 8.0 + TURN_S
    assert decide([busy, wanted], 1, 0.0, 8.0 + TURN_S).closed == {"b"}
    assert decide([replace(busy, num_inside=0, waiting_since=9.0), wanted], 1, 0.0, 20.0).sleep == ("b",)


def sleep_busy(models: Sequence[ModelView], *rest: float) -> Decision:
    return decide([replace(model, num_inside=0) for model in models], *rest)  # type: ignore[arg-type]


def wake_all(models: Sequence[ModelView], _most: int, *rest: float) -> Decision:
    return decide(models, len(models), *rest)


def keep_open(models: Sequence[ModelView], *rest: float) -> Decision:
    return decide(models, *rest)._replace(closed=frozenset())  # type: ignore[arg-type]


def wake_last(models: Sequence[ModelView], *rest: float) -> Decision:
    newest = [replace(one, waiting_since=-one.waiting_since) if one.waiting_since else one for one in models]
    return decide(models, *rest)._replace(wake=decide(newest, *rest).wake[:1])  # type: ignore[arg-type]


def sleep_early(models: Sequence[ModelView], most: int, _after: float, now: float) -> Decision:
    return decide(models, most, 0.001, now)


def sleep_never(models: Sequence[ModelView], *rest: float) -> Decision:
    return decide(models, *rest)._replace(sleep=())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "complaint", "options"),
    [
        (sleep_busy, "a busy model", {}),
        (wake_all, "too many", {}),
        (keep_open, "starved", {"max_awake": 1}),
        (wake_last, "starved", {"num_models": 5, "max_awake": 1}),
        (sleep_early, "for nobody", {"num_models": 2}),
        (sleep_never, "starved", {}),
    ],
)
def test_a_broken_rule_is_noticed(broken: Policy, complaint: str, options: dict[str, int]) -> None:
    with pytest.raises(AssertionError, match=complaint):
        run_busily(broken, **options)
