"""Children that answer calls: what goes wrong with them is noticed, named and leaves no process."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from runtime.child import MAX_MESSAGE_BYTES, ChildError, ChildServer, StandingChild, pack, serve_parent
from runtime.fork import Fork, Limits

WAIT_S = 60.0
MODULE = "tests.runtime.test_child"
HERE = {"PYTHONPATH": str(Path(__file__).parents[2])}  # children do not look into the current folder


class Do(msgspec.Struct, tag=True):
    """A call, and its answer."""

    what: str
    data: bytes = b""


Child = ChildServer[Do]


def run(test: Callable[[Child], Awaitable[Any]], timeout_s: float = WAIT_S, start: str = "ready") -> Child:
    """`test` on a child that is ready; it is gone afterwards."""

    async def main() -> Child:
        child = Child(MODULE, Do(start), Do, environment=HERE)
        try:
            await child.wait_ready(timeout_s)
            await test(child)
        finally:
            await child.close()
            assert child.ended.done()
        return child

    return asyncio.run(main())


def test_calls_are_answered_in_any_order_and_the_end_of_the_stream_is_the_childs_end() -> None:
    async def test(child: Child) -> None:
        asked = [child.ask(Do(what, bytes(size)), WAIT_S) for what, size in (("later", 1 << 22), ("soon", 0))]
        assert [len((await answer).data) for answer in asyncio.as_completed(asked)] == [0, 1 << 22]

    assert run(test).ended.result() == 0


@pytest.mark.parametrize(
    ("what", "trouble"),
    [
        ("exit", "ended with exit status 7"),
        ("die", "ended with signal SIGKILL"),
        ("hang up", "ended with exit status 0"),
        ("garbage", "sent what is no answer"),
        ("too long", "sent what is no answer .a message of .* bytes is too long"),
        ("unasked", "sent what is no answer .77"),
    ],
)
def test_a_child_that_fails_is_named_and_all_calls_end(what: str, trouble: str) -> None:
    async def test(child: Child) -> None:
        waiting = asyncio.ensure_future(child.ask(Do("never"), WAIT_S))
        with pytest.raises(ChildError, match=trouble):
            await child.ask(Do(what), WAIT_S)
        with pytest.raises(ChildError, match=trouble):
            await waiting
        with pytest.raises(ChildError, match=trouble):
            await child.ask(Do("soon"), WAIT_S)
        assert not child.is_answering

    run(test)


def test_a_stopped_child_is_killed_when_its_time_is_over() -> None:
    async def test(child: Child) -> None:
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ChildError, match=r"did not answer within 0.2 s"):
            await child.ask(Do("soon"), 0.2)

    assert run(test).ended.result() == -signal.SIGKILL
    with pytest.raises(ChildError, match="did not answer"):
        run(test, 0.1, start="never")


def test_a_cancelled_call_harms_no_other() -> None:
    async def test(child: Child) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.ask(Do("later"), WAIT_S), 0.01)
        assert (await child.ask(Do("later"), WAIT_S)).what == "later"

    run(test)


def test_the_work_on_a_call_is_cancelled_with_it() -> None:
    async def test(child: Child) -> None:
        asked = asyncio.create_task(child.ask(Do("note end"), WAIT_S))
        await child.ask(Do("soon"), WAIT_S)
        assert (await child.ask(Do("ended?"), WAIT_S)).data == b""
        asked.cancel()
        await child.ask(Do("soon"), WAIT_S)
        assert (await child.ask(Do("ended?"), WAIT_S)).data == b"cancelled"
        late = asyncio.create_task(child.ask(Do("soon"), WAIT_S))  # cancelled as its answer comes
        await asyncio.sleep(0)
        late.cancel()
        assert (await child.ask(Do("soon"), WAIT_S)).what == "soon" and child.is_answering

    run(test)


def test_a_start_outlives_who_asked_for_it_first() -> None:
    """One child is started, for all who wait; a closed one starts none."""
    started, has_begun = list[Child](), asyncio.Event()

    def start() -> Child:
        started.append(Child(MODULE, Do("later"), Do, environment=HERE))
        has_begun.set()
        return started[-1]

    async def test() -> None:
        standing = StandingChild(start, WAIT_S)
        try:
            first, second = (asyncio.create_task(standing.ask(Do("soon"), WAIT_S)) for _ in range(2))
            await has_begun.wait()
            first.cancel()
            assert (await second).what == "soon" and first.cancelled() and len(started) == 1
            started[0].kill()
            await started[0].wait(WAIT_S)
            last = asyncio.create_task(standing.ask(Do("soon"), WAIT_S))  # closes the old child first
            await asyncio.sleep(0)
        finally:
            await standing.close()
        with pytest.raises(ChildError):
            await last
        assert all(child.ended.done() for child in started)

    asyncio.run(test())


def test_a_child_inherits_nothing_and_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-m", MODULE, "parent"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert len(list(Path(f"/proc/{child}/fd").iterdir())) <= 4 + 3, "its own, the link and asyncio's"
        handle = os.pidfd_open(child)
        os.kill(child, signal.SIGINT)  # a terminal's Ctrl-C reaches it too, and is for the parent
        assert not select.select([handle], [], [], 0.2)[0]
        parent.kill()
        assert select.select([handle], [], [], WAIT_S)[0], "it outlives the parent"
        os.close(handle)


# -- forks with limits -----------------------------------------------------------------------------------------------

LIMITS = Limits(cpu_s=0.3, wall_s=WAIT_S, memory_bytes=64 << 20)


def spin(call: bytes) -> object:
    """What a hostile input may do."""
    match call:
        case b"loop":
            while True:
                pass
        case b"one operation":
            return str(10**300000000)[:1]
        case b"sleep":
            time.sleep(WAIT_S)
        case b"memory":
            return len(bytes(1 << 30))
        case b"exit":
            os._exit(3)
    return len(call)


@pytest.mark.parametrize(
    ("call", "trouble"),
    [("loop", "slow"), ("one operation", "slow"), ("sleep", "busy"), ("memory", "crashed"), ("exit", "crashed")],
)
def test_a_fork_ends_with_what_breaks_its_limits(call: str, trouble: str) -> None:
    limits = replace(LIMITS, wall_s=2.0) if trouble == "busy" else LIMITS

    async def main() -> None:
        fork = Fork(limits, spin)
        for _ in range(3):  # the CPU time is of one call
            end_s = time.process_time() + 0.15
            while time.process_time() < end_s:
                assert msgspec.msgpack.decode(cast(msgspec.Raw, await fork.ask(b"four"))) == 4
        assert await fork.ask(call.encode()) == trouble and fork.pid == 0
        fork.end()

    asyncio.run(main())
    fork = Fork(limits, spin)
    assert msgspec.msgpack.decode(cast(msgspec.Raw, fork.ask_now(bytes(1 << 20)))) == 1 << 20
    assert fork.ask_now(call.encode()) == trouble and fork.pid == 0


def test_a_fork_ends_with_the_task_that_asks() -> None:
    async def main() -> None:
        fork = Fork(LIMITS, spin)
        handle = os.pidfd_open(fork.pid)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fork.ask(b"sleep"), 0.05)
        assert select.select([handle], [], [], WAIT_S)[0] and fork.pid == 0
        os.close(handle)

    asyncio.run(main())


# -- the processes ---------------------------------------------------------------------------------------------------


noted: list[bytes] = []


async def work(call: Do) -> Do:
    raw = socket.socket(fileno=os.dup(int(sys.argv[1])))
    match call.what:
        case "never":
            await asyncio.sleep(WAIT_S)
        case "note end":
            try:
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                noted.append(b"cancelled")
                raise
        case "ended?":
            return Do("", b"".join(noted))
        case "later":
            await asyncio.sleep(0.1)
        case "exit":
            os._exit(7)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang up":
            raw.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(WAIT_S)
        case "garbage":
            raw.send((3).to_bytes(4, "little") + b"abc")
        case "too long":
            raw.send((MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        case "unasked":
            raw.send(pack((77, call)))
    return call


async def be_parent() -> None:
    child = Child(MODULE, Do("ready"), Do, environment=HERE)
    await child.wait_ready(WAIT_S)
    print(child.pid, flush=True)
    await child.wait()


if __name__ == "__main__":
    asyncio.run(be_parent() if sys.argv[1] == "parent" else serve_parent(int(sys.argv[1]), Do, work))
