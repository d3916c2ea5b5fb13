"""Batches in real processes: the gateway is killed, and drained, in the midst of 60 lines."""

import json
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest

from tests.support.fleet import ProcessFleet, run_fleet
from tests.support.live import WAIT_S, wait_until
from tests.support.postgres import run_postgres
from tests.support.surface import MODEL

NUM_LINES = 60
CHATS: Any = "/v1/chat/completions"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    folder = tmp_path_factory.mktemp("state") / "batches"
    with run_fleet(1, 1, {"gateway": [f"--batch-dir={folder}", "--drain-s=60"]}, lease_s=60, forks=True) as running:
        yield running


@pytest.fixture
def client(fleet: ProcessFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """Two gateways with one database and one folder."""
    folder = tmp_path_factory.mktemp("state") / "batches"
    with run_postgres() as postgres:
        flags = [f"--batch-dir={folder}", f"--state-url={postgres.url}", "--state-lease-s=2"]
        with run_fleet(1, 1, {"gateway": flags}, lease_s=60, forks=True, starts=False) as running:
            running.add_gateway("gateway-b")
            running.start()
            yield running


def body(number: int) -> Any:
    question = [{"role": "user", "content": f"What is {number} plus 30?"}]
    return {"model": MODEL, "messages": question, "temperature": 0, "max_tokens": 24}


def begin(client: openai.OpenAI) -> str:
    lines = [
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": CHATS, "body": body(number)})
        for number in range(NUM_LINES)
    ]
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h").id


def num_answered(client: openai.OpenAI, batch_id: str) -> int:
    with suppress(openai.APIConnectionError):
        counts = client.batches.retrieve(batch_id).request_counts
        return counts.completed if counts else 0
    return 0


def check_whole(client: openai.OpenAI, batch_id: str) -> None:
    """Each line is answered once, as a live request is."""
    wait_until(lambda: client.batches.retrieve(batch_id).status == "completed")
    batch = client.batches.retrieve(batch_id)
    assert batch.error_file_id is None and batch.output_file_id
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert Counter(row["custom_id"] for row in rows) == {f"{number}": 1 for number in range(NUM_LINES)}
    said = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    for number in (0, 47, 59):
        live = client.chat.completions.create(**body(number))
        assert said[f"{number}"] == live.choices[0].message.content


@pytest.mark.nightly
def test_a_gateway_killed_in_mid_batch_answers_each_line_once(fleet: ProcessFleet, client: openai.OpenAI) -> None:
    batch_id = begin(client)
    for share in (0.2, 0.6):
        wait_until(lambda share=share: num_answered(client, batch_id) >= share * NUM_LINES)  # type: ignore[misc]
        assert client.batches.retrieve(batch_id).status == "in_progress"
        fleet.gateway.restart()
    check_whole(client, batch_id)
    fleet.wait_until_unused()


@pytest.mark.nightly
def test_a_drain_leaves_the_rest_to_the_next_gateway(fleet: ProcessFleet, client: openai.OpenAI) -> None:
    batch_id = begin(client)
    wait_until(lambda: num_answered(client, batch_id) >= 20)
    live = iter(
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
    )
    next(live)
    fleet.gateway.signal(signal.SIGTERM)
    wait_until(lambda: "draining" in fleet.gateway.read_log().rpartition("listening")[2])
    counts = list[int]()
    for at, last in enumerate(live):
        if at % 10 == 5 and last.choices[0].finish_reason is None:
            counts.append(num_answered(client, batch_id))
    assert len({*counts} - {0}) <= 1, "lines are none of what a drain waits for"
    assert last.choices[0].finish_reason == "length", "a live answer ends first"
    assert fleet.gateway.wait_exited(30) == 0
    assert "batch ends" not in fleet.gateway.read_log().rpartition("draining")[2]
    fleet.gateway.restart()
    check_whole(client, batch_id)


def test_another_gateway_goes_on_with_the_batches_of_one_that_was_killed(pair: ProcessFleet) -> None:
    first, second = pair.gateway, pair["gateway-b"]
    clients = [
        openai.OpenAI(base_url=f"http://{one.address}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
        for one in (first, second)
    ]
    ids = [begin(client) for client in clients]
    wait_until(lambda: all(num_answered(clients[1], batch_id) >= 10 for batch_id in ids))
    first.kill()
    for batch_id in ids:
        check_whole(clients[1], batch_id)
    log = second.read_log()
    assert log.count("batch ends") == len(ids) - first.read_log().count("batch ends")
    first.restart()
    assert all(clients[0].batches.retrieve(batch_id).status == "completed" for batch_id in ids)
    pair.wait_until_unused()
