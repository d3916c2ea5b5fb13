"""Pages that workers of any role read from one another. The rules are the real ones (tiers/plans.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from protos import kv_pb2
from tests.simulator.model import Memory, Offer
from tests.simulator.world import Action, Failure
from wire.page_keys import PageKey
from worker.kv_cache import Restore
from worker.prefix_cache import NoRoomError
from worker.tiers import plans

if TYPE_CHECKING:
    from tests.simulator.worker import Answer, SimWorker

LEND_S = 2.0


@dataclass(frozen=True, slots=True)
class Lent:
    """The answer to `lend`."""

    offer: Offer  # without a session
    memory: Memory
    has_draft: list[bool]


class Loans:
    """Of one worker, through all its incarnations."""

    def __init__(self, worker: "SimWorker") -> None:
        self.lenders: Sequence[SimWorker] = ()  # from which gateways let it read
        self.is_forced = False  # every call names one of them
        self.worker = worker

    def lend(self, incarnation: str, keys: Sequence[PageKey], begin: int, answer: "Answer") -> None:
        worker = self.worker
        if incarnation != worker.incarnation:
            answer(Failure("another incarnation"))
            return
        kv, memory = worker.scheduler.kv, worker.memory
        loan = plans.find_loan(kv, keys, begin, kv.max_offer_pages)
        offer = Offer(
            kv_pb2.Ticket(), incarnation, ("", 0), range(begin, begin + len(loan.pages)), loan.pages,
            self.promise(loan.pages), loan.slots, [memory.slot_generations[slot] for slot in loan.slots],
        )  # fmt: skip
        answer(Lent(offer, memory, [kv.cache.has_draft(page) for page in loan.pages]))
        worker.is_changed = True

    def promise(self, pages: Sequence[int]) -> list[int]:
        """The generations that a loan names."""
        return [self.worker.memory.generations[page] for page in pages]

    def borrow(self, source: kv_pb2.PageSource, keys: Sequence[PageKey], then: Action, before: int = -1) -> None:
        """Read what the source has more of these pages, in parts. `before`: pages that were there at the last part."""
        worker = self.worker
        begin = len(worker.scheduler.kv.cache.find(keys))
        lender = next((one for one in self.lenders if one.name == source.address), None)
        if lender is None or begin <= before or begin == len(keys):
            then()
            return

        def take(answer: Any) -> None:
            if isinstance(answer, Failure) or not answer.offer.pages:
                then()
            else:
                self._read(answer, keys, partial(self.borrow, source, keys, then, begin), then)

        def ask(answer: "Answer") -> None:
            lender.loans.lend(source.incarnation, keys, begin, answer)

        worker.world.call(worker, lender, ask, take, LEND_S)

    def _read(self, lent: Lent, keys: Sequence[PageKey], then: Action, give_up: Action) -> None:
        offer, worker = lent.offer, self.worker
        plan = plans.plan_loan(keys, offer.positions.start, len(offer.pages), len(offer.slots))
        try:
            restore = plans.begin_restore(worker.scheduler, *plan)
        except NoRoomError:
            give_up()
            return
        worker.is_changed = True

        def end(failure: BaseException | None) -> None:
            self.end(restore, lent, failure)
            worker.loop.thread.wake()
            (give_up if failure else then)()

        worker.read_offer(offer, lent.memory, (restore.pages, restore.slots), end)

    def end(self, restore: Restore, lent: Lent, failure: BaseException | None) -> None:
        worker = self.worker
        if failure is not None:
            worker.world.note("loan failed", worker.name, str(failure))
            plans.end_restore(worker.scheduler.kv, restore, [], 0)
        else:
            worker.world.note("borrowed", worker.name, len(restore.pages))
            plans.end_restore(worker.scheduler.kv, restore, lent.has_draft, len(restore.slots))
