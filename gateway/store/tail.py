"""Answers read from the store as if workers gave them: tokens that are there, and those that another gateway adds."""

import asyncio
from asyncio import Future
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from gateway.errors import ApiError
from gateway.router.attempt_record import AttemptRecord
from gateway.router.engine_client import Admitted, Load, TokenizedRequest, Tokens
from gateway.store.database import RUNNING, Answer, Database, Status, StoreError, TokenPart
from gateway.store.line import Line
from gateway.store.run import ChoiceTokens, join_parts

LOOK_S = 0.2  # between two looks at answers that grow


class Wanted(NamedTuple):
    """How far a reader has read a choice."""

    answer: str
    choice: int
    num_read: int  # tokens


class Found(NamedTuple):
    """The rest of a choice behind a place, as the store has it."""

    tokens: ChoiceTokens
    status: Status | None  # of the answer; None: it is gone
    result: bytes  # the whole answer, if it is over


class Tail:
    """Looks at the store for all who follow answers there: one call for all of them. Lives on the asyncio thread."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._waiting: dict[Future[Found], Wanted] = {}
        self._looking: asyncio.Task[None] | None = None

    async def look(self, place: Wanted) -> Found:
        """Reads what is there now, perhaps nothing new. Raises StoreError."""
        return (await self._find([place]))[place]

    async def wait(self, place: Wanted) -> Found:
        """Waits for the next look that finds something new, and returns that."""
        future: Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting[future] = place
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_on())
        try:
            return await future
        finally:
            del self._waiting[future]

    async def _look_on(self) -> None:
        """Looks again and again while any reader waits."""
        while self._waiting:
            await asyncio.sleep(LOOK_S)
            waiting = dict(self._waiting)
            try:
                found = await self._find(waiting.values())
            except StoreError:
                continue
            except Exception as error:  # those who wait are to learn of a bug
                self._wake(dict.fromkeys(waiting, error))
                raise
            changed = {future: found[place] for future, place in waiting.items()}
            self._wake({future: new for future, new in changed.items() if new.tokens.ids or new.status not in RUNNING})

    @staticmethod
    def _wake(results: Mapping[Future[Found], Found | Exception]) -> None:
        for future, result in results.items():
            if future.done():
                continue
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

    async def _find(self, places: Collection[Wanted]) -> dict[Wanted, Found]:
        """Choices that several follow are read once, from the first of their places on."""
        first: dict[tuple[str, int], int] = {}
        for answer, choice, num_read in places:
            first[answer, choice] = min(num_read, first.get((answer, choice), num_read))
        rows = await self._line.call(Database.find_new, [(*of, begin) for of, begin in first.items()])
        found = dict(zip(first, rows, strict=True))
        return {place: self._cut(place, *found[place[:2]]) for place in places}

    @staticmethod
    def _cut(place: Wanted, parts: Sequence[TokenPart], status: Status | None, result: bytes) -> Found:
        """The rest behind the place, without an end that is about to be written with the whole answer."""
        all_of_it = join_parts([replace(part, choice=0) for part in parts], 1)[0]
        begin = place.num_read - parts[0].first if parts else 0
        if all_of_it.finish and status in RUNNING:
            return Found(ChoiceTokens(), status, result)
        new = ChoiceTokens(all_of_it.ids[begin:], all_of_it.logprobs[begin:], all_of_it.finish)
        return Found(new, status, result)


class StoredTokens:
    """The EngineClient of one answer: its choices are generated in the order in which they are asked for."""

    def __init__(self, tail: Tail, answer: Answer) -> None:
        self._answer = replace(answer)  # as last read
        self._tail = tail
        self._num_choices = 0

    @property
    def result(self) -> bytes | None:
        """The whole answer, if it is known to be over."""
        return None if self._answer.status in RUNNING else self._answer.result

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[Admitted]:
        yield Admitted(0)

    async def generate(
        self, request: TokenizedRequest, admitted: Admitted, attempts: list[AttemptRecord] | None = None
    ) -> AsyncGenerator[Tokens, None]:
        """Raises ApiError where the answer has failed, or is gone."""
        place = Wanted(self._answer.id, self._num_choices, 0)
        self._num_choices += 1
        look = self._tail.look
        while True:
            try:
                new, status, result = await look(place)
            except StoreError:
                await asyncio.sleep(LOOK_S)
                continue
            look = self._tail.wait
            if status is None:
                raise ApiError(404, f"the answer {self._answer.id} was deleted", None, "not_found")
            self._answer.status, self._answer.result = status, result
            place = place._replace(num_read=place.num_read + len(new.ids))
            if new.ids or new.finish:
                yield new.tokens
            if new.finish:
                return
            if status not in RUNNING:
                raise EndedError(result)

    def load(self) -> Load:
        return Load(0, 0, 0, 0)

    def readiness(self) -> str | None:
        return None

    def can_serve(self, adapter: str = "") -> bool:
        return True


class EndedError(Exception):
    """The answer ended without its last token: it failed or was cancelled."""

    def __init__(self, result: bytes) -> None:
        """`result`: of the answer."""
        super().__init__(result)
        self.result = result
