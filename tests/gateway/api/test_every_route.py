"""All routes in all spellings of their paths, with all keys: no request gets further than its key allows."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gateway.api.adapters import LOAD_PATH, UNLOAD_PATH, build_adapter_router
from gateway.api.http.access import CheckedRoute, Need
from gateway.api.http.service_routes import build_fleet_router
from gateway.batches.routes import add_batches
from gateway.batches.store import BatchStore
from protos import inference_pb2
from tests.support.api_server import FULL, KEYS, SERVED, WAIT_S, Served, run_api
from tests.support.combinations import combination

ADMIN_KEY = "sixteen-characters-of-a-key"
BEHIND = (
    "%0a", "%0d%0a", "%00", "%09", "%7f", "%20", "/", "//", "/.", "/..", ";x", "?x=/live", "#/live", "%0a?x", "%2f",
)  # fmt: skip
BEFORE = ("/", "/.", "/live/..", "/%2e", "http://live", "/v1/..", "/live%0a/..")
FOLDER = {"lora_name": "two", "lora_path": "/adapters/two"}


class Loader:
    """Counts what gets through to adapters."""

    num_calls = 0

    async def load(self, *_: object) -> None:
        self.num_calls += 1

    async def unload(self, *_: object) -> None:
        self.num_calls += 1


LOADER = Loader()
ROUTES: list[CheckedRoute] = []


@contextmanager
def serve(folder: Path, admin_key: str) -> Iterator[Served]:
    """The whole public surface, as main.py puts it together."""

    def extend(app: FastAPI, served: Any) -> None:
        fleet: Any = SimpleNamespace(workers=list, parts={})
        app.include_router(build_fleet_router(fleet, {}, served))
        app.include_router(build_adapter_router(served, {SERVED: cast(Any, LOADER)}))
        add_batches(app, served, BatchStore(folder / "batches", 1 << 20))
        found = [one.original_route for one in iter_route_contexts(app.routes)]
        assert all(isinstance(route, CheckedRoute) for route in found), "a route that checks nothing"
        ROUTES[:] = cast(list[CheckedRoute], found)

    with run_api(folder, replace(FULL, admin_key=admin_key), extend=extend) as served:
        yield served


@pytest.fixture(scope="module", params=[combination(""), ADMIN_KEY], ids=["no admin key", "admin key"])
def whole(request: pytest.FixtureRequest, full: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`full` starts before and ends after: each restores the logging that it found."""
    with serve(tmp_path_factory.mktemp("model"), request.param) as served:
        yield served


def spellings(path: str) -> Iterator[str]:
    yield path
    yield from (path + end for end in BEHIND)
    yield from (begin + path for begin in BEFORE)
    yield path[:-1] + f"%{ord(path[-1]):02x}"
    yield path.upper()
    yield path.replace("/", "%2f")
    yield path.replace("/", "//")


def ask(connection: http.client.HTTPConnection, method: str, target: str, headers: dict[str, str]) -> int:
    """The status of what is asked for, byte for byte."""
    body = json.dumps(FOLDER).encode() if method == "POST" else b""
    connection.putrequest(method, target)
    for name, value in {**headers, "content-type": "application/json", "content-length": str(len(body))}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_no_spelling_of_any_route_gets_round_its_key(whole: Served) -> None:
    """Without a key: 401 unless the route is open. With an ordinary one adapters stay as they are."""
    needs = {(method, route.path): route.need for route in ROUTES for method in route.methods or ()}
    assert {path for (_, path), need in needs.items() if need is Need.ADMIN_KEY} == {LOAD_PATH, UNLOAD_PATH}
    assert len(needs) > 30
    ordinary = {"authorization": f"Bearer {KEYS[0]}"}
    connection = http.client.HTTPConnection(*whole.host_port, timeout=WAIT_S)
    for (method, template), need in needs.items():
        for target in spellings(template.replace("{", "").replace("}", "").replace(":path", "")):
            status = ask(connection, method, target, {})
            is_refused = status in ((401, 403) if need is Need.ADMIN_KEY else (401,))
            assert is_refused or need is Need.NOTHING, (method, target, status)
            assert status < 500
            status = ask(connection, method, target, ordinary)
            assert status < 500 and (need is not Need.ADMIN_KEY or status >= 400), (method, target, status)
            has_control = any(f"%{code:02x}" in target.partition("?")[0] for code in (*range(32), 127))
            assert not has_control or status in (400, 401, 403), (method, target, status)
    assert not LOADER.num_calls
    connection.close()


def test_the_admin_key_opens_no_other_spelling(whole: Served) -> None:
    connection = http.client.HTTPConnection(*whole.host_port, timeout=WAIT_S)
    admin = {"authorization": f"Bearer {ADMIN_KEY}"}
    statuses = {ask(connection, "POST", LOAD_PATH + end, admin) for end in ("%0a", "%00", "/", "%20")}
    assert statuses <= {400, 401, 403} and not LOADER.num_calls
    connection.close()


def test_no_spelling_of_a_method_gets_round_the_key_of_grpc(whole: Served) -> None:
    """Every rpc of every service, as reflection names them."""
    methods = [
        f"/{service.full_name}/{rpc}"
        for file in (inference_pb2, health_pb2, reflection_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for rpc in service.methods_by_name
    ]
    assert len(methods) >= 8
    for method in methods:
        for target in (method, method + "/", method + "%0a", "/" + method, method.lower(), method + "?x", method + "#"):
            if target != "/grpc.health.v1.Health/Check":
                with pytest.raises(grpc.RpcError) as refusal:
                    list(whole.channel.stream_stream(target)(iter(()), timeout=WAIT_S))
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED, target
