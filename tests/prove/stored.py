"""Stored answers beside gateways and workers that are killed: each client gets each event once and in order."""

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import psycopg

from tests.prove.report import Report
from tests.support.fleet import Process, ProcessFleet, run_fleet
from tests.support.live import HTTP_S, WAIT_S, wait_until
from tests.support.postgres import run_postgres
from tests.support.surface import MODEL

NUM_STREAMS, NUM_KINDS, NUM_TOKENS = 64, 8, 200
KILL_EVERY_S, LEASE_S = 10.0, 2.0
CHATS = range(NUM_KINDS - 4, NUM_KINDS)
ENDS = ("response.completed", "response.incomplete", "response.failed")
STORY = {"type": "object", "properties": {"story": {"type": "string", "minLength": 4000}}, "required": ["story"]}
Event = dict[str, Any]


@dataclass
class Found:
    """What became of all streams."""

    outcomes: Counter[str] = field(default_factory=Counter)  # right, resumed, wrong, unknown
    complaints: list[str] = field(default_factory=list)
    num_kills: int = 0


def ask(number: int) -> dict[str, Any]:
    """A request of one of NUM_KINDS: those of CHATS have two choices."""
    asked, text = {"model": MODEL, "seed": number, "stream": True}, f"Tell me story {number}"
    if number in CHATS:
        asked |= {"messages": [{"role": "user", "content": text}], "max_tokens": NUM_TOKENS // 2, "n": 2, "store": True}
        form = {"type": "json_schema", "json_schema": {"name": "story", "schema": STORY}}
        return asked | ({"response_format": form} if number % 2 else {})
    asked |= {"input": text, "max_output_tokens": NUM_TOKENS}
    if number % 2:
        asked["text"] = {"format": {"type": "json_schema", "name": "story", "schema": STORY}}
    return asked


def shape(events: Sequence[Event]) -> list[Any]:
    """What does not differ between two answers to one request: of chats, each choice's chunks in their order."""
    told: list[Any] = [
        (event["type"], event["sequence_number"], event.get("delta", "")) for event in events if "type" in event
    ]
    choices = [one for event in events for one in event.get("choices", ())]
    for index in range(2):
        told += [(index, one["delta"], one["finish_reason"]) for one in choices if one["index"] == index]
    return told


def find_id(events: Sequence[Event]) -> str:
    """Of the answer."""
    return str(events[0]["response"]["id"] if "response" in events[0] else events[0]["id"])


def read(client: httpx.Client, events: list[Event], method: str, url: str, **options: Any) -> None:
    """Adds the events of a stream, as far as it comes."""
    with client.stream(method, url, **options) as reply:
        if reply.status_code == 404 and events:
            raise LookupError(f"{find_id(events)} behind {len(events)} events")
        if reply.status_code != 200:
            return
        name = ""
        for line in reply.iter_lines():
            if line.startswith("id: "):
                name = line[4:]
            elif line == "data: [DONE]":
                events.append({"sse_id": name, "is_end": True})
            elif line.startswith("data: ") and (event := json.loads(line[6:])).keys() & {"sequence_number", "choices"}:
                events.append(event | {"sse_id": name})


def follow(client: httpx.Client, gateways: Sequence[Process], number: int, until: float) -> list[Event]:
    """A whole stream, read from whichever gateway answers. LookupError: none of them knows it."""
    events: list[Event] = []
    while not (events and (events[-1].get("type") in ENDS or "is_end" in events[-1])):
        if time.monotonic() > until:
            raise TimeoutError(f"{len(events)} events")
        path = "chat/completions" if number in CHATS else "responses"
        url = f"http://{random.choice(gateways).address}/v1/{path}"
        try:
            if not events:
                read(client, events, "POST", url, json=ask(number))
            else:
                after = {"last-event-id": events[-1]["sse_id"]}
                read(client, events, "GET", f"{url}/{find_id(events)}?stream=true", headers=after)
        except httpx.HTTPError:
            time.sleep(0.05)
    return events


def disturb(fleet: ProcessFleet, gateways: Sequence[Process], seconds: float, found: Found) -> None:
    """Kill a gateway every KILL_EVERY_S, in turn, and a decode worker with every third."""
    until = time.monotonic() + seconds
    while time.monotonic() + KILL_EVERY_S < until:
        time.sleep(KILL_EVERY_S)
        victims = [gateways[found.num_kills % len(gateways)]]
        if found.num_kills % 3 == 2:
            victims.append(fleet["decode-1"])
        for victim in victims:
            victim.restart()
        found.num_kills += 1


def run(minutes: float) -> Found:
    """All streams until the time is over; what they began is read to its end."""
    found, lock = Found(), threading.Lock()
    client = httpx.Client(timeout=httpx.Timeout(HTTP_S, read=30.0), limits=httpx.Limits(max_connections=None))
    with run_postgres() as postgres:
        flags = {"gateway": [f"--state-url={postgres.url}", f"--state-lease-s={LEASE_S:g}"]}
        with run_fleet(1, 2, flags, forks=True, starts=False) as fleet:
            gateways = [fleet.gateway, fleet.add_gateway("gateway-b")]
            fleet.start()
            now = time.monotonic()
            wanted = [shape(follow(client, gateways, number, now + WAIT_S)) for number in range(NUM_KINDS)]
            until = time.monotonic() + 60 * minutes

            def ask_on(stream: int) -> None:
                rank = 0
                while time.monotonic() < until:
                    number, rank, complaint = (stream + rank) % NUM_KINDS, rank + 1, ""
                    try:
                        events = follow(client, gateways, number, until + WAIT_S)
                        outcome = "right" if shape(events) == wanted[number] else "wrong"
                        complaint = "" if outcome == "right" else f"{number}: {shape(events)[-3:]} of {len(events)}"
                    except LookupError as error:
                        outcome, complaint = "unknown", f"unknown: {error}"
                    except TimeoutError as error:
                        outcome, complaint = "hung", f"hung: {error}"
                    with lock:
                        found.outcomes[outcome] += 1
                        found.complaints += [complaint] if complaint else []

            with ThreadPoolExecutor(NUM_STREAMS) as threads:
                asking = [threads.submit(ask_on, stream) for stream in range(NUM_STREAMS)]
                disturb(fleet, gateways, 60 * minutes, found)
                for one in asking:
                    one.result()
            count = "SELECT count(*) FROM answers WHERE status IN ('queued', 'in_progress')"
            with psycopg.connect(postgres.url, autocommit=True) as connection:
                wait_until(lambda: connection.execute(count).fetchone() == (0,))
            fleet.wait_until_unused()
    client.close()
    return found


def prove_stored(report: Report, minutes: float) -> str:
    """Returns what was done."""
    found = run(minutes)
    report.num_answers += found.outcomes.total()
    report.num_wrong += found.outcomes["wrong"]
    is_right = set(found.outcomes) == {"right"} and found.num_kills > 0
    report.require(is_right, f"stored answers: {dict(found.outcomes)}; {found.complaints[:3]}")
    kills = f"{found.num_kills} gateways killed, one every {KILL_EVERY_S:g} s, and decode workers"
    return f"{kills}, under {NUM_STREAMS} stored streams with {found.outcomes.total()} answers"
