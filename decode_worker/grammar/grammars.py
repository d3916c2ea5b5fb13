"""A worker's grammars: each is compiled once, cached and shared.

Runs on the asyncio thread. Knows neither sessions nor the wire.
"""

import asyncio
import hashlib
from collections import OrderedDict

from decode_worker.grammar.cache import ByteCache
from decode_worker.grammar.compiler import GrammarCompiler
from decode_worker.grammar.errors import GrammarBusyError, GrammarRefusedError
from decode_worker.grammar.limits import find_problem
from decode_worker.grammar.matcher import Grammar
from decode_worker.metrics import GrammarMetrics

MAX_COMPILING = 16  # grammars that wait for the compiler, the present one included
MAX_REFUSALS = 1024  # remembered, so that asking again costs nothing

_Key = bytes


class Grammars:
    """(kind, text) |-> grammar."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int, metrics: GrammarMetrics) -> None:
        self._compiler = compiler
        self._metrics = metrics
        self.cache: ByteCache[_Key, Grammar] = ByteCache(max_bytes)
        self._refusals: OrderedDict[_Key, tuple[str, str]] = OrderedDict()  # key |-> message, param; oldest first
        self._compiling: dict[_Key, asyncio.Task[Grammar]] = {}

    async def start(self) -> None:
        """Start the compiler. Returns when it is ready, or has failed, which is logged."""
        await self._compiler.start()

    async def get(self, kind: str, text: str, timeout_s: float) -> Grammar:
        """The grammar of a text, within `timeout_s`. A compilation that takes longer continues: ask again.

        Raises GrammarRefusedError, GrammarBusyError or GrammarBrokenError. Cancelling does not cancel the compilation.
        """
        problem = find_problem(kind, text)
        if problem is not None:
            self._count("refused")
            raise GrammarRefusedError(problem)
        key = hashlib.sha256(f"{kind}\0{text}".encode()).digest()
        grammar = self.cache.get(key)
        if grammar is not None and grammar.is_too_slow.is_set():
            self._refuse(key, GrammarRefusedError("the answer takes too long to check; make it less ambiguous"))
        elif grammar is not None:
            self._count("cached")
            return grammar
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
        with self._metrics.compile_seconds.time():
            return await self._compiler.compile(kind, text)

    def _keep(self, key: _Key, task: asyncio.Task[Grammar]) -> None:
        del self._compiling[key]
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._count("compiled")
            self.cache.put(key, task.result(), task.result().num_bytes)
        elif isinstance(error, GrammarRefusedError):
            self._count("refused")
            self._refuse(key, error)
        else:
            self._count("failed")

    def _refuse(self, key: _Key, error: GrammarRefusedError) -> None:
        """From now on, without compiling."""
        self._refusals[key] = str(error), error.param
        if len(self._refusals) > MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def _count(self, result: str) -> None:
        self._metrics.results.labels(result).inc()

    async def close(self) -> None:
        """End the compiler and all waiting calls."""
        for task in self._compiling.values():
            task.cancel()
        await self._compiler.close()
