"""API keys and browsers' origins on the REST API."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.request.prepare import ApiOptions
from tests.support.adapters import APIS
from tests.support.api_server import KEYS, ORIGIN, WAIT_S, Served, run_api

BODY = APIS["completions"].body({})
OTHER = "https://other.example"
JSON = {"content-type": "application/json"}


@pytest.fixture
def stranger(served: Served) -> Iterator[httpx.Client]:
    """A client without a key."""
    with httpx.Client(base_url=served.url, timeout=WAIT_S) as client:
        yield client


@pytest.mark.parametrize(
    "path",
    [
        "/ready", "/metrics", "/version", "/openapi.json", "/v1/models", "/nothing", "//live", "/live/", "//", "/page/",
        "/page/index.html",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "wrong", [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key x"]
)
def test_a_key_is_needed(served: Served, stranger: httpx.Client, path: str, wrong: str | None) -> None:
    answer = stranger.get(served.url + path, headers={} if wrong is None else {"authorization": wrong})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer" and "x-request-id" in answer.headers


@pytest.mark.parametrize(
    "path", ["/live/../v1/models", "/v1/../v1/models", "/./live", "/live%00", "/live;x", "/page/app.js/../../v1/models"]
)
def test_paths_with_dots_need_a_key(served: Served, path: str) -> None:
    with socket.create_connection(served.host_port, timeout=WAIT_S) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: odd.example\r\nconnection: close\r\n\r\n".encode())
        assert b" 401 " in raw.recv(4096)


def test_probes_need_no_key(stranger: httpx.Client) -> None:
    assert [stranger.get(path).status_code for path in ("/live", "/health")] == [200, 200]


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(stranger: httpx.Client, key: str) -> None:
    for written in (f"Bearer {key}", f"bearer  {key}"):
        headers = {b"authorization": written.encode()}
        assert stranger.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert stranger.get("/v1/models", headers=headers).status_code == 200


def test_preflights_pass_and_answers_name_the_origin(served: Served, stranger: httpx.Client) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = stranger.options("/v1/chat/completions", headers={"origin": ORIGIN, **asked})
    refused = stranger.get("/v1/models", headers={"origin": ORIGIN})
    assert (preflight.status_code, refused.status_code) == (200, 401)
    assert {answer.headers["access-control-allow-origin"] for answer in (preflight, refused)} == {ORIGIN}
    assert "access-control-allow-origin" not in stranger.get("/live", headers={"origin": OTHER}).headers
    assert "access-control-allow-credentials" not in preflight.headers


def post(client: httpx.Client, origin: str | None, **headers: str) -> int:
    """The status."""
    headers |= JSON | ({} if origin is None else {"origin": origin})
    return client.post("/v1/completions", content=json.dumps(BODY), headers=headers).status_code


@pytest.mark.parametrize(
    "origin", [OTHER, "null", "", "http://", "http://127.0.0.1", "http://localhost:1", f"{ORIGIN}:444", "*"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize", "/nothing"])
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_pages_of_foreign_origins_cannot_make_it_work(plain: Served, origin: str, path: str, kind: str) -> None:
    refused = plain.http.post(path, content="{}", headers={"content-type": kind, "origin": origin})
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (403, "permission_error")
    assert f"--cors-origins={origin} " in error["message"]
    assert "access-control-allow-origin" not in refused.headers
    assert post(plain.http, origin) == 403
    assert not plain.ring.generations


def test_pages_of_our_own_and_of_listed_origins_are_served(plain: Served) -> None:
    own = plain.url.removeprefix("http://")
    for origin in (None, ORIGIN, f"http://{own}", f"https://{own}"):
        assert post(plain.http, origin) == 200, origin
    for origin, host, status in [  # behind a proxy
        ("https://chat.example", "chat.example", 200),
        ("https://chat.example", "chat.example:443", 200),
        ("http://chat.example", "Chat.Example:80", 200),
        ("http://chat.example:8080", "chat.example:8080", 200),
        ("http://chat.example", "chat.example:443", 403),
        ("http://chat.example:8080", "chat.example", 403),
    ]:
        assert post(plain.http, origin, host=host) == status, (origin, host)
    assert plain.http.get("/v1/models", headers={"origin": OTHER}).status_code == 200


def test_all_origins_may_be_let_in(tmp_path: Path) -> None:
    with run_api(tmp_path, ApiOptions(cors_origins=("*",))) as served:
        served.ring.reset(served.script("x"))
        assert [post(served.http, origin) for origin in (OTHER, "null")] == [200, 200]


def test_a_key_is_asked_for_before_the_origin(stranger: httpx.Client) -> None:
    assert post(stranger, OTHER) == 401
    assert post(stranger, OTHER, **{"x-api-key": KEYS[0]}) == 403
    assert post(stranger, ORIGIN, **{"x-api-key": KEYS[0]}) == 200


def test_the_document_says_which_keys_are_needed_where(served: Served, stranger: httpx.Client) -> None:
    document = served.http.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert document["security"] == [{name: []} for name in schemes] != []
    assert document["paths"]["/live"]["get"]["security"] == []
    for scheme in schemes.values():
        named = (scheme["name"], KEYS[0]) if "name" in scheme else ("authorization", f"{scheme['scheme']} {KEYS[0]}")
        assert stranger.get("/version", headers=dict([named])).status_code == 200


def test_any_of_the_keys_opens_in_either_header(served: Served) -> None:
    key, other = KEYS[0].encode(), KEYS[1].encode()
    right: list[dict[bytes, bytes]] = [
        {b"x-api-key": key}, {b"x-api-key": other}, {b"authorization": b"Bearer " + key},
        {b"authorization": b"Bearer wrong", b"x-api-key": key},
    ]  # fmt: skip
    wrong: list[dict[bytes, bytes]] = [
        {}, {b"x-api-key": b"wrong"}, {b"x-api-key": b""}, {b"x-api-key": b"Bearer " + key}, {b"authorization": key},
        {b"authorization": b"Basic " + key, b"x-api-key": b"wrong"},
    ]  # fmt: skip
    with httpx.Client() as http:
        for headers in [*right, *wrong]:
            answer = http.post(f"{served.url}/v1/messages", json=APIS["messages"].body({}), headers=headers)
            assert answer.status_code == (200 if headers in right else 401), headers
            if headers in wrong:
                assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "authentication_error")
