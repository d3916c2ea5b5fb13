"""Keys as a file: who may do what, limits a minute, and changes without a restart."""

import asyncio
import codecs
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from cli.keys import keys as keys_command
from cli.service import CommandError
from gateway.access import allowance
from gateway.access.allowance import LIMIT_HEADERS, Allowance
from gateway.access.key_file import MAX_KEYS, KeyFile, read_entries
from gateway.access.keys import ANYBODY, Key, Keys
from gateway.adapters.registry import Adapter
from gateway.answer import choices
from gateway.batches import runner
from gateway.batches.routes import add_batches
from gateway.batches.runner import BatchRunner
from gateway.batches.store import BatchStore
from gateway.errors import ApiError, overloaded
from protos import inference_pb2, inference_pb2_grpc
from runtime import file_watch
from runtime.settings import ConfigError
from tests.support.api_server import ANSWER, KEYS, PLAIN, SERVED, WAIT_S, Served, run_api
from tests.support.fake_engine_client import Script
from tests.support.words import HELLO

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 9},
}


def line(name: str, key: str = "", **more: object) -> str:
    """A key's table."""
    fields = {"name": name, "sha256": sha256((key or name).encode()).hexdigest(), **more}
    shown = {field: str(value).lower() if isinstance(value, bool) else repr(value) for field, value in fields.items()}
    return "\n".join(["[[key]]", *(f"{field} = {value}" for field, value in shown.items()), ""])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute in which nothing comes back, however slow the machine is."""
    monkeypatch.setattr(allowance._Amount, "refill", lambda self, now: None)


@contextmanager
def serve(folder: Path, *lines: str, **options: Any) -> Iterator[Served]:
    """The API with these keys."""
    path = folder / "keys.toml"
    path.write_text("".join(lines))
    adapters = {"sql": Adapter("sql", "/adapters/sql", "digest")}
    with run_api(folder, replace(PLAIN, **options), adapters=adapters, key_file=path) as served:
        served.engine.reset(served.script(ANSWER))
        yield served


def post(served: Served, key: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return served.http.post(path, json={"model": SERVED, **PATHS[path], **fields}, headers=bearer(key))


def test_a_key_is_known_by_its_name_and_gets_its_priority(tmp_path: Path) -> None:
    with serve(tmp_path, line("alice", priority=3), line("bob")) as served:
        for key, asked, priority in (
            ("alice", None, 3),
            ("alice", 0, 3),
            ("alice", 8, 8),
            ("bob", None, 5),
            ("bob", 0, 0),
        ):
            assert post(served, key, priority=asked).status_code == 200
            assert (served.engine.sent[-1]["owner"], served.engine.sent[-1]["priority"]) == (key, priority)
        assert post(served, "carol").status_code == 401


def test_lines_of_the_log_have_the_keys_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[tuple[str, object]]()

    class Log:
        def info(self, event: str, **_: object) -> None:
            said.append((event, structlog.contextvars.get_contextvars().get("key")))

    monkeypatch.setattr(choices, "_log", Log())
    with serve(tmp_path, line("alice"), line("bob")) as served:
        stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
        for key in ("alice", "bob"):
            assert post(served, key).status_code == 200
            list(stub.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=[("authorization", f"Bearer {key}")]))
    assert said == [("answered", key) for key in ("alice", "alice", "bob", "bob")]


def test_a_key_uses_its_models_only(tmp_path: Path) -> None:
    with serve(tmp_path, line("all"), line("base", models=[SERVED]), line("tuned", models=["sql"])) as served:
        for key, names in (("all", [SERVED, "sql"]), ("base", [SERVED]), ("tuned", ["sql"])):
            listed = served.http.get("/v1/models", headers=bearer(key)).json()["data"]
            assert [one["id"] for one in listed] == names
            for path in PATHS:
                for model in (SERVED, "sql"):
                    answer = post(served, key, path, model=model)
                    assert answer.status_code == (200 if model in names else 403), (key, path, model)
            tokens = served.http.post("/tokenize", json={"model": SERVED, "prompt": "a"}, headers=bearer(key))
            assert tokens.status_code == (200 if SERVED in names else 403)
        stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
        with pytest.raises(grpc.RpcError) as refusal:
            list(stub.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=[("authorization", "Bearer tuned")]))
        assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "may not use" in str(refusal.value.details())


@pytest.mark.usefixtures("still")
def test_beyond_its_requests_a_key_is_told_to_wait(tmp_path: Path) -> None:
    lines = [line(f"few{at}", requests_per_minute=2) for at in range(len(PATHS))]
    with serve(tmp_path, *lines, line("bob")) as served:
        for at, path in enumerate(PATHS):
            few = f"few{at}"
            first = post(served, few, path)
            assert first.status_code == 200
            assert first.headers["x-ratelimit-limit-requests"] == "2"
            assert first.headers["x-ratelimit-remaining-requests"] == "1"
            assert post(served, few, "/v1/completions", stream=True).headers["x-ratelimit-remaining-requests"] == "0"
            refused = post(served, few, path)
            assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
            assert f"the key {few} has used its 2 requests a minute" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "30"
            assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
            stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
            key = [("authorization", f"Bearer {few}")]
            with pytest.raises(grpc.RpcError) as also:
                list(stub.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=key))
            assert also.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not set(LIMIT_HEADERS) & set(post(served, "bob", path).headers)
            assert served.count("requests_refused_total", reason="rate_limit_exceeded", owner=few) == 2


@pytest.mark.usefixtures("still")
def test_a_request_that_no_worker_answers_takes_nothing(tmp_path: Path) -> None:
    """So lines of batches, which are sent again, do not use up what their key has."""
    with serve(tmp_path, line("few", requests_per_minute=2, tokens_per_minute=1000)) as served:
        served.engine.reset(Script(error=overloaded("full")))
        for _ in range(4):
            assert post(served, "few").json()["error"]["code"] == "overloaded"
        served.engine.reset(served.script(ANSWER))
        assert post(served, "few").headers["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.usefixtures("still")
def test_tokens_of_prompts_and_answers_are_counted(tmp_path: Path) -> None:
    with serve(tmp_path, line("alice", tokens_per_minute=100)) as served:
        num_prompt, num_answer = len(served.ids("hi")), len(served.ids(ANSWER)) + 1
        stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="hi"), metadata=[("authorization", "Bearer alice")])
        assert list(call)
        trailing = dict(call.trailing_metadata())
        left = 100.0 - num_prompt - num_answer
        assert int(trailing["x-ratelimit-remaining-tokens"]) == left
        while left > num_prompt:
            answer = post(served, "alice")
            assert answer.status_code == 200
            left -= num_prompt + num_answer
        refused = post(served, "alice")
        assert refused.status_code == 429 and "100 tokens a minute" in refused.json()["error"]["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0" or left > 0


def test_an_admin_key_of_the_file_is_one(tmp_path: Path) -> None:
    keys = Keys(KEYS, has_file=True)
    (tmp_path / "keys.toml").write_text(line("alice") + line("root", admin=True))
    KeyFile(tmp_path / "keys.toml", keys)
    assert keys.check_admin(bearer("root").items()).name == "root"
    assert keys.check(bearer(KEYS[0]).items()).name == "key-1"
    with pytest.raises(ApiError) as refusal:
        keys.check_admin(bearer("alice").items())
    assert refusal.value.status == 401


def test_keys_do_not_share_kv_unless_they_are_to(tmp_path: Path) -> None:
    """So `cached_tokens` and times tell no key what another one sent."""
    with serve(tmp_path, line("alice"), line("bob"), salts_by_key=True) as served:
        salts = list[str]()
        for key, own in (("alice", ""), ("bob", ""), ("alice", "x"), ("alice", "")):
            assert post(served, key, cache_salt=own or None).status_code == 200
            salts.append(served.engine.sent[-1]["cache_salt"])
        assert len(set(salts)) == 3 and salts[0] == salts[3] and all(salts)
    assert (Keys().are_several, Keys(("a",)).are_several, Keys(("a", "b")).are_several) == (False, False, True)
    assert Keys(has_file=True).are_several and not Keys(has_file=True).is_open


@pytest.mark.usefixtures("still")
def test_lines_of_batches_count_as_requests_of_their_key(
    full: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And end with it. `full` starts before and ends after: each restores the logging that it found."""
    (tmp_path / "keys.toml").write_text(line("few", requests_per_minute=2))
    monkeypatch.setattr(runner, "MAX_RETRY_S", 0.05)
    known, stores = list[Keys](), list[BatchStore]()

    def extend(app: Any, served: Any) -> None:
        known.append(served.keys)
        served.models[0].ring.reset(Script([min(served.models[0].tokenizer.eos_token_ids)]))
        store = BatchStore(tmp_path / "batches", 1 << 20)
        stores.append(store)
        add_batches(app, served, store)

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            running = BatchRunner(store, app, served, served.keys, 1 << 20)
            running.start()
            yield
            await running.close()

        app.router.lifespan_context = lifespan

    def find(batch_id: str) -> Any:
        return served.http.get(f"/v1/batches/{batch_id}").json()

    def wait(is_so: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + WAIT_S
        while not is_so(batch := find(begun)):
            assert time.monotonic() < deadline, batch
            time.sleep(0.02)
        return batch

    body = {"model": SERVED, "prompt": "hi"}
    lines = [{"custom_id": f"{at}", "method": "POST", "url": "/v1/completions", "body": body} for at in range(3)]
    with run_api(tmp_path / "model", PLAIN, extend=extend, key_file=tmp_path / "keys.toml") as served:
        served.http.headers.update(bearer("few"))
        content = "\n".join(map(json.dumps, lines)).encode()
        uploaded = served.http.post("/v1/files", files={"file": ("lines", content)}, data={"purpose": "batch"}).json()
        asked = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        begun = served.http.post("/v1/batches", json=asked).json()["id"]
        wait(lambda batch: batch["request_counts"]["completed"] == 2)
        assert post(served, "few").status_code == 429
        assert {one["owner"] for one in served.engine.sent} == {"few"}
        before = find(begun)
        assert (before["status"], before["request_counts"]["completed"]) == ("in_progress", 2)
        known[0].replace([Key("other", sha256(b"few").digest(), allowance=Allowance(1000))])
        wait(lambda batch: batch["request_counts"]["completed"] == 3)
        asked["input_file_id"] = uploaded["id"]
        known[0].replace([Key("few", sha256(b"few").digest(), allowance=Allowance(1, 0))])
        post(served, "few")
        begun = served.http.post("/v1/batches", json=asked).json()["id"]
        wait(lambda batch: batch["status"] == "in_progress")
        known[0].replace([])
        deadline = time.monotonic() + WAIT_S
        while stores[0].held:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        known[0].replace([Key("few", sha256(b"few").digest())])
        batch = find(begun)
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "invalid_api_key")


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_the_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "LOOK_S", 0.02)
    path, keys = tmp_path / "keys.toml", Keys(has_file=True)
    path.write_text(line("alice", requests_per_minute=1))

    def knows(name: str) -> bool:
        return keys.find_owner(sha256(name.encode()).hexdigest()[:32]) is not None

    file = KeyFile(path, keys)
    following = asyncio.create_task(file.follow())
    alice = keys.check(bearer("alice").items())
    alice.allowance.begin(time.perf_counter(), "alice", 1)
    path.write_text(line("alice", requests_per_minute=1) + line("bob"))
    await until(lambda: knows("bob"))
    assert keys.check(bearer("alice").items()) is alice, "what it has used is forgotten"
    for wrong in ("[[key]]\nname = 5", "rubbish"):
        path.write_text(wrong)
        await asyncio.sleep(0.1)
        assert knows("alice") and knows("bob")
    path.unlink()
    await asyncio.sleep(0.1)
    assert knows("bob")
    other = tmp_path / "other.toml"
    other.write_text(line("bob"))
    path.symlink_to(other)
    await until(lambda: not knows("alice"))
    path.write_text("")
    await until(lambda: not knows("bob"))
    with pytest.raises(ApiError):
        keys.check(bearer("alice").items())
    assert ANYBODY.name == "" and not keys.is_open
    following.cancel()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[key]]\nname = 'a'", "sha256"), (line("a", sha256="x"), "sha256"), (line("a") + "color = 'red'", "color"),
        (line("a", priority=10), "priority"), (line("a", requests_per_minute=0), "requests_per_minute"),
        (line("key-1"), "key-1"), (line("a b"), "a b"), (line("other"), "other"), (line("a") + line("a", "b"), "twice"),
        (line("a", "k") + line("b", "k"), "twice"), ("[key]", "key"), ("x", "keys.toml"),
        (line("a", models="m"), "models"),
        (line("a") + "\n" + line("b", admin=False).replace("false", "1"), "admin"),
        ("".join(line(f"n{number}") for number in range(MAX_KEYS + 1)), "1000"), ("#" * (2 << 20), "bytes"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.toml") as refusal:
        read_entries(path)
    assert told in str(refusal.value) and "\n" not in str(refusal.value)


def test_keys_add_prints_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    assert keys_command("add", "alice", file=path) == 0
    first = capsys.readouterr().out.strip()
    limits: Any = {"requests_per_minute": 5, "tokens_per_minute": 7, "priority": 2}
    assert keys_command("add", "bob", file=path, admin=True, model=("a", 'ü"\\'), **limits) == 0
    second = capsys.readouterr().out.strip()
    assert path.stat().st_mode & 0o777 == 0o600
    alice, bob = read_entries(path)
    marked = tmp_path / "marked.toml"
    marked.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert read_entries(marked) == (alice, bob)
    marked.unlink()
    assert (alice.name, alice.sha256) == ("alice", sha256(first.encode()).hexdigest())
    assert (bob.admin, bob.models, bob.priority, bob.requests_per_minute) == (True, ("a", 'ü"\\'), 2, 5)
    assert first not in path.read_text() and second not in path.read_text() and first != second
    with pytest.raises(CommandError, match="already"):
        keys_command("add", "alice", file=path)
    with pytest.raises(ConfigError, match="a key's name"):
        keys_command("add", "key-1", file=path)
    with pytest.raises(CommandError, match="priority"):
        keys_command("add", "carol", file=path, priority=10)
    assert [one.name for one in read_entries(path)] == ["alice", "bob"] and len(list(tmp_path.iterdir())) == 1


@given(
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 400), st.integers(0, 400)), min_size=1, max_size=60),
    limit=st.integers(1, 300),
)
def test_over_any_time_no_more_is_begun_than_the_limit_allows(steps: list[tuple[float, int, int]], limit: int) -> None:
    """At most a minute's tokens at once and what comes later, and of answers those of what was begun."""
    allowance, now, begun, answers, most_prompt = Allowance(limit, limit), 0.0, 0, 0, 0
    num_begun = 0
    for pause_s, prompt, answer in steps:
        now += pause_s
        try:
            allowance.begin(now, "k", prompt)
        except ApiError as error:
            assert error.status == 429 and error.retry_after_s is not None
            assert error.retry_after_s >= 600 or _may_begin(allowance, now + error.retry_after_s, prompt)
        else:
            num_begun += 1
            begun, most_prompt = begun + prompt, max(most_prompt, prompt)
            assert num_begun <= limit * (1 + now / 60) + 1e-6
            assert begun + answers <= limit * (1 + now / 60) + most_prompt + 1e-6
            allowance.spend(now, answer)
            answers += answer


def _may_begin(allowance: Allowance, now: float, prompt: int) -> bool:
    try:
        allowance.check(now, "k", prompt)
    except ApiError as error:
        return "requests" not in str(error)  # each limit has its own wait
    return True
