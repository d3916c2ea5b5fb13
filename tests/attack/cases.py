"""What one client with an ordinary key sends to cost all others much, and as many harmless bytes beside it.

Runs in a process of its own, so that it does not slow those that measure.
"""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import grpc
import httpx

MODEL = "target"  # the demo model
MB8 = 8 * 10**6
WAIT_S = 60.0
HOLD_S = 4.0  # connections that are kept without use
TOGETHER = 4  # requests at once, unless a case says otherwise
X = [{"role": "user", "content": "x"}]
AMBIGUOUS = 'root ::= x\nx ::= "a" | "b" | x x'
CHAT, TEXT, BATCH_CHAT = "/v1/chat/completions", "/v1/completions", "/v1/batches"
Outcome = Counter[str]


@dataclass(frozen=True)
class Target:
    """Where the service is, and the attacker's key."""

    url: str
    grpc_address: str
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}", "content-type": "application/json"}

    @property
    def host_port(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)


@dataclass(frozen=True)
class Case:
    """`attack` and `control` do what takes a while; what they need is built before."""

    attack: Callable[[Target], Outcome]
    control: Callable[[Target], Outcome]


# -- requests ---------------------------------------------------------------------------------------------------------


def post(target: Target, requests: Sequence[tuple[str, bytes]], together: int = TOGETHER) -> Outcome:
    with httpx.Client(base_url=target.url, timeout=WAIT_S, headers=target.headers) as client:

        def send(request: tuple[str, bytes]) -> str:
            try:
                return str(client.post(request[0], content=request[1]).status_code)
            except httpx.HTTPError as error:
                return type(error).__name__

        with ThreadPoolExecutor(together) as threads:
            return Counter(threads.map(send, requests))


def harmless(num_bytes: int) -> bytes:
    """A request with as many bytes, whose answer has one token."""
    return encode(prompt="x", max_tokens=1, user="a" * max(num_bytes - 60, 0))


def encode(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}).encode()


def bodies(path: str, body: bytes, count: int, together: int = TOGETHER) -> Case:
    """A request that is sent some times."""
    given, control = [(path, body)] * count, [(TEXT, harmless(len(body)))] * count
    return Case(partial(post, requests=given, together=together), partial(post, requests=control, together=together))


def calling(arguments: str) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return encode(messages=[*X, {"role": "assistant", "content": "", "tool_calls": [call]}], max_tokens=1)


def strict_tools() -> bytes:
    branches = [{"type": "object", "properties": {f"p{at}": {"const": at}}, "required": [f"p{at}"]} for at in range(19)]
    schema = {"type": "object", "properties": {"a": {"oneOf": branches}}}
    tools = [
        {"type": "function", "function": {"name": f"f{at}", "parameters": schema, "strict": True}} for at in range(60)
    ]
    return encode(messages=X, tools=tools, max_tokens=1)


def call_grpc(target: Target, method: str, message: bytes, count: int) -> Outcome:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target.grpc_address, options) as channel:
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/baton.v1.Inference/{method}")
        found = Outcome()
        for _ in range(count):
            try:
                list(call(message, metadata=(("authorization", f"Bearer {target.key}"),), timeout=WAIT_S))
                found["OK"] += 1
            except grpc.RpcError as error:
                found[error.code().name] += 1
        return found


def messages(method: str, message: bytes, count: int) -> Case:
    control = [(TEXT, harmless(len(message)))] * count
    return Case(partial(call_grpc, method=method, message=message, count=count), partial(post, requests=control))


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(number: int, content: bytes) -> bytes:
    """A field with these bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


# -- batches ----------------------------------------------------------------------------------------------------------


def batch(target: Target, lines: bytes, seconds: float) -> Outcome:
    """Runs for a while, then it is cancelled, and its file deleted."""
    headers = {"authorization": f"Bearer {target.key}"}
    with httpx.Client(base_url=target.url, timeout=WAIT_S, headers=headers) as client:
        file = client.post("/v1/files", files={"file": ("a.jsonl", lines)}, data={"purpose": "batch"})
        if file.status_code != 200:
            return Counter([str(file.status_code)])
        given = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        made = client.post(BATCH_CHAT, json=given).json()
        time.sleep(seconds)
        client.post(f"{BATCH_CHAT}/{made['id']}/cancel")
        ended = made
        until = time.monotonic() + WAIT_S
        while ended["status"] not in ("cancelled", "failed", "completed") and time.monotonic() < until:
            time.sleep(0.1)
            ended = client.get(f"{BATCH_CHAT}/{made['id']}").json()
        for name in (made["input_file_id"], ended["output_file_id"], ended["error_file_id"]):
            if name:
                client.delete(f"/v1/files/{name}")
        return Counter([ended["status"]])


def batch_lines(count: int, **fields: Any) -> bytes:
    body = {"model": MODEL, "messages": X, **fields}
    lines = [{"custom_id": str(at), "method": "POST", "url": CHAT, "body": body} for at in range(count)]
    return b"\n".join(json.dumps(line).encode() for line in lines)


# -- connections ------------------------------------------------------------------------------------------------------


def hold(target: Target, head: str, data: bytes, count: int) -> Outcome:
    """Connections that send this and then neither send nor read."""
    found = Outcome()
    start = f"{head} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {target.key}\r\n".encode() if head else b""
    with ExitStack() as opened:
        for _ in range(count):
            try:
                connection = opened.enter_context(socket.create_connection(target.host_port, WAIT_S))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
                connection.sendall(start + data)
                found["open"] += 1
            except OSError:
                found["cut"] += 1
        time.sleep(HOLD_S)
    return found


def holding(head: str, data: bytes, count: int) -> Case:
    control = [(TEXT, harmless(len(data)))] * count
    return Case(partial(hold, head=head, data=data, count=count), partial(post, requests=control))


def unfinished(path: str, kind: str, num_announced: int, num_sent: int, count: int) -> Case:
    head = f"content-type: {kind}\r\ncontent-length: {num_announced}\r\n\r\n".encode()
    return holding(f"POST {path}", head + b" " * num_sent, count)


def unread(body: bytes, count: int) -> Case:
    """Beside the same requests whose answers are read."""
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    control = partial(post, requests=[(TEXT, body)] * count, together=count)
    return Case(partial(hold, head=f"POST {TEXT}", data=head + body, count=count), control)


def build_cases() -> Mapping[str, Callable[[], Case]]:
    """By name; each is built when it runs."""
    many = "[" + "[]," * (MB8 // 4) + "[]]"
    ask = field(2, field(1, b"user") + field(2, b"x"))
    return {
        "containers in arguments": lambda: bodies(CHAT, calling(f'{{"a": {many}}}'), 8),
        "text of escapes in arguments": lambda: bodies(CHAT, calling(json.dumps({"a": "\n" * (MB8 // 4)})), 8),
        "numbers of 4,200 digits": lambda: bodies(CHAT, calling('{"a": [' + ("9" * 4200 + ",") * 1900 + "1]}"), 8),
        "equal keys": lambda: bodies(CHAT, b'{"x": {' + b'"a": 1,' * 49_000 + b'"a": 1}}', 40),
        "60 strict tools with oneOf": lambda: bodies(CHAT, strict_tools(), 40),
        "gRPC: 4 M empty images": lambda: messages("Chat", ask + field(2, field(7, b"") * 3_900_000), 4),
        "gRPC: 8 M token ids": lambda: messages("Generate", field(3, field(1, b"\x01" * (MB8 - 99))), 4),
        "texts to tokenise": lambda: bodies("/tokenize", encode(prompt="lorem ipsum " * 2500), 300, 32),
        "later system messages": lambda: bodies(
            CHAT, encode(messages=[{"role": "system", "content": f"{at} {'x' * 8}"} for at in range(4000)]), 20
        ),
        "places: 12 times n = 128": lambda: bodies(CHAT, encode(messages=X, n=128, max_tokens=16), 12, 12),
        "ambiguous grammar, n = 64": lambda: bodies(
            CHAT, encode(messages=X, n=64, max_tokens=40, structured_outputs={"grammar": AMBIGUOUS}), 1
        ),
        "batch: 200 lines, n = 128": lambda: Case(
            partial(batch, lines=batch_lines(200, n=128, max_tokens=32), seconds=8.0),
            partial(batch, lines=batch_lines(200, max_tokens=32), seconds=8.0),
        ),
        "batch: 100 MiB of empty lines": lambda: Case(
            partial(batch, lines=b"\n" * (100 << 20), seconds=2.0),
            partial(batch, lines=batch_lines(1, user="a" * (1 << 20), max_tokens=1) + b" " * (99 << 20), seconds=2.0),
        ),
        "30 uploads that never come": lambda: unfinished("/v1/files", "multipart/form-data; boundary=b", MB8, 0, 30),
        "60 bodies that end early": lambda: unfinished(TEXT, "application/json", MB8, MB8 - 1, 60),
        "20 answers that are not read": lambda: unread(
            encode(prompt="x", n=64, max_tokens=64, logprobs=20, temperature=1.0, ignore_eos=True), 20
        ),
        "2,000 idle connections": lambda: holding("", b"", 2000),
    }


@contextmanager
def _told(pipe: Connection, what: str) -> Iterator[None]:
    pipe.send(what)
    pipe.recv()
    yield


def attack(pipe: Connection, name: str, target: Target, is_control: bool) -> None:
    """Builds a case, says so, and sends its outcome when it was told to go on. In a process of its own."""
    case = build_cases()[name]()
    with _told(pipe, "ready"):
        pipe.send((case.control if is_control else case.attack)(target))
