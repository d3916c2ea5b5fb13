"""`baton bench agents`: sessions whose every turn repeats all before it. How much of that is computed twice."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from bench.load.answers import Answer
from bench.load.client import Client
from bench.load.loops import Done
from bench.load.metrics import spread, ttft_s
from bench.load.options import Target
from bench.load.prompts import Message, PromptWriter
from bench.load.runs import SPARE_CONNECTIONS, Start
from bench.load.server import discover, open_http
from bench.load.sessions import Piece, Session, Shape, Turn, draw_sessions, read_trace
from runtime.settings import ConfigError

Said = list[int] | str | list[Message]  # what a session's prompts and answers were so far
SOURCES = "_tokens"  # ends the names of Baton's counts of a prompt's tokens, by where their KV came from


@dataclass(frozen=True, kw_only=True)
class AgentOptions(Shape, Target):
    """One call of `baton bench agents`."""

    trace: Path | None = None
    """JSON lines of Mooncake or of AIPerf's multi-turn format to replay; without one, sessions are drawn."""
    at_once: int = 0
    """Most sessions at the same time; 0: all."""

    def __post_init__(self) -> None:
        self.require(1, "sessions", "turns", "group_size")
        self.require(0, "system_tokens", "at_once", "seed")
        if not self.scale > 0:
            raise ConfigError(f"scale={self.scale} cannot be used: a number above 0")

    def build(self) -> list[Session]:
        """Raises ConfigError."""
        return draw_sessions(self) if self.trace is None else read_trace(self.trace, self.scale)


@dataclass(frozen=True, slots=True)
class Asked:
    """A turn and its answer."""

    turn: int
    answer: Answer
    seen_tokens: int  # of the prompt, that an earlier request of the run had or got as its answer

    @property
    def twice(self) -> int:
        """Tokens computed though they had been; the last of a page and of an answer are among them."""
        return max(min(self.seen_tokens, self.answer.prompt_tokens - 1) - self.answer.cached_tokens, 0)


class Agents:
    """Sends sessions, and remembers which beginnings of prompts it has sent."""

    def __init__(self, client: Client, writer: PromptWriter, done: Done) -> None:
        self._client = client
        self._writer = writer
        self._done = done
        self._sent: set[tuple[tuple[int, int], ...]] = set()  # keys of the first pieces of a prompt
        self.asked: list[Asked] = []

    async def run(self, sessions: Sequence[Session], at_once: int) -> float:
        """All of them; returns the seconds that they took."""
        limit, began, numbers = asyncio.Semaphore(at_once or len(sessions)), time.perf_counter(), count()

        async def run_one(session: Session) -> None:
            await asyncio.sleep(session.start_s - (time.perf_counter() - began))
            async with limit:
                await self._talk(session, f"{began} {next(numbers)}")

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(run_one(session))
        return time.perf_counter() - began

    async def _talk(self, session: Session, name: str) -> None:
        """Ends with its first failure: what follows has no history."""
        fields: dict[str, Any] = {"prompt_cache_key": name}
        said: Said = []
        has_text = any(piece.text for turn in session.turns for piece in turn.pieces)
        fields |= {} if has_text else {"return_token_ids": True}
        num_said = 0
        for number, turn in enumerate(session.turns):
            await asyncio.sleep(turn.pause_s)
            is_new = turn.is_whole or number == 0
            prompt = self._write(turn, [] if is_new else said, has_text)
            seen = self._note(turn.pieces) if is_new else num_said
            answer = await self._client.ask(prompt, turn.num_output, fields)
            self.asked.append(Asked(number, answer, seen))
            self._done(answer)
            if answer.error:
                return
            num_said = answer.prompt_tokens + answer.output_tokens
            said = _add(prompt, answer)

    def _note(self, pieces: Sequence[Piece]) -> int:
        """Tokens at the start of a prompt of these pieces that an earlier prompt began with."""
        path: tuple[tuple[int, int], ...] = ()
        count = 0
        for piece in pieces:
            path += (piece.key,)
            count += piece.num_tokens if path in self._sent else 0
            self._sent.add(path)
        return count

    def _write(self, turn: Turn, said: Said, is_chat: bool) -> Said:
        if is_chat:
            before = said if isinstance(said, list) else []
            return [*before, *({"role": "user", "content": piece.text} for piece in turn.pieces)]
        parts = [self._writer.draw(piece.num_tokens, *piece.key) for piece in turn.pieces if piece.num_tokens]
        return _join([*([said] if said else []), *parts])


def _join(parts: Sequence[Any]) -> Said:
    if isinstance(parts[0], str):
        return " ".join(parts)
    return [token for part in parts for token in part]


def _add(prompt: Said, answer: Answer) -> Said:
    if isinstance(prompt, str):
        return prompt + answer.text
    if isinstance(prompt[0], dict):
        return [*prompt, {"role": "assistant", "content": answer.text}]
    return [*prompt, *answer.token_ids]


async def run_agents(options: AgentOptions, start: Start) -> dict[str, Any]:
    """Raises ConfigError if nothing can be measured."""
    sessions = options.build()
    async with open_http(options.url, options.api_key, len(sessions) + SPARE_CONNECTIONS) as http:
        server, ids = await discover(http, options.model)
        writer = PromptWriter(ids, server.words_a_token)
        agents = Agents(Client(http, server), writer, start("agents", sum(len(one.turns) for one in sessions)))
        seconds = await agents.run(sessions, options.at_once)
    return summarise(agents.asked, seconds)


def summarise(asked: Sequence[Asked], seconds: float) -> dict[str, Any]:
    """The figures: of all requests, and of each turn. Pure."""
    done = [one for one in asked if not one.answer.error]
    numbers = sorted({one.turn for one in done})
    return {
        "seconds": seconds,
        "completed": len(done),
        "failed": len(asked) - len(done),
        "errors": sorted({one.answer.error for one in asked if one.answer.error}),
        "all": _count(done),
        "turns": [{"turn": turn + 1, **_count([one for one in done if one.turn == turn])} for turn in numbers],
        "sources": dict(_count_sources(done)),
    }


def _count(asked: Sequence[Asked]) -> dict[str, float]:
    prompts = sum(one.answer.prompt_tokens for one in asked)
    return {
        "requests": len(asked),
        **spread("ttft_ms", [ttft_s(one.answer) for one in asked]),
        "prompt_tokens": prompts,
        "cached_share": sum(one.answer.cached_tokens for one in asked) / max(prompts, 1),
        "seen_share": sum(one.seen_tokens for one in asked) / max(prompts, 1),
        "computed_twice_share": sum(one.twice for one in asked) / max(prompts, 1),
    }


def _count_sources(asked: Sequence[Asked]) -> Counter[str]:
    """Prompt tokens by where their KV came from, as Baton says; none of another server."""
    found: Counter[str] = Counter()
    for one in asked:
        for name, value in one.answer.timing.items():
            if name.endswith(SOURCES) and name not in ("draft_tokens", "accepted_tokens"):
                found[name.removesuffix(SOURCES)] += value
    return found
