"""Starts the services whose answers are recorded, and sends requests. Imports nothing of the product."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import grpc

START_S, ANSWER_S, STOP_S = 120.0, 120.0, 60.0
EARLY_S = 0.5  # a refusal that needs only a request's head comes within this time
LARGE = 60_000  # bytes of a body, before which we look for such a refusal
DEMO = Path("demo")
SERVE = ("--dtype=float32", "--threads=1", "--heartbeat-s=60", "--lease-s=120", "--stall-s=120", "--served-name=demo",
         "--local-prefill-max-tokens=0")  # fmt: skip
FLAGS: Mapping[str, Sequence[str]] = {  # service |-> its command
    "plain": ("serve", *SERVE, "--max-context-tokens=512"),
    "drafts": ("serve", *SERVE, "--max-context-tokens=512", "--decode-workers=2", "--served-name=other/name",
               f"--draft-model={DEMO / 'draft'}", "--speculate=draft", "--tool-format=hermes",
               "--cors-origins=https://a.example"),
    "both": ("serve", *SERVE, "--max-context-tokens=512", "--prefill-workers=0", "--served-name=*", "--cors-origins=*",
             "--tool-format=mistral-args", "--reasoning-format=none"),
    "tight": ("serve", *SERVE, "--max-context-tokens=192", "--api-key=key-one", "--api-key=key-two", "--max-queue=2",
              "--body-limit-bytes=16384", "--decode-max-running=2", "--patience-s=0",
              "--no-prefill=wait", "--tool-format=llama3"),
    "alone": ("gateway", "--decode=127.0.0.1:1", "--prefill=127.0.0.1:1", "--served-name=demo", "--patience-s=0",
              "--no-prefill=fail", "--tool-format=none"),
}  # fmt: skip
KEYS: Mapping[str, str] = {"tight": "Bearer key-one"}  # service |-> the header authorization
MARKERS = {"<think>": "ĠThe", "</think>": "Ġ="}  # |-> the token that stands for it in the tight service's model


@dataclass
class Service:
    """A running service."""

    name: str
    http: str = ""  # host:port
    grpc: str = ""
    ops: dict[str, str] = field(default_factory=dict)  # process |-> host:port of its probes
    log: list[str] = field(default_factory=list)
    is_up: threading.Event = field(default_factory=threading.Event)

    @property
    def metadata(self) -> dict[str, str]:
        """The header that requests have unless they name it."""
        return {"authorization": KEYS[self.name]} if self.name in KEYS else {}


@contextmanager
def start(name: str) -> Iterator[Service]:
    """The service in processes of its own; its workers are alive."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", reasons=name == "tight")
        first, *flags = FLAGS[name]
        command = [sys.executable, "-m", "cli.main", first, f"--model={model}", "--port=0", "--grpc-port=0", *flags]
        kept = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=kept)
        service = Service(name)
        threading.Thread(target=read_log, args=(process, service), daemon=True).start()
        try:
            if not service.is_up.wait(START_S) or not service.http:
                raise SystemExit(f"{name} did not start:\n{''.join(service.log[-30:])}")
            wait_for_workers(service)
            yield service
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)


def write_model(folder: Path, reasons: bool) -> Path:
    """The demo model, greedy unless a request says otherwise. `reasons`: up to the first " =" of each answer."""
    shutil.copytree(DEMO / "target", folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "temperature": 0}))
    if not reasons:
        return folder
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for marker, token in MARKERS.items():
        number = model["vocab"].pop(token)
        model["vocab"][marker] = number
        model["merges"] = [pair for pair in model["merges"] if token not in (*pair, "".join(pair))]
        tokenizer["added_tokens"].append({"id": number, "content": marker, **plain})
    tokenizer["added_tokens"].sort(key=lambda added: added["id"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += (
        "{%- if add_generation_prompt -%}{%- if reasoning_effort == 'max' -%}Carefully: {% endif -%}"
        "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>"
        "{%- else -%}<think>{%- endif -%}{%- endif -%}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def read_log(process: subprocess.Popen[str], service: Service) -> None:
    """Keep the log, and note where the processes listen."""
    assert process.stderr is not None
    for line in process.stderr:
        service.log.append(line)
        event = json.loads(line) if line.startswith("{") else {}
        if "metrics" in event:  # "ready" of a process under `baton serve`
            service.ops[event["process"]] = event["metrics"].split("/")[2]
        elif "ops" in event:  # "listening" of a gateway without it
            service.ops["gateway"] = event["ops"]
        if "grpc" in event:
            service.http, service.grpc = event["address"], event["grpc"]
            service.is_up.set()
    service.is_up.set()  # it has ended


def wait_for_workers(service: Service) -> None:
    if service.name == "alone":
        return
    head = "".join(f"{key}: {value}\r\n" for key, value in service.metadata.items())
    request = f"GET /status HTTP/1.1\r\nHost: localhost\r\n{head}\r\n".encode()
    deadline = time.monotonic() + START_S
    while not all(worker["alive"] for worker in json.loads(send(service.http, request, b"", "GET")[2])["workers"]):
        if time.monotonic() > deadline:
            raise SystemExit(f"the workers of {service.name} are not alive:\n{''.join(service.log[-30:])}")
        time.sleep(0.1)


def send(address: str, head: bytes, body: bytes, method: str) -> tuple[int, list[tuple[str, str]], bytes]:
    """The answer to one request on a connection of its own; status 0: closed without one."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
        with suppress(ConnectionError):  # the answer may have come before all was sent
            if len(body) < LARGE:
                connection.sendall(head + body)
            else:
                connection.sendall(head)
                if not select.select([connection], [], [], EARLY_S)[0]:
                    connection.sendall(body)
        try:
            response = HTTPResponse(connection, method=method)
            response.begin()
            return response.status, response.getheaders(), response.read()
        except (HTTPException, ConnectionError) as error:
            return 0, [], type(error).__name__.encode()


def call(channel: Any, method: str, message: bytes, metadata: Mapping[str, str]) -> tuple[Any, list[bytes]]:
    """A finished call, which has its status, and its messages."""
    running: Any = channel.unary_stream(method)(message, timeout=ANSWER_S, metadata=tuple(metadata.items()))
    messages: list[bytes] = []
    with suppress(grpc.RpcError):  # the status says so
        messages.extend(running)
    return running, messages
