"""The compiler's own process: `python -m decode_worker.grammar.compiler_process FD`.

It reads the vocabulary once, then forks for each grammar. The fork has limits of CPU time and memory and ends with its
grammar: whatever a hostile text does to it ends there, and the next grammar finds everything loaded.

    worker ◄── calls and answers ──► this process ──fork──► one compilation

It ends with the worker, however that ends, and a compilation under way with it.
"""

import asyncio
import random
import re
import sys
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from decode_worker.grammar.bindings import compile_text
from decode_worker.grammar.culprit import GrammarPart, find_culprit, find_long_chain, tag_parts
from decode_worker.grammar.errors import GrammarMismatchError
from decode_worker.grammar.limits import (
    MAX_COMPILED_BYTES,
    MAX_MEMORY_BYTES,
    MAX_TOKEN_CPU_S,
    TRIAL_TOKENS,
    free_lead,
)
from decode_worker.grammar.matcher import LoadedGrammar
from decode_worker.grammar.vocabulary import Vocabulary, read_vocabulary
from decode_worker.interfaces import GrammarRefusedError
from runtime.child import serve_parent
from runtime.fork import Busy, Limits, Refused, as_answer, work_in_fork
from runtime.peer_input import MAX_JSON_DEPTH

# Before xgrammar's messages: a place in its own code, and the condition that did not hold there.
_NO_MESSAGE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")
_MAX_MESSAGE_CHARS = 300

_TOO_LARGE = f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile; simplify it"


class CompilerStart(msgspec.Struct, tag=True):
    """The first call; answered by Vocabulary."""

    folder: str  # of the tokenizer
    vocab_size: int
    cpu_s: int  # for one grammar
    wall_s: float


class Compile(msgspec.Struct, tag=True):
    """Answered by Compiled, Refused or Busy."""

    kind: str
    text: str


class Compiled(msgspec.Struct, tag=True):
    grammar: bytes  # serialised


Call = CompilerStart | Compile
Answer = Vocabulary | Compiled | Refused | Busy


class Compiler:
    """Answers the worker's calls, which come one after the other."""

    def __init__(self, fd: int) -> None:
        """fd: of the worker's calls."""
        self._fd = fd

    async def answer(self, call: Call) -> Answer | msgspec.Raw:
        match call:
            case CompilerStart():
                self._limits = call
                self._vocabulary = read_vocabulary(Path(call.folder), call.vocab_size)
                _ = self._vocabulary.info  # is loaded before the first fork
                return self._vocabulary
            case Compile():
                return await self._compile_in_fork(call)

    async def _compile_in_fork(self, call: Compile) -> msgspec.Raw | Refused | Busy:
        """The answer of a fork with limits, or why there is none."""
        given = self._limits
        limits = Limits(given.cpu_s, given.wall_s, MAX_MEMORY_BYTES)
        found = await work_in_fork(self._fd, limits, lambda: answer_call(self._vocabulary, call, given.cpu_s))
        slow = f"took longer than {given.cpu_s} s to compile; simplify it"
        return as_answer(found, slow=slow, crashed="it cannot be compiled: the compiler crashed on it; simplify it")


def answer_call(vocabulary: Vocabulary, call: Compile, cpu_s: int) -> Compiled | Refused:
    """Runs in a process of its own, within limits."""
    try:
        return Compiled(_compile(vocabulary, call.kind, call.text))
    except GrammarRefusedError as error:
        if error.param:
            return Refused(str(error), error.param)
        until = cpu_s / 2  # a limit that is hit would take the reason along
        param, problem = find_culprit(call.kind, call.text, str(error), partial(_find_problem, vocabulary, until))
        return Refused(problem, param)


def _find_problem(vocabulary: Vocabulary, until: float, kind: str, text: str) -> str | None:
    """Why it cannot be compiled; None if it can, or this process has used CPU time `until`."""
    if time.process_time() < until:
        try:
            _compile(vocabulary, kind, text)
        except GrammarRefusedError as error:
            return str(error)
    return None


def _compile(vocabulary: Vocabulary, kind: str, text: str) -> bytes:
    """The serialised grammar. Raises GrammarRefusedError."""
    for part in tag_parts(text) if kind == "structural_tag" else [GrammarPart(kind, text, "")]:
        if (chain := find_long_chain(part.kind, part.text)) is not None:
            raise GrammarRefusedError(chain)
    try:
        compiled = compile_text(kind, text, vocabulary.info)
        _try_out(LoadedGrammar(compiled, vocabulary, vocabulary.text_mask(kind, text)), free_lead(kind, text))
        serialised = compiled.serialize_json().encode()
    except MemoryError as error:
        raise GrammarRefusedError(_TOO_LARGE) from error
    except RecursionError as error:
        raise GrammarRefusedError(f"it nests deeper than {MAX_JSON_DEPTH} levels") from error
    except (RuntimeError, ValueError, TypeError) as error:
        message = _NO_MESSAGE.sub("", str(error)).strip() or type(error).__name__
        raise GrammarRefusedError(_TOO_LARGE if "bad_alloc" in message else message[:_MAX_MESSAGE_CHARS]) from error
    if len(serialised) > MAX_COMPILED_BYTES:
        raise GrammarRefusedError(f"it compiles to more than {MAX_COMPILED_BYTES >> 20} MiB; simplify it")
    return serialised


def _try_out(grammar: LoadedGrammar, lead: str) -> None:
    """Follow one random answer behind `lead`: grammars may be quick to compile and slow, or impossible, to follow."""
    matcher = grammar.new_matcher(())
    matcher.begin_with(lead)
    random_number = random.Random(0)
    try:
        for _count in range(TRIAL_TOKENS):
            if matcher.is_over:
                return
            words = matcher.fill(())[0]
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if not allowed.size:
                raise GrammarRefusedError("no text matches it, or only text without an end")
            matcher.accept([int(allowed[random_number.randrange(allowed.size)])])
    except GrammarMismatchError as error:
        raise GrammarRefusedError(
            f"one token of the answer takes over {MAX_TOKEN_CPU_S * 1000:.0f} ms to check; make it less ambiguous"
        ) from error


if __name__ == "__main__":
    asyncio.run(serve_parent(int(sys.argv[1]), Call, Compiler(int(sys.argv[1])).answer))
