"""Rules broken on purpose, each in one place: the simulator must notice.

Each entry of MUTATIONS is a context within which one rule does not hold.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from decode_worker.session import Phase, Reservation, Session
from decode_worker.session_table import SessionTable
from engine.kvcache.allocator import PageAllocator
from gateway.ring.request_actions import Action
from gateway.ring.request_events import Event, News
from gateway.ring.request_machine import Request
from kvtransfer import reader
from prefill_worker.run_table import PrefillRun, RunTable
from tests.simulator.decode import SimDecode
from tests.simulator.gateway import SimGateway
from tests.simulator.model import Memory
from tests.simulator.values import Work

Mutation = Callable[[], AbstractContextManager[object]]


def _patched(*changes: tuple[Any, str, Any]) -> Mutation:
    """`changes`: owner, name of what it has, and what it gets in its place."""

    @contextmanager
    def mutate() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, value in changes:
                stack.enter_context(patch.object(owner, name, value))
            yield

    return mutate


allocate = PageAllocator.allocate
finish_step = RunTable.finish_step
find_receiving = SessionTable._find_receiving
reserve = SessionTable.reserve
step = Request.step


def _allocate_silently(self: PageAllocator, count: int) -> list[int]:
    pages = allocate(self, count)
    for page in pages:
        self._generations[page] -= 1
    return pages


def _free_for_all(self: PageAllocator, pages: Iterable[int]) -> None:
    for page in pages:
        self._num_holders[page] = 0
        self._free.append(page)


def _finish_and_free(self: RunTable, run: PrefillRun, count: int) -> None:
    finish_step(self, run, count)
    if run.computed == run.end:
        self.end(run)


def _end_run_at_once(self: RunTable, run: PrefillRun) -> None:
    run.is_ended = True
    if self._runs.pop(run.id, None) is not None:
        self.allocator.free(run.pages)


def _end_freeing(is_in_use: Callable[[Session], bool]) -> Callable[[SessionTable, Session], None]:
    def end(self: SessionTable, session: Session) -> None:
        session.phase = Phase.ENDED
        if is_in_use(session):
            self.allocator.free(session.pages)
            session.pages, session.computed = [], 0
        self._remove_if_over(session)

    return end


def _name_by_request(self: SessionTable, wanted: Reservation, now: float) -> Session:
    self._next_id = int(wanted.request_id[1:]) + 1
    return reserve(self, wanted, now)


def _find_any_attempt(self: SessionTable, session_id: int, attempt: int) -> Session:
    session = self._sessions.get(session_id)
    return find_receiving(self, session_id, session.attempt if session else attempt)


def _take_any_attempt(self: Request, event: Event, now: float) -> list[Action]:
    return step(self, replace(event, attempt=self.attempt) if isinstance(event, News) else event, now)


def _handle_of_request(self: SimGateway, work: Work) -> int:
    return 1_000_000 + int(work.client.name[1:])


def _check_nothing(sources: Sequence[reader.PageRef], found: Sequence[int]) -> None:
    pass


MUTATIONS: dict[str, Mutation] = {
    "generations are not compared after a read": _patched((reader, "check_generations", _check_nothing)),
    "a page's generation stays when its owner changes": _patched((PageAllocator, "allocate", _allocate_silently)),
    "a shared page is free with its first holder": _patched((PageAllocator, "free", _free_for_all)),
    "the page that a prompt fills in part is not copied": _patched((Memory, "copy", lambda self, source, target: None)),
    "prefill frees pages before they are acknowledged": _patched((RunTable, "finish_step", _finish_and_free)),
    "prefill frees pages under a step": _patched((RunTable, "end", _end_run_at_once)),
    "decode frees pages under a step": _patched((SessionTable, "_end", _end_freeing(lambda it: it.is_stepped))),
    "decode frees pages under a read": _patched((SessionTable, "_end", _end_freeing(lambda it: it.is_read))),
    "decode forgets the attempt": _patched(
        (SessionTable, "reserve", _name_by_request), (SessionTable, "_find_receiving", _find_any_attempt)
    ),
    "the gateway forgets the attempt": _patched(
        (SimGateway, "_new_handle", _handle_of_request), (Request, "step", _take_any_attempt)
    ),
    "decode ignores a ticket's incarnation": _patched((SimDecode, "_check_ticket", lambda self, ticket: None)),
    "decode ignores a ticket's incarnation and attempt": _patched(
        (SimDecode, "_check_ticket", lambda self, ticket: None), (SessionTable, "_find_receiving", _find_any_attempt)
    ),
    "decode ignores incarnation, attempt and handshake": _patched(
        (SimDecode, "_check_ticket", lambda self, ticket: None),
        (SessionTable, "_find_receiving", _find_any_attempt),
        (SimDecode, "_forget_peers", lambda self: None),
    ),
    "leases do not end": _patched(
        (SessionTable, "expire", lambda self, now: []), (SessionTable, "next_deadline", lambda self: None)
    ),
    "a retry forgets the tokens emitted": _patched(
        (Request, "prompt_ids", property(lambda self: list(self.generation.prompt_ids)))
    ),
    "a retry asks for all tokens again": _patched(
        (Request, "num_left", property(lambda self: self.generation.max_tokens))
    ),
}
