"""The simulated fleet: steps in bulk and one by one agree, every request ends, no page is lost; fits of costs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.simulate.channels import Wires
from bench.simulate.costs import Costs, Measured, Work, fit, load
from bench.simulate.figures import Outcome, summarise
from bench.simulate.hosts import Troubles
from bench.simulate.run import Fleet, Simulation, Workers, colocate
from bench.simulate.settings import Workload
from bench.simulate.worker import Limits
from bench.simulate.workload import build_conversations
from tests.support.combinations import examples

COSTS = Costs(step=1e-3, row=1e-5, kv_token=2e-8, token=3e-5, pair=1e-9, weights=4e-3)
WORKLOAD = Workload(num_requests=60, rate=30.0, input_tokens=200, output_tokens=40)


def build_fleet(prefill: int = 2, decode: int = 2, num_pages: int = 400, max_running: int = 16) -> Fleet:
    def role(count: int, chunk_tokens: int) -> Workers:
        return Workers(count, 1, COSTS, Limits(num_pages, max_running, chunk_tokens, 16, 8))

    return Fleet(role(prefill, 256), role(decode, 256), Wires(2e-6))


def simulate(fleet: Fleet, workload: Workload, is_bulk: bool = True) -> Outcome:
    simulation = Simulation(fleet, build_conversations(workload), is_bulk)
    outcome = simulation.run()
    simulation.check()
    return outcome


@pytest.mark.parametrize(
    ("fleet", "workload"),
    [
        (build_fleet(), WORKLOAD),
        (build_fleet(0, 3), WORKLOAD),
        (build_fleet(), replace(WORKLOAD, num_prefixes=3, prefix_tokens=100, turns=3, think_s=0.2)),
        (build_fleet(1, 1, num_pages=60, max_running=4), replace(WORKLOAD, rate=300.0)),
        (build_fleet(0, 2, num_pages=60), replace(WORKLOAD, rate=300.0, turns=2, think_s=0.1)),
    ],
    ids=["disaggregated", "colocated", "conversations", "short of pages", "short of pages, colocated"],
)
def test_steps_at_once_are_steps_one_by_one(fleet: Fleet, workload: Workload) -> None:
    slow, fast = simulate(fleet, workload, is_bulk=False), simulate(fleet, workload)
    assert fast.answers == slow.answers
    assert fast.num_preemptions == slow.num_preemptions
    assert (fast.gaps.counts == slow.gaps.counts).all()
    for role, busy in slow.busy_s.items():
        assert fast.busy_s[role] == pytest.approx(busy)


@given(
    prefill=st.integers(0, 3), decode=st.integers(1, 3), num_pages=st.integers(60, 300), max_running=st.integers(1, 8),
    rate=st.floats(1, 500), turns=st.integers(1, 3), num_prefixes=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_every_request_ends(
    prefill: int, decode: int, num_pages: int, max_running: int, rate: float, turns: int, num_prefixes: int, seed: int
) -> None:
    workload = Workload(
        num_requests=12, rate=rate, input_tokens=100, output_tokens=20, turns=turns, think_s=0.1,
        num_prefixes=num_prefixes, prefix_tokens=40, seed=seed,
    )  # fmt: skip
    fleet = build_fleet(prefill, decode, num_pages, max_running)
    outcome = simulate(fleet, workload)
    assert simulate(fleet, workload).answers == outcome.answers
    wanted = {
        (one.number, turn): count for one in build_conversations(workload) for turn, count in enumerate(one.num_answer)
    }
    assert len(wanted) == len({answer.number for answer in outcome.answers}) == 12
    for answer in outcome.answers:
        assert answer.num_tokens == wanted[answer.number] or "pages" in answer.error
        assert answer.error or answer.arrived < answer.first_at < answer.last_at


def test_prompts_between_steps_make_tokens_stutter() -> None:
    workload = replace(WORKLOAD, num_requests=150, rate=25.0, input_tokens=800)
    fleet = build_fleet(1, 1, num_pages=4000, max_running=64)
    apart, together = (summarise(simulate(one, workload), 1, 1) for one in (fleet, colocate(fleet)))
    assert apart["itl_p99_ms"] < 0.9 * together["itl_p99_ms"]
    assert apart["tpot_p99_ms"] < together["tpot_p99_ms"]


works = st.builds(Work, st.integers(0, 64), st.integers(0, 10**5), st.integers(0, 2048), st.integers(0, 10**6))
parts = st.floats(0.1, 10)


@given(parts, parts, parts, parts, parts, st.lists(works, min_size=60, max_size=60, unique=True))
@settings(max_examples=examples(30))
def test_a_fit_recovers_costs(step: float, row: float, kv: float, token: float, pair: float, done: list[Work]) -> None:
    varied = [Work(number, number * 500, 0, 0) for number in range(1, 9)] + [Work(0, 0, 64, 9999), Work(0, 0, 64, 99)]
    costs = Costs(step * 1e-3, row * 1e-5, kv * 1e-8, token * 1e-5, pair * 1e-9)
    steps = [Measured(work, costs.seconds(work)) for work in done + varied]
    found = fit(steps)
    for name in ("step", "row", "kv_token", "token", "pair"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-3)


@pytest.mark.parametrize("text", ["", "[]", '{"steps": [{"rows": 1}]}', '{"steps": "x"}'])
def test_a_file_without_steps(tmp_path: Path, text: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no measured steps"):
        load(path)


def test_workers_that_change_roles_follow_a_load_that_turns() -> None:
    costs = Costs(step=0.02, row=0.001, kv_token=0.0, token=0.001, pair=0.0)
    load = Workload(
        num_requests=150, rate=0.65, input_tokens=4000, output_tokens=50, lengths="fixed", change_s=100.0,
        then_rate=0.75, then_input_tokens=200, then_output_tokens=800,
    )  # fmt: skip
    pair = Workers(2, 1, costs, Limits(1500, 10, 512, 64))
    able = replace(pair, limits=replace(pair.limits, beside_tokens=128))
    fleets = Fleet(pair, pair, Wires(1e-6)), Fleet(able, able, Wires(1e-6), changes_roles=True)
    fixed, changing = (summarise(simulate(fleet, load), 8.0, 0.1) for fleet in fleets)
    assert changing["failed"] == 0
    assert changing["good_share"] > 1.5 * fixed["good_share"]


@pytest.mark.parametrize("changes_roles", [False, True])
def test_a_rollout_and_deaths_lose_and_mix_nothing(changes_roles: bool) -> None:
    costs = Costs(step=0.02, row=0.001, kv_token=0.0, token=0.001, pair=0.0)
    limits = Limits(1500, 10, 512, 64, 8, beside_tokens=128 if changes_roles else None)
    role, troubles = Workers(4, 1, costs, limits), Troubles(30.0, restart_s=10.0, rollout_at_s=20.0)
    load = Workload(
        num_requests=160, rate=1.6, input_tokens=800, output_tokens=200, turns=2, think_s=2.0,
        change_s=40.0 if changes_roles else 0.0, then_rate=1.6, then_input_tokens=100, then_output_tokens=400,
    )  # fmt: skip
    outcome = simulate(Fleet(role, role, Wires(1e-6), changes_roles=changes_roles, troubles=troubles), load)
    figures = summarise(outcome, 8.0, 0.1)
    wanted = {
        (one.number, turn): count for one in build_conversations(load) for turn, count in enumerate(one.num_answer)
    }
    assert {answer.number: answer.num_tokens for answer in outcome.answers} == wanted
    assert figures["failed"] == figures["mispaired"] == figures["mixed_answers"] == 0
    assert figures["deaths"] > 3 and figures["upgraded_share"] > 0.5
