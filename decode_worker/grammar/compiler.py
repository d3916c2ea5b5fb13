"""The worker's end of the compiler process: started with the worker, one request at a time, replaced if it fails.

Runs on the asyncio thread. Long work happens in the process, or on one thread.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from decode_worker.grammar.compiler_process import Answer, Compile, Compiled, CompilerStart
from decode_worker.grammar.matcher import LoadedGrammar, load_grammar
from decode_worker.grammar.vocabulary import Vocabulary
from decode_worker.interfaces import GrammarBrokenError, GrammarBusyError, GrammarRefusedError
from runtime.child import ChildError, ChildServer, StandingChild
from runtime.fork import Busy, Refused

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
        self._start = CompilerStart(str(folder), vocab_size, cpu_s, self._wall_s)
        self._turn = asyncio.Lock()  # held by the request that the process works on
        self._child = StandingChild[Answer](
            lambda: ChildServer(
                "decode_worker.grammar.compiler_process", self._start, Answer, environment=_SAFE_ENVIRONMENT
            ),
            START_S,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process's, while it runs."""
        return self._child.child.pid if self._child.child else None

    async def start(self) -> None:
        """Returns when the process is ready, or has failed, which is logged: `compile` tries again."""
        async with self._turn:
            try:
                await self._ensure_started()
            except GrammarBrokenError as error:
                log.error("no grammar can be compiled", reason=str(error))

    async def compile(self, kind: str, text: str) -> LoadedGrammar:
        """Ends within START_S and the wall limit after its turn has come.

        Raises GrammarRefusedError, GrammarBusyError or GrammarBrokenError.
        """
        async with self._turn:
            if self._is_closed:
                raise GrammarBusyError("this worker stops")
            vocabulary = await self._ensure_started()
            match answer := await self._ask(Compile(kind, text)):
                case Refused():
                    raise GrammarRefusedError(answer.message, answer.param)
                case Busy():
                    raise GrammarBusyError(f"no time to compile it within {self._wall_s:g} s: the machine is busy")
            assert isinstance(answer, Compiled)
            return await self._on_thread(lambda: load_grammar(vocabulary, answer.grammar.decode(), kind, text))

    async def close(self) -> None:
        """End the process. A compilation under way ends as GrammarBusyError."""
        self._is_closed = True
        await self._child.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _ensure_started(self) -> Vocabulary:
        """The process's vocabulary, once it has read that. Raises GrammarBrokenError."""
        before = self.pid
        try:
            vocabulary = await self._child.ready()
        except ChildError as error:
            log.warning("grammar compiler fails", error=str(error))
            raise GrammarBrokenError("the grammar compiler does not start; the worker's log says why") from error
        if self.pid != before:
            log.info("grammar compiler started", pid=self.pid)
        assert isinstance(vocabulary, Vocabulary)
        return vocabulary

    async def _ask(self, call: Compile) -> Answer:
        try:
            return await self._child.ask(call, self._wall_s + _SLACK_S)
        except ChildError as error:
            log.warning("grammar compiler fails", error=str(error))
            raise GrammarBusyError("the grammar compiler died and is started again") from error
        except asyncio.CancelledError:  # the next one should not wait for this
            if self._child.child is not None:
                self._child.child.fail("was interrupted")
            raise

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
