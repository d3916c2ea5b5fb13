"""Interfaces of what gateway/main.py adds to the router; each class here is the default without it."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from gateway.router.engine_client import State, Tokens
from protos import worker_pb2, worker_pb2_grpc


class WorkerAdapters:
    """The adapters that one worker has loaded: none."""

    loaded: frozenset[str] = frozenset()  # digests
    has_slots = True  # it has refused none for want of a slot since its last status
    version = 0  # grows with each change of `loaded` that no status has shown yet

    def learn(self, status: worker_pb2.WorkerStatus, version: int) -> None:
        """Take the worker's latest status. `version`: when it was asked for."""

    def forget(self, digest: str) -> None:
        """Note that it refused a request because it lacks the adapter."""

    def follow(self, adapters: "Adapters") -> None:
        """Load the adapters of another model from now on."""

    def wake(self) -> None:
        """Note that the adapters that it is to have have changed."""

    def describe(self) -> dict[str, str]:
        """Name |-> "loaded", or why it is not."""
        return {}

    async def run(self) -> None:
        """Loads and unloads until it is cancelled."""
        await asyncio.Event().wait()


class Adapters:
    """The adapters that requests for one model may name: none."""

    on_change: Callable[[], None]  # set by the fleet; called when workers lack something, or need it no more

    @property
    def pending(self) -> Mapping[str, str]:
        """Name |-> why it is not loaded yet."""
        return {}

    def hold(self, name: str) -> AbstractContextManager[str]:
        """The digest of the name, kept loaded until the block ends; empty for no name. Raises ApiError."""
        return nullcontext("")

    def link(
        self, address: str, stub: worker_pb2_grpc.WorkerStub, clock: Callable[[], float], mark: Callable[[], None]
    ) -> WorkerAdapters:
        """The adapters of a new worker. `mark`: called when it has loaded or unloaded one, or could not."""
        return WorkerAdapters()


class Gate:
    """Where requests wait for a model whose workers do not run now. Here they always run."""

    name = ""
    state: State = "awake"
    reason = ""  # why it could not be woken

    @property
    def is_open(self) -> bool:
        """Whether it lets requests in now."""
        return True

    @property
    def has_just_failed(self) -> bool:
        """Whether the service is not ready because the model could not be woken."""
        return False

    async def enter(self, timeout_s: float) -> float:
        """Let one request in, as `inside` needs; returns the seconds that it waited. Raises ApiError."""
        return 0.0

    def inside(self) -> AbstractContextManager[None]:
        """Count a request that was let in until the block ends."""
        return nullcontext()

    def describe(self) -> str:
        """The state in words."""
        return self.state


class AnyAttempt(Protocol):
    """One try of a request that has places. When its block ends, nothing of it is left here, and soon none there."""

    incarnations: tuple[str, str | None]  # of its workers

    def __enter__(self) -> "AnyAttempt": ...

    def __exit__(self, *_: object) -> None: ...

    async def reserve(self) -> None:
        """Reserve what it needs on its workers. Raises AttemptFailed."""

    async def next(self) -> Tokens:
        """The next tokens, or all that there is. Raises AttemptFailed, or ApiError at the request's deadline."""
