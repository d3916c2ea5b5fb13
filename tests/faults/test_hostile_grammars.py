"""Row 19 of the fault list: grammars that hang, explode or fill memory, and forced tools, in a whole service."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.support.live import HTTP, Live, serve, wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
NUM_DISTINCT = int(os.environ.get("TEST_DISTINCT_SCHEMAS", "150"))  # the fault list's 5000 take minutes
NUM_CLIENTS = 8
CACHE_MIB = 1
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serve("demo", "--dtype=float32", f"--grammar-cache-mib={CACHE_MIB}", "--grammar-cpu-s=2") as service:
        yield service
        service.wait_until_unused()


def ask(live: Live, timeout: float = 120.0, **fields: Any) -> httpx.Response:
    body = {"model": "baton-demo", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    asked = {**body, "max_tokens": 120, **fields}
    return HTTP.post(f"{live.url}/v1/chat/completions", json=asked, timeout=timeout)


def as_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


# Each token takes longer than the last; the second still passes a new grammar's trial, which is shorter.
AMBIGUOUS = 'x ::= "a" | x x | x x x | ""'
SLOW: dict[str, dict[str, Any]] = {
    "ambiguous": {"structured_outputs": {"grammar": f'root ::= [a]{{10}} x "~"\n{AMBIGUOUS}'}, "max_tokens": 120},
    "ambiguous later": {"structured_outputs": {"grammar": f'root ::= [b]{{70}} x "~"\n{AMBIGUOUS}'}, "max_tokens": 190},
}
HOSTILE: dict[str, dict[str, Any]] = {
    "nested repeats": {"structured_outputs": {"regex": "(a+)+$"}},
    "counted repeats": {"structured_outputs": {"regex": "((a{1,1000}){1,1000}){1,100}"}},
    "endless recursion": {"structured_outputs": {"grammar": "root ::= root"}},
    "left recursion": {"structured_outputs": {"grammar": 'root ::= root "a" | "a"'}},
    "schema of itself": as_schema({"$ref": "#"}),
    "10k enum": as_schema({"enum": [f"value {number}" for number in range(10_000)]}),
    "no such type": as_schema({"type": "nothing"}),
    "broken regex": {"structured_outputs": {"regex": "(("}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_or_obeyed_and_others_are_served(live: Live, name: str) -> None:
    response = ask(live, **HOSTILE[name])
    assert response.status_code in (200, 400), response.text
    if response.status_code == 400:
        error = response.json()["error"]
        assert error["message"] and error["param"].startswith(("response_format", "structured_outputs")), error
    plain = ask(live, max_tokens=5)
    assert plain.status_code == 200, plain.text


@pytest.mark.parametrize("name", SLOW)
def test_many_answers_that_are_slow_to_check_hold_up_nobody(live: Live, name: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            ask, live, **SLOW[name], n=8, speculation="ngram", max_draft_tokens=8, timeout=300.0
        )  # fmt: skip
        num_served = 0
        while not slow.done():
            assert ask(live, max_tokens=5).status_code == 200
            fitting = ask(live, **as_schema(PERSON), max_tokens=200)
            assert fitting.json()["choices"][0]["finish_reason"] == "stop", fitting.text
            num_served += 1
        assert num_served
        assert slow.result().status_code in (200, 400, 503), slow.result().text
        wait_until(lambda: HTTP.get(f"{live.url}/ready").status_code == 200, 30)  # no worker was considered stuck


@pytest.mark.timeout(600 + NUM_DISTINCT)
def test_many_distinct_schemas_leave_memory_bounded(live: Live) -> None:
    def fill(number: int) -> None:
        name = f"field_{number}"
        schema = {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]}
        response = ask(live, **as_schema(schema), max_tokens=60)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)

    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        list(clients.map(fill, range(NUM_DISTINCT // 3)))
        before = decode_memory_mib(live)
        list(clients.map(fill, range(NUM_DISTINCT // 3, NUM_DISTINCT)))
    assert decode_memory_mib(live) - before < 64  # the cache's limit is CACHE_MIB


def decode_memory_mib(live: Live) -> int:
    """The decode worker's private memory."""
    pid = next(worker["pid"] for worker in live.status() if worker["role"] == "decode")
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) >> 10
