"""However long an answer, the gateway's event loop is never blocked for long. Row 17 of the fault list.

The measure is the longest step's share of all CPU time, which is the same on a slow machine: 6 % at most.
"""

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from demo.paths import TARGET_DIR
from gateway.access.keys import Keys
from gateway.app import build_app, build_served_model
from gateway.request.prepare import ApiOptions, ServedModels
from gateway.router import attempt
from gateway.text.tokenizer import Tokenizer
from protos import decode_pb2
from runtime.lifecycle import spare_what_is_here
from tests.support.fake_engine_client import FakeEngineClient, Script

MOST_SHARE = 0.125  # twice that
LONG_PROMPT = [7 + index % 200 for index in range(2000)]
MESSAGES = [{"role": "user", "content": "x"}]
ANSWER = [30 + index % 200 for index in range(120)]


@pytest.fixture
def as_in_a_gateway() -> Iterator[None]:
    """Hides what tests have loaded and gateways have not."""
    before = structlog.get_config()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    spare_what_is_here()
    yield
    gc.unfreeze()
    structlog.configure(**before)


@pytest.mark.usefixtures("as_in_a_gateway")
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": [LONG_PROMPT] * 64, "echo": True, "logprobs": 5, "max_tokens": 1, "stream": True}),
        ("chat/completions", {"messages": MESSAGES, "n": 128, "logprobs": True, "top_logprobs": 20}),
    ],
    ids=["streamed echo", "chat n"],
)
def test_no_step_takes_long(monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any]) -> None:
    engine, steps = FakeEngineClient(), list[float]()
    engine.script = Script(ANSWER, group=5)
    served = build_served_model(engine, Tokenizer(TARGET_DIR), ["demo"], ApiOptions(), CollectorRegistry())
    app = build_app(ServedModels([served], served.metrics.registry, Keys()))

    async def test() -> None:
        await _post(app, "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})  # imports the rest
        steps.clear()
        await _post(app, f"/v1/{path}", {"model": "demo", "max_tokens": len(ANSWER), **fields})

    _measure_steps(monkeypatch, steps)
    asyncio.run(test())
    served.offload.close()
    assert max(steps) < MOST_SHARE * sum(steps)


@pytest.mark.usefixtures("as_in_a_gateway")
def test_a_long_conversation_is_tokenised_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """128k tokens: each step of the loop is a small share of the request's CPU time, most of it a thread's.

    Asked again, nothing is tokenised, unless the request has another salt.
    """
    steps, num_tokenised, tokenizer = list[float](), list[int](), Tokenizer(TARGET_DIR)
    tokenizer.context_tokens = 1 << 18
    engine = FakeEngineClient()
    engine.script = Script(ANSWER, group=5)
    served = build_served_model(engine, tokenizer, ["demo"], ApiOptions(), CollectorRegistry())
    app, took_s = build_app(ServedModels([served], served.metrics.registry, Keys())), 0.0
    texts = [" ".join(f"story {turn}.{at}: the fox {at * 7919 % 1000} runs" for at in range(20)) for turn in range(365)]
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(texts)]
    body = {"model": "demo", "messages": messages, "max_tokens": len(ANSWER), "stream": True}

    def count(texts: list[str], **options: bool) -> list[list[int]]:
        num_tokenised.append(sum(map(len, texts)))
        return encode_all(texts, **options)

    encode_all = tokenizer.encode_all
    monkeypatch.setattr(tokenizer, "encode_all", count)

    async def test() -> None:
        nonlocal took_s
        await _post(app, "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 1})  # imports the rest
        await asyncio.sleep(0)
        steps.clear()
        began = time.process_time()
        await _post(app, "/v1/chat/completions", body)
        took_s = time.process_time() - began
        measured.extend(steps)
        num_tokenised.clear()
        for salt in ("", "another", "another"):
            await _post(app, "/v1/chat/completions", {**body, "cache_salt": salt})

    measured = list[float]()
    _measure_steps(monkeypatch, steps)
    asyncio.run(test())
    served.offload.close()
    assert len(engine.generations[-1].prompt_ids) > 128_000
    assert max(measured) < MOST_SHARE * took_s
    assert num_tokenised[0] == num_tokenised[2] == 0 and num_tokenised[1] > sum(map(len, texts))


def _measure_steps(monkeypatch: pytest.MonkeyPatch, steps: list[float]) -> None:
    run = asyncio.Handle._run

    def run_measured(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        steps.append(time.thread_time() - started)

    monkeypatch.setattr(asyncio.Handle, "_run", run_measured)


async def _post(app: FastAPI, path: str, body: dict[str, Any]) -> None:
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }  # fmt: skip
    statuses = list[int]()

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    await app(scope, receive, send)
    assert statuses[0] == 200


async def test_others_get_turns_while_a_workers_long_message_is_read() -> None:
    """The log-probabilities of a long prompt come in one message."""
    made = [decode_pb2.TokenLogprobs(logprob=-at, top_ids=[at], top_logprobs=[-at]) for at in range(5000)]
    reading, turns = asyncio.create_task(attempt._unpack_logprobs(made)), 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= len(made) // attempt.READ_AT_ONCE
    found = [(one.logprob, one.top_ids, one.top_logprobs) for one in reading.result()]
    assert found == [(-at, (at,), (-at,)) for at in range(len(made))]
