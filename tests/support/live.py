"""A service in real processes: what it reports over HTTP, and one that `baton serve` starts.

For single processes that are killed and started again see fleet.py.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.forks import ForkedPopen

HAND_OFF = "--local-prefill-max-tokens"
HAND_OFF_FLAGS = (f"{HAND_OFF}=0",)  # force the transfer, although roles on one CPU share its cores
CALM = ("--heartbeat-s=60", "--lease-s=120", "--stall-s=120", "--patience-s=120")
START_S = 240.0  # a loaded machine imports torch slowly
POLL_S, MOST_POLL_S = 0.01, 0.05  # at first, and later: each look costs milliseconds of CPU
WAIT_S = 180.0  # for events that take moments on an idle machine; bounds a hang, measures nothing
HTTP_S = 10.0
CHECKOUT = Path(__file__).resolve().parents[2]
# A new connection per call. httpx's own functions prepare TLS at every call, which takes 30 ms of CPU.
HTTP = httpx.Client(trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))


def read_workers(url: str) -> list[dict[str, Any]]:
    """The workers in the /status of the gateway at `url`."""
    workers: list[dict[str, Any]] = HTTP.get(f"{url}/status", timeout=HTTP_S).json()["workers"]
    return workers


def read_families(metrics_url: str) -> Iterable[Metric]:
    """All metrics of one process."""
    return text_string_to_metric_families(HTTP.get(metrics_url, timeout=HTTP_S).text)


def read_metric(metrics_url: str, sample: str, labels: Mapping[str, str] | None = None) -> float:
    """The sum of all samples named `baton:SAMPLE` of one process that carry `labels`."""
    return sum(
        found.value
        for family in read_families(metrics_url)
        for found in family.samples
        if found.name == f"baton:{sample}" and (labels or {}).items() <= found.labels.items()
    )


def wait_until(
    is_true: Callable[[], bool], timeout_s: float = WAIT_S, explain: Callable[[], object] = lambda: "not yet true"
) -> float:
    """Seconds until `is_true`; AssertionError with `explain()` after `timeout_s`."""
    started, pause_s = time.monotonic(), POLL_S
    while not is_true():
        assert time.monotonic() - started < timeout_s, f"still after {timeout_s:g} s: {explain()}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, MOST_POLL_S)
    return time.monotonic() - started


class Service:
    """A gateway and its workers."""

    grpc_address: str  # of the gateway

    @property
    def url(self) -> str:
        """Of the gateway."""
        raise NotImplementedError

    def used_pages(self) -> dict[str, float]:
        """name |-> its own gauge, for every living worker."""
        raise NotImplementedError

    def status(self) -> list[dict[str, Any]]:
        """The gateway's /status."""
        return read_workers(self.url)

    def wait_until_unused(self, timeout_s: float = WAIT_S) -> float:
        """Seconds until no living worker has a used page."""
        return wait_until(lambda: not any(self.used_pages().values()), timeout_s, self.used_pages)

    def wait_until_whole(self, timeout_s: float = WAIT_S) -> float:
        """Seconds until the gateway considers every worker alive."""
        return wait_until(lambda: all(worker["alive"] for worker in self.status()), timeout_s, self.status)


@dataclass
class Live(Service):
    """A running `baton serve`."""

    process: subprocess.Popen[str]
    log: Path
    addresses: dict[str, str] = field(default_factory=dict)  # process name |-> host:port
    pids: dict[str, int] = field(default_factory=dict)  # process name |-> pid, of the one that was ready last
    metrics_urls: dict[str, str] = field(default_factory=dict)  # process name |-> its /metrics
    grpc_address: str = ""
    shown: list[str] = field(default_factory=list)  # the supervisor's own events
    is_ready: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://{self.addresses['gateway']}"

    def metric(self, name: str, sample: str, labels: Mapping[str, str] | None = None) -> float:
        """The sum of all samples named `baton:SAMPLE` of one process that carry `labels`."""
        return read_metric(self.metrics_urls[name], sample, labels)

    def used_pages(self) -> dict[str, float]:
        return {name: self.metric(name, "kv_cache_used_pages") for name in self.metrics_urls if name != "gateway"}

    def wait_until_unused(self, timeout_s: float = 20.0) -> float:
        """By default less than a lease: what ends frees its pages without waiting for that."""
        return super().wait_until_unused(timeout_s)

    def find(self, name: str) -> dict[str, Any]:
        """The gateway's /status entry of a worker."""
        return next(worker for worker in self.status() if worker["address"] == self.addresses[name])

    def is_alive(self, name: str) -> bool:
        """Whether the gateway considers a worker alive."""
        return bool(self.find(name)["alive"])

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one process."""
        os.kill(self.pids[name], number)

    def wait_shown(self, text: str) -> None:
        """Wait until the supervisor has reported it."""
        wait_until(lambda: any(text in line for line in self.shown), explain=lambda: self.shown)

    def complete(self) -> httpx.Response:
        """A short request over REST."""
        body = {"model": "baton-demo", "prompt": "Once upon a time", "max_tokens": 4}
        return HTTP.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S)

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def serve(
    model: Path | str,
    *flags: str,
    env: Mapping[str, str] | None = None,
    hands_over: bool = True,
    installed: Path | None = None,
    forks: bool = False,
) -> Iterator[Live]:
    """`baton serve` on free ports, ready; stopped by SIGTERM at the end.

    hands_over: transfer KV unless flags say otherwise; if False, the ports are the only flags besides `flags`.
    installed: the script to run, in a folder of its own and without our PYTHONPATH, so that it finds no checkout.
    forks: its processes are forks of one that has imported everything; not where time or memory is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        command = [
            *((installed,) if installed else (sys.executable, "-m", "cli.main")),
            "serve",
            "--model",
            str(model),
            "--port=0",
            "--grpc-port=0",
            *(() if not hands_over or any(flag.startswith(HAND_OFF) for flag in flags) else HAND_OFF_FLAGS),
            *flags,
        ]
        environment = build_environment(env or {})
        if installed:
            environment["PYTHONPATH"] = (env or {}).get("PYTHONPATH", "")
        process = (ForkedPopen if forks else subprocess.Popen)(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=environment,
            cwd=folder if installed else None,
        )
        live = Live(process, log)
        threading.Thread(target=_read_log, args=(live,), daemon=True).start()
        try:
            assert live.is_ready.wait(START_S), "the service did not start in time"
            assert live.grpc_address, f"the service did not start:\n{live.read_log()[-4000:]}"
            yield live
        finally:
            _stop(process, log)


@contextmanager
def serve_calmly(
    model: Path | str, *flags: str, env: Mapping[str, str] | None = None, forks: bool = True
) -> Iterator[Live]:
    """`serve`, with counters that depend on requests alone: pauses of a busy machine do not count as deaths.

    The gateway knows all workers before the first request.
    """
    with serve(model, *CALM, *flags, env=env, forks=forks) as live:
        live.wait_until_whole()
        yield live


def build_environment(extra: Mapping[str, str], checkout: Path = CHECKOUT) -> dict[str, str]:
    """Our environment; workers find a checkout in it even if it is not installed."""
    paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **extra}


def _read_log(live: Live) -> None:
    """Copy the service's log to its file, and record what the supervisor reports of its processes."""
    assert live.process.stderr is not None
    with live.log.open("w") as log:
        for line in live.process.stderr:
            log.write(line)
            log.flush()
            if '"role": "serve"' in line:
                _note(live, json.loads(line))
    live.is_ready.set()  # it has ended


def _note(live: Live, event: dict[str, Any]) -> None:
    live.shown.append(event["event"])
    if event["event"] != "ready":
        return
    name = event["process"]
    live.addresses[name] = event["address"]
    live.pids[name] = event["pid"]
    if "metrics" in event:
        live.metrics_urls[name] = event["metrics"]
    if name == "gateway":
        live.grpc_address = event["grpc"]
        live.is_ready.set()


def _stop(process: subprocess.Popen[str], log: Path) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=10)
        raise AssertionError(f"baton serve did not stop:\n{log.read_text()[-2000:]}") from None
