"""The longest prompt is answered alike over REST and gRPC; other hosts named in requests are never contacted.

Rows 16, 18 and 20 of the fault list, through real processes; what is refused: tests/gateway/api/test_refusals.py.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest

from tests.support.combinations import combination
from tests.support.live import HTTP, Live
from tests.support.surface import MODEL, Surface

CONTEXT = 4096
PATIENCE_S = 120.0
PROMPT = [5] * 20


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A port that nothing has a reason to connect to; fails the test if something did."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        yield listener
        with pytest.raises(TimeoutError):
            listener.accept()


def complete(demo: Live, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, "ignore_eos": True, **fields}
    return HTTP.post(f"{demo.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_answer"),
    [(CONTEXT - 1, 1, 1), combination(CONTEXT - 10, None, 10)],
)
def test_what_just_fits_is_answered_alike(
    demo: Live, surface: Surface, num_prompt: int, max_tokens: int | None, num_answer: int
) -> None:
    prompt = [5] * num_prompt
    answer = complete(demo, prompt=prompt, max_tokens=max_tokens).json()
    assert answer["usage"]["completion_tokens"] == num_answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == surface.ask_one(prompt, max_tokens=max_tokens).text


def test_hosts_in_fields_and_schemas_are_not_called(demo: Live, trap: socket.socket) -> None:
    host, port = trap.getsockname()
    url = f"http://{host}:{port}/schema"
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"$ref": url}}}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    transfer = {"remote_host": host, "remote_port": port, "do_remote_prefill": True}
    for more in ({"response_format": form}, {"messages": [picture]}, {"kv_transfer_params": transfer}):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}
        refused = HTTP.post(f"{demo.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert refused.status_code == 400, refused.text


def test_a_body_and_a_message_over_the_limit_are_refused(demo: Live, surface: Surface) -> None:
    """Of 8 MiB, unless set otherwise."""
    long = "x" * (9 << 20)
    assert complete(demo, prompt=PROMPT, stop=long).status_code == 413
    with pytest.raises(grpc.RpcError) as refused:
        surface.ask(PROMPT, stop=[long])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_headers_and_metadata_choose_no_worker(demo: Live, surface: Surface, trap: socket.socket) -> None:
    there = "{}:{}".format(*trap.getsockname())
    plain = complete(demo, prompt=PROMPT, max_tokens=8).json()["choices"]
    named = {
        "x-kv-transfer-params": json.dumps({"remote_host": there}), "x-prefill-host": there, "x-decode-host": there,
        "x-prefiller-host-port": there, "x-gateway-destination-endpoint": there, "x-data-parallel-host": there,
    }  # fmt: skip
    forwarded = {"x-forwarded-host": there, "forwarded": f"host={there}", "x-original-url": f"http://{there}/"}
    for headers in (named, forwarded, {"host": there}):
        assert complete(demo, headers, prompt=PROMPT, max_tokens=8).json()["choices"] == plain
    assert surface.ask_one(PROMPT, max_tokens=8, metadata=tuple(named.items())).text == plain[0]["text"]


def test_a_request_for_another_host_is_not_passed_on(demo: Live, trap: socket.socket) -> None:
    there = "{}:{}".format(*trap.getsockname())
    host, port = demo.addresses["gateway"].split(":")
    for line in (f"GET http://{there}/live HTTP/1.1", f"CONNECT {there} HTTP/1.1"):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
            raw.sendall(f"{line}\r\nhost: {there}\r\nconnection: close\r\n\r\n".encode())
            answer = raw.recv(4096)
            assert answer.startswith(b"HTTP/1.1 ") and b" 5" not in answer[:13], answer


def test_a_head_of_a_megabyte_is_refused_before_it_is_read(demo: Live) -> None:
    host, port = demo.addresses["gateway"].split(":")
    num_sent = 0
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-long: ")
        with suppress(ConnectionError):
            for _ in range(1024):
                raw.sendall(b"x" * 1024)
                num_sent += 1024
            assert raw.recv(4096).startswith(b"HTTP/1.1 4")
    assert num_sent >= 16 << 10  # h11's read size
    assert HTTP.get(f"{demo.url}/live", timeout=PATIENCE_S).status_code == 200
