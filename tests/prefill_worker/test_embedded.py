"""A prefill worker whose model makes vectors: one call a text, several in a step, over the real service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prefill_worker.main import PrefillRole
from protos import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from runtime.config import PrefillConfig
from runtime.rpc import bind, build_server, open_channel
from runtime.trust import load_trust
from tests.support.pooled import cosine, embed, open_engine, write_pooled
from tests.support.real_workers import packed
from worker.compose import compose_budget
from worker.process import build_worker

DICE = np.random.default_rng(1)
TEXTS = [[0, *DICE.integers(3, 300, length).tolist(), 2] for length in (1, 5, 30, 30, 90, 3, 60, 12)]


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    engine = open_engine(folder)
    config = PrefillConfig(model=str(folder), chunk_tokens=64, max_running=4, page_tokens=16, **settings)
    worker = build_worker("prefill", config, engine, "127.0.0.1:1", load_trust(config), "i")
    role, server = PrefillRole(config, worker), build_server()
    role.add_to(server)
    port = bind(server, "127.0.0.1", 0)
    role.loop.thread.start()
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
        assert not len(worker.scheduler)
        worker.scheduler.check()
    finally:
        await server.stop(0)
        await asyncio.to_thread(role.loop.thread.stop, 5.0)
        await role.close()


async def ask(stub: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    while True:
        try:
            answer = await stub.EmbedPrompt(prefill_pb2.EmbedPromptRequest(request_id="r", prompt=packed(ids)))
            return np.frombuffer(answer.vector, "<f4")
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "model", "pool"), [("bert", "BertModel", "cls_token"), ("qwen3", "Qwen3Model", "lasttoken")]
)
async def test_texts_together(tmp_path: Path, kind: str, model: str, pool: str) -> None:
    """More than run at once; causal ones in chunks, others whole although a chunk is shorter."""
    write_pooled(tmp_path, kind, model, pool, normalizes=True)
    expected = embed(open_engine(tmp_path), TEXTS)
    async with serving(tmp_path) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        status = await worker_pb2_grpc.WorkerStub(channel).Status(worker_pb2.StatusRequest())
        assert status.embeds and status.context_tokens == (131 if kind == "bert" else 130)
        for vector, own in zip(await asyncio.gather(*(ask(stub, ids) for ids in TEXTS)), expected, strict=True):
            assert cosine(vector, own) > 0.999999
        for vector, own in zip([await ask(stub, ids) for ids in TEXTS], expected, strict=True):  # some is cached now
            assert cosine(vector, own) > 0.999999
        call = stub.EmbedPrompt(prefill_pb2.EmbedPromptRequest(prompt=packed(TEXTS[4])))
        await asyncio.sleep(0)
        call.cancel()
        assert cosine(await ask(stub, TEXTS[0]), expected[0]) > 0.999999


@pytest.mark.parametrize(("architecture", "tokens"), [("Qwen3Model", 512), ("Qwen3ForCausalLM", 200)])
def test_steps_may_be_longer_where_no_answer_waits(tmp_path: Path, architecture: str, tokens: int) -> None:
    """A step of a model with answers takes two seconds at most, whose tokens take 10 ms each here."""
    write_pooled(tmp_path, "qwen3", architecture)
    budget = compose_budget(open_engine(tmp_path), 512, "--chunk-tokens")
    sizer = budget.build_sizer(budget.prompt_tokens, budget.fewest_prompt_tokens)
    for _ in range(8):
        sizer.note_step(0, sizer.alone, 0.01 * sizer.alone)
    assert sizer.alone == tokens


async def test_refusals(tmp_path: Path) -> None:
    theirs = write_pooled(tmp_path, "bert", "BertModel", "cls_token")
    theirs.embeddings.word_embeddings.weight.data[7] = np.nan
    theirs.save_pretrained(tmp_path)
    async with serving(tmp_path) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)
        for prompt, code, detail in (
            ([], "INVALID_ARGUMENT", "must not be empty"),
            ([5] * 131, "INVALID_ARGUMENT", "at most 130 are computed"),
            ([300], "INVALID_ARGUMENT", "300"),
            ([0, 7, 2], "INTERNAL", "are NaN"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=detail) as caught:
                await stub.EmbedPrompt(prefill_pb2.EmbedPromptRequest(prompt=packed(prompt)))
            assert caught.value.code().name == code
        assert len(await ask(stub, [0, 8, 2])) == 64
