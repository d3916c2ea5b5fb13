"""The REST API against its own OpenAPI document: schemathesis generates good and bad requests."""

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import booleans, integers
from schemathesis import GenerationMode, checks

from tests.support.api_server import ANSWER, PLAIN, SERVED, Served, run_api
from tests.support.tiny_tokenizer import CONTEXT

ASKED = "chat/completions completions responses responses/input_tokens messages messages/count_tokens"
# of models without answers: this one refuses them all (tests/services/test_embeddings.py)
EMBEDDING = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score", "/classify")
POSTS = [*(f"/v1/{path}" for path in ASKED.split()), "/tokenize", "/detokenize", "/api/chat", "/api/generate"]
ASKING = {"model", "messages", "prompt", "input", "max_tokens", "tokens"}  # an endpoint's main fields
GETS = ("/v1/models", "/v1/models/{model_id}", "/live", "/ready", "/health", "/version", "/metrics")
STORED, CHATS = "/v1/responses/{response_id}", "/v1/chat/completions"
CHAT = CHATS + "/{completion_id}"
OF_STORED = [
    ("GET", STORED), ("GET", f"{STORED}/input_items"), ("POST", f"{STORED}/cancel"), ("DELETE", STORED),
    ("GET", CHATS), ("GET", CHAT), ("POST", CHAT), ("DELETE", CHAT), ("GET", f"{CHAT}/messages"),
]  # fmt: skip
CHECKS: Any = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]
NUM_TRIED = 6 if settings().derandomize else 100  # few of random ones may all be refused
SETTINGS = settings(
    max_examples=NUM_TRIED, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


@pytest.fixture(scope="module")
def document(bare: Served) -> Any:
    return bare.http.get("/openapi.json").json()


@pytest.fixture
def api(plain: Served, document: Any) -> Any:
    plain.engine.reset(plain.script(f"{ANSWER}<|end|>" * CONTEXT, group=64))  # to the end with ignore_eos
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=plain.url)
    return schema


def _try(api: Any, method: str, path: str, mode: GenerationMode) -> list[int]:
    """Statuses of the answers to generated requests, each checked against the document."""
    statuses = []

    @SETTINGS
    @given(case=api[path][method].as_strategy(generation_mode=mode), num_more=integers(0, 4))
    def check(case: Any, num_more: int) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = SERVED  # another model is a 404 before all other checks
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            if case.path == "/tokenize":  # takes one of both
                case.body = case.body | ({"prompt": None} if case.body.get("messages") else {"prompt": "x"})
            more = [name for name in case.body if name not in ASKING]  # all fields together often conflict
            case.body = {name: value for name, value in case.body.items() if name not in more[num_more:]}
            for message in case.body.get("messages") or ():  # rules for calls and results that no schema can express
                message.pop("tool_calls", None)
                if message.get("role") == "tool":
                    message["role"] = "user"
        statuses.append(case.call_and_validate(checks=CHECKS, timeout=20).status_code)

    check()
    return statuses


@pytest.mark.parametrize("path", POSTS)
def test_answers_to_good_requests_are_as_documented(api: Any, path: str) -> None:
    assert 200 in _try(api, "POST", path, GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", [*POSTS, *EMBEDDING])
def test_bad_requests_are_refused_as_documented(api: Any, path: str) -> None:
    statuses = _try(api, "POST", path, GenerationMode.NEGATIVE)
    assert all(400 <= status < 500 for status in statuses)


@pytest.mark.parametrize("path", GETS)
def test_what_can_be_read_is_as_documented(api: Any, path: str) -> None:
    assert {200, 404} & set(_try(api, "GET", path, GenerationMode.POSITIVE))


@pytest.mark.parametrize(("method", "path"), OF_STORED)
def test_stored_answers_are_as_documented(document: Any, tmp_path: Path, method: str, path: str) -> None:
    with run_api(tmp_path / "model", PLAIN, state=tmp_path / "state") as served:
        served.engine.reset(served.script(ANSWER))
        response = {"model": SERVED, "input": "hello"}
        chat = {"model": SERVED, "messages": [{"role": "user", "content": "hello"}], "store": True}
        statuses: list[int] = []
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=served.url)

        @SETTINGS
        @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode.POSITIVE), is_known=booleans())
        def check(case: Any, is_known: bool) -> None:
            if is_known and "{" in path:
                url, asked = (CHATS, chat) if path.startswith(CHATS) else ("/v1/responses", response)
                name = path.partition("{")[2].partition("}")[0]
                case.path_parameters[name] = served.http.post(url, json=asked).json()["id"]
            statuses.append(case.call_and_validate(checks=CHECKS, timeout=20).status_code)

        check()
    assert (400 if path.endswith("cancel") else 200) in statuses


def test_every_operation_is_tried_and_every_answer_described(document: Any) -> None:
    assert set(document["paths"]) == {*POSTS, *EMBEDDING, *GETS, *(path for _, path in OF_STORED)}
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation["responses"]["200"]["content"]
            assert ("application/json" in content) == (path != "/metrics"), path
            is_asked = operation is methods.get("post") and path in (*POSTS, *EMBEDDING, CHAT)
            assert ("requestBody" in operation) == is_asked
    schemas, text = document["components"]["schemas"], json.dumps(document)
    assert set(schemas["ChatCompletionRequest"]["required"]) == {"model", "messages"}
    assert "HTTPValidationError" not in text and "~" not in json.dumps(schemas)
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= set(schemas)
