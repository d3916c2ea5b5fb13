"""The database of stored answers as a process: the real SQL on SQLite in memory, by virtual time, and its failures.

A call reaches it late, after its gateway has given up or died, or never; its reply may be lost; a statement may fail in
the middle of a transaction, or the connection right after the commit. Transactions follow each other.
"""

import asyncio
import random
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.simulate.virtual_time import VirtualLoop
from gateway.store.adapters import AdapterRow
from gateway.store.database import RUNNING, Answer, Database, StoreError, TokenPart
from gateway.store.run import join_parts
from tests.simulator.clock import EPOCH_S
from tests.simulator.world import Failure, Process, ViolationError, World

CALL_S = 5.0  # until a call's gateway gives it up
UNIX_EPOCH_DAYS = 2440587.5  # in Julian days


@dataclass(slots=True)
class Kept:
    """What the store has ever had of an answer."""

    first: Answer  # its row as it came
    status: str = ""
    num_ends: int = 0
    tokens: list[int] = field(default_factory=list)
    owners: set[str] = field(default_factory=set)  # gateways' ids
    is_deleted: bool = False
    result: bytes = b""  # the whole answer, once it is over


class SimStore(Process):
    """What is committed outlives its crashes."""

    failing = 0.0  # share of transactions that fail inside, or after their commit

    def __init__(self, world: World) -> None:
        self._rng = random.Random(f"store {world.seed}")
        self.database = sqlite3.connect(":memory:", isolation_level=None)
        now = EPOCH_S / 86400 + UNIX_EPOCH_DAYS
        self.database.create_function("julianday", 1, lambda _: now + world.now / 86400)
        self.answers: dict[str, Kept] = {}
        self.shared_ever = set[AdapterRow]()  # adapters as they have ever been in it
        self._served: Counter[Hashable] = Counter()  # line |-> its latest call
        self.fails_at = -1  # statements until the present transaction fails
        self.fails_late = False  # after its commit
        super().__init__(world, "store")

    def boot(self) -> None:
        pass

    def serve(self, line: Hashable, number: int, work: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        """One call. One that a later one of its line has overtaken does nothing: that one has waited for its locks."""
        if number <= self._served[line]:
            return
        self._served[line] = number
        try:
            result = work()
        except StoreError as error:
            result = error
        self.look()
        answer(result)

    def draw(self) -> None:
        """What becomes of the transaction that begins."""
        rng, self.fails_at, self.fails_late = self._rng, -1, False
        if self.failing and rng.random() < self.failing:
            self.fails_at = rng.choice([-1, rng.randrange(6)])
            self.fails_late = self.fails_at < 0

    def look(self) -> None:
        """Every answer's tokens follow each other and only grow, and it ends once."""
        rows = self.rows()
        self.shared_ever |= self.shared()
        for answer_id, kept in self.answers.items():
            if answer_id not in rows:
                kept.is_deleted = True
        for answer_id, (row, gateway) in rows.items():
            kept = self.answers.setdefault(answer_id, Kept(row))
            if kept.is_deleted:
                raise ViolationError(f"{answer_id} was deleted, and is there again")
            if gateway:
                kept.owners.add(gateway)
            if kept.status not in ("", *RUNNING) and row.status != kept.status:
                raise ViolationError(f"{answer_id} was {kept.status}, and is {row.status}")
            kept.num_ends += row.status not in RUNNING and row.status != kept.status
            kept.status = row.status
            kept.result = row.result
            tokens = self._read_tokens(answer_id)
            if tokens[: len(kept.tokens)] != kept.tokens:
                raise ViolationError(f"the tokens of {answer_id} were {kept.tokens}, and are {tokens}")
            kept.tokens = tokens

    def rows(self) -> Mapping[str, tuple[Answer, str]]:
        """Each answer, and the gateway that works on it."""
        columns = ", ".join(Answer.__slots__)
        found = self._select(f"SELECT {columns}, gateway FROM answers")
        return {row[0]: (Answer(*row[:-1]), row[-1]) for row in found}

    def shared(self) -> set[AdapterRow]:
        """Adapters, those that were unloaded too."""
        return {AdapterRow(*row) for row in self._select("SELECT model, name, path, digest FROM adapters")}

    def tokens_without_a_row(self) -> list[Any]:
        return self._select("SELECT * FROM tokens WHERE answer NOT IN (SELECT id FROM answers)")

    def _read_tokens(self, answer_id: str) -> list[int]:
        sql = f"SELECT choice, first, ids, logprobs, finish FROM tokens WHERE answer = '{answer_id}' ORDER BY first"
        parts, count = [TokenPart(*row) for row in self._select(sql)], 0
        for part in parts:
            if part.first != count:
                raise ViolationError(f"{answer_id} has {count} tokens, and then some from number {part.first} on")
            count += len(join_parts([part], 1)[0].ids)
        return join_parts(parts, 1)[0].ids

    def _select(self, sql: str) -> list[Any]:
        try:
            return self.database.execute(sql).fetchall()
        except sqlite3.OperationalError:  # no tables yet
            return []


class _Connection:
    """Fails as the store has drawn."""

    def __init__(self, store: SimStore) -> None:
        self._store = store

    def execute(self, sql: str, values: Mapping[str, object] | tuple[()] = ()) -> sqlite3.Cursor:
        store = self._store
        if sql.startswith("BEGIN"):
            store.draw()
        elif sql != "ROLLBACK":
            store.fails_at -= 1
            if store.fails_at == 0:
                raise sqlite3.OperationalError("the disk is full")
        cursor = store.database.execute(sql, values)
        if sql == "COMMIT" and store.fails_late:
            raise sqlite3.OperationalError("the connection was lost after the commit")
        return cursor

    def close(self) -> None:
        pass


class SimDatabase(Database):
    """The real one, connected to a SimStore, which is its place."""

    def __init__(self, place: Any) -> None:
        self._store: SimStore = place
        super().__init__(Path())

    def _connect(self) -> Any:
        return _Connection(self._store)


class StoreLoop(VirtualLoop):
    """A gateway's. Its executors have one thread each, whose work is done at the store."""

    def __init__(self, gateway: Process, store: SimStore) -> None:
        world, epoch = gateway.world, gateway.epoch
        super().__init__(lambda: world.now, lambda delay, action: world.at(delay, gateway, epoch, action))
        self._gateway, self._store, self._epoch = gateway, store, epoch
        self._waiting: dict[Executor, deque[tuple[asyncio.Future[Any], Callable[[], Any]]]] = {}
        self._num_calls = 0

    def run_in_executor(self, line: Executor, work: Callable[[], Any]) -> asyncio.Future[Any]:
        future = self.create_future()
        if self._gateway.epoch != self._epoch:
            future.set_exception(StoreError("the gateway has ended"))
            return future
        waiting = self._waiting.setdefault(line, deque())
        waiting.append((future, work))
        if len(waiting) == 1:
            self._begin(line)
        return future

    def _begin(self, line: Executor) -> None:
        _, work = self._waiting[line][0]
        self._num_calls += 1
        store, number, name = self._store, self._num_calls, (self._epoch, self._gateway.name, id(line))

        def serve(answer: Callable[[Any], None]) -> None:
            store.serve(name, number, work, answer)

        self._gateway.world.call(self._gateway, store, serve, lambda result: self._finish(line, result), CALL_S)

    def _finish(self, line: Executor, result: Any) -> None:
        waiting = self._waiting[line]
        future, _ = waiting.popleft()
        if not future.done():
            if isinstance(result, Failure):
                future.set_exception(StoreError(result.why))
            elif isinstance(result, StoreError):
                future.set_exception(result)
            else:
                future.set_result(result)
        if waiting:
            self._begin(line)
