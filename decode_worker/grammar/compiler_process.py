"""The compiler's own process: `python -m decode_worker.grammar.compiler_process FOLDER VOCABULARY_SIZE CPU_S WALL_S`.

It reads the vocabulary once, then forks for each grammar. The fork has limits of CPU time and memory and ends with its
grammar: whatever a hostile text does to it ends there, and the next grammar finds everything loaded.

    worker ◄── frames on stdin and stdout ──► this process ──fork──► one compilation

It ends when its stdin does: so with the worker, however that ends; a compilation under way is killed.
"""

import math
import os
import random
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from decode_worker.grammar import pipe_frames
from decode_worker.grammar.bindings import compile_text
from decode_worker.grammar.culprit import Part, find_culprit, find_long_chain, tag_parts
from decode_worker.grammar.errors import GrammarMismatchError, GrammarRefusedError
from decode_worker.grammar.limits import (
    MAX_COMPILED_BYTES,
    MAX_MEMORY_BYTES,
    MAX_TOKEN_CPU_S,
    TRIAL_TOKENS,
    free_lead,
)
from decode_worker.grammar.matcher import Grammar
from decode_worker.grammar.pipe_frames import Frame
from decode_worker.grammar.vocabulary import Vocabulary, read_vocabulary
from runtime.peer_input import MAX_JSON_DEPTH

_CHUNK_BYTES = 1 << 20
# Before xgrammar's messages: a place in its own code, and the condition that did not hold there.
_NO_MESSAGE = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: )?")
_MAX_MESSAGE_CHARS = 300

_TOO_LARGE = f"it needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory to compile; simplify it"


def main(folder: Path, size: int, cpu_s: int, wall_s: float) -> None:
    """Say that the vocabulary is there, then answer requests until stdin ends."""
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with answers
    vocabulary = read_vocabulary(folder, size)
    _write(answers, pipe_frames.pack(Frame({"status": "ready"})))
    while True:
        try:
            request = pipe_frames.read(lambda num_bytes: _read_exactly(requests, num_bytes))
        except EOFError:
            return
        if request.head["kind"] == "vocabulary":
            answer = pipe_frames.pack(vocabulary.to_frame())
        else:
            work = partial(_answer, vocabulary, request.head["kind"], request.body.decode(), cpu_s)
            answer = _run_limited(work, cpu_s, wall_s, (requests, answers))
        _write(answers, answer)


def _answer(vocabulary: Vocabulary, kind: str, text: str, cpu_s: int) -> Frame:
    """To one request. Runs in a process of its own, within limits."""
    try:
        return Frame({"status": "compiled"}, _compile(vocabulary, kind, text))
    except GrammarRefusedError as error:
        until = cpu_s / 2  # a limit that is hit would take the reason along
        param, problem = find_culprit(kind, text, str(error), partial(_find_problem, vocabulary, until))
        return _refusal(problem, param)


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
    for part in tag_parts(text) if kind == "structural_tag" else [Part(kind, text, "")]:
        if (chain := find_long_chain(part.kind, part.text)) is not None:
            raise GrammarRefusedError(chain)
    try:
        compiled = compile_text(kind, text, vocabulary.info)
        _try_out(Grammar(compiled, vocabulary, vocabulary.text_mask(kind, text)), free_lead(kind, text))
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


def _try_out(grammar: Grammar, lead: str) -> None:
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


def _run_limited(work: Callable[[], Frame], cpu_s: int, wall_s: float, not_inherited: tuple[int, int]) -> bytes:
    """The packed result of `work`, done by a fork with limits, or the packed reason why there is none."""
    source, sink = os.pipe()
    fork = os.fork()
    if fork == 0:
        try:
            for fd in (source, *not_inherited):
                os.close(fd)
            _limit_myself(cpu_s)
            _write(sink, pipe_frames.pack(work()))
        finally:
            os._exit(0)
    os.close(sink)
    try:
        result, is_late = _collect(fork, source, not_inherited[0], time.monotonic() + wall_s)
    finally:
        os.close(source)
        os.kill(fork, signal.SIGKILL)  # not reaped yet: the number is still its
        _pid, status = os.waitpid(fork, 0)
    if is_late:
        return pipe_frames.pack(Frame({"status": "busy"}))
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return pipe_frames.pack(_refusal(f"took longer than {cpu_s} s to compile; simplify it"))
    return result or pipe_frames.pack(_refusal("it cannot be compiled: the compiler crashed on it; simplify it"))


def _collect(fork: int, source: int, requests: int, deadline: float) -> tuple[bytes, bool]:
    """All that the fork writes, and whether it was too late. Ends this process when the worker is gone."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(requests, 0)  # POLLHUP only
    chunks: list[bytes] = []
    while (left_s := deadline - time.monotonic()) > 0:
        for fd, _events in poll.poll(math.ceil(left_s * 1000)):
            if fd == requests:
                os.kill(fork, signal.SIGKILL)
                os._exit(0)
            chunk = os.read(source, _CHUNK_BYTES)
            if not chunk:
                return b"".join(chunks), False
            chunks.append(chunk)
    return b"", True


def _limit_myself(cpu_s: int) -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = num_pages * resource.getpagesize() + MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)  # xgrammar's warnings quote the client's text
    os.dup2(nowhere, 1)


def _refusal(message: str, param: str = "") -> Frame:
    return Frame({"status": "refused", "message": message, "param": param})


def _read_exactly(fd: int, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        chunk = os.read(fd, num_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
