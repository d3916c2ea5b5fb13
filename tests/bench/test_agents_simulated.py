"""Agents' sessions on a simulated fleet of two prefill and two decode workers: how much is computed twice."""

from collections.abc import Sequence
from itertools import pairwise

from bench.load.agents import AgentOptions
from bench.load.sessions import Piece, Session
from bench.simulate.channels import Wires
from bench.simulate.costs import Costs
from bench.simulate.figures import Answer
from bench.simulate.run import Fleet, Simulation, Workers
from bench.simulate.worker import Limits
from bench.simulate.workload import Conversation, draw_tokens

PAGE = 16


def simulate(conversations: Sequence[Conversation], num_pages: int, token_s: float = 3e-5) -> list[Answer]:
    costs = Costs(step=1e-3, row=1e-5, kv_token=2e-8, token=token_s, pair=1e-9, weights=4e-3)
    prefill, decode = (
        Workers(2, 1, costs, Limits(num_pages, running, chunk, PAGE, 64)) for running, chunk in ((16, 512), (64, 256))
    )
    simulation = Simulation(Fleet(prefill, decode, Wires(2e-6)), conversations)
    answers = simulation.run().answers
    simulation.check()
    assert not [one.error for one in answers if one.error]
    return answers


def converse(number: int, session: Session) -> Conversation:
    """As drawn for `baton bench agents`."""
    begin, *turns = ([*turn.pieces] for turn in session.turns)
    *shared, first = begin
    prefix = b"".join(draw_tokens(f"{one.key}", one.num_tokens) for one in shared)
    num_new = [first.num_tokens, *(one.num_tokens for (one,) in turns)]
    num_answer = [max(turn.num_output, 2) for turn in session.turns]
    pauses = [turn.pause_s for turn in session.turns[1:]]
    return Conversation(number, 0.001 * number, prefix, num_new, num_answer, [*pauses, 0.0], 0)


def test_sessions_whose_histories_fill_three_quarters_of_all_pools_compute_little_twice() -> None:
    """Each of four pools holds a third of all histories."""
    options = AgentOptions(sessions=24, turns=8, scale=100.0, system_tokens=512, group_size=4, url="http://x")
    sessions = options.build()
    conversations = [converse(number, session) for number, session in enumerate(sessions)]
    parts: dict[tuple[int, int], Piece] = {one.key: one for each in sessions for one in each.turns[0].pieces[:2]}
    num_own = sum(sum(one.num_new) + sum(one.num_answer) for one in conversations)
    num_distinct = num_own + sum(part.num_tokens for part in parts.values())
    answers = {one.number: one for one in simulate(conversations, num_distinct // 3 // PAGE)}
    num_twice = 0
    for number, one in enumerate(conversations):
        for before, after in pairwise(answers[number, turn] for turn in range(len(one.num_new))):
            num_twice += max(before.num_prompt + before.num_tokens - after.num_cached, 0)
    assert num_twice <= 0.05 * sum(one.num_prompt for one in answers.values())


def test_a_burst_of_sub_agents_computes_its_prefix_once() -> None:
    """Although workers report pages of it while the rest is computed: that takes four polls."""
    shared, num_own, count = draw_tokens("shared", 4096), 30, 16
    burst = [Conversation(number, 0.0, shared, [num_own], [4], [0.0], 1) for number in range(count)]
    answers = simulate(burst, num_pages=20_000, token_s=1e-3)
    assert sum(one.num_prompt - one.num_cached for one in answers) <= len(shared) + count * (num_own + PAGE)
