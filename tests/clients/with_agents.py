"""A coding agent as its users start it, by `baton launch`, on a service of its own: `make clients`.

Runs in a network namespace without outside. The model answers by a script (scripted_model.py), so the service's own
answers, calls and counts are tested, not a stand-in for it. Checks:

    answer    one answer; how many prompt tokens the service was asked for
    call      the model calls the agent's shell, which runs, and answers from its result
    again     a second turn, of whose prompt 95 % or more come from the cache
    overflow  turns that together exceed the context: the agent shortens its history, and each is answered
    qwen-xml, harmony
              a call by models that write these dialects; that of the others writes Hermes'
    begin     a stream of the agent's API begins within 0.3 s, with 28,000 tokens that are not cached
"""

import fcntl
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.clients.checks import AGENT_CHECKS, run
from tests.clients.scripted_model import write_scripted_model
from tests.support.live import Live, build_environment, serve

CONTEXT = 65_536
SAID, CALLED = "Here is one answer.", "The tool has answered."
# Arguments with what parsers trip over; the second call of each is made at once, where the dialect has several.
COMMAND, OUTPUT = "echo baton-$((6*7))\necho '</parameter> \"🙂\"'", "baton-42"
CALLS = {  # the agents' shells |-> arguments of their calls
    "Bash": [{"command": one, "description": "Echo"} for one in (COMMAND, "echo again")],
    "bash": [{"command": one, "description": "Echo"} for one in (COMMAND, "echo more")],
    "exec_command": [{"cmd": one} for one in (COMMAND, "echo too")],
}
TURN_S = 180
LEAST_CACHED, MOST_BEGIN_S = 0.95, 0.3
WORDS_PER_TURN, NUM_LONG_TURNS, BEGIN_WORDS = 8_000, 8, 28_000
WORDS = ("value", "number", "string", "object", "result", "function", "module", "import", "default", "method", "file")
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41


@dataclass(frozen=True)
class Agent:
    """How one is asked without a terminal."""

    ask: tuple[str, ...]
    go_on: tuple[str, ...]  # the same in the last session
    path: str  # of the API that it uses
    field: str = "messages"  # of its body
    extra: tuple[str, ...] = ()  # to let the model's calls run


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(
        ("-p", "--output-format", "stream-json", "--verbose"),
        ("-c", "-p", "--output-format", "stream-json", "--verbose"),
        "/v1/messages",
        extra=("--allowedTools=Bash",),
    ),
    "codex": Agent(
        ("exec", "--json", "--skip-git-repo-check"),
        ("exec", "resume", "--last", "--json", "--skip-git-repo-check"),
        "/v1/responses",
        "input",
        ("--dangerously-bypass-approvals-and-sandbox",),
    ),
    "opencode": Agent(("run", "--format", "json"), ("run", "-c", "--format", "json"), "/v1/chat/completions"),
}


class Session:
    """An agent with a home and a folder of its own."""

    def __init__(self, name: str, programs: Path, live: Live, folder: Path) -> None:
        self.agent, self.live, self._name = AGENTS[name], live, name
        self._work = folder / "work"
        self._work.mkdir()
        kept = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
        self._environment = {**kept, "PYTHONPATH": build_environment({})["PYTHONPATH"]}

    def ask(self, text: str, options: tuple[str, ...], *expected: str, may_fail: bool = False) -> tuple[float, float]:
        """One turn, whose output must have all `expected`. Returns its prompt tokens, and those from the cache.

        Both as the decode worker counts them, over all requests that the agent made. `may_fail`: its exit status may be
        1 all the same, as opencode's is after a refusal that it has dealt with.
        """
        before = self.count()
        launch = (sys.executable, "-P", "-m", "cli.main", "launch", self._name, "--url", self.live.url, "--")
        done = subprocess.run(
            [*launch, *options, text], cwd=self._work, env=self._environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=TURN_S,
        )  # fmt: skip
        is_good = done.returncode in (0, int(may_fail)) and all(one in done.stdout for one in expected)
        assert is_good, f"{done.returncode}: {(done.stdout + done.stderr)[-300:]}"
        after = self.count()
        return after[0] - before[0], after[1] - before[1]

    def count(self) -> tuple[float, float]:
        """Prompt tokens that were looked up in the cache, and found there."""
        queries, hits = (self.live.metric("decode-0", f"prefix_cache_{what}_total") for what in ("queries", "hits"))
        return queries, hits


def check_answer(session: Session) -> str:
    tokens, _cached = session.ask("Say something.", session.agent.ask, SAID)
    return f"{tokens:.0f} prompt tokens"


def check_call(session: Session) -> str:
    session.ask("Please call your tool.", (*session.agent.ask, *session.agent.extra), OUTPUT, CALLED)
    return ""


def check_again(session: Session) -> str:
    tokens, cached = session.ask("Say something else.", session.agent.go_on, SAID)
    assert cached >= LEAST_CACHED * tokens, f"only {cached:.0f} of {tokens:.0f} prompt tokens were cached"
    return f"{cached / tokens:.1%} of {tokens:.0f} prompt tokens cached"


def check_overflow(session: Session) -> str:
    texts = [draw_text(turn, WORDS_PER_TURN) for turn in range(NUM_LONG_TURNS)]
    sizes = [session.ask(text, session.agent.go_on, SAID, may_fail=True)[0] for text in texts]
    return "prompt tokens of each turn: " + ", ".join(f"{size:.0f}" for size in sizes)


def check_begin(session: Session) -> str:
    before = session.count()[0]
    times = [measure_begin(session, draw_text(1000 + number, BEGIN_WORDS)) for number in range(3)]
    shown = ", ".join(f"{first_s:.3f} s" for first_s in times)
    found = f"first bytes after {shown}, of {(session.count()[0] - before) / len(times):.0f} prompt tokens"
    assert sorted(times)[1] <= MOST_BEGIN_S, found
    return found


def measure_begin(session: Session, text: str) -> float:
    """Seconds from the request to the first byte of its answer's body."""
    message = {"role": "user", "content": text}
    body: dict[str, Any] = {"model": "scripted", "stream": True, session.agent.field: [message]}
    if session.agent.path == "/v1/messages":
        body["max_tokens"] = 10
    started = time.monotonic()
    with httpx.stream("POST", session.live.url + session.agent.path, json=body, timeout=TURN_S) as response:
        assert response.status_code == 200, response.read()
        parts = response.iter_raw()
        next(parts)
        first_s = time.monotonic() - started
        for _part in parts:
            pass
    return first_s


def draw_text(seed: int, num_words: int) -> str:
    """Words in an order that no other seed has, so that nothing is cached; about as many tokens."""
    dice = random.Random(seed)
    return f"Read this ({seed}): " + " ".join(dice.choices(WORDS, k=num_words))


def raise_loopback() -> None:
    """A new namespace has its loopback interface down."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))


def main() -> None:
    """Arguments: the agent's name, and the folder of its program."""
    raise_loopback()
    name, programs = sys.argv[1], Path(sys.argv[2]).resolve()
    checks: dict[str, Callable[[Session], str]] = {
        "answer": check_answer, "call": check_call, "again": check_again, "overflow": check_overflow,
        "begin": check_begin,
    }  # fmt: skip
    with serving("hermes", name, programs) as session:
        with_dialects = {
            dialect: partial(check_dialect, dialect, name, programs) for dialect in ("qwen-xml", "harmony")
        }
        run({**{check: partial(test, session) for check, test in checks.items()}, **with_dialects}, AGENT_CHECKS)


def check_dialect(dialect: str, name: str, programs: Path) -> str:
    with serving(dialect, name, programs) as session:
        return check_call(session)


@contextmanager
def serving(dialect: str, name: str, programs: Path) -> Iterator[Session]:
    """A service of a model that writes this dialect, and an agent on it."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_scripted_model(Path(folder) / "model", CALLS, CALLED, SAID, CONTEXT, dialect)
        with serve(model, "--served-name=scripted", "--kv-memory-mib=512", "--draft-model=none") as live:
            yield Session(name, programs, live, Path(folder))


if __name__ == "__main__":
    main()
