"""Values that no client means: each is a 4xx that says so, never a 500."""

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.batches.routes import add_batches
from gateway.batches.store import BatchStore
from tests.support.api_server import FULL, SERVED, Served, run_api
from tests.support.words import HELLO

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1, "multipleOf": 1, "enum": [1]}}}
SAMPLED: dict[str, Any] = {
    "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0, "seed": 1, "n": 1, "logit_bias": {"5": 1}, "min_tokens": 0,
    "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "stop_token_ids": [1], "priority": 1,
    "deadline_ms": 60_000, "max_draft_tokens": 1, "max_tokens": 3,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLED, "messages": HELLO, "logprobs": True, "top_logprobs": 1, "chat_template_kwargs": {"a": 1},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "/v1/completions": {**SAMPLED, "prompt": [1, 2], "logprobs": 1, "best_of": 1},
    "/v1/responses": {
        "input": "hi", "max_output_tokens": 3, "temperature": 1, "top_logprobs": 1,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": HELLO, "max_tokens": 3, "temperature": 1, "top_k": 1, "top_p": 1,
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "tools": [{"name": "f", "input_schema": SCHEMA}],
    },
    "/api/chat": {
        "messages": HELLO, "options": {"num_predict": 3, "temperature": 1, "top_k": 1, "seed": 1, "num_ctx": 1},
        "format": SCHEMA, "logprobs": True, "top_logprobs": 1, "keep_alive": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    },
    "/api/generate": {"prompt": "hi", "context": [1], "options": {"num_predict": 3, "repeat_penalty": 1}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}  # fmt: skip


@pytest.fixture(scope="module")
def strict(full: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With batches. `full` starts before and ends after: each restores the logging that it found."""

    def extend(app: Any, served: Any) -> None:
        add_batches(app, served, BatchStore(tmp_path_factory.mktemp("batches"), 1 << 20))

    with run_api(tmp_path_factory.mktemp("model"), replace(FULL), extend=extend) as served:
        served.http.headers.update(dict(served.metadata))
        served.engine.reset(served.script("x"))
        yield served


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all parts of a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from places(inner, (*path, name))


@pytest.mark.parametrize("number", ["1" + "0" * 400, "-1" + "0" * 400, "1" + "0" * 4200, "1e400"])
@pytest.mark.parametrize("path", BODIES)
def test_numbers_beyond_any_type_are_refused_wherever_they_stand(strict: Served, path: str, number: str) -> None:
    body = {"model": SERVED, **BODIES[path]}
    for *way, last in filter(None, places(body)):
        wrong: Any = deepcopy(body)
        inner = wrong
        for step in way:
            inner = inner[step]
        inner[last] = "NUMBER"
        content = json.dumps(wrong).replace('"NUMBER"', number)
        answer = strict.http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code < 500, (way, last, answer.text)


FORM = (
    '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    '--b\r\nContent-Disposition: form-data; {}; filename="é.jsonl"{}\r\n\r\n\r\n--b--\r\n'
)
CODECS = "undefined utf-7 utf-16 rot13 base64 zip idna punycode unicode_escape cp037 no-such utf-8;charset=utf-7"


@pytest.mark.parametrize("codec", CODECS.split())
def test_a_client_chooses_no_codec_of_a_form(strict: Served, codec: str) -> None:
    """Names are UTF-8 whatever the header says: another codec could cost anything, or read a name that is not there."""
    for form in (FORM.format('name="file"', ""), FORM.format("name*=" + codec + "''%ff", ""), FORM.format("", "")):
        kind = f"multipart/form-data; boundary=b; charset={codec}"
        answer = strict.http.post("/v1/files", content=form.encode(), headers={"content-type": kind})
        assert answer.status_code in (200, 400), (form, answer.text)
        if answer.status_code == 200:
            assert answer.json()["filename"] == "é.jsonl"


@pytest.mark.parametrize("boundary", ["x", "boundary=", 'boundary=""', "boundary=" + "b" * 300, "boundary*=utf-7''b"])
def test_a_form_needs_a_boundary(strict: Served, boundary: str) -> None:
    headers = {"content-type": f"multipart/form-data; {boundary}"}
    answer = strict.http.post("/v1/files", content=FORM.format('name="file"', "").encode(), headers=headers)
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("rest", ["; name*0*=utf-7''a", "; filename*=undefined''%e4", "; \xff=\xfe", "; name=", ";;;"])
def test_strange_parts_of_a_form_are_refused(strict: Served, rest: str, tmp_path: Path) -> None:
    form = FORM.format('name="file"', rest).encode("latin-1")
    headers = {"content-type": "multipart/form-data; boundary=b"}
    assert strict.http.post("/v1/files", content=form, headers=headers).status_code in (200, 400)
