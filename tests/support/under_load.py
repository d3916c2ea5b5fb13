"""Requests to a real service while its processes are stopped, killed and drained, and waits for the outcome."""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import httpx

from bench.live import Live
from bench.plain_http import HTTP
from protos import inference_pb2, inference_pb2_grpc
from runtime.rpc import new_incarnation
from tests.support.oracle import random_prompt

WAIT_S = 180.0  # generous: the machine may be busy
MODEL = "baton-demo"


@dataclass
class Asking:
    """One request in its own thread: a greedy answer of fixed length, token by token.

    Each has its own salt, so its whole prompt is computed even if it was cached elsewhere.
    """

    address: str  # of the gateway's gRPC API
    seed: int
    num_prompt: int
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    error: grpc.RpcError | None = None
    has_begun: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        ids = inference_pb2.TokenIds(ids=random_prompt(self.num_prompt, 300, seed=self.seed))
        request = inference_pb2.GenerateRequest(
            token_ids=ids, max_tokens=self.num_tokens, temperature=0, ignore_eos=True, cache_salt=new_incarnation()
        )
        try:
            with grpc.insecure_channel(self.address) as channel:
                for part in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=2 * WAIT_S):
                    self.tokens.extend(part.token_ids)
                    self.has_begun.set()
        except grpc.RpcError as error:
            self.error = error
            self.has_begun.set()

    def answer(self) -> list[int]:
        """All its tokens; raises its error."""
        self.thread.join(2 * WAIT_S)
        assert not self.thread.is_alive(), f"still {len(self.tokens)} of {self.num_tokens} tokens"
        if self.error is not None:
            raise self.error
        return self.tokens


def ask(live: Live, count: int, num_prompt: int = 60, num_tokens: int = 500) -> list[Asking]:
    """Start `count` different requests; return when all have their first token."""
    asking = [Asking(live.grpc_address, seed, num_prompt, num_tokens) for seed in range(count)]
    for one in asking:
        assert one.has_begun.wait(WAIT_S)
    return asking


def answers(asking: list[Asking]) -> list[list[int]]:
    return [one.answer() for one in asking]


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Polls, because other processes offer no events to wait on."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {WAIT_S:g} s: {what}"
        time.sleep(0.05)


def find(live: Live, name: str) -> dict[str, object]:
    """The gateway's /status entry of a worker."""
    return next(worker for worker in live.workers() if worker["address"] == live.addresses[name])


def send(live: Live, name: str, number: signal.Signals) -> int:
    """Send a signal to one worker; return its pid."""
    pid = int(str(find(live, name)["pid"]))
    os.kill(pid, number)
    return pid


def wait_shown(live: Live, text: str) -> None:
    """Wait until `baton serve` has printed it."""
    wait_until(lambda: any(text in line for line in live.shown), f"{text!r} in {live.shown}")


def complete(live: Live) -> httpx.Response:
    """A short request over REST."""
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}
    return HTTP.post(f"{live.url}/v1/completions", json=body, timeout=WAIT_S)
