"""A decode worker's loop that launches a step before the last one is collected, or leads the rank of another process,
gives the same answers as one process step by step.
"""

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import worker.ranks.children
import worker.ranks.leader
from decode_worker.metrics import DecodeMetrics
from decode_worker.speculation.drafters import Draft, Drafter, Wanted, build_drafter
from decode_worker.speculation.lengths import PROBE_LENGTHS, CostMeter
from decode_worker.speculation.speculator import Speculator
from engine.batch import ForwardRow, Prepared
from engine.compose import FullEngine
from engine.cuda.captured import has_pieces
from engine.engine import Place
from engine.kv.memory import create_file
from engine.rank_group import join_group
from engine.runner import Launched, Runner
from runtime.config import DecodeConfig
from tests.support.batches import SAMPLINGS
from tests.support.checkpoints import write_checkpoint
from tests.support.combinations import combination
from tests.support.decode_bench import LATE, NUM_PAGES, build, build_requests, capture, run, speculators
from tests.support.decoding import (
    Answers,
    FixedCosts,
    TreeDrafter,
    build_eager_speculator,
    build_forking_speculator,
)
from tests.support.draft_heads import write_guessing_medusa, write_oracle
from tests.support.forks import ForkedPopen
from tests.support.grammars import DEMO_SIZE, compile_here, vocabulary
from tests.support.rank_follower import CPU, MEET_S
from tests.support.real_workers import NUM_PAGES as KV_PAGES
from tests.support.real_workers import PAGE_TOKENS as KV_PAGE_TOKENS
from tests.support.real_workers import build_kv_engine, packed
from tests.support.threads import one_thread
from worker.kv_cache import KVCacheManager
from worker.loop import StepExtras, WorkerLoop
from worker.params import SequenceParams
from worker.plan import TokenBudget
from worker.prefix_cache import PrefixCache
from worker.ranks.calls import Start
from worker.ranks.children import RankChildren
from worker.ranks.leader import Leader, LedHeadRunner, LedInputBatch, LedRunner
from worker.ranks.links import SEND_BYTES, LinkError, StepReceiver, StepSender, open_links
from worker.receiving import begin_read, finish_read
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Update

__all__ = ["one_thread"]  # a fixture

END_S = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a draft model that is sometimes right."""
    model, draft = (
        write_checkpoint(
            tmp_path_factory.mktemp(name), "llama", vocab=DEMO_SIZE, hidden=64, head_dim=16, layers=layers, tied=True
        )
        for name, layers in (("model", 2), ("draft", 1))
    )  # fmt: skip
    return model, draft


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> FullEngine:
    """Computes at once."""
    return build(*folders)


@pytest.fixture(scope="module")
def late(folders: tuple[Path, Path]) -> FullEngine:
    """Is late and has graphs."""
    return capture(build(*folders, LATE))


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a head that is sometimes right; beside it Medusa heads."""
    folder = tmp_path_factory.mktemp("head")
    target, _head = write_oracle(folder, vocab=DEMO_SIZE, noise=0.05)
    write_guessing_medusa(folder / "medusa", target)
    return folder / "model", folder / "head"


@contextmanager
def lead(folders: tuple[Path, Path], rendezvous: Path) -> Iterator[FullEngine]:
    """Rank 0 of 2."""
    (ours, (theirs,)), pool_fd = open_links(1), create_file()
    command = [sys.executable, "-m", "tests.support.rank_follower", *map(str, folders), str(rendezvous), "1", "2"]
    passed = (pool_fd, theirs.fileno())
    follower = ForkedPopen([*command, *map(str, passed)], pass_fds=passed)
    theirs.close()
    leader = Leader(StepSender(ours))
    ranks = join_group(str(rendezvous), 0, 2, CPU, MEET_S)
    place = Place(
        ranks, (pool_fd, -1), partial(LedInputBatch, leader), partial(LedRunner, leader),
        partial(LedHeadRunner, leader, 1),
    )  # fmt: skip
    engine = capture(build(*folders, place))
    leader.is_leading = True
    yield engine
    assert follower.poll() is None, "the follower ended by itself"
    follower.kill()
    follower.wait(END_S)
    dist.destroy_process_group()
    os.close(pool_fd)


@pytest.fixture
def led(folders: tuple[Path, Path], alone: FullEngine, tmp_path: Path) -> Iterator[FullEngine]:
    with lead(folders, tmp_path / "meet") as engine:
        assert engine.pool.page_bytes * 2 == alone.pool.page_bytes  # each rank has one of two heads
        yield engine


@pytest.fixture
def led_head(headed: tuple[Path, Path], tmp_path: Path) -> Iterator[FullEngine]:
    with lead(headed, tmp_path / "meet") as engine:
        yield engine


@pytest.fixture(scope="module")
def late_head(headed: tuple[Path, Path]) -> FullEngine:
    engine = capture(build(*headed, LATE))
    assert engine.draft_runner is not None and not has_pieces(engine.draft_runner)
    return engine


@pytest.fixture(scope="module")
def late_medusa_head(headed: tuple[Path, Path]) -> FullEngine:
    model, head = headed
    engine = capture(build(model, head.with_name("medusa"), LATE))
    assert engine.draft_runner is not None and not engine.draft_runner.forwards.shapes
    assert engine.runner.forwards.shapes
    return engine


@pytest.fixture(scope="module")
def expected(alone: FullEngine) -> Answers:
    """Step by step, without drafts, with enough pages."""
    return run(alone, build_requests("off"))


@pytest.fixture(scope="module")
def expected_head(headed: tuple[Path, Path]) -> Answers:
    return run(build(*headed), build_requests("off"))


ABORTS = {2: 1, 3: 1, 14: 2, 20: 1, 30: 1, 33: 3}


@pytest.mark.parametrize(
    ("which", "steps_ahead", "drafter", "num_pages", "aborted"),
    [
        ("late", 1, "off", 26, ABORTS), ("late", 1, "ngram", 26, {}), ("late", 1, "draft", NUM_PAGES, {}),
        combination("late", 1, "draft", 26, ABORTS), combination("led", 0, "ngram", 26, {}),
        ("led", 1, "draft", 26, ABORTS),
        ("late_head", 1, "draft", 26, ABORTS), ("led_head", 1, "draft", NUM_PAGES, {}),
        ("late_medusa_head", 1, "draft", 26, ABORTS), ("late_medusa_head", 1, "forks", 26, ABORTS),
        ("late", 1, "tree", 26, ABORTS), ("led", 1, "tree", 26, {}),
    ],
)  # fmt: skip
def test_answers_are_those_of_one_process_step_by_step(
    which: str,
    steps_ahead: int,
    drafter: str,
    num_pages: int,
    aborted: dict[int, int],
    request: pytest.FixtureRequest,
) -> None:
    engine: FullEngine = request.getfixturevalue(which)
    expected: Answers = request.getfixturevalue("expected_head" if which.endswith("head") else "expected")
    requests = build_requests(drafter)
    if drafter == "tree":
        drafters = {"tree": TreeDrafter(expected.tokens, DEMO_SIZE, 0.8)}
        speculator: Speculator = build_eager_speculator(drafters, steps_ahead > 0)
    elif drafter == "forks":
        assert engine.draft_runner is not None
        forking = build_drafter(engine.draft_runner, CostMeter(), 64, engine.has_draft_kv)
        speculator = build_forking_speculator({"forks": forking}, steps_ahead > 0)
    else:
        speculator = speculators(engine, is_ahead=steps_ahead > 0)[drafter]
    answers = run(engine, requests, speculator, steps_ahead, num_pages, aborted)
    if num_pages == NUM_PAGES:
        assert answers.scheduler.kv.num_hit and not answers.scheduler.num_preemptions
    else:
        assert answers.scheduler.num_preemptions
    timings = [end.timing for end in answers.ends.values() if end.timing is not None]
    assert any(one.accepted_tokens for one in timings) == (drafter != "off")
    assert {params.handle for params in requests} - aborted.keys() <= answers.ends.keys()
    for handle, tokens in answers.tokens.items():
        is_aborted = handle in aborted and handle not in answers.ends
        size = len(tokens) if is_aborted else None
        assert tokens == expected.tokens[handle][:size], handle
        if is_aborted:
            continue
        assert answers.ends[handle].finish_reason == expected.ends[handle].finish_reason
        assert answers.ends[handle].error == expected.ends[handle].error
        for told, known in (
            (answers.logprobs, expected.logprobs), (answers.prompt_logprobs, expected.prompt_logprobs)
        ):  # fmt: skip
            assert [one.top_ids for one in told[handle]] == [one.top_ids for one in known[handle]]
            here, there = ([one.logprob for one in side[handle]] for side in (told, known))
            assert here == pytest.approx(there, abs=1e-4)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_request_that_probes_drafts_though_it_seems_worth_nothing(late: FullEngine, steps_ahead: int) -> None:
    """Also where the step before has to be collected first."""

    class Wrong(Drafter):
        def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
            return [Draft([0] * one.count) for one in wanted]

    meter = FixedCosts()
    for rows in (1, 256):
        meter.note(rows, float(rows))
    speculator = Speculator({"draft": Wrong()}, meter, "off", 0, bool(steps_ahead))
    (params, *_) = build_streams("draft", has_json=False)
    answers = run(late, [replace(params, probes=True)], speculator, steps_ahead)
    assert answers.num_drafted == sum(PROBE_LENGTHS[:3]), "in the steps 32, 64 and 96 of 120"


def test_a_draft_model_reads_prompts_while_no_step_is_in_flight(
    late: FullEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would be measured with the other's time."""
    num_in_flight, loops = list[int](), list[WorkerLoop]()
    launch, compute = WorkerLoop._launch, late.draft_runner.launch if late.draft_runner else None

    def launch_noting(loop: WorkerLoop, planned: list[ScheduledSequence], updates: list[Update]) -> None:
        loops.append(loop)
        launch(loop, planned, updates)

    def compute_noting(requests: Sequence[ForwardRow]) -> Launched:
        num_in_flight.append(len(loops[-1]._in_flight))
        assert compute is not None
        return compute(requests)

    monkeypatch.setattr(WorkerLoop, "_launch", launch_noting)
    monkeypatch.setattr(late.draft_runner, "launch", compute_noting)
    run(late, build_requests("draft"), speculators(late, is_ahead=True)["draft"], steps_ahead=1)
    assert len(num_in_flight) > 20 and not any(num_in_flight)


def build_streams(drafter: str, has_json: bool) -> list[SequenceParams]:
    """Eight long answers; one matches a grammar if `has_json`."""
    grammar = compile_here("ebnf", 'root ::= "{" [a-z]* "}"', vocabulary())
    draw = random.Random(1)
    return [
        SequenceParams(
            str(handle), np.array([draw.randrange(2, DEMO_SIZE) for _ in range(12)], np.int32).tobytes(), 11, 120,
            gateway="g", handle=handle, sampling=SAMPLINGS[handle % 4], drafter=drafter,
            max_draft_tokens=0 if drafter == "off" else 4, grammar=grammar if has_json and handle == 3 else None,
        )
        for handle in range(1, 9)
    ]  # fmt: skip


@pytest.mark.parametrize("has_json", [False, True])
def test_the_device_seldom_waits_for_the_host(alone: FullEngine, late: FullEngine, has_json: bool) -> None:
    """Not for masks either, whatever the tokens are."""
    plain = run(alone, build_streams("off", has_json))
    answers = run(late, build_streams("off", has_json), steps_ahead=1)
    assert answers.tokens == plain.tokens
    drained = answers.num_drained, answers.num_launched
    assert answers.num_launched > 50 and answers.num_drained <= 0.05 * answers.num_launched, drained


@example(sizes=[2 * SEND_BYTES, 5], num_followers=2)
@given(sizes=st.lists(st.integers(0, 400), max_size=30), num_followers=st.integers(1, 3))
def test_messages_of_any_size_arrive_whole_and_in_order(sizes: list[int], num_followers: int) -> None:
    ours, theirs = open_links(num_followers)
    messages = [bytes(index % 256 for index in range(size)) for size in sizes]
    told: list[list[bytes]] = [[] for _ in range(num_followers)]

    def read(number: int) -> None:
        follower = StepReceiver(theirs[number])
        told[number] = [follower.read(timeout_s=END_S) for _ in messages]

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(num_followers)]
    for thread in threads:
        thread.start()
    leader = StepSender(ours)
    for message in messages:
        leader.write(message, timeout_s=END_S)
    for thread in threads:
        thread.join(END_S)
    for end in (*ours, *theirs):
        end.close()
    assert told == [messages] * num_followers


def test_waits_have_an_end() -> None:
    ours, theirs = open_links(2)
    leader, first = StepSender(ours), StepReceiver(theirs[0])
    with pytest.raises(LinkError, match=r"no step came for 0.01 s"):
        first.read(timeout_s=0.01)
    leader.write(bytes(40), timeout_s=1)
    assert first.read(timeout_s=1) == bytes(40)
    with pytest.raises(LinkError, match=r"a rank does not read its steps for 0.01 s"):
        leader.write(bytes(4 * SEND_BYTES), timeout_s=0.01)
    for end in (*ours, *theirs):
        end.close()


def test_a_rank_and_rank_0_see_that_the_other_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other process has their ends of the link: what is passed on is copied here, as a child's would be."""
    leaders: list[socket.socket] = []
    inherited: list[list[int]] = []

    def open_kept(num_followers: int) -> tuple[list[socket.socket], list[socket.socket]]:
        ours, theirs = open_links(num_followers)
        leaders.extend(ours)
        return ours, theirs

    class Child:
        ended: Future[int] = Future()

        def __init__(self, _module: str, start: Start, _answers: object, fds: Sequence[int]) -> None:
            assert fds[1:] == start.pool_fds
            inherited.append([os.dup(fd) for fd in fds])

    monkeypatch.setattr(worker.ranks.children, "ChildServer", Child)
    monkeypatch.setattr(worker.ranks.children, "open_links", open_kept)
    ranks = RankChildren("decode", DecodeConfig(model="m", tp=3), "w")
    ranks.lead(("weights", ""))
    first, second = inherited
    for fd in second:
        os.close(fd)
    with pytest.raises(LinkError, match="Broken pipe"):
        ranks.leader.flush()
    follower = StepReceiver(socket.socket(fileno=first.pop(0)))
    follower.read(timeout_s=END_S)
    for end in leaders:
        end.close()
    with pytest.raises(LinkError, match="the other process is gone"):
        follower.read(timeout_s=END_S)
    for fd in (*first, *ranks.pool_fds):
        os.close(fd)


def test_the_progress_of_graphs_ends_with_the_last_one(
    headed: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cuda.warm_up.CudaCapture", lambda: lambda compute: compute)
    monkeypatch.setattr("engine.cuda.warm_up.is_capturable", lambda runner: True)
    engine, done = build(*headed, LATE), list[tuple[int, int]]()
    replace(engine, padding_page=NUM_PAGES).warm_up(4, 3, (), lambda *progress: done.append(progress))
    total = len(done)
    assert done == [(count, total) for count in range(1, total + 1)]


def test_a_failed_warm_up_of_rank_0_is_explained(alone: FullEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks warm up by themselves: nothing was sent, so the process lives on to say why it cannot start."""

    def fail(_self: Runner, _step: Prepared) -> Launched:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker.ranks.leader, "end_process", lambda: pytest.fail("the process ended without a word"))
    monkeypatch.setattr(Runner, "_run", fail)
    ours, theirs = open_links(1)
    runner = LedRunner(Leader(StepSender(ours)), 0, alone.runner.model, None, alone.pool.tensor, alone.rows)
    with pytest.raises(ValueError, match="no room on the GPU for the first steps and graphs: lower --gpu-memory-share"):
        replace(alone, padding_page=0, runner=runner, draft_runner=None).warm_up(0)
    for end in (*ours, *theirs):
        end.close()


def test_a_sequence_whose_kv_came_while_a_step_ran_is_in_the_next_launch() -> None:
    """Not in the one after: it waits for no step that was launched before its KV was there."""
    engine, runner = build_kv_engine()
    scheduler = Scheduler(KVCacheManager(PrefixCache(KV_PAGES, engine.pool.generations), KV_PAGE_TOKENS), 8, END_S)
    loop = WorkerLoop(
        StepExtras(), scheduler, engine.runner, engine.rows, engine.pool, TokenBudget(99, ""), lambda *_: None,
        DecodeMetrics(scheduler), steps_ahead=1,
    )  # fmt: skip
    scheduler.admit(SequenceParams("answers", packed([1, 2, 3]), 2, 30), 0.0)
    awaited = scheduler.admit(
        SequenceParams("awaited", packed(list(range(9))), 8, 3, local_prefill_max_tokens=0), time.monotonic()
    )
    launched: list[int] = []  # sequences of each step
    launch = runner.launch

    def launch_noting(requests: Sequence[ForwardRow]) -> Launched:
        launched.append(len(requests))
        return launch(requests)

    runner.launch = launch_noting  # type: ignore[method-assign]
    for _ in range(4):
        loop.step()
    pages, _slots = begin_read(scheduler, awaited.id, awaited.params.attempt, 0, 8, 2)
    assert len(pages) == 2 and launched == [1] * 4 and len(loop._in_flight) == 1
    finish_read(scheduler, awaited.id, 8, time.monotonic())
    loop.step()
    assert launched == [1, 1, 1, 1, 2]
