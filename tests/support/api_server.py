"""The public surface on real sockets, for tests: uvicorn and grpc.aio in a thread of their own."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import httpx
import structlog
import uvicorn
import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from gateway.access.key_file import KeyFile
from gateway.access.keys import Keys
from gateway.adapters.registry import Adapter
from gateway.api.grpc.service import add_inference_services, build_interceptors
from gateway.app import add_model, build_app
from gateway.held import Held
from gateway.request.prepare import ApiOptions, ServedModels
from gateway.store.keeper import AnswerKeeper
from gateway.store.routes import add_answers
from gateway.store.runs import Runs
from gateway.text.tokenizer import Tokenizer
from gateway.tracing import Tracing
from runtime.rpc import build_server
from tests.support.fake_engine_client import FakeEngineClient, Script
from tests.support.tiny_tokenizer import write_byte_level

LEASE_S = 2.0  # of stored answers
WAIT_S = 60.0  # longer than any wait takes; a test that reaches it fails
SERVED = "tiny"
ANSWER = "hello 🙂 world"
KEYS = ("first-key", "zweiter-schlüssel")
ORIGIN = "https://page.example"
MAX_BODY = 2**20
FULL = ApiOptions(KEYS, (ORIGIN,), max_body_bytes=MAX_BODY, tool_format="hermes")
PLAIN = ApiOptions(cors_origins=(ORIGIN,), tool_format="none")  # no key is needed; the model has no tools


@dataclass(frozen=True)
class Served:
    """Running APIs, and the fakes behind them."""

    engine: FakeEngineClient
    tokenizer: Tokenizer
    host_port: tuple[str, int]
    http: httpx.Client  # has the base URL
    grpc_port: int
    channel: grpc.Channel
    metadata: tuple[tuple[str, str], ...]  # with the first key
    registry: CollectorRegistry
    held: Held  # by clients
    runs: Runs | None  # of stored answers
    run: Callable[[Coroutine[Any, Any, None]], None]  # on the event loop

    @property
    def url(self) -> str:
        """Where REST is served."""
        return f"http://{self.host_port[0]}:{self.host_port[1]}"

    def ids(self, text: str) -> list[int]:
        """Tokens of an answer."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def script(self, text: str, *, ends: bool = True, **fields: Any) -> Script:
        """An answer of this text, its end token last if it `ends`."""
        return Script([*self.ids(text), *[min(self.tokenizer.eos_token_ids)] * ends], **fields)

    def count(self, metric: str, **labels: str) -> float:
        """A metric's current value."""
        return self.registry.get_sample_value(f"baton:{metric}", labels) or 0.0

    def wait_count(self, value: float, metric: str, **labels: str) -> None:
        """Wait until a metric has this value; fail if it never does."""
        deadline = time.monotonic() + WAIT_S
        while (count := self.count(metric, **labels)) != value:
            assert time.monotonic() < deadline, f"{metric} is {count}, not {value}"
            time.sleep(0.005)


@contextmanager
def run_api(
    folder: Path,
    options: ApiOptions,
    write: Callable[[Path], Path] = write_byte_level,
    tracing: Tracing | None = None,
    names: Sequence[str] = (SERVED,),
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    extend: Callable[[FastAPI, ServedModels], None] = lambda app, served: None,
    key_file: Path | None = None,
    state: Path | None = None,
) -> Iterator[Served]:
    """Serve REST and gRPC on free loopback ports until the context ends. `write` writes the checkpoint's folder.

    `extend`: adds routes. `state`: folder of stored answers. The end of the context is as a kill for them.
    """
    logging = structlog.get_config()
    plain: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.KeyValueRenderer(),
    ]
    structlog.configure(processors=plain, logger_factory=structlog.ReturnLoggerFactory())
    engine, tokenizer, registry = FakeEngineClient(), Tokenizer(write(folder)), CollectorRegistry()
    listener = socket.create_server(("127.0.0.1", 0))
    ready, ports, loops = threading.Event(), list[int](), list[asyncio.AbstractEventLoop]()

    async def serve() -> None:
        grpc_server = build_server(build_interceptors(served))
        add_inference_services(grpc_server, served)
        ports.append(grpc_server.add_insecure_port("127.0.0.1:0"))
        await grpc_server.start()
        if runs:
            await runs.start()
            runs.serve()
        loops.append(asyncio.get_running_loop())
        ready.set()
        await http.serve([listener])
        await grpc_server.stop(0)
        await served.close()

    served = ServedModels(options, registry, Keys(options.api_keys, options.admin_key, has_file=key_file is not None))
    add_model(served, engine, tokenizer, names, tracing=tracing, adapters=adapters)
    if key_file:
        KeyFile(key_file, served.keys)
    runs = Runs(served, state, ttl_s=3600, max_bytes=1 << 30, lease_s=LEASE_S) if state else None
    keeper = AnswerKeeper(served, runs) if runs else None
    app = build_app(served, keeper)
    add_answers(app, served, keeper)
    extend(app, served)
    http = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=lambda: uvloop.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(WAIT_S)
    address: tuple[str, int] = listener.getsockname()
    key = {"authorization": f"Bearer {options.api_keys[0]}"} if options.api_keys else {}
    try:
        with (
            httpx.Client(base_url=f"http://{address[0]}:{address[1]}", timeout=WAIT_S) as client,
            grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel,
        ):
            yield Served(
                engine,
                tokenizer,
                address,
                client,
                ports[0],
                channel,
                tuple(key.items()),
                registry,
                served.held,
                runs,
                lambda work: asyncio.run_coroutine_threadsafe(work, loops[0]).result(WAIT_S),
            )
    finally:
        http.should_exit = True
        thread.join(WAIT_S)
        structlog.configure(**logging)
