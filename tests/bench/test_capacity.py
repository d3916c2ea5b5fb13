"""`baton plan`: in the simulated fleet proposals meet their goals and one worker fewer does not; limits are named."""

import json
import math
from dataclasses import replace
from typing import Literal

import pytest
from cyclopts.exceptions import CycloptsError
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity import Goals, Proposal, Role, UnreachableError, find_wait, propose
from bench.roofline import handoff_token_s, kv_tokens_that_fit
from bench.simulate.channels import Wires
from bench.simulate.figures import summarise
from bench.simulate.run import Fleet, Simulation, Workers
from bench.simulate.settings import Workload
from bench.simulate.worker import Limits
from bench.simulate.workload import build_conversations
from cli import main
from cli.bench import load_shape
from cli.service import CommandError
from cli.sources import use_sources
from engine.cuda.sizes import most_logits
from runtime.config import DecodeConfig
from runtime.gpus import CARDS, CardName
from runtime.settings import ConfigError
from tests.support.combinations import combination, examples
from tests.support.command_line import parse
from worker.startup.limits import ModelShape, estimate_room, limits_of

EIGHT = load_shape("8B")
SEVENTY = load_shape("70B")
LOCAL_CHUNK_TOKENS = 256
WITHIN = 1.1  # the queueing formulas are approximations


def build_workers(role: Role, count: int) -> Workers:
    chunk = role.chunk_tokens or LOCAL_CHUNK_TOKENS
    return Workers(count, role.tp, role.costs, Limits(role.kv_tokens // 64, role.max_running, chunk, 64))


def simulate(proposal: Proposal, model: ModelShape, gpu: CardName, goals: Goals, fewer: str = "") -> dict[str, float]:
    prefill_role = proposal.prefill or replace(proposal.decode, count=0)
    prefill = build_workers(prefill_role, prefill_role.count - (fewer == "prefill"))
    decode = build_workers(proposal.decode, proposal.decode.count - (fewer == "decode"))
    fleet = Fleet(prefill, decode, Wires(handoff_token_s(model, CARDS[gpu], proposal.decode.tp)))
    workload = Workload(
        num_requests=int(goals.rate * 6) + 60, rate=goals.rate, input_tokens=goals.input_tokens,
        output_tokens=goals.output_tokens, lengths="fixed",
    )  # fmt: skip
    simulation = Simulation(fleet, build_conversations(workload))
    figures = summarise(simulation.run(), goals.ttft_s, goals.tpot_s)
    simulation.check()
    return figures


SEVENTY_ON_TWO, BY_MEMORY = "prompts, 70B on two GPUs", "answers, by memory"  # a case for each role
CASES: dict[str, tuple[ModelShape, CardName, Goals, Literal["prefill", "decode"]]] = {
    "prompts, 8B": (EIGHT, "h100", Goals(20, 2000, 40, 0.3, 0.03), "prefill"),
    SEVENTY_ON_TWO: (SEVENTY, "h200", Goals(8, 1500, 30, 0.6, 0.05), "prefill"),
    "answers, by TPOT": (EIGHT, "h100", Goals(40, 500, 200, 0.4, 0.0075), "decode"),
    BY_MEMORY: (EIGHT, "l40s", Goals(7, 6000, 100, 1.5, 0.2), "decode"),
}


@pytest.mark.parametrize(
    ("model", "gpu", "goals", "binding"),
    [case if name in (SEVENTY_ON_TWO, BY_MEMORY) else combination(*case) for name, case in CASES.items()],
    ids=CASES,
)
def test_a_proposal_meets_its_goals_and_one_worker_fewer_does_not(
    model: ModelShape, gpu: CardName, goals: Goals, binding: Literal["prefill", "decode"]
) -> None:
    proposal = propose(model, CARDS[gpu], goals, 64)
    found = simulate(proposal, model, gpu, goals)
    assert found["failed"] == found["preemptions"] == 0
    for share in ("p50", "p90"):
        assert found[f"ttft_{share}_ms"] <= WITHIN * goals.ttft_s * 1e3
        assert found[f"tpot_{share}_ms"] <= WITHIN * goals.tpot_s * 1e3
    assert proposal.prefill is not None
    expected = proposal.prefill.expected_s, proposal.decode.expected_s
    assert (found["ttft_p90_ms"] / 1e3, found["tpot_p90_ms"] / 1e3) == pytest.approx(expected, rel=0.5)
    fewer = simulate(proposal, model, gpu, goals, binding)
    assert fewer["ttft_p90_ms"] > goals.ttft_s * 1e3 or fewer["tpot_p90_ms"] > goals.tpot_s * 1e3


@pytest.mark.parametrize(
    ("gpu", "goals", "num_gpus"),
    [
        ("h100", Goals(4, 1000, 200, 0.5, 0.02), 1),
        ("l4", Goals(0.3, 500, 100, 2.0, 0.12), 1),
        ("a100", Goals(1.2, 2000, 100, 2.0, 0.05), 1),
    ],
)
def test_one_gpu_gets_one_worker_that_does_both(gpu: CardName, goals: Goals, num_gpus: int) -> None:
    proposal = propose(EIGHT, CARDS[gpu], goals, num_gpus)
    assert proposal.prefill is None
    assert proposal.decode.num_gpus == num_gpus
    found = simulate(proposal, EIGHT, gpu, goals)
    assert found["failed"] == 0
    assert found["ttft_p90_ms"] <= WITHIN * goals.ttft_s * 1e3
    assert found["tpot_p90_ms"] <= WITHIN * goals.tpot_s * 1e3
    assert found["tpot_p90_ms"] / 1e3 == pytest.approx(proposal.decode.expected_s, rel=0.5)


def test_what_binds_is_named() -> None:
    easy = Goals(1, 1000, 100, 1.0, 0.05)

    def limit(model: ModelShape, gpu: CardName, goals: Goals, num_gpus: int = 64) -> tuple[str, str]:
        with pytest.raises(UnreachableError) as caught:
            propose(model, CARDS[gpu], goals, num_gpus)
        return caught.value.limit, str(caught.value)

    assert limit(SEVENTY, "l40s", easy, 2) == (
        "memory", "weights and one request of 1100 tokens do not fit with 2 ranks",
    )  # fmt: skip
    assert limit(EIGHT, "a100", replace(easy, tpot_s=0.001))[0] == "tpot"
    assert limit(EIGHT, "a100", replace(easy, input_tokens=8000, ttft_s=0.05))[0] == "ttft"
    what, why = limit(EIGHT, "a100", replace(easy, rate=100.0), 8)
    assert what == "gpus"
    assert "and 8 given" in why


@given(
    gpu=st.sampled_from(list(CARDS)), rate=st.floats(0.1, 50), input_tokens=st.integers(2, 8000),
    output_tokens=st.integers(2, 1000), ttft_s=st.floats(0.2, 5), tpot_s=st.floats(0.02, 0.2),
)  # fmt: skip
@settings(max_examples=examples(40), deadline=None)
def test_a_proposal_is_within_its_own_limits(
    gpu: CardName, rate: float, input_tokens: int, output_tokens: int, ttft_s: float, tpot_s: float
) -> None:
    goals = Goals(rate, input_tokens, output_tokens, ttft_s, tpot_s)
    try:
        found = propose(EIGHT, CARDS[gpu], goals, 512)
    except UnreachableError:
        return
    prefill, decode = found.prefill, found.decode
    assert prefill is not None, "with so many GPUs there are both"
    assert prefill.expected_s <= ttft_s
    assert decode.expected_s <= tpot_s * 1.01
    assert decode.max_running * (input_tokens + output_tokens) <= decode.kv_tokens
    assert prefill.max_running * input_tokens <= prefill.kv_tokens
    more = propose(EIGHT, CARDS[gpu], replace(goals, rate=rate * 2), 10**6)
    assert more.prefill is not None and more.prefill.num_gpus >= prefill.num_gpus
    assert more.decode.num_gpus >= decode.num_gpus


@pytest.mark.parametrize("gpu", ["l4", "h100", "b200"])
def test_what_fits_is_what_a_worker_allocates(gpu: CardName) -> None:
    limits = limits_of(
        DecodeConfig(max_running=64, local_prefill_chunk_tokens=2048),
        EIGHT.vocab_size,
        most_logits(CARDS[gpu].memory_bytes),
    )
    for tp in (1, 2, 4):
        room = estimate_room(EIGHT, limits, CARDS[gpu].memory_bytes, tp)
        expected = room.left_bytes(0.9) // EIGHT.kv_token_bytes_of(tp)
        assert kv_tokens_that_fit(EIGHT, CARDS[gpu], tp, limits) == expected > 0


def test_a_queue_that_is_full_never_empties_and_an_idle_one_has_no_wait() -> None:
    assert find_wait(10, 0.2, 2) == math.inf
    assert find_wait(0.1, 0.1, 4) == 0
    waits = [find_wait(9, 0.1, count) for count in (1, 2, 3)]
    assert waits == sorted(waits, reverse=True)


def run(*words: str) -> int:
    use_sources(main.app, words[0], None)  # an earlier test may have set a file
    found = main.app(words, exit_on_error=False)
    assert isinstance(found, int)
    return found


PLAN = ("plan", "--model=8B", "--gpu=h100", "--rate=20", "--input=2000", "--output=300", "--ttft=500", "--tpot=20")


def test_the_command_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PLAN, "--num-gpus=8") == 0
    text = capsys.readouterr().out
    assert "80% of the bandwidth" in text
    flags = text.partition("baton serve ")[2].splitlines()[0].split()
    config = parse("serve", *flags)
    assert (config.prefill_workers, config.decode_workers, config.chunk_tokens) == (2, 1, 2048)


@pytest.mark.parametrize("word", ["--rate=0", "--output-tokens=0", "--decode-workers=0"])
def test_a_simulation_of_nothing(word: str) -> None:
    with pytest.raises((ConfigError, CycloptsError), match="cannot be used"):
        run("bench", "simulate", word)


def test_the_command_says_what_binds() -> None:
    with pytest.raises(CommandError, match="limit: gpus"):
        run(*PLAN, "--num-gpus=2")


def test_a_simulation_by_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--num-requests=20", "--output-tokens=10", "--times=1", "--times=2"
    assert run("bench", "simulate", *sizes, "--colocated", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["1 + 1", "0 + 2", "2 + 2", "0 + 4"]
    assert [one["requests"] for one in found.values()] == [20, 20, 40, 40]
