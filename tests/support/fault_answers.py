"""The answer to an undisturbed request, what is allowed of a disturbed one, and where the service reports its work."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from protos import worker_pb2, worker_pb2_grpc
from runtime.rpc import new_incarnation
from tests.support.asking import CLIENT_S, Asking
from tests.support.fleet import Process, ProcessFleet
from tests.support.live import WAIT_S, Service, wait_until
from tests.support.oracle import Oracle, random_prompt

VOCAB = 300
CLEAN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)  # errors that ask a client to retry
CROWD = ((100, 12), (400, 60), (100, 12), (20, 40), (400, 60), (100, 12))  # prompt and answer tokens, sent at once
MET_S = 120.0  # until each worker has served; on an idle machine one crowd is enough


@dataclass(frozen=True)
class Truth:
    """The greedy float32 answers of transformers."""

    oracle: Oracle

    def check(self, asking: Asking) -> None:
        """The request succeeded with exactly the undisturbed tokens."""
        tokens = asking.answer()
        assert tokens == self.oracle.answer(asking.prompt, asking.num_tokens, guess=tokens)

    def check_clean(self, asking: Asking) -> None:
        """It succeeded, or failed cleanly after a prefix of the undisturbed answer."""
        asking.finish()
        assert asking.code in (None, *CLEAN), f"{asking.code}: {asking.detail}"
        num_tokens = asking.num_tokens if asking.code is None else min(asking.num_tokens, len(asking.tokens))
        assert asking.tokens == self.oracle.answer(asking.prompt, num_tokens, guess=asking.tokens)

    def check_canary(self, fleet: ProcessFleet) -> None:
        """An ordinary request gets the right answer."""
        self.check(ask(fleet, num_prompt=100, num_tokens=12))

    def check_crowd(self, fleet: ProcessFleet) -> None:
        """Concurrent requests are answered right, and every worker serves some of them."""
        before = _offers_accepted(fleet)

        def ask_all() -> bool:
            for asking in [ask(fleet, *shape) for shape in CROWD]:
                self.check(asking)
            return all(count > before[name] for name, count in _offers_accepted(fleet).items())

        wait_until(ask_all, MET_S, lambda: f"some workers have no part in it: {before}, {_offers_accepted(fleet)}")


def mend(fleet: ProcessFleet, truth: Truth) -> None:
    """All workers run again and take part in right answers."""
    for process in fleet.workers():
        if not process.is_running:
            process.restart()
    fleet.wait_until_whole()
    fleet.wait_until_unused()
    truth.check_crowd(fleet)


def ask(
    service: Service, num_prompt: int = 200, num_tokens: int = 250, seed: int = 1, timeout_s: float = CLIENT_S
) -> Asking:
    """Sent with its own salt, so the whole prompt is computed even if it was cached."""
    prompt = prompt_of(num_prompt, seed)
    return Asking(service.grpc_address, prompt, num_tokens, timeout_s, cache_salt=new_incarnation())


def ask_several(service: Service, count: int, num_tokens: int, num_prompt: int = 60) -> list[Asking]:
    """Different requests; returns when all have their first token."""
    asking = [ask(service, num_prompt, num_tokens, seed, 2 * WAIT_S) for seed in range(count)]
    for one in asking:
        one.wait_for_tokens(1)
    return asking


def answers(asking: Sequence[Asking]) -> list[list[int]]:
    return [one.answer() for one in asking]


def prompt_of(num_tokens: int, seed: int = 1) -> Sequence[int]:
    return random_prompt(num_tokens, VOCAB, seed)


def find_busy(fleet: ProcessFleet, role: str) -> Process:
    """Wait for a worker of this role that holds pages, and return it."""
    busy: list[Process] = []

    def look() -> bool:
        workers = [worker for worker in fleet.workers() if worker.role == role and worker.is_running]
        busy.extend(worker for worker in workers if worker.metric("kv_cache_used_pages"))
        return bool(busy)

    wait_until(look, explain=lambda: f"no {role} worker is busy")
    return busy[0]


def find(fleet: ProcessFleet, process: Process) -> dict[str, Any]:
    """The gateway's /status entry of a worker."""
    port = str(process.port)
    return next(worker for worker in fleet.status() if worker["address"].rpartition(":")[2] == port)


def is_alive(fleet: ProcessFleet, process: Process) -> bool:
    """Whether the gateway considers it alive."""
    return bool(find(fleet, process)["alive"])


def ask_status(worker: Process) -> worker_pb2.WorkerStatus:
    """What it tells its gateway."""
    with grpc.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerStub(channel)
        status: worker_pb2.WorkerStatus = stub.Status(worker_pb2.StatusRequest(), timeout=30)
        return status


def _offers_accepted(fleet: ProcessFleet) -> dict[str, float]:
    return {worker.name: worker.metric("offers_accepted_total") for worker in fleet.workers()}


def read_events(log: str, event: str) -> list[dict[str, Any]]:
    """Log lines of a process for one kind of event, oldest first."""
    lines = [line for line in log.splitlines() if line.startswith("{") and f'"event": "{event}"' in line]
    return [json.loads(line) for line in lines]


def failed_attempts(log: str) -> list[str]:
    """The reasons of failed attempts in a gateway's log."""
    return [str(line["reason"]) for line in read_events(log, "attempt ended") if line["is_failure"]]
