"""The gateway's end of the process that renders chat templates, for all models. On the asyncio thread."""

import asyncio

import structlog

from gateway.errors import not_ready, overloaded
from gateway.fair_turns import FairTurns
from gateway.shares import Shared
from gateway.text.template import ChatTemplate, TemplateRefusalError
from gateway.text.template_process import (
    FORKS,
    WALL_S,
    Answer,
    Render,
    Rendered,
    TemplateStart,
)
from runtime.child import ChildError, ChildServer, StandingChild
from runtime.fork import Busy, Refused

MAX_WAITING = 4096  # conversations, with those being rendered, which take 1 ms: more are refused with 429
TIMEOUT_S = 30.0  # for their turn
START_S = 120.0  # to load libraries: a second, unless the machine is busy
_SLACK_S = 5.0  # for the process to answer that time is over
log = structlog.get_logger()


class Templates:
    """Starts the process when the first conversation comes, or before."""

    def __init__(self) -> None:
        self._templates: list[ChatTemplate] = []
        self._child = StandingChild[Answer](self._start, START_S)
        self._waiting = Shared(MAX_WAITING)
        self._turns = FairTurns(FORKS)

    @property
    def child(self) -> ChildServer[Answer] | None:
        """The process, while there is one."""
        return self._child.child

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return self.child.pid if self.child else None

    def add(self, template: ChatTemplate) -> int:
        """The template's number in `pack_conversation`. Before the process starts."""
        self._templates.append(template)
        return len(self._templates) - 1

    async def start(self) -> None:
        """Returns when the process is ready, or has failed, which is logged: `render` tries again."""
        try:
            await self._child.ready()
        except ChildError as error:
            log.error("no chat template can be rendered", reason=str(error))

    async def render(self, packed: bytes, owner: str) -> str:
        """packed: by `pack_conversation`; owner: as in Shared. A request that is cancelled ends its fork.

        Raises TemplateRefusalError, or ApiError: 429 if too many wait or there is no time, 503.
        """
        if not self._waiting.has_room(owner):
            raise overloaded(f"{self._waiting.total} conversations are waiting to be rendered; try again in a moment")
        with self._waiting.held(owner):
            await self._take_turn(owner)
            try:
                answer = await self._ask(packed)
            finally:
                self._turns.give_back(owner)
        match answer:
            case Rendered():
                return answer.text
            case Refused():
                raise TemplateRefusalError(answer.message)
            case Busy():
                raise overloaded(f"no time to render the conversation within {WALL_S:g} s: the machine is busy")
        raise AssertionError(answer)

    async def close(self) -> None:
        """End the process."""
        await self._child.close()

    async def _take_turn(self, owner: str) -> None:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._turns.take(owner)
        except TimeoutError:
            raise overloaded(f"the conversation was not rendered within {TIMEOUT_S:g} s; try again later") from None

    async def _ask(self, packed: bytes) -> Answer:
        try:
            return await self._child.ask_twice(Render(packed), WALL_S + _SLACK_S, "chat template process")
        except ChildError as error:
            message = "the process that renders chat templates died and is started again; try again"
            raise not_ready(message) from error

    def _start(self) -> ChildServer[Answer]:
        start = TemplateStart(self._templates)
        return ChildServer("gateway.text.template_process", start, Answer)
