"""A worker's grammars: each is compiled once, cached and shared. Runs on the asyncio thread."""

import asyncio
import hashlib
from collections import OrderedDict

from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.errors import GrammarBusyError, GrammarRefusedError
from decode_worker.grammar.limits import find_problem
from decode_worker.grammar.matcher import Grammar
from decode_worker.metrics import DecodeMetrics

MAX_COMPILING = 16  # grammars that wait for the compiler, the present one included
MAX_REFUSALS = 1024  # remembered, so that asking again costs nothing

_Key = bytes


class Grammars:
    """(kind, text) |-> grammar. The least recently used are dropped when all take more than `max_bytes`."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int, metrics: DecodeMetrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self._max_bytes = max_bytes
        self.cached: OrderedDict[_Key, tuple[Grammar, int]] = OrderedDict()  # with bytes; least recently used first
        self.num_bytes = 0  # of them
        self._refusals: OrderedDict[_Key, tuple[str, str]] = OrderedDict()  # key |-> message, param; oldest first
        self._compiling: dict[_Key, asyncio.Task[Grammar]] = {}

    async def start(self) -> None:
        """Start the compiler. Returns when it is ready, or has failed, which is logged."""
        await self._compiler.start()

    async def get(self, kind: str, text: str, timeout_s: float) -> Grammar:
        """The grammar of a text, within `timeout_s`. A compilation that takes longer continues: ask again.

        Raises GrammarRefusedError, GrammarBusyError or GrammarBrokenError. Cancelling does not cancel the compilation.
        """
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
            self._refuse(key, GrammarRefusedError("the answer takes too long to check; make it less ambiguous"))
        if key in self._refusals:
            self._count("refused")
            raise GrammarRefusedError(*self._refusals[key])
        task = self._compiling.get(key) or self._begin(key, kind, text)
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise GrammarBusyError("the grammar is still being compiled")
        return task.result()

    def _begin(self, key: _Key, kind: str, text: str) -> asyncio.Task[Grammar]:
        if len(self._compiling) >= MAX_COMPILING:
            raise GrammarBusyError(f"{len(self._compiling)} other grammars are being compiled")
        task = self._compiling[key] = asyncio.create_task(self._compile(kind, text))
        task.add_done_callback(lambda done: self._keep(key, done))
        return task

    async def _compile(self, kind: str, text: str) -> Grammar:
        with self._metrics.grammar_seconds.time():
            return await self._compiler.compile(kind, text)

    def _keep(self, key: _Key, task: asyncio.Task[Grammar]) -> None:
        del self._compiling[key]
        if task.cancelled():
            return
        match task.exception():
            case None:
                self._count("compiled")
                self._cache(key, task.result())
            case GrammarRefusedError() as error:
                self._count("refused")
                self._refuse(key, error)
            case _:
                self._count("failed")

    def _cache(self, key: _Key, grammar: Grammar) -> None:
        """One larger than `max_bytes` is not kept."""
        if (num_bytes := grammar.num_bytes) > self._max_bytes:
            return
        self.cached[key] = grammar, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            _oldest, (_grammar, freed) = self.cached.popitem(last=False)
            self.num_bytes -= freed

    def _refuse(self, key: _Key, error: GrammarRefusedError) -> None:
        """From now on, without compiling."""
        self._refusals[key] = str(error), error.param
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _count(self, result: str) -> None:
        self._metrics.grammars.labels(result).inc()

    async def close(self) -> None:
        """End the compiler and all waiting calls."""
        for task in self._compiling.values():
            task.cancel()
        await self._compiler.close()
