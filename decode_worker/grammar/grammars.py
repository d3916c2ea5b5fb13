"""A worker's grammars: each is compiled once, cached and shared. Runs on the asyncio thread."""

import asyncio
import hashlib
from collections import OrderedDict

from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.limits import find_problem
from decode_worker.grammar.matcher import LoadedGrammar
from decode_worker.interfaces import GrammarBusyError, GrammarRefusedError, GrammarSource
from decode_worker.metrics import DecodeMetrics

MAX_COMPILING = 16  # grammars that wait for the compiler, the present one included
MAX_REFUSALS = 1024  # remembered, so that asking again costs nothing


class Grammars(GrammarSource):
    """(kind, text) |-> grammar. The least recently used are dropped when all take more than `max_bytes`."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int, metrics: DecodeMetrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self._max_bytes = max_bytes
        # By the hash of kind and text, those first that are dropped first:
        self.cached: OrderedDict[bytes, tuple[LoadedGrammar, int]] = OrderedDict()  # with its bytes
        self.num_bytes = 0  # of them
        self._refusals: OrderedDict[bytes, tuple[str, str]] = OrderedDict()  # message, param
        self._compiling: dict[bytes, asyncio.Task[LoadedGrammar]] = {}

    async def start(self) -> None:
        await self._compiler.start()

    async def get(self, kind: str, text: str, timeout_s: float) -> LoadedGrammar:
        """Cancelling does not cancel the compilation."""
        if (problem := find_problem(kind, text)) is not None:
            self._count("refused")
            raise GrammarRefusedError(problem)
        key = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
        if key in self.cached:
            grammar, _num_bytes = self.cached[key]
            if not grammar.is_too_slow:
                self._count("cached")
                self.cached.move_to_end(key)
                return grammar
            self._refuse(key, "the answer takes too long to check; make it less ambiguous", "")
        if key in self._refusals:
            self._count("refused")
            raise GrammarRefusedError(*self._refusals[key])
        if (task := self._compiling.get(key)) is None:
            if len(self._compiling) >= MAX_COMPILING:
                raise GrammarBusyError(f"{len(self._compiling)} other grammars are being compiled")
            task = self._compiling[key] = asyncio.create_task(self._compile(key, kind, text))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # even if all have left
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise GrammarBusyError("the grammar is still being compiled")
        return task.result()

    async def _compile(self, key: bytes, kind: str, text: str) -> LoadedGrammar:
        try:
            with self._metrics.grammar_seconds.time():
                grammar = await self._compiler.compile(kind, text)
        except GrammarRefusedError as error:
            self._count("refused")
            self._refuse(key, str(error), error.param)
            raise
        except Exception:
            self._count("failed")
            raise
        finally:
            del self._compiling[key]
        self._count("compiled")
        self._keep(key, grammar, grammar.num_bytes)
        return grammar

    def _keep(self, key: bytes, grammar: LoadedGrammar, num_bytes: int) -> None:
        if num_bytes <= self._max_bytes:
            self.cached[key] = grammar, num_bytes
            self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes:
                _oldest, (_grammar, freed) = self.cached.popitem(last=False)
                self.num_bytes -= freed

    def _refuse(self, key: bytes, message: str, param: str) -> None:
        """From now on, without compiling."""
        self._refusals[key] = message, param
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _count(self, result: str) -> None:
        self._metrics.grammars.labels(result).inc()

    async def close(self) -> None:
        """End the compiler and all waiting calls."""
        for task in self._compiling.values():
            task.cancel()
        await self._compiler.close()
