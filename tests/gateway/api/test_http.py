"""REST below the APIs: bodies that are not JSON objects, too large or too slow; paths, probes, request ids."""

import codecs
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from gateway.held import IDLE_S
from gateway.request.prepare import ApiOptions
from tests.support.adapters import APIS
from tests.support.api_server import KEYS, MAX_BODY, SERVED, WAIT_S, Served, run_api
from tests.support.words import HELLO

TEXT = APIS["completions"].body({})
CHAT = APIS["chat"].body({})


def post(served: Served, content: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
    """The status, and the error or the answer."""
    answer = served.http.post(path, content=content, headers=headers)
    body = answer.json()
    if answer.status_code != 200:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    return answer.status_code, body.get("error", body)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"model":"\\ud800"}', b'{"model":"\xff\xfe"}', b'{"model": 1' + b"0" * 100_000 + b"}",
        b"[" + b"[]," * 300_000 + b"[]]", b"\x00", b"--boundary\r\n",
    ],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_bodies_that_are_no_json_object(served: Served, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize"):
        status, error = post(served, body, path)
        assert status == 400 and error["message"]


@pytest.mark.parametrize(
    ("element", "count"),
    [("[]", 20_001), ('""', 50_001), ("1", 510_000)],
    ids=["containers", "strings", "numbers"],
)
def test_bodies_of_too_many_elements(served: Served, element: str, count: int) -> None:
    body = f'{{"model": "{SERVED}", "prompt": [{",".join([element] * count)}]}}'
    _, error = post(served, body, "/v1/completions")
    assert (error["param"], error["code"]) == (None, "body_too_complex"), error


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"model": "m", "max_tokens": N}', "max_tokens"),
        ('{"messages": [{"n": 1}, {"content": [1, "N", {"a": -N}]}]}', "messages[1].content[2].a"),
        ('{"chat_template_kwargs": {"a": [1, 0.N]}}', "chat_template_kwargs.a[1]"),
        ('{"a": N', None),
    ],
)
def test_a_number_that_is_too_long_is_named(served: Served, body: str, path: str | None) -> None:
    status, error = post(served, body.replace("N", "9" * 400))
    assert (status, error["param"], error["code"]) == (400, path, "body_too_complex")
    assert error["message"] == f"{path or 'the body'} has a number of more than 128 digits"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ('{"model": "m", "prompt": "a", "prompt": "b"}', "prompt"),
        ('{"model": "m", "prompt": {"a": [], "b": {}}, "prompt": "b"}', "prompt"),
        ('{"model": "m", "pr\\u006fmpt": "a", "prompt": "b"}', "prompt"),
        ('{"model": "m", "messages": [{}, {"role": "user", "role": "user"}]}', "messages[1].role"),
        ('{"model": "m", "a": [[1, {"b\\":": {"c": 1, "c": 2}}]]}', 'a[0][1].b":.c'),
        ('{"model": "m", "n": ' + "9" * 128 + ', "n": 1}', "n"),
    ],
)
def test_a_key_that_comes_twice_is_named(served: Served, body: str, path: str) -> None:
    status, error = post(served, body)
    assert (status, error["param"], error["code"]) == (400, path, "invalid_json") and path in error["message"]


def test_keys_are_counted_as_they_are_parsed(served: Served) -> None:
    """Colons, quotes and brackets in strings are not keys; equal keys in different objects are no duplicates."""
    metadata = {"a:b": {"a": '{"'}, "b": [{"a": 1}, {"a": 2}]}
    more = {**TEXT, "prompt": '{"a": 1, "a": {}}\\', "user": '\\":"', "metadata": metadata}
    assert post(served, json.dumps(more), "/v1/completions")[0] == 200


def test_a_body_of_another_type_is_a_415(served: Served) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        status, error = post(served, "{}", **{"content-type": kind})
        assert status == 415 and kind in error["message"]
        assert error["message"].endswith("send JSON with the header 'Content-Type: application/json'")
    for read in ({}, {"content-type": "Application/JSON; charset=utf-8"}, {"content-type": "application/vnd.x+json"}):
        assert post(served, b'{"prompt": 1}', "/v1/completions", **read)[1]["param"] == "model"


def test_a_body_over_the_limit_is_refused_while_it_is_read(served: Served) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(MAX_BODY // 2**16 + 8):
            yield b" " * 2**16

    status, error = post(served, chunks())
    assert (status, error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("length", "told"),
    [
        (99999999999, (413, "invalid_request_error", "body_too_large")),
        (10, (408, "invalid_request_error", "body_timeout")),
    ],
)
def test_a_body_that_never_comes_is_given_up(tmp_path: Path, length: int, told: tuple[int, str, str]) -> None:
    head = ["POST /v1/completions HTTP/1.1", "host: localhost", f"content-length: {length}"]
    with ExitStack() as opened:
        served = opened.enter_context(run_api(tmp_path, ApiOptions(max_body_bytes=MAX_BODY, body_timeout_s=0.1)))
        raw = opened.enter_context(socket.create_connection(served.host_port, timeout=WAIT_S))
        raw.sendall("\r\n".join([*head, "", "{"]).encode())
        response = HTTPResponse(raw)
        response.begin()
        error = json.loads(response.read())["error"]
        assert (response.status, error["type"], error["code"]) == told


def test_a_body_with_two_lengths_is_refused_and_ends_the_connection(served: Served) -> None:
    """Proxies take the one or the other: what follows could be a request that only we see."""
    head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-length: 5", "transfer-encoding: chunked"]
    head += [f"{name}: {value}" for name, value in served.metadata]
    with socket.create_connection(served.host_port, timeout=WAIT_S) as raw:
        raw.sendall("\r\n".join([*head, "", "0", "", "GET /live HTTP/1.1", "host: localhost", "", ""]).encode())
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert b" 400 " in answer and b"two_lengths" in answer and answer.count(b"HTTP/1.1") == 1


def test_large_rubbish_does_not_hold_up_others(served: Served) -> None:
    fields: list[dict[str, Any]] = [
        {"prompt": ["x"] * 200_000}, {"prompt": [1] * 300_000}, {"messages": [5] * 300_000},
        {"messages": [{}] * 60_000}, {f"k{i}": 1 for i in range(60_000)},
        {"messages": [{f"k{i}": 1 for i in range(60_000)}]},
        {"stop": ["x"] * 200_000}, {"prompt": "a" * 900_000},
    ]  # fmt: skip
    parsing_s = whole_s = 0.0  # CPU time
    for more in fields:
        encoded = json.dumps({**TEXT, **more})
        began = time.process_time()
        json.loads(encoded)
        parsed = time.process_time()
        assert post(served, encoded, "/v1/completions")[0] == 400
        parsing_s += parsed - began
        whole_s += time.process_time() - parsed
    assert whole_s < 20 * parsing_s


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/live", 405),
        ("POST", "//v1/completions", 404), ("POST", "/v1/completions/", 404), ("GET", "/docs", 404),
    ],
)  # fmt: skip
def test_paths_and_methods_that_are_not_served(served: Served, method: str, path: str, status: int) -> None:
    answer = served.http.request(method, served.url + path)
    error = answer.json()["error"]
    told = {404: ("not_found_error", "not_found"), 405: ("invalid_request_error", "method_not_allowed")}
    assert (answer.status_code, error["type"], error["code"]) == (status, *told[status])
    assert path == "/live" or answer.headers.get("allow") == ("POST" if status == 405 else None)


@pytest.mark.parametrize("path", ["/health", "/live", "/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/"])
def test_head_is_get_without_a_body(served: Served, path: str) -> None:
    got, head = served.http.get(path), served.http.head(path)
    assert (head.status_code, head.headers["content-type"], head.content) == (200, got.headers["content-type"], b"")
    assert served.http.head("/v1/completions").status_code == 405
    assert served.http.head("/v1/models", headers={"authorization": "Bearer x"}).status_code == 401
    methods = {method for one in served.http.get("/openapi.json").json()["paths"].values() for method in one}
    assert "head" not in methods


def test_a_byte_order_mark_before_a_body_is_none_of_it(served: Served) -> None:
    body = codecs.BOM_UTF8 + json.dumps({"prompt": "x"}).encode()
    assert post(served, body, "/tokenize")[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize(("coding", "is_taken"), [("gzip", False), ("br, gzip", False), ("identity", True), ("", True)])
def test_a_body_with_a_coding_is_refused_by_its_name(served: Served, path: str, coding: str, is_taken: bool) -> None:
    refused = served.http.post(path, content=b"\x1f\x8b", headers={"content-encoding": coding})
    if is_taken:
        assert refused.status_code != 415 or "Content-Encoding" not in refused.text
    else:
        assert refused.status_code == 415
        assert f"Content-Encoding is '{coding}'" in refused.json()["error"]["message"]


def test_request_ids(served: Served) -> None:
    for bad in (b"x" * 129, "caf\u00e9".encode(), b"tab\there"):
        answer = served.http.get("/live", headers={b"x-request-id": bad})
        assert answer.headers["x-request-id"].startswith("req-")
    assert served.http.get("/nothing", headers={"x-request-id": "e"}).headers["x-request-id"] == "e"


@pytest.mark.parametrize(
    ("names", "others"), [(("one", "two"), {}), (("one", "*"), {"claude-haiku": 200, "x" * 200: 200, "x" * 201: 404})]
)
def test_several_names(tmp_path: Path, names: tuple[str, ...], others: dict[str, int]) -> None:
    listed = [name for name in names if name != "*"]
    with run_api(tmp_path, ApiOptions(), names=names) as running:
        data = running.http.get("/v1/models").json()["data"]
        assert ([model["id"] for model in data], {model["root"] for model in data}) == (listed, {"one"})
        for name, status in {**dict.fromkeys(listed, 200), "huh": 200 if others else 404, **others}.items():
            assert running.http.get(f"/v1/models/{name}").status_code == status
            for api in APIS.values():
                running.engine.reset(running.script("hello"))
                assert api.ask(running, {"model": name}).status == status
            answer = running.http.post("/v1/chat/completions", json={**CHAT, "model": name}).json()
            assert answer.get("model", name) == name
            if status == 404:
                assert answer["error"]["message"].endswith(
                    "this service has " + ", ".join(f"'{one}'" for one in listed)
                )


def test_probes_version_and_metrics(served: Served) -> None:
    served.http.post("/v1/chat/completions", json={**CHAT, "messages": HELLO}).raise_for_status()
    assert [served.http.get(path).status_code for path in ("/live", "/ready", "/health")] == [200] * 3
    assert "version" in served.http.get("/version").json()
    text = served.http.get("/metrics").text
    for name in ("prompt_tokens_total", "generation_tokens_total", "request_success_total", "cancelled_total"):
        assert f"baton:{name}" in text
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert f'baton:{name}_seconds_bucket{{le="0.001"}}' in text
    served.engine.unready = "no decode worker is alive"
    answer = served.http.get("/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "no decode worker is alive"


def test_errors_of_messages_have_a_shape_of_their_own(served: Served) -> None:
    answers = [
        (served.http.get("/v1/messages"), 405, "invalid_request_error"),
        (served.http.post("/v1/messages/huh"), 404, "not_found_error"),
        (served.http.post("/v1/messages", content=b"{"), 400, "invalid_request_error"),
        (served.http.post("/v1/messages", data={"a": "b"}), 415, "invalid_request_error"),
    ]
    for answer, status, kind in answers:
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert (answer.json()["error"].keys(), answer.json()["error"]["type"]) == ({"type", "message"}, kind)


def test_bodies_under_way_are_bounded_together_and_the_oldest_idle_gives_way(served: Served) -> None:
    """Each sends less than a body may have, and then nothing."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    head += f"content-length: {MAX_BODY}\r\n\r\n"
    held = served.held
    held.bytes.most, before = 4 * MAX_BODY, held.bytes.most
    try:
        with ExitStack() as connections:
            for _ in range(8):
                connection = connections.enter_context(socket.create_connection(served.host_port, WAIT_S))
                connection.sendall(head.encode() + b" " * (MAX_BODY - 1))
                time.sleep(0.15)
            assert held.bytes.total <= 3 * MAX_BODY, "a key's share"
            time.sleep(IDLE_S)
            assert post(served, json.dumps(TEXT), "/v1/completions")[0] == 200
        deadline = time.monotonic() + WAIT_S
        while held.bytes.total:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        held.bytes.most = before
