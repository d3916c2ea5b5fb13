"""A prefill and a decode worker in this process, and requests made by hand."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from runtime.config_parts import Transport
from tests.support.fake_workers import PATIENCE_S, Signal
from tests.support.real_workers import (
    DecodeWorker,
    Gateway,
    PrefillWorker,
    decode_worker,
    gateway,
    prefill_worker,
)

PROMPT = [(number * 7) % 50 + 1 for number in range(23)]
OTHER = [token + 1 for token in PROMPT]  # shares no page with it


@asynccontextmanager
async def workers(
    transport: Transport = "auto", lease_s: float = PATIENCE_S, heartbeat_s: float = PATIENCE_S, **others: Any
) -> AsyncIterator[tuple[Gateway, PrefillWorker, DecodeWorker]]:
    """One worker per role; `others`: settings of decode. Checks at the end that no page is held."""
    signal = Signal()
    async with (
        prefill_worker(signal, heartbeat_s) as prefill,
        decode_worker(signal, transport, lease_s, **others) as decode,
    ):
        async with gateway(decode, signal) as opened:
            yield opened, prefill, decode
        await signal.until(lambda: used(prefill) == used(decode) == 0)


def used(worker: PrefillWorker | DecodeWorker) -> int:
    return worker.scheduler.kv.cache.num_held


async def refusal(call: Awaitable[object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def answer(opened: Gateway, prefill: PrefillWorker, handle: int, prompt: list[int] = PROMPT) -> list[int]:
    """One whole request, made by hand."""
    reserved = await opened.ask(handle, prompt)
    if reserved.needs_prefill:
        await prefill.run(reserved.ticket, prompt)
    assert await opened.end_of(handle) == ("length", "")
    return opened.tokens[handle]
