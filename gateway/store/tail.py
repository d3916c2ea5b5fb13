"""Answers read from the store as if workers gave them: tokens that are there, and those that another gateway adds."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace

from gateway.errors import ApiError
from gateway.router.attempt_record import AttemptRecord
from gateway.router.engine_client import Admitted, Load, TokenizedRequest, Tokens
from gateway.store.database import RUNNING, Answer, Database, StoreError
from gateway.store.line import Line
from gateway.store.run import join_parts

LOOK_S = 0.2  # between two looks at an answer that grows


class StoredTokens:
    """The EngineClient of one answer: its choices are generated in the order in which they are asked for."""

    def __init__(self, line: Line, answer: Answer) -> None:
        self._answer = replace(answer)  # as last read
        self._line = line
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
        choice, self._num_choices = self._num_choices, self._num_choices + 1
        num_read = 0
        while True:
            try:
                parts, status, result = await self._line.call(Database.find_new, self._answer.id, choice, num_read)
            except StoreError:
                await asyncio.sleep(LOOK_S)
                continue
            if status is None:
                raise ApiError(404, f"the answer {self._answer.id} was deleted", None, "not_found")
            self._answer.status, self._answer.result = status, result
            new = join_parts(parts, choice + 1)[choice]
            if new.finish and status in RUNNING:  # its end is about to be written, with the whole answer
                await asyncio.sleep(LOOK_S / 4)
                continue
            num_read += len(new.ids)
            if new.ids or new.finish:
                yield new.tokens
            if new.finish:
                return
            if status not in RUNNING:
                raise EndedError(result)
            await asyncio.sleep(LOOK_S)

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
