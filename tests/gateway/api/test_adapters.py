"""The endpoints that load and unload adapters (LoRA), and requests that name one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from gateway.adapters.registry import Adapter
from gateway.api.adapters import LOAD_PATH, UNLOAD_PATH, build_adapter_router
from gateway.errors import ApiError
from gateway.request.prepare import ApiOptions
from protos import inference_pb2, inference_pb2_grpc
from tests.support.api_server import ANSWER, FULL, KEYS, PLAIN, SERVED, Served, run_api

ADMIN_KEY = "sixteen-characters-of-a-key"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
NAMES = {"one": Adapter("one", "/adapters/one", "digest")}


class Loader:
    """Records what the endpoints ask for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: ApiError | None = None

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        self.asked.append((name, path, in_place))
        if self.error:
            raise self.error

    async def unload(self, name: str) -> None:
        self.asked.append(name)
        if self.error:
            raise self.error


LOADER = Loader()


def extend(app: Any, served: Any) -> None:
    app.include_router(build_adapter_router(served, {SERVED: cast(Any, LOADER)}))


@pytest.fixture(scope="module")
def adapted(full: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`full` starts before and ends after: each restores the logging that it found."""

    options = replace(FULL, admin_key=ADMIN_KEY)
    with run_api(tmp_path_factory.mktemp("model"), options, adapters=NAMES, extend=extend) as served:
        served.http.headers.update(dict(served.metadata))
        yield served


@pytest.fixture
def served(adapted: Served) -> Served:
    adapted.engine.reset(adapted.script(ANSWER))
    LOADER.asked.clear()
    LOADER.error = None
    return adapted


def told(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def test_adapters_are_loaded_and_unloaded_as_in_vllm(served: Served) -> None:
    body: dict[str, Any] = {"lora_name": "two", "lora_path": "/adapters/two"}
    answer = served.http.post(LOAD_PATH, json=body, headers=ADMIN)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    assert answer.headers["content-type"].startswith("text/plain")
    served.http.post(LOAD_PATH, json={**body, "load_inplace": True}, headers=ADMIN)
    answer = served.http.post(UNLOAD_PATH, json={"lora_name": "two", "lora_int_id": 1}, headers=ADMIN)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'two' removed successfully.")
    assert LOADER.asked == [("two", "/adapters/two", False), ("two", "/adapters/two", True), "two"]
    LOADER.error = ApiError(404, "The lora adapter 'two' cannot be found.", "lora_name", "adapter_not_found")
    answer = served.http.post(UNLOAD_PATH, json={"lora_name": "two"}, headers=ADMIN)
    assert told(answer) == (404, "The lora adapter 'two' cannot be found.")
    LOADER.error = None
    LOADER.asked.clear()
    for fault, said in (
        ({"lora_name": "two"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_path": "/adapters/two"}, "Both 'lora_name' and 'lora_path' must be provided."),
        ({**body, "lora_name": "n" * 201}, "lora_name has 201 characters"),
        ({**body, "lora_path": "p" * 5000}, "lora_path has 5000 characters"),
        ({**body, "lora_name": SERVED}, "is the model's own name"),
        ({**body, "base": "x"}, "unknown field 'base'"),
    ):
        status, message = told(served.http.post(LOAD_PATH, json=fault, headers=ADMIN))
        assert status == 400 and said in message
    assert told(served.http.post(UNLOAD_PATH, json={}, headers=ADMIN))[0] == 400
    assert not LOADER.asked


@pytest.mark.parametrize("path", [LOAD_PATH, UNLOAD_PATH])
def test_only_the_admin_key_changes_adapters(served: Served, path: str) -> None:
    for headers in ({}, {"authorization": f"Bearer {KEYS[0]}"}, {"authorization": "", "x-api-key": ADMIN_KEY}):
        status, message = told(served.http.post(path, json={"lora_name": "two"}, headers=headers))
        assert status == 401 and "--admin-key" in message
    assert not LOADER.asked
    assert served.http.get("/v1/models", headers=ADMIN).status_code == 401, "the admin key is no API key"


@pytest.mark.parametrize("options", [FULL, PLAIN], ids=["keys", "open"])
def test_without_an_admin_key_nobody_changes_adapters(served: Served, tmp_path: Path, options: ApiOptions) -> None:
    with run_api(tmp_path, options, extend=extend) as without:
        for path in (LOAD_PATH, UNLOAD_PATH, f"{LOAD_PATH}%0a"):
            for headers in (ADMIN, dict(without.metadata)):
                status, message = told(without.http.post(path, json={"lora_name": "two"}, headers=headers))
                assert status == 403 and "--admin-key" in message
    assert not LOADER.asked


def test_models_lists_adapters_after_the_names_of_the_model(served: Served) -> None:
    base, one = served.http.get("/v1/models").json()["data"]
    assert (base["id"], base["root"], "parent" in base) == (SERVED, SERVED, False)
    assert (one["id"], one["root"], one["parent"]) == ("one", "/adapters/one", SERVED)
    assert served.http.get("/v1/models/one").json() == one
    stub = inference_pb2_grpc.InferenceStub(served.channel)
    listed = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=served.metadata)
    assert [model.id for model in listed.models] == [SERVED, "one"]


def test_every_api_takes_an_adapters_name_as_model(served: Served) -> None:
    turn = [{"role": "user", "content": "hi"}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": turn},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": turn, "max_tokens": 9},
    }
    for path, body in bodies.items():
        answer = served.http.post(path, json={"model": "one", **body}).json()
        assert answer["model"] == "one", answer
    served.http.post("/v1/completions", json={"model": SERVED, "prompt": "hi"})
    stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
    list(stub.Generate(inference_pb2.GenerateRequest(model="one", text="hi"), metadata=served.metadata))
    assert [one.adapter for one in served.engine.generations] == ["one"] * 4 + ["", "one"]
    assert served.http.post("/tokenize", json={"model": "one", "prompt": "hi"}).status_code == 200
    counted = served.http.post("/v1/messages/count_tokens", json={"model": "one", "messages": turn})
    assert counted.status_code == 200
    status, message = told(served.http.post("/v1/completions", json={"model": "two", "prompt": "hi"}))
    assert status == 404 and f"this service has '{SERVED}', 'one'" in message
