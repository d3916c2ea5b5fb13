"""Builds the images for CPUs and runs the compose file with every prompt handed over: what holds, and what it takes.

Asks, kills, freezes, cuts, stops, scales and limits containers, and serves other models. Exit code 1 if anything is
wrong. Where there is no Docker it says so and ends with 0, with --require with 1.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cyclopts import App
from rich.console import Console

from demo.paths import TARGET_DIR
from tests.containers.docker import (
    ASK_S,
    FOLDER,
    Fleet,
    NoDockerError,
    build,
    docker,
    find_torch,
    open_daemon,
    run,
)
from tests.support.fleet import free_ports
from tests.support.live import HTTP, wait_until
from tests.support.vision import data_uri, picture

MOST_MB = {"gateway": 450, "worker-cpu": 1900}
FIRST_TOKEN_S = 8.0  # after a prefill worker is lost, in whichever way, and what the prompts take in any case
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 1000, 60
QUESTION, ANSWER = "What is 12 plus 30?", "12 + 30 = 40 + 2 = 42."  # of the demo model
APART = """
services:
  prefill-cpu: {pid: !reset null, ipc: !reset null}
  decode-cpu: {pid: !reset null, ipc: !reset null}
"""
ONE_CORE = "services: {prefill-cpu: {cpus: 1}, decode-cpu: {cpus: 1}}"
ADAPTER = """
services:
  gateway: {environment: {BATON_LORA: tuned=/models/tuned}}
  prefill-cpu: {environment: {BATON_MAX_LORAS: 1}}
  decode-cpu: {environment: {BATON_MAX_LORAS: 1}}
"""
CORES = "from baton.runtime.hardware import num_cores; print(num_cores())"

app = App(name="python -m tests.containers", help=__doc__)
Rows = list[tuple[str, str]]


def prompt_of(number: int) -> list[int]:
    """Token ids that share no page with another number's."""
    return [10 + (number * 131 + at * 7) % 900 for at in range(PROMPT_TOKENS)]


@dataclass
class Checks:
    """One after the other on one fleet."""

    fleet: Fleet
    console: Console
    rows: Rows = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    truth: list[str] = field(default_factory=list)  # the answers to the prompts while nothing is wrong
    most_pages: int = 0  # of KV, without a limit of memory
    calm_s: float = 0.0  # until the last first token of all prompts while nothing is wrong

    @contextmanager
    def row(self, name: str) -> Iterator[list[str]]:
        """A row of the table, for the texts that the block adds. Whatever ends it is a finding."""
        found: list[str] = []
        started = time.monotonic()
        try:
            yield found
        except Exception as error:
            self.problems.append(f"{name}: {error!r}")
            found.append("WRONG")
        self.rows.append((name, ", ".join(found)))
        self.console.print(f"{time.monotonic() - started:4.0f} s  {name}: {self.rows[-1][1]}")

    # -- asking ------------------------------------------------------------------------------------------------------

    def check_answer(self, transport: str, **body: Any) -> str:
        """Text of an answer whose prompt was handed over by `transport`."""
        message = {"role": "user", "content": QUESTION}
        asked = {"model": "baton-demo", "messages": [message], "max_tokens": 20, **body}
        (choice,) = self.fleet.ask("chat/completions", **asked)["choices"]
        used = choice["timing"]["transport"]
        assert used == transport, f"handed over by {used or 'nothing'}, not {transport}"
        return str(choice["message"]["content"])

    def hands_over(self) -> bool:
        """Whether prompts go to prefill, and from there in shared memory."""
        with suppress(AssertionError):
            return bool(self.check_answer("shm", cache_salt=str(time.monotonic_ns())))
        return False

    def stream(self, number: int) -> tuple[float, str]:
        """When its first token came, and its text."""
        first, parts = 0.0, []
        body = {
            "model": "baton-demo", "prompt": prompt_of(number), "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "stream": True, "ignore_eos": True, "cache_salt": str(time.monotonic_ns()),
        }  # fmt: skip
        with HTTP.stream("POST", f"{self.fleet.url}/v1/completions", json=body, timeout=ASK_S) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    message = json.loads(line.removeprefix("data: "))
                    assert "error" not in message, message
                    first = first or time.monotonic()
                    parts += [choice["text"] for choice in message["choices"]]
        return first, "".join(parts)

    def ask_all(self, cause: Callable[[], object] = lambda: None, delay_s: float = 0.1) -> float:
        """Ask all prompts at once, and cause something meanwhile. Returns seconds from then to the last first token.

        `delay_s`: for which prompts are computed before. 0: they come after, to a worker that still counts as alive.
        """
        caused = time.monotonic()
        if not delay_s:
            cause()
        with ThreadPoolExecutor(NUM_PROMPTS) as threads:
            asked = [threads.submit(self.stream, number) for number in range(NUM_PROMPTS)]
            if delay_s:
                time.sleep(delay_s)
                caused = time.monotonic()
                cause()
            found = [one.result() for one in asked]
        texts = [text for _, text in found]
        self.truth = self.truth or texts
        assert texts == self.truth, "an answer has another text"
        return max(first for first, _ in found) - caused

    # -- rows --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.fleet.down()
        with self.row("`up` to ready, without and with built kernels") as found:
            found.append(f"{self.fleet.up():.0f} s")
            self.fleet.call("down")
            found.append(f"{self.fleet.up():.0f} s")
            self.most_pages = self.num_pages()
        with self.row("an answer, its prompt handed over in shared memory") as found:
            text = self.check_answer("shm")
            assert text == ANSWER, text
            found.append("yes")
            self.calm_s = self.ask_all(delay_s=0.0)
        with self.row("containers: read-only, user 10001, without capabilities, with an end of logs") as found:
            for name in ("gateway-1", "prefill-cpu-1", "decode-cpu-1"):
                status = self.fleet.exec(name, "cat", "/proc/self/status")
                assert "CapEff:\t0000000000000000" in status and "Uid:\t10001\t10001" in status
                assert "Read-only file system" in self.fleet.exec(name, "touch", "/opt/x", check=False)
                assert "max-size" in self.fleet.inspect(name, "json .HostConfig.LogConfig.Config")
            found.append("yes")

    def lose_prefill(self) -> None:
        """Killed, frozen, or cut off while eight prompts run or wait: the texts stay the same."""
        name, network = "prefill-cpu-1", "baton-test_default"

        def connect() -> None:
            """With another address: it starts again, to say which."""
            docker("network", "connect", "--alias=prefill", network, f"baton-test-{name}")
            self.fleet.docker("restart", name)

        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "killed": (lambda: self.fleet.docker("kill", name), lambda: self.fleet.docker("start", name)),
            "frozen": (lambda: self.fleet.docker("pause", name), lambda: self.fleet.docker("unpause", name)),
            "cut off": (lambda: docker("network", "disconnect", network, f"baton-test-{name}"), connect),
        }
        for way, (cause, mend) in ways.items():
            with self.row(f"prefill {way} under {NUM_PROMPTS} prompts: the last first token after") as found:
                took = self.ask_all(cause, delay_s=0.1 if way == "killed" else 0.0)
                found.append(f"{took:.1f} s")
                assert took < FIRST_TOKEN_S + self.calm_s, f"{took:.1f} s; with nothing wrong {self.calm_s:.1f} s"
                mend()
                wait_until(self.hands_over)

    def scale(self) -> None:
        with self.row("two decode workers (`--scale`): each is handed prompts") as found:
            found.append(f"{self.fleet.up('--scale=decode-cpu=2'):.0f} s")
            wait_until(lambda: sum(one["alive"] for one in self.fleet.workers()) == 3)
            wait_until(lambda: self.ask_all() > 0 and {one["transport"] for one in self.fleet.workers()} == {"shm"})
            assert not any(one["trouble"] for one in self.fleet.workers()), self.fleet.workers()
        with self.row("one of two killed, then the other stopped, under 8 answers: the same texts") as found:
            self.ask_all(lambda: self.fleet.docker("kill", "decode-cpu-1"))
            self.fleet.docker("start", "decode-cpu-1")
            wait_until(lambda: sum(one["alive"] for one in self.fleet.workers()) == 3)
            self.ask_all(lambda: self.fleet.docker("stop", "decode-cpu-2"))
            code = self.fleet.inspect("decode-cpu-2", ".State.ExitCode")
            assert code == "0", f"exit code {code}"
            found.append("yes")
        with self.row("the holder of the namespaces killed, then `up`") as found:
            self.fleet.docker("kill", "namespaces-cpu-1")
            found.append(f"{self.fleet.up():.0f} s")
            self.ask_all()

    def limit(self) -> None:
        with self.row("workers of 1 GB (`WORKER_MEMORY=1g`)") as found:
            self.fleet.up(WORKER_MEMORY="1g")
            self.ask_all()
            for name in ("prefill-cpu-1", "decode-cpu-1"):
                assert self.fleet.inspect(name, ".State.OOMKilled}} {{.RestartCount") == "false 0"
            pages = self.num_pages()
            assert pages < self.most_pages / 2, f"{pages} pages of KV; without a limit {self.most_pages}"
            found.append(f"{pages} pages of KV")
        with self.row("workers of one core") as found:
            self.fleet.up(override=ONE_CORE)
            cores = self.fleet.exec("decode-cpu-1", "python", "-c", CORES).strip()
            assert cores == "1", f"it counts {cores} cores"
            self.ask_all()
            found.append("one thread")

    def serve_others(self) -> None:
        with self.row("no shared namespaces, as on two hosts: handed over by gRPC") as found:
            self.fleet.up(override=APART)
            self.ask_all()
            self.check_answer("grpc", cache_salt="apart")
            found.append("yes")
        with self.row("an adapter") as found:
            self.fleet.up(override=ADAPTER)
            texts = {model: self.ask_model(model) for model in ("baton-demo", "tuned")}
            assert texts["baton-demo"] != texts["tuned"] == self.ask_model("tuned"), texts
            found.append("yes")
        with self.row("a GGUF file") as found:
            self.fleet.up(MODEL="/models/tiny.gguf")
            (model,) = [one["id"] for one in HTTP.get(f"{self.fleet.url}/v1/models").json()["data"]]
            found.append(f"{len(self.ask_model(model))} characters")
        with self.row("an image") as found:
            self.fleet.up(MODEL="/models/seeing")
            image = {"type": "image_url", "image_url": {"url": data_uri(picture())}}
            (model,) = [one["id"] for one in HTTP.get(f"{self.fleet.url}/v1/models").json()["data"]]
            message = {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]}
            found.append(f"{len(self.check_answer('shm', model=model, messages=[message]))} characters")

    def num_pages(self) -> int:
        """Of the decode workers' pools."""
        return sum(one["free_pages"] + one["used_pages"] for one in self.fleet.workers() if one["role"] == "decode")

    def ask_model(self, model: str) -> str:
        return self.check_answer("shm", model=model, cache_salt=str(time.monotonic_ns()))


def write_models(folder: Path) -> None:
    """A GGUF file, a model that sees, an adapter of the demo model. Imports torch."""
    if (folder / "tuned").exists():
        return
    from tests.support.checkpoints_vision import write_vlm_checkpoint
    from tests.support.gguf_files import write_gguf_models
    from tests.support.lora import write_adapter

    folder.mkdir(parents=True, exist_ok=True)
    write_gguf_models(folder, "Q4_K_M")
    write_vlm_checkpoint(folder / "seeing", "qwen3_vl")
    write_adapter(folder / "tuned", TARGET_DIR, "llama", seed=1)
    run("chmod", "-R", "a+rX", folder)


def build_images(checks: Checks) -> None:
    with find_torch() as torch_index:
        for target, most in MOST_MB.items():
            with checks.row(f"`{target}`, built") as found:
                megabytes, seconds = build(target, torch_index)
                found += [f"{megabytes:.0f} MB", f"{seconds:.0f} s"]
                assert megabytes <= most or not torch_index, f"{megabytes:.0f} MB, at most {most}"


@app.default
def main(*, require: bool = False, document: Path | None = None) -> int:
    """Build, run, print the table.

    Parameters
    ----------
    require
        Without Docker, fail.
    document
        Put the table between this file's markers, such as deploy/README.md, if nothing is wrong.
    """
    console, started = Console(), time.monotonic()
    with ExitStack() as stack:
        try:
            console.print(stack.enter_context(open_daemon()))
        except NoDockerError as error:
            console.print(f"nothing is checked: {error}")
            return 1 if require else 0
        write_models(FOLDER / "models")
        checks = Checks(Fleet(free_ports(2)), console)
        build_images(checks)
        stack.callback(checks.fleet.down)
        for part in (checks.start, checks.lose_prefill, checks.scale, checks.limit, checks.serve_others):
            part()
    minutes = (time.monotonic() - started) / 60
    lines = [(f"on {os.cpu_count()} cores", f"{minutes:.1f} minutes in all"), ("---", "---"), *checks.rows]
    table = "".join(f"| {name} | {found} |\n" for name, found in lines)
    console.print(table, *checks.problems, sep="\n", markup=False)
    if document is not None and not checks.problems:
        between = re.compile(r"(?<=<!-- containers -->\n).*?(?=<!-- /containers -->)", re.DOTALL)
        document.write_text(between.sub(lambda _: table, document.read_text()))
    return 1 if checks.problems else 0


if __name__ == "__main__":
    sys.exit(app())
