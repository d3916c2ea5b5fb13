"""Followed word for word, what `baton serve` advises leads to a start, or to the word that the model does not fit."""

import re
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.capacity import Goals, UnreachableError, propose
from bench.proposal import describe_start
from cli.bench import load_shape
from cli.plan import plan_workers
from engine.cuda.advice import describe_full_gpu
from runtime.config import ServeConfig
from runtime.gpus import CARDS, Card, CardName
from runtime.settings import ConfigError
from tests.support.combinations import examples
from tests.support.command_line import parse
from worker.startup.limits import ModelShape
from worker.startup.pool_size import plan_pools

EIGHT, SEVENTY, ONE = load_shape("8B"), load_shape("70B"), load_shape("1B")
TRIES = 8
HONEST = "--model to a smaller one"
GPUS = [name for name in CARDS if name != "cpu"]


class Machine:
    """GPUs of one kind, on which the workers of a service start one after the other."""

    def __init__(self, shape: ModelShape, card: Card, num_gpus: int) -> None:
        self.shape, self.card = shape, card
        self.gpus = tuple(map(str, range(num_gpus)))

    def start(self, config: ServeConfig) -> dict[str, int]:
        """Name of each worker |-> tokens of its pool. ConfigError or ValueError as workers give it."""
        total_bytes = int(self.card.memory_bytes)
        free, found = dict.fromkeys(range(len(self.gpus)), total_bytes), {}
        for plan in plan_workers(config, self.gpus):
            tp = plan.settings.tp
            weights = self.shape.weight_bytes_of(tp)
            for gpu in plan.gpus:
                if weights > free[gpu]:
                    raise ConfigError(describe_full_gpu(weights, free[gpu], total_bytes))
            page_bytes = self.shape.kv_token_bytes_of(tp) * plan.settings.page_tokens
            pools = plan_pools(plan.settings, self.shape, page_bytes, self.card, total_bytes, 0)
            assert pools.room is not None
            for gpu in plan.gpus:
                free[gpu] -= pools.room.taken_bytes + pools.room.reserve_bytes + pools.num_pages * page_bytes
                assert free[gpu] >= 0, "what starts fits"
            found[plan.name] = pools.num_pages * pools.settings.page_tokens
        return found


def follow(machine: Machine, config: ServeConfig) -> tuple[ServeConfig, list[str], bool]:
    """(settings at the end, errors, whether it started): repeat the start with the setting that the error names."""
    said: list[str] = []
    for _ in range(TRIES):
        try:
            machine.start(config)
            return config, said, True
        except ValueError as error:
            said.append(str(error))
        if HONEST in said[-1]:
            return config, said, False
        found = re.search(r"(?:set|needs) --([a-z-]+) ([0-9.]+)", said[-1])
        assert found, said
        name, number = found[1].replace("-", "_"), float(found[2])
        given: dict[str, Any] = {name: number if name == "gpu_memory_share" else int(number)}
        config = replace(config, **given)
    raise AssertionError(f"advice leads nowhere: {said}")


def test_8b_on_one_card_of_24_gb() -> None:
    machine = Machine(EIGHT, CARDS["rtx-4090"], 1)
    config, said, is_started = follow(machine, ServeConfig())
    assert is_started and not said, "one worker by default"
    _config, said, is_started = follow(machine, ServeConfig(prefill_workers=1))
    assert is_started and any("set --prefill-workers 0" in each for each in said)
    long = replace(EIGHT, context_tokens=131_072)
    config, said, is_started = follow(Machine(long, CARDS["rtx-4090"], 1), ServeConfig())
    assert is_started and len(said) == 1 and config.max_context_tokens > 16_384
    _config, said, is_started = follow(Machine(SEVENTY, CARDS["rtx-4090"], 1), ServeConfig())
    assert not is_started and len(said) == 1


@settings(max_examples=examples(150), deadline=None)
@given(
    shape=st.sampled_from([ONE, EIGHT, SEVENTY]), context=st.sampled_from([512, 8192, 131_072]),
    card=st.sampled_from(GPUS), num_gpus=st.sampled_from([1, 2, 4, 8]), prefill=st.sampled_from([None, 0, 1, 2]),
    decode=st.integers(1, 3), share=st.sampled_from([0.0, 0.05, 0.3, 0.6, 0.95]),
    mib=st.sampled_from([0, 1, 5000, 10**6]), tp=st.sampled_from([1, 2]),
)  # fmt: skip
@example(EIGHT, 131_072, "a100-40gb", 1, 1, 2, 0.6, 1, 1)
def test_advice_leads_to_a_start(
    shape: ModelShape, context: int, card: CardName, num_gpus: int, prefill: int | None, decode: int, share: float,
    mib: int, tp: int,
) -> None:  # fmt: skip
    config = ServeConfig(
        prefill_workers=prefill, decode_workers=decode, gpu_memory_share=share, kv_memory_mib=mib,
        decode_tp=min(tp, num_gpus),
    )  # fmt: skip
    machine = Machine(replace(shape, context_tokens=context), CARDS[card], num_gpus)
    config, said, is_started = follow(machine, config)
    if not is_started:
        used = shape.num_weights * shape.weight_bytes / (config.decode_tp if config.prefill_workers == 0 else 1)
        assert used > 0.8 * CARDS[card].memory_bytes, said


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([ONE, EIGHT, SEVENTY]), context=st.sampled_from([8192, 131_072]),
    card=st.sampled_from(GPUS), num_gpus=st.sampled_from([1, 2, 8]), rate=st.floats(0.1, 20),
    input_tokens=st.integers(10, 4000), output_tokens=st.integers(10, 500),
)  # fmt: skip
def test_a_proposal_starts_as_it_stands(
    shape: ModelShape, context: int, card: CardName, num_gpus: int, rate: float, input_tokens: int, output_tokens: int
) -> None:
    shape = replace(shape, context_tokens=context)
    goals = Goals(rate, input_tokens, output_tokens, 3.0, 0.2)
    try:
        proposal = propose(shape, CARDS[card], goals, num_gpus)
    except UnreachableError:
        return
    (line,) = [line for line in describe_start("8B", shape, proposal) if line.startswith("start")]
    config = parse(*line.partition("baton ")[2].split())
    pools = Machine(shape, CARDS[card], num_gpus).start(config)
    assert len(pools) == proposal.decode.count + (proposal.prefill.count if proposal.prefill else 0)
    for name, tokens in pools.items():
        role = proposal.prefill if name.startswith("prefill") else proposal.decode
        assert role is not None
        assert tokens >= min(role.kv_tokens, role.max_running * shape.context_tokens) // 16 * 16
