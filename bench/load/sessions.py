"""Sessions of agents: drawn with the shape of recorded ones, or read from traces. Pure; random only by seed.

Recorded (219 sessions of a coding agent): prompts of 195k tokens at the median, 632 new ones a turn (3,735 at p90), 317
in an answer, 2 s between an answer and the next turn (11 minutes at p99), half of all in groups that share a prefix.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.settings import ConfigError

PROMPT, NEW, OUTPUT, PAUSE_S = 195_000, 632, 317, 2.0  # at the median
NEW_SIGMA, OUTPUT_SIGMA, PAUSE_SIGMA = 1.39, 1.0, 2.5  # of lognormal distributions: p90 of NEW, p99 of PAUSE_S
SHARED = 0.9  # of a group's first prompts
BLOCK_TOKENS = 512  # of a block in Mooncake's traces
KIND = {"prefix": 0, "first": 1, "turn": 2, "block": 3, "system": 4}  # of pieces, so that none is another's


@dataclass(frozen=True, slots=True)
class Piece:
    """So many tokens that follow from a kind and a number: equal pieces have equal tokens. Or this text."""

    kind: str
    number: int
    num_tokens: int
    text: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return KIND[self.kind], self.number


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    pieces: Sequence[Piece]
    num_output: int
    pause_s: float  # since the answer before, or since the session's start
    is_whole: bool = False  # `pieces` are the prompt; otherwise they follow what was said before


@dataclass(frozen=True, slots=True)
class Session:
    """Turns, each after the answer to the one before."""

    start_s: float
    turns: Sequence[Turn]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sessions to draw."""

    sessions: int = 16
    """Sessions to draw."""
    turns: int = 8
    """Requests of each."""
    scale: float = 100.0
    """Tokens and pauses of recorded sessions, or of the trace, are divided by this."""
    system_tokens: int = 0
    """Tokens of a system prompt that all drawn sessions begin with; not divided."""
    group_size: int = 4
    """Half of the drawn sessions are in groups of this size, on one prefix."""
    seed: int = 0
    """Seed of lengths and pauses. Contents differ in each call, so that caches have nothing of an earlier one."""


def draw_sessions(shape: Shape) -> list[Session]:
    """Half are in groups, whose first prompts share most tokens; all have the same system prompt, and start at once."""
    dice = np.random.default_rng(shape.seed)
    size = (shape.sessions, shape.turns)
    new, output = (
        np.maximum(np.rint(dice.lognormal(np.log(median / shape.scale), sigma, size)), 2).astype(int).tolist()
        for median, sigma in ((NEW, NEW_SIGMA), (OUTPUT, OUTPUT_SIGMA))
    )
    pauses = dice.lognormal(np.log(PAUSE_S / shape.scale), PAUSE_SIGMA, size).tolist()
    grown = (NEW * np.exp(NEW_SIGMA**2 / 2) + OUTPUT * np.exp(OUTPUT_SIGMA**2 / 2)) / shape.scale
    first = max(int(PROMPT / shape.scale - grown * shape.turns / 2), 16)  # so that the median prompt is as recorded
    sessions = []
    for number in range(shape.sessions):
        in_group = number < shape.sessions // 2
        shared = int(first * SHARED) if in_group else 0
        begin = [
            Piece("system", 0, shape.system_tokens), Piece("prefix", number // shape.group_size, shared),
            Piece("first", number, first - shared),
        ]  # fmt: skip
        turns = [
            Turn(
                begin if turn == 0 else [Piece("turn", number * shape.turns + turn, new[number][turn])],
                output[number][turn], pauses[number][turn] if turn else 0.0,
            )
            for turn in range(shape.turns)
        ]  # fmt: skip
        sessions.append(Session(0.0, turns))
    return sessions


def read_trace(path: Path, scale: float) -> list[Session]:
    """A file of Mooncake (input_length, output_length, hash_ids) or AIPerf's multi-turn (turns). Raises ConfigError."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        if not rows:
            raise ValueError("it is empty")
        if "turns" in rows[0]:
            return [Session(0.0, list(_read_texts(row, scale))) for row in rows]
        return _read_blocks(rows, scale)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"trace={str(path)!r} cannot be used ({reason}): JSON lines with input_length, output_length and hash_ids "
            "(Mooncake), or with turns that have a text (AIPerf's multi-turn)"
        ) from error


def _read_texts(row: Mapping[str, Any], scale: float) -> Iterator[Turn]:
    for number, turn in enumerate(row["turns"]):
        output = int(turn.get("output_length") or max(OUTPUT / scale, 2))
        yield Turn([Piece("turn", number, 0, str(turn["text"]))], output, float(turn.get("delay") or 0) / 1e3 / scale)


def _read_blocks(rows: Sequence[Mapping[str, Any]], scale: float) -> list[Session]:
    """Rows of one session_id are its turns, `delay` ms after one another; each of the others is a session."""
    sessions: dict[str, Session] = {}
    for number, row in enumerate(rows):
        num_input, num_output = (max(round(row[name] / scale), 2) for name in ("input_length", "output_length"))
        block = max(round(BLOCK_TOKENS / scale), 1)
        pieces = [Piece("block", int(one), block) for one in row.get("hash_ids") or ()]
        rest = num_input - block * len(pieces)
        if rest < 0 and pieces:  # the last is not whole
            pieces[-1] = Piece("block", pieces[-1].number, max(block + rest, 1))
        elif rest > 0:
            pieces.append(Piece("first", number, rest))
        start_s, delay_s = (float(row.get(name) or 0) / 1e3 / scale for name in ("timestamp", "delay"))
        name = str(row.get("session_id") or f"/{number}")
        before = sessions.get(name, Session(start_s, ()))
        turn = Turn(pieces, num_output, delay_s if before.turns else 0.0, is_whole=True)
        sessions[name] = Session(before.start_s, [*before.turns, turn])
    return list(sessions.values())
