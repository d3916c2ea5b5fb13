"""Adapters (LoRA) through real workers: loaded, handed over, unloaded and refused; tokens are the merged model's."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grpc
import pytest

from engine.adapters.peft import find_digest
from engine.adapters.slots import AdapterLimits
from engine.compose import FullEngine, build_engine
from protos import worker_pb2
from tests.support.checkpoints import write_checkpoint, write_tokenizer
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.handover import refusal
from tests.support.lora import greedy, write_adapter
from tests.support.oracle import random_prompt
from tests.support.real_workers import (
    CONTEXT_TOKENS,
    MAX_RUNNING,
    PAGE_TOKENS,
    Gateway,
    KvRunner,
    PrefillWorker,
    decode_worker,
    gateway,
    prefill_worker,
)
from tests.support.threads import one_thread
from worker.table import num_rows_for

__all__ = ["one_thread"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, COUNT = 320, 8
PROMPT = random_prompt(22, VOCAB, seed=3)


class Adapters(NamedTuple):
    base: Path
    folders: list[Path]
    merged: list[Any]  # transformers' models; the last one is the base

    def digest(self, number: int) -> str:
        return find_digest(self.folders[number]) if number >= 0 else ""

    def expected(self, number: int, count: int = COUNT, prompt: list[int] = PROMPT) -> list[int]:
        return greedy(self.merged[number], prompt, count)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    base = write_tokenizer(write_checkpoint(folder / "base", "llama", vocab=VOCAB), VOCAB)
    folders = [folder / "one", folder / "two", folder / "none"]
    merged = [write_adapter(one, base, "llama", seed=seed, r=4) for seed, one in enumerate(folders[:2])]
    merged.append(write_adapter(folders[2], base, "llama", seed=0, r=4, lora_alpha=0))
    return Adapters(base, folders[:2], merged)


def build(base: Path, max_loras: int) -> tuple[FullEngine, KvRunner]:
    """What `decode_worker` takes; nothing holds up these steps."""
    engine = build_engine(
        str(base), "", "float32", "cpu", 1, PAGE_TOKENS, num_rows_for(MAX_RUNNING), lambda *_: (60, 0),
        lambda done, total: None, CONTEXT_TOKENS, adapter_limits=AdapterLimits(max_loras, 8),
    )  # fmt: skip
    cast(Any, engine.runner).may_run = type("Never", (), {"set": lambda self: None})()
    return engine, cast(KvRunner, engine.runner)


class Pair(NamedTuple):
    opened: Gateway
    prefill: PrefillWorker
    decode: FullEngine

    async def load(self, folder: Path, name: str = "name") -> str:
        """On both workers."""
        (digest,) = {await load(stub, folder, name) for stub in (self.prefill.worker, self.opened.worker)}
        return digest

    async def answer(self, handle: int, digest: str) -> tuple[list[int], int]:
        """The tokens, and how many tokens of the prompt prefill found cached."""
        ticket = await self.opened.reserve(handle, PROMPT, COUNT, adapter=digest)
        cached = (await self.prefill.run(ticket, PROMPT)).cached_tokens
        assert await self.opened.end_of(handle) == ("length", "")
        return self.opened.tokens[handle], cached


@asynccontextmanager
async def pair(base: Path, decode_loras: int) -> AsyncIterator[Pair]:
    signal, engine = Signal(), build(base, decode_loras)
    async with (
        prefill_worker(signal, built=build(base, 2)) as prefill,
        decode_worker(signal, built=engine) as decode,
        gateway(decode, signal) as opened,
    ):
        yield Pair(opened, prefill, engine[0])


async def load(stub: Any, path: Path, name: str = "name", digest: str = "") -> str:
    request = worker_pb2.LoadAdapterRequest(name=name, path=str(path), digest=digest)
    return str((await stub.LoadAdapter(request, timeout=PATIENCE_S)).digest)


async def unload(stub: Any, digest: str) -> None:
    await stub.UnloadAdapter(worker_pb2.UnloadAdapterRequest(digest=digest), timeout=PATIENCE_S)


async def status(stub: Any) -> worker_pb2.WorkerStatus:
    found: worker_pb2.WorkerStatus = await stub.Status(worker_pb2.StatusRequest(), timeout=PATIENCE_S)
    return found


async def until_freed(engine: FullEngine) -> None:
    while engine.adapters is None or engine.adapters.hosted:  # noqa: ASYNC110, no event for it
        await asyncio.sleep(0.005)


async def test_each_request_has_its_adapter_on_both_workers(adapters: Adapters) -> None:
    async with pair(adapters.base, 2) as workers:
        assert [await workers.load(folder) for folder in adapters.folders] == [adapters.digest(0), adapters.digest(1)]
        for handle, number in enumerate((0, -1, 1), 1):
            digest = adapters.digest(number)
            await workers.opened.ask(handle + 10, PROMPT[:5], 40, local=100, adapter=digest)  # runs beside the others
            assert await workers.answer(handle, digest) == (adapters.expected(number), 0)
        for handle, number in enumerate((0, -1, 1), 11):
            assert await workers.opened.end_of(handle) == ("length", "")
            assert workers.opened.tokens[handle] == adapters.expected(number, 40, PROMPT[:5])
        again = await workers.opened.ask(20, PROMPT, COUNT, adapter=adapters.digest(1))
        assert again.ticket.begin == 20 and not again.needs_prefill, "its own pages"
        assert await workers.opened.end_of(20) == ("length", "")
        assert workers.opened.tokens[20] == adapters.expected(1)


async def test_a_request_without_a_free_slot_waits_and_an_unloaded_adapter_ends_with_its_last_request(
    adapters: Adapters, tmp_path: Path
) -> None:
    async with pair(adapters.base, 1) as workers:
        opened, decode = workers.opened, workers.decode
        one, two = [await workers.load(folder) for folder in adapters.folders]
        await opened.ask(1, PROMPT, 40, local=100, adapter=one)

        async def refused(handle: int, digest: str) -> tuple[str, str]:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await opened.ask(handle, PROMPT, adapter=digest)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            return str(dict(error.value.trailing_metadata() or ())["baton-refused-for"]), error.value.details() or ""

        reason, detail = await refused(2, two)
        assert reason == "slot" and "--max-loras" in detail
        await unload(opened.worker, one)
        await unload(opened.worker, one)
        reason, detail = await refused(2, one)
        assert reason == "adapter" and one in detail and (await status(opened.worker)).peer.address in detail
        assert await opened.end_of(1) == ("length", "")
        assert opened.tokens[1] == adapters.expected(0, 40), "it has its adapter to its end"
        await opened.ask(2, PROMPT, COUNT, local=100, adapter=two)
        assert await opened.end_of(2) == ("length", "")
        assert opened.tokens[2] == adapters.expected(1)
        found = await status(opened.worker)
        assert (dict(found.adapters), found.max_loras) == ({two: "name"}, 1)
        # the same name with other weights: another digest, so that nothing computed before is found
        shutil.copytree(adapters.folders[1], tmp_path / "name")
        assert await load(opened.worker, tmp_path / "name", "other name") == two
        assert dict((await status(opened.worker)).adapters) == {two: "other name"}
        await unload(opened.worker, two)
        await asyncio.wait_for(until_freed(decode), PATIENCE_S)
        shutil.copytree(adapters.folders[0], tmp_path / "name", dirs_exist_ok=True)
        assert await load(opened.worker, tmp_path / "name") == one
        await opened.ask(3, PROMPT, COUNT, local=100, adapter=one)
        assert await opened.end_of(3) == ("length", "")
        assert opened.tokens[3] == adapters.expected(0)


async def test_loads_are_refused_by_name(adapters: Adapters, tmp_path: Path) -> None:
    one, two = (adapters.digest(number) for number in (0, 1))
    async with pair(adapters.base, 0) as workers:
        prefill, stub = workers.prefill, workers.prefill.worker
        code, detail = await refusal(load(workers.opened.worker, adapters.folders[0]))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "--max-loras" in detail
        code, detail = await refusal(load(stub, adapters.folders[0], digest=two))
        assert code is grpc.StatusCode.FAILED_PRECONDITION and one in detail and two in detail
        large = tmp_path / "large"
        write_adapter(large, adapters.base, "llama", seed=1, r=9)
        for folder, said in ((tmp_path / "gone", "does not exist"), (large, "--max-lora-rank 9"), (tmp_path, "has no")):
            code, detail = await refusal(load(stub, folder))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and said in detail
        code, detail = await refusal(load(stub, adapters.folders[0], "n" * 300))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "300 characters" in detail

        async def fail() -> None:
            raise ValueError("rank 1: disk on fire")

        loader: Any = prefill.service._adapters
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(loader, "_others", SimpleNamespace(load_adapter=lambda *_: [fail()]))
            code, detail = await refusal(load(stub, adapters.folders[0]))
            assert (code, detail) == (grpc.StatusCode.INVALID_ARGUMENT, "rank 1: disk on fire")
            patched.setattr("worker.adapters.loader.MOST_BYTES", 100)
            code, detail = await refusal(load(stub, adapters.folders[0]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "unload others" in detail
        await asyncio.wait_for(until_freed(loader._engine), PATIENCE_S)
        assert not (await status(stub)).adapters, "no rank keeps what another one lacks"
