"""A decode worker's loop over several ranks: real processes that follow through shared memory give the same answers."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import worker.ranks
from engine.engine import Engine, Place
from engine.kv.pool import create_file
from engine.prepared import Prepared
from engine.ranks import join_group
from engine.runner import Launched, Runner
from tests.support.checkpoints import write_checkpoint
from tests.support.decode_bench import NUM_PAGES, build, build_requests, capture, run, speculators
from tests.support.decoding import Answers
from tests.support.grammars import DEMO_SIZE
from tests.support.rank_follower import CPU, MEET_S
from tests.support.threads import one_thread
from worker.rank_ring import RingError, RingFollower, RingLeader, open_ring
from worker.ranks import Leader, LedInputBatch, LedRunner

__all__ = ["one_thread"]  # a fixture

END_S = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    model, draft = (
        write_checkpoint(
            tmp_path_factory.mktemp(name), "llama", vocab=DEMO_SIZE, hidden=64, head_dim=16, layers=layers, tied=True
        )
        for name, layers in (("model", 2), ("draft", 1))
    )  # fmt: skip
    return model, draft


@pytest.fixture(scope="module")
def alone(folders: tuple[Path, Path]) -> Engine:
    return build(*folders)


@pytest.fixture(scope="module")
def led(folders: tuple[Path, Path], alone: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Rank 0 of 2."""
    rendezvous, fds, pool_fd = str(tmp_path_factory.mktemp("ranks") / "meet"), open_ring(1), create_file()
    command = [sys.executable, "-m", "tests.support.rank_follower", *map(str, folders), rendezvous, "1", "2"]
    passed = (pool_fd, *fds)
    follower = subprocess.Popen([*command, *map(str, passed)], pass_fds=passed)
    leader = Leader(RingLeader(fds))
    ranks = join_group(rendezvous, 0, 2, CPU, MEET_S)
    place = Place(ranks, (pool_fd, -1), partial(LedInputBatch, leader), partial(LedRunner, leader))
    engine = capture(build(*folders, place))
    assert engine.pool.page_bytes * 2 == alone.pool.page_bytes  # each rank has one of two heads
    leader.is_leading = True
    yield engine
    assert follower.poll() is None, "the follower ended by itself"
    follower.kill()
    follower.wait(END_S)
    dist.destroy_process_group()
    for fd in passed:
        os.close(fd)


@pytest.fixture(scope="module")
def expected(alone: Engine) -> Answers:
    return run(alone, build_requests("off"))


@pytest.mark.parametrize(
    ("drafter", "num_pages", "steps_ahead"),
    [("off", NUM_PAGES - 1, 0), ("ngram", 26, 0), ("draft", 26, 0), ("off", 26, 1), ("draft", 26, 1)],
    ids=["room", "preemption-ngram", "preemption-draft", "ahead", "ahead-draft"],
)
def test_answers_are_those_of_one_process(
    led: Engine, expected: Answers, drafter: str, num_pages: int, steps_ahead: int
) -> None:
    speculator = speculators(led, is_ahead=steps_ahead > 0)[drafter]
    answers = run(led, build_requests(drafter), speculator, steps_ahead, num_pages)
    assert answers.tokens == expected.tokens
    for handle, known in expected.logprobs.items():
        told = answers.logprobs[handle]
        assert [one.top_ids for one in told] == [one.top_ids for one in known]
        assert [one.logprob for one in told] == pytest.approx([one.logprob for one in known], abs=1e-4)
    assert {handle: end.finish_reason for handle, end in answers.ends.items()} == {
        handle: end.finish_reason for handle, end in expected.ends.items()
    }


@given(sizes=st.lists(st.integers(0, 400), max_size=30), num_followers=st.integers(1, 3))
def test_messages_of_any_size_arrive_whole_and_in_order(sizes: list[int], num_followers: int) -> None:
    fds = open_ring(num_followers, num_bytes=128)
    messages = [bytes(index % 256 for index in range(size)) for size in sizes]
    told: list[list[bytes]] = [[] for _ in range(num_followers)]

    def read(number: int) -> None:
        follower = RingFollower(fds, number)
        told[number] = [follower.read(timeout_s=END_S) for _ in messages]

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(num_followers)]
    for thread in threads:
        thread.start()
    leader = RingLeader(fds)
    for message in messages:
        leader.write(message, timeout_s=END_S)
    for thread in threads:
        thread.join(END_S)
    for fd in fds:
        os.close(fd)
    assert told == [messages] * num_followers


def test_waits_have_an_end() -> None:
    fds = open_ring(2, num_bytes=64)
    leader, first = RingLeader(fds), RingFollower(fds, 0)
    with pytest.raises(RingError, match=r"no step came for 0.01 s"):
        first.read(timeout_s=0.01)
    leader.write(bytes(40), timeout_s=1)
    assert first.read(timeout_s=1) == bytes(40)
    with pytest.raises(RingError, match=r"a rank does not read its steps for 0.01 s"):  # the second rank
        leader.write(bytes(40), timeout_s=0.01)
    for fd in fds:
        os.close(fd)


def test_a_failed_warm_up_of_rank_0_is_explained(alone: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks warm up by themselves: nothing was sent, so the process lives on to say why it cannot start."""

    def fail(_self: Runner, _step: Prepared) -> Launched:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(worker.ranks, "end_process", lambda: pytest.fail("the process ended without a word"))
    monkeypatch.setattr(Runner, "_run", fail)
    fds = open_ring(1)
    runner = LedRunner(Leader(RingLeader(fds)), 0, *(None, None, alone.pool.tensor, alone.rows))
    with pytest.raises(ValueError, match="no room on the GPU for the first steps and graphs: lower --gpu-memory-share"):
        replace(alone, padding_page=0, runner=runner, draft_runner=None).warm_up(0)
    for fd in fds:
        os.close(fd)
