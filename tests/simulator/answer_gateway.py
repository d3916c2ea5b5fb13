"""A gateway that keeps answers: the real keeper, runs and replays over the real router, and a simulated database."""

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from gateway.access.keys import Keys
from gateway.adapters.loader import AdapterLoader
from gateway.adapters.registry import Adapter
from gateway.app import add_model
from gateway.request.prepare import ApiOptions, ServedModel, ServedModels
from gateway.router.engine_client import EngineClient
from gateway.store.adapters import AdapterRow, SharedAdapters
from gateway.store.keeper import AnswerKeeper
from gateway.store.runs import Runs
from gateway.text.template import Conversation
from gateway.text.templates import Templates
from gateway.text.tokenizer import Tokenizer
from tests.simulator.decode import SimDecode
from tests.simulator.gateway import PATIENCE_S, SimGateway
from tests.simulator.store import SimStore, StoreLoop
from tests.simulator.world import ViolationError, World
from tests.support.tiny_tokenizer import SPECIAL, write_byte_level
from worker.sequences import Sequence as Tokens

MODEL = "m"
LEASE_S = 3.0
CONTEXT_TOKENS = 150
OPTIONS = ApiOptions(tool_format="none", reasoning_format="none")


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer(write_byte_level(Path(folder)), CONTEXT_TOKENS)


@cache
def vocabulary() -> Sequence[int]:
    """Of the model: letters, bytes of characters that have several, and now and then the end."""
    ids = {tokenizer().raw_bytes(token_id): token_id for token_id in range(len(SPECIAL), len(SPECIAL) + 256)}
    letters, parts = ([ids[bytes([byte])] for byte in text.encode()] for text in ("abcdefghij", "é🙂"))
    return [*letters, *letters, *parts, *parts, min(tokenizer().eos_token_ids)]


class PlainTemplates(Templates):
    """Renders in this process."""

    async def render(self, packed: bytes, owner: str) -> str:
        _, conversation = msgspec.json.decode(packed, type=tuple[int, Conversation])
        said = "".join(f"<|{one['role']}|>{one['content']}<|end|>" for one in conversation.messages)
        return said + "<|assistant|>"


def serve(ring: EngineClient) -> tuple[ServedModels, ServedModel]:
    """What a gateway's APIs serve."""
    served = ServedModels(OPTIONS, CollectorRegistry(), Keys())
    served.templates = PlainTemplates()
    return served, add_model(served, ring, tokenizer(), [MODEL])


class AnswersDecode(SimDecode):
    """The only role. The content of a sequence follows from its seed."""

    pace_s = 0.0  # of its slowest step

    def step_delay(self) -> float:
        return 0.001 + self.world.rng.random() * self.pace_s

    def find_seed(self, sequence: Tokens) -> int:
        return sequence.params.sampling.seed


class AnswersGateway(SimGateway):
    """It ends as a process does: at once, or drained."""

    timeout_s = 30.0

    def __init__(self, world: World, name: str, decodes: Sequence[AnswersDecode], store: SimStore) -> None:
        self.store = store
        self.connections = set[Callable[[], None]]()  # what breaks them off
        super().__init__(world, name, [], decodes, 0, True, False)
        self.num_open = 1

    def build_loop(self) -> StoreLoop:
        return StoreLoop(self, self.store)

    def start(self) -> None:
        super().start()
        self.served, _ = serve(self.router)
        place: Any = self.store
        self.runs = Runs(self.served, place, ttl_s=1e6, max_bytes=1 << 30, lease_s=LEASE_S)
        self.keeper = AnswerKeeper(self.served, self.runs)
        self.loader = AdapterLoader(self.fleet, CollectorRegistry())
        self.adapters = SharedAdapters(self.runs, {MODEL: self.loader})
        self.changed: dict[str, AdapterRow] = {}  # by name: the latest change of an adapter here
        self.loop.create_task(self._keep())

    async def _keep(self) -> None:
        await self.runs.start()
        await self.fleet.changes.until(lambda: self.router.readiness() is None, PATIENCE_S)
        self.runs.serve()
        await self.adapters.start()

    def change_adapter(self, name: str, digest: str) -> None:
        """As the API does when all workers have answered. `digest`: empty: it is unloaded."""

        async def change() -> None:
            known = self.loader.adapters
            if digest:
                known.add(Adapter(name, f"/{name}"), digest)
            elif not known.remove(name):
                return
            self.changed[name] = AdapterRow(MODEL, name, f"/{name}" if digest else "", digest)
            await self.loader.share(name, known.named.get(name))

        if self.is_up:
            self.loop.create_task(change())

    def named(self) -> set[AdapterRow]:
        return {AdapterRow(MODEL, name, one.path, one.digest) for name, one in self.loader.adapters.named.items()}

    def check(self) -> None:
        super().check()
        for row in self.adapters._unsaved.values():
            if row not in self.named() and (row.path or row.name in self.loader.adapters.named):
                raise ViolationError(f"{self.name} has forgotten {row}, which the store lacks")

    def drain(self, then: Callable[[], None]) -> None:
        """As SIGTERM does."""

        async def drain() -> None:
            await self.runs.drain()
            await self.runs.let_go()
            self.later(0.1, then)

        if self.is_up:
            self.loop.create_task(drain())

    def crash(self) -> None:
        super().crash()
        for break_off in list(self.connections):
            break_off()
        self.num_open = 1

    @property
    def num_requests(self) -> int:
        return 1 << 30

    @property
    def is_idle(self) -> bool:
        return not (
            self.adapters._unsaved or self.runs.running or self.runs._taking or self.runs.replays._followers.total
        )
