"""API keys and browsers' origins on the REST API."""

import socket
from collections.abc import Iterator

import pytest

from gateway.app import FrontOptions
from tests.fake_ring import Script
from tests.front_server import SERVED, Served, run_front

KEYS = ("first-key", "zweiter-schlüssel")
ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = FrontOptions(api_keys=KEYS, cors_origins=(ORIGIN,))
    with run_front(tmp_path_factory.mktemp("tiny"), options) as served:
        served.ring.reset(Script([5, 1]))
        yield served


PATHS = [
    "/ready",
    "/health",
    "/metrics",
    "/version",
    "/openapi.json",
    "/v1/models",
    "/nothing",
    "//live",
    "/live/",
    "/",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_key_is_needed(served: Served, path: str) -> None:
    wrong_ones = [None, "", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key x"]
    for wrong in wrong_ones:
        answer = served.http.get(served.url + path, headers={} if wrong is None else {"authorization": wrong})
        assert answer.status_code == 401, wrong
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert "x-request-id" in answer.headers


def test_paths_with_dots_need_a_key(served: Served) -> None:
    for path in (b"/live/../v1/models", b"/v1/../v1/models", b"/./live", b"/live%00", b"/live;x"):
        with socket.create_connection(served.host_port, timeout=5) as raw:
            raw.sendall(b"GET " + path + b" HTTP/1.1\r\nhost: odd.example\r\nconnection: close\r\n\r\n")
            assert b" 401 " in raw.recv(4096), path


def test_liveness_needs_no_key(served: Served) -> None:
    assert served.http.get("/live").status_code == 200


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(served: Served, key: str) -> None:
    headers = {b"authorization": f"Bearer {key}".encode()}
    body = {"model": SERVED, "prompt": "x"}
    assert served.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    lower = {b"authorization": f"bearer  {key}".encode()}
    assert served.http.get("/v1/models", headers=lower).status_code == 200


def test_preflights_pass_and_answers_name_the_origin(served: Served) -> None:
    asked = {
        "origin": ORIGIN,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    preflight = served.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    refused = served.http.get("/v1/models", headers={"origin": ORIGIN})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == ORIGIN
    other = served.http.get("/live", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-credentials" not in preflight.headers


def test_the_document_tells_which_keys_are_needed_where(served: Served) -> None:
    document = served.http.get(served.url + "/openapi.json", headers={"authorization": f"Bearer {KEYS[0]}"}).json()
    assert document["security"] == [{name: []} for name in document["components"]["securitySchemes"]] != []
    assert document["paths"]["/live"]["get"]["security"] == []
    for scheme in document["components"]["securitySchemes"].values():
        name, value = (
            (scheme["name"], KEYS[0]) if "name" in scheme else ("authorization", f"{scheme['scheme']} {KEYS[0]}")
        )
        assert served.http.get(served.url + "/version", headers={name: value}).status_code == 200
