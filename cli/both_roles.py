"""A worker of both roles over one model, one pool and one loop: which of them take requests changes while it serves.

        ┌── SetRoles ──┐
open ───┴──► closed ───┴──► open      of each role; at least one is open
               └── takes nothing new; what it has goes on to its end, and its pages are lent as before
"""

import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

import grpc

from decode_worker.interfaces import Drafts, Masks
from decode_worker.main import DecodeRole
from decode_worker.metrics import DecodeMetrics
from decode_worker.service import DecodeService
from decode_worker.step_extras import DraftsAndMasks
from engine.batch import ForwardRow
from engine.compose import FullEngine
from prefill_worker.embedded import EmbeddedTexts
from prefill_worker.kv_sender import KVSender
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.service import PrefillService
from protos import prefill_pb2_grpc, worker_pb2
from runtime.config import RolesConfig
from runtime.config_parts import ROLES, WorkerRoles, roles_of
from worker import process
from worker.role import Worker
from worker.scheduler import Scheduler
from worker.sequences import ScheduledSequence, Update
from worker.service import Context, WorkerService

KEPT_S = 60.0  # for which roles are those of the caller that set them


def run(config: RolesConfig) -> int:
    """Serve until a signal. Returns the exit code."""
    return process.run("worker", config, BothRoles)


class OpenRoles:
    """Which roles take requests, and who says so."""

    def __init__(self, setting: WorkerRoles) -> None:
        self.names = roles_of(setting)
        self._caller = ""
        self._set_at = -KEPT_S

    def set(self, names: Collection[str], caller: str, now: float) -> None:
        """ValueError if these are not roles; PermissionError while another caller's are kept."""
        if not names or set(names) - set(ROLES):
            raise ValueError(f"roles are {', '.join(names) or 'none'}; they must be prefill, decode or both")
        age_s = now - self._set_at
        if caller != self._caller and age_s < KEPT_S:
            raise PermissionError(
                f"{self._caller} set this worker's roles {age_s:.0f} s ago, for at least {KEPT_S:g} s: try again later"
            )
        self.names = tuple(role for role in ROLES if role in names)
        self._caller, self._set_at = caller, now

    async def check(self, role: str, context: Context) -> None:
        """Abort the call if the role is closed."""
        if role not in self.names:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this worker takes no {role} requests now")


class BothMetrics(PrefillMetrics, DecodeMetrics):
    """Metrics of a worker of both roles."""


class RoleService(WorkerService):
    """The service of one role, which takes new requests while that is open."""

    role: str

    def __init__(self, roles: OpenRoles, *parts: Any) -> None:
        """`parts`: of the role's own service, which comes next among the bases."""
        super().__init__(*parts)
        self._roles = roles

    async def check_draining(self, context: Context) -> None:
        await super().check_draining(context)
        await self._roles.check(self.role, context)


class PrefillPart(RoleService, PrefillService):
    role = "prefill"


class DecodePart(RoleService, DecodeService):
    """It has the rpcs of a worker, for both roles."""

    role = "decode"

    def __init__(self, roles: OpenRoles, sender: KVSender, *parts: Any) -> None:
        super().__init__(roles, *parts)
        self._sender = sender

    async def SetRoles(self, request: worker_pb2.SetRolesRequest, context: Context) -> worker_pb2.SetRolesResponse:
        try:
            self._roles.set(request.roles, request.caller, time.monotonic())
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PermissionError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        with self._thread.lock:
            roles = ["decode" if one.params.max_tokens else "prefill" for one in self._scheduler]
        return worker_pb2.SetRolesResponse(num_left=sum(role not in self._roles.names for role in roles))

    def add_to_status(self, status: worker_pb2.WorkerStatus) -> None:
        super().add_to_status(status)
        status.weaknesses.update(self._sender.find_weaknesses())
        status.transports.update(self._sender.transports())
        status.roles.extend(self._roles.names)


class PromptsToo(DraftsAndMasks):
    """Prompts for other workers get the draft model's KV with each chunk: they share pages and offers."""

    def __init__(self, engine: FullEngine, drafts: Drafts, masks: Masks, scheduler: Scheduler) -> None:
        super().__init__(drafts, masks, scheduler)
        self._draft_runner = None if engine.has_head else engine.draft_runner  # the model's runner leads a head

    def draft(self, planned: Seq[ScheduledSequence]) -> None:
        super().draft(planned)
        prompts = [step for step in planned if not step.sequence.params.max_tokens]
        if self._draft_runner is not None and prompts:
            rows = [ForwardRow(step.sequence.row, step.begin, step.count) for step in prompts]
            self._draft_runner.launch(rows).collect()
            for step in prompts:
                step.draft_lead = 0


class BothRoles(DecodeRole):
    """The decode role, whose loop computes other workers' prompts as well."""

    def __init__(self, config: RolesConfig, worker: Worker) -> None:
        roles = OpenRoles(config.role)
        worker.scheduler.kv.needs_draft = worker.engine.has_draft_kv
        metrics = BothMetrics(worker.scheduler)
        self._sender = KVSender(worker, config.lease_s, metrics)
        super().__init__(
            config, worker, lambda _: metrics, partial(PromptsToo, worker.engine),
            partial(DecodePart, roles, self._sender),
        )  # fmt: skip
        self._prompts = PrefillPart(
            roles, worker, config, self.loop.thread, self._features, self._sender, self._peers, metrics,
            EmbeddedTexts(None),
        )  # fmt: skip

    def _hear(self, step: int, updates: list[Update]) -> None:
        super()._hear(step, updates)
        self._prompts.hand_overs.on_updates(updates)

    def add_to(self, server: grpc.aio.Server) -> None:
        super().add_to(server)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._prompts, server)

    async def close(self) -> None:
        await super().close()
        await self._sender.close()
