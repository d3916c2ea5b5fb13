"""Limits of a grammar's cost, and checks of its text that need no parser. Pure."""

import json
import math
import re
from typing import Any

from runtime.peer_input import MAX_JSON_DEPTH

KINDS = ("json_schema", "json_object", "regex", "ebnf", "structural_tag")
MAX_TEXT_BYTES = 256 << 10  # of a grammar: a client's 64 KiB, or its tools and the gateway's text around them
MAX_MEMORY_BYTES = 1 << 30  # address space for one compilation, beyond the compiler's own
MAX_COMPILED_BYTES = 32 << 20  # serialised
TRIAL_TOKENS = 64  # length of the answer on which a new grammar is tried
MAX_TOKEN_CPU_S = 0.1  # for one token's mask or state
MAX_TURN_CPU_S = 0.02  # then an answer gets no more drafts in this step, and continues its replay in the next
MAX_STEP_CPU_S = 0.15  # then the other answers wait for the next step; before the forward, and again after it
MAX_STUCK_CPU_S = 0.3  # then a call that cannot be interrupted is abandoned
MAX_STUCK = 4  # abandoned calls at once
CHEAP_CPU_S = 0.001  # of an answer's masks: such grammars are not a burden
BESIDE_SHARE = 0.2  # of a worker's time, for costlier ones while other answers wait for their steps
MAX_BESIDE_CPU_S = 0.05  # of these in a step
MAX_ANSWER_CPU_S = 1.0  # of one answer's masks beside others, if they take more than MAX_TURN_CPU_S at the mean
UNKNOWN_CPU_S = 0.005  # assumed for an answer's first masks: more than honest grammars need

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)


class Allowance:
    """CPU time that costly grammars may take beside other answers: BESIDE_SHARE of all time, unused time kept a while.

    So a client that sends an ambiguous grammar slows its own answers, however many, and hardly the others.
    """

    def __init__(self) -> None:
        self._left_s = MAX_BESIDE_CPU_S
        self._at = -math.inf

    def look(self, now: float) -> float:
        """Seconds that may be taken now; none are left if it is not positive."""
        self._left_s = min(self._left_s + BESIDE_SHARE * (now - self._at), MAX_BESIDE_CPU_S)
        self._at = now
        return self._left_s

    def take(self, cpu_s: float) -> None:
        self._left_s -= cpu_s


def find_problem(kind: str, text: str) -> str | None:
    """Why the text is refused unseen, in words for the client; None if it is not."""
    if kind not in KINDS:
        return f"{kind!r} is no kind of grammar; there are {', '.join(KINDS)}"
    num_bytes = len(text.encode())
    if num_bytes > MAX_TEXT_BYTES:
        return f"it has {num_bytes} bytes; at most {MAX_TEXT_BYTES} are allowed"
    if kind in ("json_schema", "structural_tag") and json_depth(text) > MAX_JSON_DEPTH:
        return f"it nests deeper than {MAX_JSON_DEPTH} levels"
    if "\0" in text:
        return "it holds a NUL character"
    return None


def json_depth(text: str) -> int:
    """How deep brackets nest outside strings, of any text. Linear time."""
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        if match[0] in ("[", "{"):
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in ("]", "}"):
            depth -= 1
    return deepest


def free_lead(kind: str, text: str) -> str:
    """The shortest text that ends the free text with which all answers begin, as reasoning; empty if none does.

    Random tokens do not find the end of free text: a trial has to begin behind it. `text` is a grammar that compiles.
    """
    node: dict[str, Any] = json.loads(text)["format"] if kind == "structural_tag" else {"type": kind}
    while node["type"] in ("sequence", "optional"):
        node = node["content"] if node["type"] == "optional" else node["elements"][0]
    is_free = node["type"] == "tag" and node["content"]["type"] == "any_text"
    return f"{node['begin']}{node['end']}" if is_free else ""
