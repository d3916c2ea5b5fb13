"""Three models behind one gateway, of which two are awake: real processes, killed while they wake."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.live import HTTP, HTTP_S, WAIT_S, Live, serve, wait_until
from tests.support.lora import write_adapter

DRAFT = Path(__file__).parents[2] / "demo" / "draft"
NAMES = ("a", "b", "c")
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Models "a" and "b" are the demo, "c" is its draft model, with an adapter "tale": each has a decode worker."""
    tale, kv = map(tmp_path_factory.mktemp, ("tale", "kv"))
    write_adapter(tale, DRAFT, "llama", seed=0)
    with serve(
        "a=demo", "--model=b=demo", f"--model=c={DRAFT}", "--max-awake=2", "--prefill-workers=0", "--dtype=float32",
        "--threads=1", "--draft-model=none", "--max-context-tokens=512", f"--kv-disk={kv}", f"--lora=tale={tale}@c",
        hands_over=False, forks=True,
    ) as service:  # fmt: skip
        yield service


def ask(live: Live, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 1, "seed": 3, "include_timing": True}
    return HTTP.post(f"{live.url}/v1/completions", json=body, timeout=WAIT_S)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def read_states(live: Live) -> dict[str, str]:
    """Model |-> its state, as of /status."""
    states: dict[str, str] = HTTP.get(f"{live.url}/status", timeout=HTTP_S).json()["models"]
    return states


def find_worker(live: Live, model: str) -> int | None:
    """The pid of the model's worker, if one runs, by the command lines of the supervisor's children."""
    for pid in Path(f"/proc/{live.process.pid}/task/{live.process.pid}/children").read_text().split():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:  # it has just ended
            continue
        if f"--model-name={model}" in words and "decode" in words:
            return int(pid)
    return None


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """Model |-> what it answers, as far as tests have asked; "a" and "b" answer alike."""
    return {}


def expect(live: Live, texts: dict[str, str], model: str) -> str:
    """Asks the model only if it is not known: that may put another one to sleep."""
    weights = "c" if model == "c" else "a"
    if weights not in texts:
        texts[weights] = text_of(ask(live, model))
    return texts[weights]


def settled(live: Live) -> dict[str, list[str]]:
    """State |-> models, once none is between two."""
    states: dict[str, str] = {}

    def have_settled() -> bool:
        states.update(read_states(live))
        return sorted(states.values()) == ["asleep", "awake", "awake"]

    wait_until(have_settled, explain=lambda: states)
    return {state: [name for name in NAMES if states[name] == state] for state in ("asleep", "awake")}


def test_each_name_gets_its_model(live: Live, texts: dict[str, str]) -> None:
    listed = HTTP.get(f"{live.url}/v1/models", timeout=HTTP_S).json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [*((name, None) for name in NAMES), ("tale", "c")]
    assert read_states(live) == {"a": "awake", "b": "awake", "c": "asleep"}
    assert {worker["model"] for worker in live.status()} == {"a", "b"}
    texts["a"] = text_of(ask(live, "a"))
    assert texts["a"] == text_of(ask(live, "b"))
    refused = ask(live, "d")
    assert refused.status_code == 404 and "this service has 'a', 'b', 'c', 'tale'" in refused.text
    assert live.metric("gateway", "request_success_total", {"model": "b"}) == 1
    assert HTTP.get(f"{live.url}/ready", timeout=HTTP_S).status_code == 200


def test_a_request_wakes_its_model_in_the_place_of_the_one_used_longest_ago(live: Live, texts: dict[str, str]) -> None:
    text_of(ask(live, "b"))
    before = find_worker(live, "a")
    assert before is not None and find_worker(live, "c") is None
    answer = ask(live, "tale")  # which no worker has loaded
    texts["c"] = text_of(ask(live, "c"))
    assert text_of(answer) != texts["c"] != text_of(ask(live, "b"))
    waited_s = answer.json()["choices"][0]["timing"]["wake_seconds"]
    assert waited_s > 0 and answer.headers["x-baton-warning"].startswith("the model was asleep: the request waited ")
    assert read_states(live) == {"a": "asleep", "b": "awake", "c": "awake"}
    assert not Path(f"/proc/{before}").exists(), "its memory is free"
    again = ask(live, "tale")
    assert text_of(again) == text_of(answer) and "x-baton-warning" not in again.headers
    assert "wake_seconds" not in again.json()["choices"][0]["timing"]


def test_no_request_is_lost_when_all_models_are_asked_at_once(live: Live, texts: dict[str, str]) -> None:
    names = [NAMES[number % 3] for number in range(24)]
    alone = {name: expect(live, texts, name) for name in NAMES}
    done = {name: live.metric("gateway", "request_success_total", {"model": name}) for name in NAMES}
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(lambda name: ask(live, name), names))
    assert [text_of(answer) for answer in answers] == [alone[name] for name in names]
    for name in NAMES:
        assert live.metric("gateway", "request_success_total", {"model": name}) == done[name] + 8, "each once"
    assert sum(find_worker(live, name) is not None for name in NAMES) <= 2


def test_a_worker_killed_while_it_wakes_loses_no_request(live: Live, texts: dict[str, str]) -> None:
    (model,) = settled(live)["asleep"]
    expected = expect(live, texts, model)
    pid: list[int] = []

    def find() -> bool:
        pid[:] = filter(None, [find_worker(live, model)])
        return bool(pid)

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, live, model) for _ in range(4)]
        wait_until(find)
        os.kill(pid[0], signal.SIGKILL)
        live.wait_shown(f"{model} decode-0 ended with signal SIGKILL while it was waking; it starts again in 0.5 s")
        assert [text_of(answer.result()) for answer in answers] == [expected] * 4


def test_a_worker_killed_while_it_falls_asleep_loses_no_request(live: Live, texts: dict[str, str]) -> None:
    found = settled(live)
    (asleep,), (oldest, other) = found["asleep"], found["awake"]
    expected = {name: expect(live, texts, name) for name in (asleep, oldest)}
    for name in (oldest, other):
        text_of(ask(live, name))
    pid = find_worker(live, oldest)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it does not end when asked to
    with ThreadPoolExecutor(2) as pool:
        woken = pool.submit(ask, live, asleep)
        wait_until(lambda: read_states(live)[oldest] == "falling asleep", explain=lambda: read_states(live))
        falling = pool.submit(ask, live, oldest)
        os.kill(pid, signal.SIGKILL)
        assert (text_of(woken.result()), text_of(falling.result())) == (expected[asleep], expected[oldest])


def test_a_conversation_outlives_the_sleep_of_its_model(live: Live) -> None:
    """Its KV lies in files. A stream begins when the model is awake."""
    found = settled(live)
    (asleep,), (model, other) = found["asleep"], found["awake"]
    body: dict[str, Any] = {"model": model, "prompt": PROMPT * 12, "max_tokens": 4, "temperature": 0}
    before = HTTP.post(f"{live.url}/v1/completions", json=body, timeout=WAIT_S)
    for name in (other, asleep):
        text_of(ask(live, name))
    wait_until(lambda: read_states(live)[model] == "asleep", explain=lambda: read_states(live))
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", f"{live.url}/v1/completions", json=streamed, timeout=WAIT_S) as response:
        assert response.status_code == 200 and "the model was asleep" in response.headers["x-baton-warning"]
        *events, last = response.read().decode().removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    *chunks, usage = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(before)
    num_prompt = before.json()["usage"]["prompt_tokens"]
    assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16 > 0


def test_a_killed_worker_of_an_awake_model_is_started_again(live: Live, texts: dict[str, str]) -> None:
    model, _ = settled(live)["awake"]
    expected = expect(live, texts, model)
    pid = find_worker(live, model)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert text_of(ask(live, model)) == expected
    assert read_states(live)[model] == "awake"
