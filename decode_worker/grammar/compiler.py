"""The worker's end of the compiler process: started with the worker, one request at a time, replaced if it fails.

Runs on the asyncio thread. Long work happens in the process, or on one thread.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from decode_worker.grammar import pipe_frames
from decode_worker.grammar.errors import GrammarBrokenError, GrammarBusyError, GrammarRefusedError
from decode_worker.grammar.matcher import Grammar, load_grammar
from decode_worker.grammar.pipe_frames import Frame
from decode_worker.grammar.vocabulary import Vocabulary, vocabulary_from_frame

T = TypeVar("T")
log = structlog.get_logger()

START_S = 120.0  # to load libraries and vocabulary: half a second, unless the machine is busy
_SLACK_S = 5.0  # for the process to answer that time is over
_SAFE_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # it forks: no threads


def wall_limit_s(cpu_s: int) -> float:
    """The longest that a compilation with this CPU limit may take: it shares the CPU with other processes."""
    return 10.0 * cpu_s + 10.0


class GrammarCompiler:
    """Compiles grammars for one tokenizer."""

    def __init__(self, folder: Path, vocab_size: int, cpu_s: int) -> None:
        """`folder` has the tokenizer; `vocab_size` is the model's. Starts nothing."""
        self._wall_s = wall_limit_s(cpu_s)
        self._command = [
            sys.executable, "-P", "-m", "decode_worker.grammar.compiler_process",
            str(folder), str(vocab_size), str(cpu_s), str(self._wall_s),
        ]  # fmt: skip
        self._turn = asyncio.Lock()  # held by the request that the process works on
        self._process: Process | None = None
        self._vocabulary: Vocabulary | None = None  # once the first grammar needs it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when the process is ready, or has failed, which is logged: `compile` tries again."""
        async with self._turn:
            try:
                await self._ensure_started()
            except GrammarBrokenError as error:
                log.error("no grammar can be compiled", reason=str(error))

    async def compile(self, kind: str, text: str) -> Grammar:
        """Ends within START_S and the wall limit after its turn has come.

        Raises GrammarRefusedError, GrammarBusyError or GrammarBrokenError.
        """
        async with self._turn:
            if self._is_closed:
                raise GrammarBusyError("this worker stops")
            process = await self._ensure_started()
            if self._vocabulary is None:
                reply = await self._ask(process, Frame({"kind": "vocabulary"}))
                self._vocabulary = await self._on_thread(lambda: vocabulary_from_frame(reply))
            vocabulary = self._vocabulary
            answer = await self._ask(process, Frame({"kind": kind}, text.encode()))
            if answer.head["status"] == "refused":
                raise GrammarRefusedError(answer.head["message"], answer.head["param"])
            if answer.head["status"] != "compiled":
                raise GrammarBusyError(f"no time to compile it within {self._wall_s:g} s: the machine is busy")
            return await self._on_thread(lambda: load_grammar(vocabulary, answer.body.decode(), kind, text))

    async def close(self) -> None:
        """End the process. A compilation under way ends as GrammarBusyError."""
        self._is_closed = True
        await self._kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ensure_started(self) -> Process:
        """The process, which has read the vocabulary. Raises GrammarBrokenError."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self._kill()
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env={**os.environ, **_SAFE_ENVIRONMENT}
        )
        if await self._read(process, START_S) is None:
            raise GrammarBrokenError("the grammar compiler does not start; the worker's log says why")
        log.info("grammar compiler started", pid=process.pid)
        return process

    async def _ask(self, process: Process, request: Frame) -> Frame:
        assert process.stdin is not None
        try:
            process.stdin.write(pipe_frames.pack(request))
        except (BrokenPipeError, ConnectionResetError):
            log.warning("grammar compiler is gone")
        answer = await self._read(process, self._wall_s + _SLACK_S)
        if answer is None:
            raise GrammarBusyError("the grammar compiler died and is started again")
        return answer

    async def _read(self, process: Process, timeout_s: float) -> Frame | None:
        """Its next message; None when there is none, and then the process is dead."""
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                return await pipe_frames.read_from(process.stdout)
        except (TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            log.warning("grammar compiler fails", error=str(error) or type(error).__name__)
            await self._kill()
            return None
        except asyncio.CancelledError:  # in mid-message: it cannot be asked again
            await self._kill()
            raise

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
