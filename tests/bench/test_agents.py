"""`baton bench agents`: sessions that are drawn or read from traces, and what counts as computed twice."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, cast

import pytest

from bench.load.agents import AgentOptions, Agents, summarise
from bench.load.answers import Answer
from bench.load.client import Client
from bench.load.prompts import PromptWriter
from bench.load.report import build_agents
from bench.load.sessions import PROMPT, Session
from runtime.settings import ConfigError

IDS = range(1000)


class Server(Client):
    """Answers at once, and has cached all prompts and answers so far, or forgets everything."""

    def __init__(self, forgets: bool = False) -> None:
        self.prompts: list[Any] = []
        self._forgets = forgets
        self._known: list[list[Any]] = []

    async def ask(self, prompt: Any, num_tokens: int, fields: Mapping[str, Any] = {}) -> Answer:
        self.prompts.append(prompt)
        parts = _split(prompt)
        cached = 0 if self._forgets else max([_count_common(parts, known) for known in self._known], default=0)
        ids = list(range(2000, 2000 + num_tokens))
        text = " so" * num_tokens
        self._known.append([*parts, *_split(text if isinstance(prompt, str) else ids)])
        count = len(parts)
        timing = {"cached_tokens": cached, "queue_seconds": 0.5}
        return Answer(0.0, (1.0,), 1.0, count, num_tokens, "", True, timing, min(cached, count - 1), text, ids)


def _split(prompt: Any) -> list[Any]:
    return prompt.split() if isinstance(prompt, str) else list(prompt)


def _count_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def run(sessions: Sequence[Session], server: Server, ids: Sequence[int] = IDS) -> tuple[Agents, dict[str, Any]]:
    writer = PromptWriter(ids, words_a_token=1.0, run=0)  # drawn runs have parts that begin alike by chance
    agents = Agents(server, writer, lambda _answer: None)
    seconds = asyncio.run(agents.run(sessions, 1))
    return agents, summarise(agents.asked, seconds)


@pytest.mark.parametrize("ids", [IDS, ()], ids=["ids", "text"])
def test_seen_is_what_an_endless_cache_would_have(ids: Sequence[int]) -> None:
    sessions = AgentOptions(sessions=8, turns=4, scale=1000.0, system_tokens=20, group_size=2).build()
    agents, figures = run(sessions, Server(), ids)
    assert figures["completed"] == 32
    assert figures["all"]["computed_twice_share"] == 0.0
    assert figures["all"]["cached_share"] == pytest.approx(figures["all"]["seen_share"], abs=0.02)
    assert all(one.seen_tokens >= one.answer.cached_tokens for one in agents.asked)
    assert next(one.seen_tokens for one in agents.asked if one.turn == 0) == 0
    assert figures["sources"] == {"cached": sum(one.answer.timing["cached_tokens"] for one in agents.asked)}
    assert build_agents(figures).row_count == 5


def test_a_server_that_forgets_computes_all_that_was_seen_again() -> None:
    sessions = AgentOptions(sessions=4, turns=3, scale=1000.0).build()
    _, figures = run(sessions, Server(forgets=True))
    assert figures["all"]["cached_share"] == 0.0
    assert figures["all"]["computed_twice_share"] == pytest.approx(figures["all"]["seen_share"], abs=0.02)
    assert figures["turns"][1]["computed_twice_share"] > 0.9, "a second turn repeats the first"


def test_drawn_sessions_have_the_recorded_shape() -> None:
    sessions = AgentOptions(sessions=40, turns=21, scale=100.0, group_size=5).build()
    lengths = []
    for session in sessions:
        said = 0
        for turn in session.turns:
            said += sum(piece.num_tokens for piece in turn.pieces)
            lengths.append(said)
            said += turn.num_output
    assert median(lengths) == pytest.approx(PROMPT / 100, rel=0.1)
    first = [session.turns[0].pieces for session in sessions]
    assert len({pieces[1].key for pieces in first[:20]}) == 4, "half of them are in groups of five"
    assert not any(pieces[1].num_tokens for pieces in first[20:])
    assert sessions == AgentOptions(sessions=40, turns=21, scale=100.0, group_size=5).build()


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 20, "hash_ids": [1, 2, 3]},
        {"timestamp": 100, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 4]},
        {"timestamp": 200, "input_length": 700, "output_length": 20, "session_id": "a"},
        {"timestamp": 900, "input_length": 800, "output_length": 20, "session_id": "a", "delay": 10},
    ]
    sessions = AgentOptions(trace=write(tmp_path, rows), scale=10.0).build()
    assert [len(session.turns) for session in sessions] == [1, 1, 2]
    assert [session.start_s for session in sessions] == pytest.approx([0.0, 0.01, 0.02])
    server = Server()
    agents, figures = run(sessions, server)
    assert [len(prompt) for prompt in server.prompts] == [130, 110, 70, 80]
    assert [one.seen_tokens for one in agents.asked] == [0, 102, 0, 0]
    assert figures["all"]["computed_twice_share"] == 0.0


def test_a_trace_of_conversations(tmp_path: Path) -> None:
    rows = [{"session_id": "a", "turns": [{"text": "Hello"}, {"text": "And now?", "delay": 5, "output_length": 3}]}]
    server = Server()
    _, figures = run(AgentOptions(trace=write(tmp_path, rows), scale=1.0).build(), server)
    assert [[message["role"] for message in prompt] for prompt in server.prompts] == [
        ["user"], ["user", "assistant", "user"],
    ]  # fmt: skip
    assert server.prompts[1][2]["content"] == "And now?"
    assert figures["completed"] == 2


@pytest.mark.parametrize("rows", [[], [{"input_length": 5}], [{"turns": 3}], [[1]]])
def test_what_is_no_trace(tmp_path: Path, rows: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"trace=.*cannot be used.*hash_ids"):
        AgentOptions(trace=write(tmp_path, rows)).build()


@pytest.mark.parametrize("bad", [{"sessions": 0}, {"turns": 0}, {"scale": 0.0}, {"group_size": 0}, {"at_once": -1}])
def test_bad_options(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}="):
        AgentOptions(**cast("Any", bad))


def write(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
