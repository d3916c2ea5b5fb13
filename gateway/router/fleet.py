"""All workers of this gateway, by role and address, and those of each of its models. Lives on the asyncio thread."""

import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from gateway.router.changes import Changes
from gateway.router.decode_client import DecodeClient
from gateway.router.interfaces import Adapters
from gateway.router.prefill_client import PrefillClient
from gateway.router.worker_client import Identity, WorkerClient
from gateway.router.worker_keys import KeyIndex
from gateway.router.worker_view import Role, WorkerView
from kvtransfer.layout import find_mismatch
from runtime import rpc
from runtime.rpc import OpenChannel

log = structlog.get_logger()
CHECK_S = 25e-6  # times the number of workers: between two looks for those that have become silent


class Fleet:
    """Owns the clients. `changes`: a worker may have got room, appeared or died.

    A gateway with several models has a part for each. A worker says which model it serves, and is in that part then:

        joined ──says a model of ours──► in its part ──says another, no request left──► in that part
                    └── says any other ──► in no part: /status and the log say why
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        heartbeat_s: float,
        stall_s: float,
        context_tokens: int,
        open_channel: OpenChannel = rpc.open_channel,
        clock: Callable[[], float] = time.monotonic,
        changes: Changes | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """`context_tokens`: the longest prompt and answer that this gateway accepts. `changes`: of the whole fleet."""
        self._limits = heartbeat_s, stall_s
        self._clock = clock
        self._context_tokens = context_tokens
        self._open_channel = open_channel
        self.changes = changes or Changes()
        self.changes.follow(self._look)
        self._is_started = False
        self._log = log  # with the model's name, of a part
        self._serving: dict[Role, bool] = {}  # whether a worker of the role takes requests, as logged
        self._views: dict[WorkerClient, WorkerView | None] = {}  # None: of a duplicate; not kept where it has parts
        self._stale: dict[WorkerClient, None] = {}  # those whose view may have changed
        self._check_at = -float("inf")  # when to see who has become silent
        self._compared: set[Identity] = set()  # workers compared with all others in the set
        self.parts: dict[str, Fleet] = {}  # name of a model |-> its workers; none where there is one model
        self.adapters = adapters or Adapters()
        self.adapters.on_change = self._wake_all
        self.replaced: set[str] = set()  # fingerprints of weights: workers with them get others (scaling/weights.py)
        self._index = KeyIndex()
        self.prefill: dict[str, PrefillClient] = {}
        self.decode: dict[str, DecodeClient] = {}
        for address in prefill:
            self.join("prefill", address)
        for address in decode:
            self.join("decode", address)

    def add_part(self, model: str, context_tokens: int) -> "Fleet":
        """The workers of one of several models, as they say that they serve it. Before `start`."""
        parts = *self._limits, context_tokens, self._open_channel, self._clock, self.changes
        part = self.parts[model] = Fleet((), (), *parts, type(self.adapters)())
        part._log = log.bind(model=model)
        return part

    def join(self, role: Role, address: str, source: str = "", server_name: str = "") -> None:
        """Connect to a worker. `source`: the DNS name that has the address. `server_name`: as in `OpenChannel`."""
        channel = self._open_channel(address, server_name)
        parts = (*self._limits, source, self._clock, self.adapters, self.changes.mark)
        worker: WorkerClient
        if role == "prefill":
            worker = self.prefill[address] = PrefillClient(address, channel, *parts)
        else:
            worker = self.decode[address] = DecodeClient(address, channel, *parts)
        worker.keys.index = self._index
        worker.replaced = self.replaced
        worker.stale = self._stale
        if source:
            log.info("worker found", role=role, address=address, source=source)
        if self._is_started:
            worker.start()

    def leave(self, role: Role, address: str) -> WorkerClient:
        """Forget a worker where no request runs. The caller closes it."""
        worker = self.prefill[address] if role == "prefill" else self.decode[address]
        self._drop(worker)
        worker.keys.reset()
        if worker.model is not None:
            self.parts[worker.model]._drop(worker)
        log.info("worker left", role=role, address=address, source=worker.source)
        self.changes.mark()  # some may wait for what it alone lacked
        return worker

    def _look(self) -> None:
        """Give workers to the parts, which report; without parts, report."""
        for worker in self.workers() if self.parts else ():
            if worker.status.peer.incarnation:
                self._assign(worker)
        if not self.parts:
            self._refresh()
            self._report_outage()

    def _refresh(self) -> None:
        """See which views have changed."""
        if (now := self._clock()) >= self._check_at:
            self._check_at = now + CHECK_S * len(self._views)
            self._stale.update((worker, None) for worker in self._views if now > worker.view_until)
        for worker in [*self._stale]:
            self._views[worker] = None if worker.duplicate_of else worker.view()
            self._report_mismatches(worker)
        self._stale.clear()

    def _assign(self, worker: WorkerClient) -> None:
        """Put it into the part of the model that it serves now, once no request of another model has a place there."""
        model, before = worker.status.peer.model, worker.model
        if model != before and not worker.num_mine:
            if before is not None:
                self.parts[before]._drop(worker)
            worker.model = model if model in self.parts else None
            if worker.model is not None:
                self.parts[model]._adopt(worker)
        stray = ""
        if worker.model != model:
            stray = f"serves {model or 'a model that it does not name'}, this gateway has {', '.join(self.parts)}"
        if stray != worker.stray_because:
            worker.stray_because = stray
            if stray:
                log.error("a worker serves none of the models", role=worker.role, address=worker.address, reason=stray)

    def _adopt(self, worker: WorkerClient) -> None:
        """Take a worker that serves this part's model from now on."""
        if isinstance(worker, PrefillClient):
            self.prefill[worker.address] = worker
        elif isinstance(worker, DecodeClient):
            self.decode[worker.address] = worker
        worker.adapters.follow(self.adapters)
        worker.replaced = self.replaced
        worker.stale = self._stale

    def _drop(self, worker: WorkerClient) -> None:
        """Remove a worker that serves it no more. No request runs there."""
        (self.prefill if worker.role == "prefill" else self.decode).pop(worker.address)
        self._compared.discard(worker.identity)
        self._views.pop(worker, None)
        self._stale.pop(worker, None)
        worker.stale = {}

    def _report_mismatches(self, worker: WorkerClient) -> None:
        """Log once, naming both values, whether it refuses what we accept, or cannot exchange pages with another one.

        Unless it is not alive yet: it is compared when it is.
        """
        if worker.identity in self._compared or not worker.view().is_alive:
            return
        self._compared.add(worker.identity)
        num_tokens = worker.status.context_tokens
        if num_tokens < self._context_tokens:
            reason = f"max_context_tokens here {self._context_tokens}, there {num_tokens}"
            self._log.error("a worker has less context than the gateway", there=worker.address, reason=reason)
        is_prefill, layout, reasons = worker.role == "prefill", worker.view().layout, set[str]()
        for other in self.of_role("decode" if is_prefill else "prefill").values():
            if other.view().layout == layout or other.identity not in self._compared:
                continue
            here, there = (worker, other) if is_prefill else (other, worker)
            mismatch = find_mismatch(here.status.peer.layout, there.status.peer.layout)
            if mismatch is not None and mismatch not in reasons:  # one line for a thousand workers that are alike
                reasons.add(mismatch)
                of_two = here.status.peer.revision != there.status.peer.revision  # which a rollout has
                write = self._log.info if of_two else self._log.error
                write("workers do not match", here=here.address, there=there.address, reason=mismatch)

    def _report_outage(self) -> None:
        """Log once that no worker of a role takes requests any more, and once that one does again."""
        effects: dict[Role, str] = {"prefill": "--no-prefill says what follows", "decode": "they wait, then get a 503"}
        for role, effect in effects.items():
            workers = self.of_role(role)
            was_serving = self._serving.get(role, False)
            is_serving = any(worker.view().is_alive for worker in workers.values())
            if is_serving and not was_serving:
                self._log.info(f"{role} workers take requests")
            elif was_serving and not is_serving:
                reason = "; ".join(f"{address} {worker.view().trouble}" for address, worker in workers.items())
                self._log.error(f"no {role} worker takes requests: {effect}", reason=reason or "none is known")
            self._serving[role] = is_serving

    def expect_outage(self) -> None:
        """Log nothing when all workers end: they are about to, on purpose."""
        self._serving.clear()

    def _wake_all(self) -> None:
        for worker in self.workers():
            worker.adapters.wake()
        self.changes.mark()

    def of_role(self, role: Role) -> Mapping[str, WorkerClient]:
        """address |-> worker"""
        return self.prefill if role == "prefill" else self.decode

    def workers(self) -> list[WorkerClient]:
        return [*self.prefill.values(), *self.decode.values()]

    def views(self) -> Sequence[WorkerView]:
        """Views of all workers, each worker once. Only of a fleet without parts."""
        self._refresh()
        return [*filter(None, self._views.values())]

    def start(self) -> None:
        self._is_started = True
        for worker in self.workers():
            worker.start()

    async def close(self) -> None:
        for worker in self.workers():
            await worker.close()
