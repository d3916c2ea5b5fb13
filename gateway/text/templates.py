"""The gateway's end of the process that renders chat templates, for all models. On the asyncio thread."""

import structlog

from gateway.errors import not_ready, overloaded
from gateway.text.template import ChatTemplate, TemplateRefusalError
from gateway.text.template_process import (
    FORKS,
    WALL_S,
    Answer,
    Busy,
    Refused,
    Render,
    Rendered,
    TemplateStart,
)
from gateway.text.turns import Turns
from runtime.child import ChildError, ChildServer, StandingChild

MAX_WAITING = 64  # conversations of one owner; more are refused with 429
TIMEOUT_S = 30.0  # for their turn
START_S = 120.0  # to load libraries: a second, unless the machine is busy
_SLACK_S = 5.0  # for the process to answer that time is over
log = structlog.get_logger()


class Templates:
    """Starts the process when the first conversation comes, or before."""

    def __init__(self) -> None:
        self._templates: list[ChatTemplate] = []
        self._child = StandingChild[Answer](self._start, START_S)
        self._turns = Turns(FORKS, MAX_WAITING, TIMEOUT_S, "conversations to be rendered")

    @property
    def child(self) -> ChildServer[Answer] | None:
        """The process, while there is one."""
        return self._child.child

    @property
    def pid(self) -> int | None:
        """Of the process."""
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
        """packed: by `pack_conversation`. A request that is cancelled ends its fork.

        Raises TemplateRefusalError, or ApiError: 429 if too many of the owner's wait or there is no time, 503.
        """
        async with self._turns.take(owner):
            answer = await self._ask(packed)
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

    async def _ask(self, packed: bytes) -> Answer:
        for _try in range(2):  # it may have died by another's hand
            try:
                return await self._child.ask(Render(packed), WALL_S + _SLACK_S)
            except ChildError as error:
                log.warning("chat template process fails", error=str(error))
        raise not_ready("the process that renders chat templates died and is started again; try again")

    def _start(self) -> ChildServer[Answer]:
        start = TemplateStart(self._templates)
        return ChildServer("gateway.text.template_process", start, Answer)
