"""What an undisturbed request answers, and what a disturbed one may be."""

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from bench.asking import Asking
from bench.fleet import Process, ProcessFleet, wait_until
from tests.oracle import Oracle, random_prompt

VOCAB = 300
CLEAN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)  # errors that tell a client to try again


@dataclass(frozen=True)
class Truth:
    """The greedy float32 answers of transformers."""

    oracle: Oracle

    def check(self, asking: Asking) -> None:
        """The request ended well, with exactly the undisturbed tokens."""
        asking.finish()
        assert asking.code is None, f"{asking.code}: {asking.detail}"
        assert asking.tokens == self.oracle.answer(asking.prompt, asking.num_tokens)

    def check_clean(self, asking: Asking) -> None:
        """It ended well, or with a clean error after a beginning of the undisturbed answer."""
        asking.finish()
        assert asking.code in (None, *CLEAN), f"{asking.code}: {asking.detail}"
        whole = self.oracle.answer(asking.prompt, asking.num_tokens)
        assert asking.tokens == (whole if asking.code is None else whole[: len(asking.tokens)])

    def check_canary(self, fleet: ProcessFleet) -> None:
        """An ordinary request is answered right."""
        self.check(ask(fleet, num_prompt=100, num_tokens=12))


def ask(fleet: ProcessFleet, num_prompt: int = 200, num_tokens: int = 250, seed: int = 1) -> Asking:
    return Asking(fleet.grpc_address, prompt_of(num_prompt, seed), num_tokens)


def prompt_of(num_tokens: int, seed: int = 1) -> Sequence[int]:
    return random_prompt(num_tokens, VOCAB, seed)


def find_busy(fleet: ProcessFleet, role: str) -> Process:
    """The worker of a role that holds pages, once there is one."""
    busy: list[Process] = []

    def look() -> bool:
        workers = [worker for worker in fleet.workers() if worker.role == role and worker.is_running]
        busy.extend(worker for worker in workers if worker.metric("kv_cache_used_pages"))
        return bool(busy)

    wait_until(look, 30, lambda: f"no {role} worker is busy")
    return busy[0]


def is_alive(fleet: ProcessFleet, process: Process) -> bool:
    """As the gateway sees it."""
    port = str(process.port)
    return any(worker["alive"] for worker in fleet.status() if worker["address"].rpartition(":")[2] == port)
