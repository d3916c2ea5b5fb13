"""Who may call the gateway, and how much may be sent. Row 21 of the fault list."""

import hmac
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.api import access
from gateway.errors import ApiError
from protos import inference_pb2, inference_pb2_grpc
from tests.support.live import HTTP, Live, serve

pytestmark = pytest.mark.timeout(900)  # starting three processes takes minutes on a loaded machine

KEYS = ("row-21-first-key", "row-21-second-key")
LIMIT_BYTES = 4096
CALL_S = 60.0
WRONG = [
    None,
    "",
    "Bearer",
    "Bearer row-21-first-ke",
    "Bearer row-21-first-keyy",
    "Bearer row-21-first-key row-21-second-key",
    "Basic row-21-first-key",
    "row-21-first-key",
]
TARGETS = [
    b"//v1/models",
    b"/v1//models",
    b"/v1/../v1/models",
    b"/v1/../",
    b"/live/../v1/models",
    b"/live/../live",
    b"/./live",
    b"//live",
    b"/live/",
    b"/live%2f..%2fv1/models",
    b"/%6cive/../v1/models",
    b"/v1/models?x=/live",
    b"/v1/models#/live",
    b"/LIVE",
    b"/live;/v1/models",
    b"/live%00",
]
HOSTS = [b"localhost", b"evil.example", b"127.0.0.1:1", b"live", b"/live", b"a, b", b"[::1]:99999", b""]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    flags = [f"--api-key={key}" for key in KEYS]
    with serve("demo", *flags, f"--body-limit-bytes={LIMIT_BYTES}", "--kv-memory-mib=64") as service:
        yield service


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": key}


def _routes(live: Live) -> list[tuple[str, str]]:
    """(method, path) of all routes that the service lists, and of some that other servers have."""
    document = HTTP.get(f"{live.url}/openapi.json", headers=_headers(f"Bearer {KEYS[0]}"), timeout=CALL_S).json()
    listed = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert ("GET", "/metrics") in listed and ("GET", "/status") in listed and ("POST", "/v1/chat/completions") in listed
    others = [
        "/page/",
        "/docs",
        "/redoc",
        "/openapi.json",
        "/docs/oauth2-redirect",
        "/debug",
        "/v1",
        "/fleet",
        "/nothing",
    ]
    return [*(route for route in listed if route[1] not in ("/live", "/health")), *(("GET", path) for path in others)]


def test_row_21_no_route_but_live_and_the_page_answers_without_a_key(live: Live) -> None:
    for path in ("/live", "/health", "/", "/page/app.js", "/page/style.css"):
        assert HTTP.get(live.url + path, timeout=CALL_S).status_code == 200
    with httpx.Client(base_url=live.url, timeout=CALL_S) as client:
        for method, path in _routes(live):
            for key in WRONG:
                for each in {method, "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"}:
                    answer = client.request(each, path, headers=_headers(key))
                    assert answer.status_code == 401, (each, path, key, answer.text)
    for key in KEYS:
        assert HTTP.get(f"{live.url}/status", headers=_headers(f"Bearer {key}"), timeout=CALL_S).status_code == 200


@pytest.mark.parametrize("target", TARGETS)
def test_row_21_no_spelling_of_a_path_gets_round_the_key(live: Live, target: bytes) -> None:
    assert _status_of(live, target, b"localhost") == 401


@pytest.mark.parametrize("host", HOSTS)
def test_row_21_no_host_gets_round_the_key(live: Live, host: bytes) -> None:
    for target in (
        b"/v1/models",
        b"/metrics",
        b"/status",
        b"http://localhost/v1/models",
        b"http://live/live/../status",
    ):
        assert _status_of(live, target, host) in (400, 401), (target, host)  # 400: invalid HTTP
    assert _status_of(live, b"/live", host) in (200, 400)


def _status_of(live: Live, target: bytes, host: bytes) -> int:
    """Sends the path as it is; ordinary clients normalise it."""
    address, _, port = live.addresses["gateway"].rpartition(":")
    with socket.create_connection((address, int(port)), timeout=CALL_S) as raw:
        raw.sendall(b"GET " + target + b" HTTP/1.1\r\nhost: " + host + b"\r\nconnection: close\r\n\r\n")
        return int(raw.makefile("rb").readline().split()[1])


def test_row_21_no_grpc_method_but_the_health_check_answers_without_a_key(live: Live) -> None:
    services = {
        "baton.v1.Inference": ("Generate", "ListModels", "Chat", "Nothing"),
        "grpc.health.v1.Health": ("Watch", "List"),
        "grpc.reflection.v1alpha.ServerReflection": ("ServerReflectionInfo",),
        "grpc.reflection.v1.ServerReflection": ("ServerReflectionInfo",),
        "baton.v1.Decode": ("Status", "Drain"),
        "nobody": ("knows",),
    }
    methods = [f"/{service}/{method}" for service, names in services.items() for method in names]
    spellings = [
        "//grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Check/../Watch",
        "/grpc.health.v1.Health/check",
    ]
    with grpc.insecure_channel(live.grpc_address) as channel:
        for method in (*methods, *spellings):
            for key in WRONG:
                call: Any = channel.unary_unary(method)
                with pytest.raises(grpc.RpcError) as refused:
                    call(b"", metadata=tuple(_headers(key).items()), timeout=CALL_S)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, (method, key, refused.value)
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=CALL_S)
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        models = inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {KEYS[1]}"),), timeout=CALL_S
        )
        assert models.models


def test_row_21_probes_and_scrapers_need_no_key(live: Live) -> None:
    """At the ops port of every process, which has nothing else."""
    assert set(live.metrics_urls) == {"gateway", "prefill-0", "decode-0"}
    for url in live.metrics_urls.values():
        ops_url = url.removesuffix("/metrics")
        answers = [HTTP.get(ops_url + path, timeout=CALL_S) for path in ("/live", "/ready", "/metrics")]
        assert [answer.status_code for answer in answers] == [200, 200, 200], url
        assert "baton:num_requests_running" in answers[2].text and KEYS[0] not in answers[2].text
        assert HTTP.get(f"{ops_url}/status", timeout=CALL_S).status_code == 404


def test_row_21_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is compared with all keys, also after a match, in time independent of where they differ."""
    compared: list[bytes] = []
    constant_time = hmac.compare_digest

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return constant_time(given, key)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    access.check_key(f"Bearer {KEYS[0]}".encode(), KEYS)
    for wrong in (f"Bearer {KEYS[0][:-1]}x", "Bearer x", "Basic x", ""):
        with pytest.raises(ApiError):
            access.check_key(wrong.encode(), KEYS)
    assert compared == [key.encode() for key in KEYS] * 5


def test_row_16_body_limit_holds_for_rest_and_grpc(live: Live) -> None:
    key = f"Bearer {KEYS[0]}"
    with grpc.insecure_channel(live.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def send(num_bytes: int) -> tuple[int, grpc.StatusCode]:
            """The REST and gRPC statuses for a body and a message of about this size."""
            text = "x" * (num_bytes - 200)
            body = {"model": "baton-demo", "prompt": "x", "stop": text, "max_tokens": 1}
            answer = HTTP.post(f"{live.url}/v1/completions", json=body, headers=_headers(key), timeout=CALL_S)
            request = inference_pb2.GenerateRequest(text="x", stop=[text], max_tokens=1)
            try:
                list(stub.Generate(request, metadata=(("authorization", key),), timeout=CALL_S))
            except grpc.RpcError as error:
                return answer.status_code, error.code()
            return answer.status_code, grpc.StatusCode.OK

        assert send(LIMIT_BYTES + 1000) == (413, grpc.StatusCode.RESOURCE_EXHAUSTED)
        within = send(LIMIT_BYTES - 500)
        assert within[0] in (200, 400) and within[1] in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT)
