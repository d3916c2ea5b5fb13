"""A whole service in real processes, started by `baton serve`, for benchmarks and end-to-end tests."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plain_http import read_metric, read_workers

HAND_OFF = "--local-prefill-max-tokens"
HAND_OFF_FLAGS = (f"{HAND_OFF}=0",)  # force the transfer, although roles on one CPU share its cores
START_S = 240.0  # a loaded machine imports torch slowly


@dataclass
class Live:
    """A running service."""

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

    def workers(self) -> list[dict[str, Any]]:
        """The gateway's /status."""
        return read_workers(self.url)

    def metric(self, name: str, sample: str, labels: Mapping[str, str] | None = None) -> float:
        """The sum of all samples named `baton:SAMPLE` of one process that carry `labels`."""
        return read_metric(self.metrics_urls[name], sample, labels)

    def wait_until_unused(self, timeout_s: float = 20.0) -> float:
        """Seconds until no worker's gauge shows a used page; fails after `timeout_s`."""
        started = time.monotonic()
        while True:
            used = {name: self.metric(name, "kv_cache_used_pages") for name in self.metrics_urls if name != "gateway"}
            waited = time.monotonic() - started
            if not any(used.values()):
                return waited
            assert waited < timeout_s, f"pages still used after {waited:.1f} s: {used}"
            time.sleep(0.02)

    def read_log(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def serve(
    model: Path | str, *flags: str, env: Mapping[str, str] | None = None, hands_over: bool = True
) -> Iterator[Live]:  # fmt: skip
    """`baton serve` on free ports, ready; stopped by SIGTERM at the end.

    hands_over: transfer KV unless flags say otherwise; if False, the ports are the only flags besides `flags`.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        command = [
            sys.executable,
            "-m",
            "cli.main",
            "serve",
            "--model",
            str(model),
            "--port=0",
            "--grpc-port=0",
            *(() if not hands_over or any(flag.startswith(HAND_OFF) for flag in flags) else HAND_OFF_FLAGS),
            *flags,
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=build_environment(env or {}),
        )
        live = Live(process, log)
        threading.Thread(target=_read_log, args=(live,), daemon=True).start()
        try:
            assert live.is_ready.wait(START_S), "the service did not start in time"
            assert live.grpc_address, f"the service did not start:\n{live.read_log()[-4000:]}"
            yield live
        finally:
            _stop(process, log)


def build_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment; workers find this checkout in it even if it is not installed."""
    paths = [str(Path(__file__).resolve().parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
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
