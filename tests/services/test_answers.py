"""Stored answers in real processes: gateways, workers and the database are killed while answers are written."""

import json
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import openai
import psycopg
import pytest

from tests.support.fleet import HOST, Process, ProcessFleet, run_fleet
from tests.support.live import CHECKOUT, WAIT_S, wait_until
from tests.support.postgres import Postgres, run_postgres
from tests.support.surface import MODEL

# What reading a stream raises when its connection ends: the client's own error, or that of its HTTP library.
BROKEN = openai.APIError, import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]).HTTPError
NUM_STREAMS = 2
NUM_BEFORE = 8  # events that each stream has at least when its gateway is killed
NUM_TOKENS = 120
STORY = {"type": "object", "properties": {"story": {"type": "string", "minLength": 2000}}, "required": ["story"]}
LEASE_S = 2.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    with run_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def fleet(postgres: Postgres) -> Iterator[ProcessFleet]:
    """With two gateways."""
    flags = [f"--state-url={postgres.url}", f"--state-lease-s={LEASE_S:g}"]
    with run_fleet(1, 2, {"gateway": flags}, lease_s=60, forks=True, starts=False) as running:
        running.add_gateway("gateway-b")
        running.start()
        yield running


def client_of(gateway: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{HOST}:{gateway.port}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


def asked(number: int) -> Any:
    """For a long answer, in a form."""
    return {
        "model": MODEL,
        "input": f"Tell me story {number}",
        "max_output_tokens": NUM_TOKENS,
        "text": {"format": {"type": "json_schema", "name": "story", "schema": STORY}},
        "extra_body": {"seed": number},
    }


def begin(gateway: Process, number: int) -> tuple[Any, list[Any]]:
    """A stream, and the first NUM_BEFORE of its events."""
    stream = client_of(gateway).responses.create(**asked(number), stream=True)
    return stream, [next(stream) for _ in range(NUM_BEFORE)]


def shape(events: Sequence[Any]) -> list[Any]:
    """What does not differ between two answers to one request."""
    return [(event.type, event.sequence_number, getattr(event, "delta", "")) for event in events]


@contextmanager
def stopped(processes: Sequence[Process]) -> Iterator[None]:
    for process in processes:
        process.stop()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def decode_workers(fleet: ProcessFleet) -> list[Process]:
    return [worker for worker in fleet.workers() if worker.role == "decode"]


def is_known(gateway: Process, answer_id: str) -> bool:
    with suppress(openai.NotFoundError):
        return client_of(gateway).responses.retrieve(answer_id).id == answer_id
    return False


def read_on(gateways: Sequence[Process], answer_id: str, events: list[Any]) -> None:
    """Reads the rest of a stream from whichever gateway answers."""

    def is_read() -> bool:
        for gateway in gateways:
            try:
                after = events[-1].sequence_number
                stream = client_of(gateway).responses.retrieve(answer_id, stream=True, starting_after=after)
                events.extend(stream)
            except (openai.APIConnectionError, openai.APIStatusError, openai.APIError):
                continue
            if events[-1].type in ("response.completed", "response.incomplete"):
                return True
        return False

    wait_until(is_read)


def test_killed_gateway(fleet: ProcessFleet) -> None:
    """Each client gets each event once, and the text of an undisturbed answer."""
    first, second = fleet.gateway, fleet["gateway-b"]
    begun = [Event() for _ in range(NUM_STREAMS)]

    def follow(number: int) -> list[Any]:
        events: list[Any] = []
        try:
            for event in client_of(first).responses.create(**asked(number), stream=True):
                events.append(event)
                if len(events) == NUM_BEFORE:
                    begun[number].set()
        except BROKEN:  # the connection broke
            pass
        read_on([second, first], events[0].response.id, events)
        return events

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        following = [threads.submit(follow, number) for number in range(NUM_STREAMS)]
        assert all(event.wait(WAIT_S) for event in begun)
        with stopped(decode_workers(fleet)):  # so that some are not over
            first.kill()
        got = [one.result(WAIT_S) for one in following]
    first.start()
    first.wait_ready()
    for number, events in enumerate(got):
        whole = list(client_of(second).responses.create(**asked(number), stream=True))
        assert shape(events) == shape(whole)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        stored = client_of(first).responses.retrieve(events[0].response.id)
        assert stored.output_text == events[-1].response.output_text == whole[-1].response.output_text
    assert "an answer goes on here" in second.read_log()


def test_gateways_that_both_believe_they_have_it(fleet: ProcessFleet) -> None:
    """One stops for longer than its lease; what it writes when it runs again changes nothing."""
    first, second = fleet.gateway, fleet["gateway-b"]
    stream, events = begin(first, 77)
    answer_id = events[0].response.id
    wait_until(lambda: is_known(second, answer_id))
    with stopped(decode_workers(fleet)):
        first.stop()
        try:
            wait_until(lambda: answer_id in second.read_log())
        finally:
            first.resume()
    events += list(stream)  # from the first, which learns that it has lost it
    whole = list(client_of(second).responses.create(**asked(77), stream=True))
    for gateway in (first, second):
        read = list(client_of(gateway).responses.retrieve(answer_id, stream=True))
        assert shape(read) == shape(whole) == shape(events)
    assert client_of(second).responses.retrieve(answer_id).status == whole[-1].response.status


@pytest.mark.nightly
@pytest.mark.parametrize("is_killed", [True, False])
def test_chats_outlive_their_gateway(fleet: ProcessFleet, is_killed: bool) -> None:
    """Killed or drained: each choice's chunks come once and in order, in the form that was asked for, with usage."""
    first, second = fleet.gateway, fleet["gateway-b"]
    form = {"type": "json_schema", "json_schema": {"name": "story", "schema": STORY}}
    asked = {
        "model": MODEL, "messages": [{"role": "user", "content": "Tell me a story"}], "n": 2, "seed": 7,
        "max_tokens": NUM_TOKENS, "response_format": form, "logprobs": True,
        "store": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    chunks: list[tuple[str, str]] = []
    url = f"http://{first.address}/v1/chat/completions"
    with httpx.Client(timeout=WAIT_S) as client:
        whole = [*read_chunks(client, "POST", url, json=asked)]
        with suppress(httpx.HTTPError), closing(read_chunks(client, "POST", url, json=asked)) as reading:
            chunks += [next(reading) for _ in range(2 * NUM_BEFORE)]
            answer_id = json.loads(chunks[0][1])["id"]
            with stopped(decode_workers(fleet)):
                first.kill() if is_killed else first.terminate()
                assert is_killed or first.wait_exited(WAIT_S) == 0
            chunks += reading
        url = f"http://{second.address}/v1/chat/completions/{answer_id}?stream=true"
        while chunks[-1][1] != "[DONE]":
            chunks += read_chunks(client, "GET", url, headers={"last-event-id": chunks[-1][0]})
        first.restart()
        assert [shown(chunks, index) for index in range(3)] == [shown(whole, index) for index in range(3)]
        kept = client.get(url.partition("?")[0]).json()
        for choice in kept["choices"]:
            deltas = [delta.get("content") or "" for delta, *_ in shown(chunks, choice["index"])]
            assert "".join(deltas) == choice["message"]["content"]


def read_chunks(client: httpx.Client, method: str, url: str, **fields: Any) -> Generator[tuple[str, str], None, None]:
    """SSE ids and data of a stream; none of one that is not known yet."""
    with client.stream(method, url, **fields) as reply:
        name = ""
        for line in reply.iter_lines() if reply.status_code == 200 else ():
            if line.startswith("id: "):
                name = line[4:]
            elif line.startswith("data: "):
                yield name, line[6:]


def shown(chunks: Sequence[tuple[str, str]], index: int) -> list[Any]:
    """What does not differ between two answers to one request: of a choice, or behind the last of them the usage."""
    told = [json.loads(data) for _, data in chunks if data != "[DONE]"]
    if index == 2:
        return [one["usage"]["completion_tokens"] for one in told if not one["choices"]]
    choices = [one["choices"][0] for one in told if one["choices"] and one["choices"][0]["index"] == index]
    scored = [[token["token"] for token in (one["logprobs"] or {"content": []})["content"]] for one in choices]
    return [(one["delta"], one["finish_reason"], tokens) for one, tokens in zip(choices, scored, strict=True)]


def test_drained_gateway(fleet: ProcessFleet) -> None:
    """It leaves its answers to the other one and ends at once."""
    first, second = fleet.gateway, fleet["gateway-b"]
    stream, events = begin(first, 78)
    with stopped(decode_workers(fleet)):
        first.terminate()
        assert first.wait_exited(WAIT_S) == 0
    with suppress(*BROKEN):
        events += list(stream)
    read_on([second], events[0].response.id, events)
    first.restart()
    whole = list(client_of(second).responses.create(**asked(78), stream=True))
    assert shape(events) == shape(whole)


@pytest.mark.nightly
def test_example_survives(fleet: ProcessFleet, postgres: Postgres) -> None:
    """The program of examples/ prints the whole answer although its gateway is killed in the middle."""
    first, second = fleet.gateway, fleet["gateway-b"]
    urls = [f"http://{gateway.address}" for gateway in (first, second)]
    command = [sys.executable, f"{CHECKOUT}/examples/python/survives.py", "Tell me a long story", *urls]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as running:
        assert running.stdout is not None and (begun := running.stdout.read(1))
        with stopped(decode_workers(fleet)):
            first.kill()
        rest, errors = running.communicate(timeout=WAIT_S)
        assert running.returncode == 0, errors
    first.restart()
    with psycopg.connect(postgres.url) as connection:
        row = connection.execute("SELECT result FROM answers ORDER BY created_s DESC, id LIMIT 1").fetchone()
    assert row is not None
    output = json.loads(row[0])["output"]
    assert (begun + rest).decode().removesuffix("\n") == output[0]["content"][0]["text"]


def test_chained_turns_compute_what_is_new(fleet: ProcessFleet) -> None:
    """As many prompt tokens are cached as when the whole conversation is sent."""
    client = client_of(fleet.gateway)
    first = client.responses.create(model=MODEL, input="hello " * 40, temperature=0, max_output_tokens=24)
    said: list[Any] = [{"role": "user", "content": "hello " * 40}, {"role": "assistant", "content": first.output_text}]
    more: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}
    chained = client.responses.create(input="and then?", previous_response_id=first.id, **more)
    whole = client.responses.create(input=[*said, {"role": "user", "content": "and then?"}], **more)
    assert chained.output_text == whole.output_text and chained.usage and whole.usage and first.usage
    assert chained.usage.input_tokens == whole.usage.input_tokens
    assert chained.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16 - 16 > 0


def test_killed_database(fleet: ProcessFleet, postgres: Postgres) -> None:
    """Answers go on, with one warning; what needs the store says so; what it lacks is written when it is back."""
    gateway = fleet.gateway
    client = client_of(gateway)
    before = client.responses.create(**asked(1))
    num_warned = gateway.read_log().count("answers are not stored for now")
    postgres.kill()
    try:
        told = [client.responses.create(**asked(number)) for number in range(3)]
        streamed = list(client.responses.create(**asked(0), stream=True))
        assert streamed[-1].response.output_text == told[0].output_text
        assert told[1].output_text == before.output_text
        for call in (
            lambda: client.responses.create(**asked(9), background=True),
            lambda: client.responses.create(**asked(9), previous_response_id=before.id),
            lambda: client.responses.retrieve("resp_" + 48 * "0"),
        ):
            with pytest.raises(openai.InternalServerError) as refused:
                call()
            assert refused.value.status_code == 503 and refused.value.code == "store_unavailable"
        wait_until(lambda: gateway.read_log().count("answers are not stored for now") == num_warned + 1)
    finally:
        postgres.start()
    other = client_of(fleet["gateway-b"])

    def is_there() -> bool:
        with suppress(openai.APIStatusError):
            return bool(other.responses.retrieve(told[2].id).output_text == told[2].output_text)
        return False

    wait_until(is_there)
    assert gateway.read_log().count("answers are not stored for now") == num_warned + 1


@pytest.mark.nightly
def test_alone_with_a_file(tmp_path: Path) -> None:
    """One gateway and a folder: after a kill the next one goes on."""
    flags = {"gateway": [f"--state-dir={tmp_path / 'state'}", f"--state-lease-s={LEASE_S:g}"]}
    with run_fleet(1, 1, flags, lease_s=60, forks=True) as fleet:
        client = client_of(fleet.gateway)
        whole = client.responses.create(**asked(5))
        with stopped([fleet["decode-0"]]):
            told = client.responses.create(**asked(5), background=True)
            fleet.gateway.kill()
        fleet.gateway.restart()
        wait_until(lambda: client.responses.retrieve(told.id).status not in ("queued", "in_progress"))
        assert client.responses.retrieve(told.id).output_text == whole.output_text
