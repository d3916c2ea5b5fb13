"""API keys and browsers' origins on the REST API."""

import hmac
import json
import socket
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.access.keys import Keys
from gateway.errors import ApiError
from gateway.main import find_openness
from gateway.request.prepare import ApiOptions
from runtime.config import GatewayConfig
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


PATHS = "/ready /metrics /version /openapi.json /v1/models /nothing //live /live/ // /page/ /page/nothing.js"
OPEN = "/live /health / /page/style.css /page/app.js /page/examples.json"


def test_a_key_is_needed_but_for_probes_and_the_page(served: Served, stranger: httpx.Client) -> None:
    for path in PATHS.split():
        answer = stranger.get(served.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
        assert answer.headers["www-authenticate"] == "Bearer" and "x-request-id" in answer.headers
    assert {stranger.get(path).status_code for path in OPEN.split()} == {200}
    head = stranger.head("/")
    assert (head.status_code, head.content) == (200, b"")


TARGETS = (
    "/live/../v1/models /v1/../v1/models /./live /live%00 /live;x /page/app.js/../../v1/models /live%2f..%2fv1/models "
    "/%6cive/../v1/models /v1/models?x=/live /v1/models#/live /LIVE http://live/live/../v1/models"
)


def test_no_spelling_of_a_path_or_host_gets_round_the_key(served: Served) -> None:
    for target in TARGETS.split():
        for host in ("odd.example", "live", "/live", "a, b", "[::1]:99999", ""):
            with socket.create_connection(served.host_port, timeout=WAIT_S) as raw:
                raw.sendall(f"GET {target} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
                assert b" 401 " in raw.recv(4096), (target, host)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "can use all models: set BATON_API_KEY or --api-keys-file"),
        ({"host": "gateway.lan", "batch_dir": "/b"}, "can use all models, and read all files and batches: set"),
        ({"host": "::", "api_key": ("k",)}, None),
        ({"host": "::", "api_keys_file": "/k.toml"}, None),
        ({"host": "127.0.0.2"}, None),
    ],
)
def test_an_open_port_without_a_key_is_reported(settings: dict[str, Any], said: str | None) -> None:
    found = find_openness(GatewayConfig(decode=("d:1",), **settings))
    assert found is None if said is None else said in (found or "")


def test_a_key_is_compared_with_all_keys_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = list[bytes](), hmac.compare_digest

    def note(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return compare(given, key)

    monkeypatch.setattr(hmac, "compare_digest", note)
    texts = ("first-key", "second-key")
    keys = Keys(texts)
    assert keys.check([("authorization", "Bearer first-key")]).name == "key-1"
    for wrong in ("Bearer first-kex", "Bearer x"):
        with pytest.raises(ApiError):
            keys.check([("authorization", wrong)])
    assert compared == [sha256(key.encode()).digest() for key in texts] * 3


def test_preflights_pass_and_answers_name_the_origin(served: Served, stranger: httpx.Client) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflight = stranger.options("/v1/chat/completions", headers={"origin": ORIGIN, **asked})
    deleting = {**asked, "access-control-request-method": "DELETE"}
    assert stranger.options("/v1/files/file-1", headers={"origin": ORIGIN, **deleting}).status_code == 200
    refused = stranger.get("/v1/models", headers={"origin": ORIGIN})
    assert (preflight.status_code, refused.status_code) == (200, 401)
    assert {answer.headers["access-control-allow-origin"] for answer in (preflight, refused)} == {ORIGIN}
    assert "access-control-allow-origin" not in stranger.get("/live", headers={"origin": OTHER}).headers
    assert "access-control-allow-credentials" not in preflight.headers


def post(client: httpx.Client, origin: str | None, **headers: str) -> int:
    """Returns the status."""
    headers |= JSON | ({} if origin is None else {"origin": origin})
    return client.post("/v1/completions", content=json.dumps(BODY), headers=headers).status_code


@pytest.mark.parametrize(
    "origin", [OTHER, "null", "", "http://", "http://127.0.0.1", "http://localhost:1", f"{ORIGIN}:444", "*"]
)
def test_pages_of_foreign_origins_cannot_make_it_work(plain: Served, origin: str) -> None:
    for path in ("/v1/completions", "/v1/messages", "/tokenize", "/nothing"):
        for kind in ("application/json", "text/plain"):
            refused = plain.http.post(path, content="{}", headers={"content-type": kind, "origin": origin})
            error = refused.json()["error"]
            assert (refused.status_code, error["type"]) == (403, "permission_error")
            assert f"--cors-origins={origin} " in error["message"]
            assert "access-control-allow-origin" not in refused.headers
    assert post(plain.http, origin) == 403
    assert not plain.engine.generations


def test_pages_of_our_own_and_of_listed_origins_are_served(plain: Served, tmp_path: Path) -> None:
    own = plain.url.removeprefix("http://")
    for origin in (None, ORIGIN, f"http://{own}", f"https://{own}"):
        assert post(plain.http, origin) == 200, origin
    assert plain.http.get("/v1/models", headers={"origin": OTHER}).status_code == 200
    with run_api(tmp_path, ApiOptions(cors_origins=(ORIGIN,), hosts=("chat.example",))) as served:
        served.engine.reset(served.script("x"))
        check_origins_behind_a_proxy(served)


def check_origins_behind_a_proxy(plain: Served) -> None:
    for origin, host, status in [
        ("https://chat.example", "chat.example", 200),
        ("https://chat.example", "chat.example:443", 200),
        ("http://chat.example", "Chat.Example:80", 200),
        ("http://chat.example:8080", "chat.example:8080", 200),
        ("http://chat.example", "chat.example:443", 403),
        ("http://chat.example:8080", "chat.example", 403),
    ]:
        assert post(plain.http, origin, host=host) == status, (origin, host)


def test_all_origins_may_be_let_in(tmp_path: Path) -> None:
    with run_api(tmp_path, ApiOptions(cors_origins=("*",))) as served:
        served.engine.reset(served.script("x"))
        assert [post(served.http, origin) for origin in (OTHER, "null")] == [200, 200]


def test_the_document_says_which_keys_are_needed_where(served: Served, stranger: httpx.Client) -> None:
    document = served.http.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert document["security"] == [{name: []} for name in schemes] != []
    assert document["paths"]["/live"]["get"]["security"] == []
    for scheme in schemes.values():
        named = (scheme["name"], KEYS[0]) if "name" in scheme else ("authorization", f"{scheme['scheme']} {KEYS[0]}")
        assert stranger.get("/version", headers=dict([named])).status_code == 200


KEY, SECOND = (key.encode() for key in KEYS)


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "status"),
    [
        (None, KEY, 200), (None, SECOND, 200), (b"Bearer " + KEY, None, 200), (b"bearer  " + SECOND, None, 200),
        (b"Bearer wrong", KEY, 200),
        (None, None, 401), (None, b"wrong", 401), (None, b"", 401), (None, b"Bearer " + KEY, 401), (KEY, None, 401),
        (b"", None, 401), (b"Bearer", None, 401), (b"Bearer " + KEY + b" x", None, 401), (b"Basic " + KEY, b"x", 401),
    ],
)  # fmt: skip
def test_any_of_the_keys_opens_in_either_header(
    served: Served, stranger: httpx.Client, authorization: bytes | None, x_api_key: bytes | None, status: int
) -> None:
    headers = {b"authorization": authorization, b"x-api-key": x_api_key, b"origin": ORIGIN.encode()}
    given = {name: value for name, value in headers.items() if value is not None}
    answer = stranger.post("/v1/messages", json=APIS["messages"].body({}), headers=given)
    assert answer.status_code == status
    if status == 200:
        number = 2 if SECOND in (*(authorization or b"").split(), x_api_key) else 1
        assert served.engine.sent[-1]["owner"] == f"key-{number}"
    assert status == 200 or (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "authentication_error")
    refused = stranger.post("/v1/messages", json={}, headers={**given, b"origin": OTHER.encode()})
    assert refused.status_code == (403 if status == 200 else 401), "the key comes before the origin"


OWN_HOSTS = "localhost LOCALHOST:8000 localhost. 127.0.0.1 10.1.2.3:80 [::1] [fd00::7]:8000"
FOREIGN_HOSTS = "rebound.example rebound.example:8000 localhost.example 127.0.0.1.example evil@localhost a,localhost"


def test_without_keys_only_our_own_names_are_served(plain: Served, served: Served, tmp_path: Path) -> None:
    """A stranger's name that leads here (DNS rebinding) makes the stranger's page our own, by its origin."""
    for path in ("/v1/models", "/live", "/", "/metrics", "/nothing"):
        for host in FOREIGN_HOSTS.split():
            refused = plain.http.get(path, headers={"host": host})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed"), (path, host)
        for host in OWN_HOSTS.split():
            assert plain.http.get(path, headers={"host": host}).status_code in (200, 404), (path, host)
    assert post(plain.http, "http://rebound.example", host="rebound.example") == 403
    key = {"authorization": f"Bearer {KEYS[0]}"}
    assert served.http.get("/v1/models", headers={"host": "rebound.example", **key}).status_code == 200
    with run_api(tmp_path, ApiOptions(hosts=("gateway", "*.chat.example"))) as named:
        for host, status in [("Gateway:8000", 200), ("a.chat.example", 200), ("chat.example", 403), ("gate", 403)]:
            assert named.http.get("/v1/models", headers={"host": host}).status_code == status, host


@pytest.mark.parametrize("blank", ["\t", " ", "  \t "])
def test_blanks_around_a_key_change_nothing(served: Served, stranger: httpx.Client, blank: str) -> None:
    """Whoever reads the header finds the same key: the share of the service is the key's own."""
    for name, value in (("authorization", f"Bearer{blank}{KEYS[0]}{blank}"), ("x-api-key", f"{blank}{KEYS[0]}{blank}")):
        with socket.create_connection(served.host_port, timeout=WAIT_S) as raw:
            body = json.dumps(BODY)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\n{name}:{value}\r\ncontent-length: {len(body)}\r\n"
            raw.sendall(f"{head}connection: close\r\n\r\n{body}".encode())
            assert b" 200 " in raw.recv(4096)
        assert served.engine.sent[-1]["owner"] == "key-1"
