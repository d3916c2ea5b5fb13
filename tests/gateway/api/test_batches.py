"""OpenAI's files and batches by the official client, answered by scripted workers."""

import json
import socket
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.access.keys import ANYBODY, Keys
from gateway.batches import runner as runner_module
from gateway.batches import store as store_module
from gateway.batches.routes import add_batches
from gateway.batches.runner import BatchRunner
from gateway.batches.store import BatchStore, new_id
from gateway.errors import ApiError, not_ready, overloaded
from gateway.store.database import FILE, StoreError
from tests.support.api_server import ANSWER, FULL, KEYS, MAX_BODY, SERVED, WAIT_S, Served, run_api
from tests.support.fake_engine_client import PLACES, Script
from tests.support.words import HELLO

CHATS: Any = "/v1/chat/completions"
MAX_BYTES = 8 << 20
LEASE_S = 2.0
OWN_KEYS = (*KEYS, "other-key")
CHAT: Any = {"model": SERVED, "messages": HELLO}


@contextmanager
def serve(
    model: Path,
    folder: Path,
    keys: tuple[str, ...] = OWN_KEYS,
    answer: str = ANSWER,
    state: Path | None = None,
    place: Path | None = None,
    **options: Any,
) -> Iterator[Served]:
    """The API with batches in `folder`, as main.py puts it together. `state`: as in run_api. `place`: of records."""

    def extend(app: Any, served: Any) -> None:
        store = BatchStore(folder, MAX_BYTES, place, LEASE_S)
        [model] = served.models
        ids = model.tokenizer.encode(answer, add_special_tokens=False)
        model.ring.reset(Script([*ids, min(model.tokenizer.eos_token_ids)]))  # batches go on at once
        add_batches(app, served, store)

        @asynccontextmanager
        async def lifespan(_: Any) -> AsyncIterator[None]:
            runner = BatchRunner(store, app, served, Keys(keys), MAX_BODY)
            runner.start()
            yield
            await runner.close()
            store.close()

        app.router.lifespan_context = lifespan

    with run_api(model, replace(FULL, api_keys=OWN_KEYS, **options), extend=extend, state=state) as served:
        yield served


@pytest.fixture(scope="module")
def shared(full: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`full` starts before and ends after: each restores the logging that it found."""
    with serve(tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("batches")) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    shared.engine.reset(shared.script(ANSWER))
    return shared


def client_of(served: Served, key: str = KEYS[0]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=WAIT_S)


@pytest.fixture
def client(served: Served) -> openai.OpenAI:
    return client_of(served)


def read_record(folder: Path, record_id: str) -> Any:
    """What the folder's own store has of a file or batch."""
    with closing(sqlite3.connect(folder / FILE)) as database:
        [(value,)] = database.execute("SELECT value FROM batch_records WHERE id = ?", (record_id,))
    return json.loads(value)


def change_record(folder: Path, record_id: str, ends_s: int | None = None, **fields: Any) -> None:
    value = json.dumps(read_record(folder, record_id) | fields)
    with closing(sqlite3.connect(folder / FILE)) as database, database:
        sql = "UPDATE batch_records SET value = ?, ends_s = coalesce(?, ends_s) WHERE id = ?"
        database.execute(sql, (value, ends_s, record_id))


def line(custom_id: str, body: Any = CHAT, url: str = CHATS) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def begin(client: openai.OpenAI, *lines: str, url: Any = CHATS) -> Any:
    file = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"a": "b"})


def wait(client: openai.OpenAI, batch: Any, until: Callable[[Any], bool] = lambda one: bool(one.completed_at)) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not until(batch := client.batches.retrieve(batch.id)):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def read(client: openai.OpenAI, file_id: str | None) -> dict[Any, Any]:
    """custom_id |-> line of an output or error file; each once."""
    assert file_id is not None
    rows = [json.loads(row) for row in client.files.content(file_id).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize(
    ("url", "body", "text_of"),
    [
        (CHATS, CHAT, lambda body: body["choices"][0]["message"]["content"]),
        ("/v1/completions", {"model": SERVED, "prompt": "x"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"model": SERVED, "input": "x"}, lambda body: body["output"][0]["content"][0]["text"]),
    ],
)
def test_a_batch_is_answered_as_live_requests_are(
    client: openai.OpenAI, served: Served, url: str, body: Any, text_of: Any
) -> None:
    begun = begin(client, *(line(f"line {number}", {**body, "seed": number}, url) for number in range(9)), url=url)
    assert (begun.status, begun.metadata, begun.object, begun.output_file_id) == (
        "validating",
        {"a": "b"},
        "batch",
        None,
    )
    batch = wait(client, begun)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (9, 9, 0)
    rows = read(client, batch.output_file_id)
    assert set(rows) == {f"line {number}" for number in range(9)}
    for row in rows.values():
        response = row["response"]
        assert (response["status_code"], row["error"]) == (200, None)
        assert response["request_id"] and text_of(response["body"]) == ANSWER
    asked = served.engine.sent
    assert {sent["priority"] for sent in asked} == {9}, "live requests go first"
    assert sorted(sent["seed"] for sent in asked) == list(range(9))
    assert client.files.retrieve(str(batch.output_file_id)).purpose == "batch_output"


def test_wrong_lines_are_in_the_error_file_and_the_others_are_answered(client: openai.OpenAI) -> None:
    batch = wait(
        client,
        begin(
            client,
            line("good"),
            "{not json",
            line("good"),
            line("elsewhere", url="/v1/embeddings"),
            line("unknown model", {**CHAT, "model": "other"}),
            line("streamed", {**CHAT, "stream": True}),
            line("no object", [1]),
            line("long", {**CHAT, "user": "x" * MAX_BODY}),
        ),
    )
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 7)
    assert set(read(client, batch.output_file_id)) == {"good"}
    rows = [json.loads(row) for row in client.files.content(batch.error_file_id).text.splitlines()]
    unasked = {row["error"]["code"]: row["error"]["message"] for row in rows if row["error"]}
    assert set(unasked) == {"invalid_json_line", "duplicate_custom_id", "mismatched_url", "line_too_long"}
    assert "line 3" in unasked["duplicate_custom_id"] and "line 8" in unasked["line_too_long"]
    refused = {row["custom_id"]: row["response"] for row in rows if not row["error"]}
    statuses = {name: response["status_code"] for name, response in refused.items()}
    assert statuses == {"unknown model": 404, "streamed": 400, "no object": 400}
    assert refused["unknown model"]["body"]["error"]["code"] == "model_not_found"
    assert refused["streamed"]["body"]["error"]["param"] == "stream"


def test_lines_store_no_answers(full: Served, tmp_path: Path) -> None:
    """Their file has them; a line that asks for it is refused by name."""
    with serve(tmp_path / "model", tmp_path / "batches", state=tmp_path / "state") as served:
        client = client_of(served)
        for url, body in ((CHATS, CHAT), ("/v1/responses", {"model": SERVED, "input": "hello"})):
            batch = wait(client, begin(client, line("a", body | {"store": True}, url), line("b", body, url), url=url))
            refused = read(client, batch.error_file_id)["a"]["response"]
            assert (refused["status_code"], refused["body"]["error"]["param"]) == (400, "store")
            answer_id = read(client, batch.output_file_id)["b"]["response"]["body"]["id"]
            assert served.http.get(f"{url}/{answer_id}", headers=dict(served.metadata)).status_code == 404


def test_a_key_sees_only_what_it_made(client: openai.OpenAI, served: Served) -> None:
    other = client_of(served, OWN_KEYS[2])
    batch = wait(client, begin(client, line("one")))
    for file_id in (batch.input_file_id, batch.output_file_id):
        for call in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
    for refused in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            refused(batch.id)
    with pytest.raises(openai.NotFoundError):
        other.batches.create(input_file_id=batch.input_file_id, endpoint=CHATS, completion_window="24h")
    assert [*other.files.list(), *other.batches.list()] == []
    with pytest.raises(openai.AuthenticationError):
        client_of(served, "no key of ours").files.list()
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.id)


def test_lists_go_page_by_page_newest_first(client: openai.OpenAI) -> None:
    batches = [wait(client, begin(client, line("one"))) for _ in range(3)]
    found = list(client.batches.list(limit=2))
    assert [one.id for one in found][:3] == [one.id for one in reversed(batches)]
    assert len({one.id for one in found}) == len(found)
    assert len(client.batches.list(limit=2).data) == 2
    inputs = [one.id for one in client.files.list(purpose="batch", limit=2)]
    assert inputs[:3] == [one.input_file_id for one in reversed(batches)]
    assert [one.id for one in client.files.list(purpose="batch", order="asc")] == inputs[::-1]
    with pytest.raises(openai.BadRequestError, match="after"):
        client.batches.list(after="batch_unknown")
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)


def test_a_cancelled_batch_keeps_what_is_answered(client: openai.OpenAI, served: Served) -> None:
    served.engine.reset(Script(served.ids("so far"), is_hanging=True), served.script(ANSWER))
    begun = begin(client, *(line(f"line {number}") for number in range(20)))
    wait(client, begun, lambda one: one.request_counts.completed == 1)
    with pytest.raises(openai.ConflictError, match="not over"):
        client.files.delete(begun.input_file_id)
    assert client.batches.cancel(begun.id).status == "cancelling"
    batch = wait(client, begun, lambda one: one.cancelled_at is not None)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
    assert len(read(client, batch.output_file_id)) == 1
    assert client.batches.cancel(begun.id).status == "cancelled"
    assert served.engine.num_inside == 0
    assert client.files.delete(begun.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(begun.input_file_id)


def test_refusals_for_the_moment_are_tried_again_and_others_are_the_lines_own(
    client: openai.OpenAI, served: Served
) -> None:
    failed = Script(error=ApiError(503, "too many attempts failed", None, "failed", retry_after_s=1))
    served.engine.reset(
        served.script(ANSWER),
        Script(error=overloaded("the queue is full")),
        Script(error=not_ready("no worker")),
        Script(error=ApiError(504, "too long", None, "timeout")),
    )
    batch = wait(client, begin(client, *(line(f"line {number}") for number in range(3))))
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    (row,) = read(client, batch.error_file_id).values()
    assert row["response"]["status_code"] == 504
    served.engine.reset(failed)
    (row,) = read(client, wait(client, begin(client, line("kills workers"))).error_file_id).values()
    assert row["response"]["body"]["error"]["code"] == "failed"
    assert len(served.engine.generations) == 3


def test_uploads_are_bounded_while_they_are_read(client: openai.OpenAI, served: Served) -> None:
    with pytest.raises(openai.APIStatusError, match="larger than") as caught:
        client.files.create(file=b"x" * (MAX_BYTES + 70_000), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="'batch' here"):
        client.files.create(file=b"x", purpose="fine-tune")
    for body, kind, status in [
        (b"--b\r\nnonsense", "multipart/form-data; boundary=b", 400),
        (b"x", "multipart/form-data", 400),
        (b"{}", "application/json", 415),
        (b"\x1f\x8b", "multipart/form-data; boundary=b; coding=gzip", 415),
    ]:
        headers = {**dict(served.metadata), "content-type": kind, "content-encoding": kind.partition("coding=")[2]}
        assert served.http.post("/v1/files", content=body, headers=headers).status_code == status
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    kept = client.files.create(file=b"x" * (MAX_BYTES // 2), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="larger than"):
        client.files.create(file=b"x" * (MAX_BYTES // 2 + 70_000), purpose="batch")
    client.files.delete(kept.id)


def test_a_folder_with_files_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    tmp_path.chmod(0o755)
    with pytest.raises(ValueError, match="files of others"):
        BatchStore(tmp_path, MAX_BYTES)
    assert [path.name for path in tmp_path.iterdir()] == ["letters"] and tmp_path.stat().st_mode & 0o777 == 0o755


def test_uploads_hold_the_room_of_what_has_arrived_and_no_key_all_of_it(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, MAX_BYTES)
    with ExitStack() as uploads:
        takes = [uploads.enter_context(store.upload("one")) for _ in range(100)]
        takes[0](3 * MAX_BYTES // 4)
        with pytest.raises(ApiError, match="larger than the room"):
            takes[1](1)
        with store.upload("other") as take:
            take(MAX_BYTES // 8)
        with store.upload(ANYBODY.owner) as take:
            take(MAX_BYTES // 4)
    assert store.bytes.total == 0
    with store.upload(ANYBODY.owner) as take:
        take(MAX_BYTES)
    store.close()


def test_an_upload_from_which_nothing_comes_ends(full: Served, tmp_path: Path) -> None:
    with (
        serve(tmp_path / "model", tmp_path / "batches", body_timeout_s=0.1) as served,
        socket.create_connection(served.host_port, WAIT_S) as connection,
    ):
        key = f"authorization: Bearer {KEYS[0]}\r\n"
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
            + f"content-length: 3000000\r\n{key}\r\n".encode()
        )
        assert b" 408 " in connection.recv(1000).partition(b"\r\n")[0]


def test_no_key_uses_up_batches_and_files_and_output_counts(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_OPEN_BATCHES", 8)
    served.engine.unready = "not yet"
    begun = [begin(client, line("a")) for _ in range(6)]
    with pytest.raises(openai.RateLimitError, match="open batches"):
        begin(client, line("a"))
    other = client_of(served, "other-key")
    begun_by_other = begin(other, line("a"))
    served.engine.unready = None
    for one, batch in [*((client, batch) for batch in begun), (other, begun_by_other)]:
        assert wait(one, batch).request_counts.completed == 1


def test_one_line_wakes_models_that_sleep_and_the_others_follow(client: openai.OpenAI, served: Served) -> None:
    served.engine.is_asleep = True
    batch = wait(client, begin(client, *(line(f"line {number}") for number in range(3))))
    assert batch.request_counts.completed == 3
    served.engine.is_asleep, served.engine.unready = True, "the gateway is draining"
    begun = begin(client, line("a"))
    wait(client, begun, lambda one: one.status == "in_progress")
    assert len(served.engine.generations) == 3, "what is not ready is not asked"
    served.engine.unready = None
    assert wait(client, begun).request_counts.completed == 1


def test_a_line_of_many_answers_leaves_places_free(client: openai.OpenAI, served: Served) -> None:
    """Whatever n and the number of prompts are: the reserve of places is never given to batches."""
    served.engine.reset(served.script(ANSWER, delay_s=0.01))
    most = 0

    def look(batch: Any) -> bool:
        nonlocal most
        most = max(most, served.engine.num_running)
        return bool(batch.completed_at)

    many = {**CHAT, "n": 100}
    batch = wait(client, begin(client, *(line(f"line {number}", many) for number in range(3))), look)
    assert batch.request_counts.completed == 3
    assert 2 <= most <= PLACES - PLACES // 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"extra_body": {"output_expires_after": {}}}, "output_expires_after"),
    ],
)
def test_bad_batches_are_refused_by_field(client: openai.OpenAI, fields: Any, param: str) -> None:
    file = client.files.create(file=b"{}", purpose="batch")
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**{"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h", **fields})
    assert caught.value.param == param


def test_a_file_without_lines_fails_the_batch(client: openai.OpenAI) -> None:
    batch = wait(client, begin(client, "", " "), lambda one: one.failed_at is not None)
    (fault,) = batch.errors.data
    assert (batch.status, fault.code) == ("failed", "invalid_input_file") and "no lines" in fault.message


def test_without_a_folder_the_option_is_named(full: Served, tmp_path: Path) -> None:
    with (
        run_api(tmp_path, FULL, extend=lambda app, served: add_batches(app, served, None)) as bare,
        pytest.raises(openai.PermissionDeniedError, match="--batch-dir"),
    ):
        client_of(bare).files.create(file=b"x", purpose="batch")


def test_what_a_crash_leaves_is_taken_up(full: Served, tmp_path: Path) -> None:
    """A batch in its midst, torn output, an upload without a record, a record that is no JSON."""
    model, folder = tmp_path / "model", tmp_path / "batches"
    model.mkdir()
    with serve(model, folder) as first:
        hanging = Script(first.ids("so"), is_hanging=True)
        first.engine.reset(hanging, *[first.script("first")] * 4)
        begun = begin(client_of(first), *(line(f"line {number}") for number in range(10)))
        wait(client_of(first), begun, lambda one: one.request_counts.completed == 4)
        for place in (None, tmp_path / "state"):
            with pytest.raises(ValueError, match="another gateway's"):
                BatchStore(folder, MAX_BYTES, place)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    with closing(sqlite3.connect(folder / FILE)) as database:
        [(output_id,)] = database.execute("SELECT output_id FROM batch_records WHERE id = ?", (begun.id,))
    with (folder / output_id).open("ab") as output:
        output.write(b'{"id": "batch_req_x_9", "custom')
    orphan, other = folder / f"file-{'0' * 32}", folder / "notes.txt"
    orphan.write_bytes(b"x")
    other.write_bytes(b"x")
    (folder / "batch_torn.json").write_bytes(b'{"owner"')
    with serve(model, folder, answer="second") as second:
        client = client_of(second)
        rows = read(client, wait(client, begun).output_file_id)
        texts = [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows.values()]
        assert sorted(texts) == ["first"] * 4 + ["second"] * 6
        assert set(rows) == {f"line {number}" for number in range(10)}
    assert other.exists() and not orphan.exists()
    assert (folder / "batch_torn.json").exists()


def test_records_of_earlier_gateways_are_taken(full: Served, tmp_path: Path) -> None:
    model, folder, name, batch_id = tmp_path / "model", tmp_path / "batches", new_id("file-"), new_id("batch_")
    for one in (model, folder):
        one.mkdir(mode=0o700)
    (folder / "lock").touch(0o600)
    (folder / name).write_text(line("one"))
    times = {"created_at": int(time.time()), "expires_at": int(time.time()) + 10_000}
    file = {"object": "file", "id": name, "bytes": 9, "filename": "x", "purpose": "batch", **times}
    batch = {"object": "batch", "id": batch_id, "endpoint": CHATS, "input_file_id": name, **times}
    files = {"output_id": new_id("file-"), "error_id": new_id("file-")}
    for value, more in ((file, {}), (batch, files)):
        owner = sha256(KEYS[0].encode()).hexdigest()[:32]
        (folder / f"{value['id']}.json").write_text(json.dumps({"owner": owner, "value": value, "made_s": 1.0, **more}))
    with serve(model, folder) as served:
        client = client_of(served)
        assert wait(client, client.batches.retrieve(batch_id)).request_counts.completed == 1
        assert client.files.retrieve(name).bytes == 9
    assert not list(folder.glob("*.json"))


@pytest.mark.parametrize("is_killed", [False, True])
def test_gateways_with_one_store_run_a_batch_once_and_go_on_with_each_others(
    full: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    folder, place, release = tmp_path / "batches", tmp_path / "state", BatchStore.release
    models = [tmp_path / "a", tmp_path / "b"]

    async def release_nothing(self: BatchStore) -> None:
        """As if it had been killed."""

    for model in models:
        model.mkdir()
    with ExitStack() as ends:
        first = ends.enter_context(serve(models[0], folder, place=place))
        first.engine.reset(Script(first.ids("so"), is_hanging=True), *[first.script("first")] * 4)
        begun = begin(client_of(first), *(line(f"line {number}") for number in range(10)))
        wait(client_of(first), begun, lambda one: one.request_counts.completed == 4)
        with serve(models[1], folder, answer="second", place=place) as second:
            client = client_of(second)
            wait(client, begun, lambda one: one.request_counts.completed == 4)
            time.sleep(2 * LEASE_S)
            assert not second.engine.generations, "the first one has its lease"
            monkeypatch.setattr(BatchStore, "release", release_nothing if is_killed else release)
            ends.close()
            batch = wait(client, begun)
            rows = read(client, batch.output_file_id)
            texts = [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows.values()]
            assert sorted(texts) == ["first"] * 4 + ["second"] * 6 and batch.error_file_id is None
            assert client.files.content(begun.input_file_id).text.count("\n") == 9


def test_another_gateway_cancels_a_batch(full: Served, tmp_path: Path) -> None:
    folder, place = tmp_path / "batches", tmp_path / "state"
    for name in "ab":
        (tmp_path / name).mkdir()
    with serve(tmp_path / "a", folder, place=place) as first, serve(tmp_path / "b", folder, place=place) as second:
        first.engine.reset(Script(first.ids("so"), is_hanging=True), first.script("first"))
        begun = begin(client_of(first), line("one"), line("two"))
        wait(client_of(first), begun, lambda one: one.request_counts.completed == 1)
        assert client_of(second).batches.cancel(begun.id).status == "cancelling"
        batch = wait(client_of(second), begun, lambda one: one.cancelled_at is not None)
        assert batch.request_counts.completed == len(read(client_of(second), batch.output_file_id)) == 1
        assert first.engine.num_inside == 0 and not second.engine.generations


def test_gateways_with_other_folders_say_so(full: Served, tmp_path: Path) -> None:
    place = tmp_path / "state"
    for name in "ab":
        (tmp_path / name).mkdir()
    with serve(tmp_path / "b", tmp_path / "theirs", place=place) as other:
        with serve(tmp_path / "a", tmp_path / "ours", place=place) as first:
            first.engine.reset(Script(first.ids("so"), is_hanging=True))
            begun = begin(client_of(first), line("one"))
            wait(client_of(first), begun, lambda one: one.status == "in_progress")
        client = client_of(other)
        assert client.batches.retrieve(begun.id).status == "in_progress"
        for call in (client.files.content, client.files.delete):
            with pytest.raises(openai.ConflictError, match="--batch-dir of another gateway"):
                call(begun.input_file_id)
        with pytest.raises(openai.ConflictError, match="share one"):
            client.batches.create(input_file_id=begun.input_file_id, endpoint=CHATS, completion_window="24h")
        assert not other.engine.generations


@pytest.mark.parametrize("status", ["completed", "cancelled"])
def test_an_end_that_the_disk_refused_is_saved_later_and_nothing_is_taken_back(
    full: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    stores, saved = list[BatchStore](), list[str]()
    save = BatchStore.save

    async def fail_once(self: BatchStore, record: Any, files: Any = ()) -> bool:
        given = record.value.status
        saved.append(given)
        if given == status and saved.count(given) == 1:
            raise StoreError("the disk is full")
        stores.append(self)
        return await save(self, record, files)

    monkeypatch.setattr(BatchStore, "save", fail_once)
    monkeypatch.setattr(runner_module, "TROUBLE_S", 0.05)
    model, folder = tmp_path / "model", tmp_path / "batches"
    model.mkdir()
    with serve(model, folder) as served:
        client = client_of(served)
        if status == "cancelled":
            served.engine.reset(Script(served.ids("so"), is_hanging=True), served.script(ANSWER))
        batch = begin(client, line("one"), line("two"))
        if status == "cancelled":
            wait(client, batch, lambda one: one.request_counts.completed == 1)
            client.batches.cancel(batch.id)
        deadline = time.monotonic() + WAIT_S
        while read_record(folder, batch.id)["status"] != status:
            assert time.monotonic() < deadline, saved
            time.sleep(0.02)
        assert saved[saved.index(status) :] == [status, status], "each is saved once"
        wait(client, batch, lambda one: stores[0].bytes.total == sum(file.bytes for file in client.files.list()))
        num_answered = 2 if status == "completed" else 1
        assert len(read(client, client.batches.retrieve(batch.id).output_file_id)) == num_answered


def test_a_batch_ends_after_its_day_and_names_what_is_left(full: Served, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "batches"
    model.mkdir()
    with serve(model, folder) as first:
        first.engine.reset(Script(first.ids("so"), is_hanging=True), first.script(ANSWER))
        begun = begin(client_of(first), *(line(f"line {number}") for number in range(3)))
        wait(client_of(first), begun, lambda one: one.request_counts.completed == 1)
    change_record(folder, begun.id, expires_at=1)
    with serve(model, folder) as second:
        client = client_of(second)
        batch = wait(client, begun, lambda one: one.expired_at is not None)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 1, 2)
        rows = read(client, batch.output_file_id) | read(client, batch.error_file_id)
        assert set(rows) == {"line 0", "line 1", "line 2"}
        assert {row["error"]["code"] for row in rows.values() if row["error"]} == {"batch_expired"}


def test_old_files_and_batches_are_deleted_but_not_the_input_of_one_that_runs(full: Served, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "batches"
    model.mkdir()
    with serve(model, folder) as first:
        client = client_of(first)
        done = wait(client, begin(client, line("one")))
        first.engine.reset(Script(first.ids("so"), is_hanging=True))
        running = begin(client, line("one"))
        kept = client.files.create(file=b"x", purpose="batch")
    for old in (done.id, done.input_file_id, done.output_file_id, running.id, running.input_file_id):
        change_record(folder, old, ends_s=1)
    with serve(model, folder) as second:
        client = client_of(second)
        wait(client, running)
        assert {one.id for one in client.files.list(purpose="batch")} == {running.input_file_id, kept.id}
        assert [one.id for one in client.batches.list()] == [running.id]
    assert not (folder / done.input_file_id).exists()


def test_a_batch_of_a_key_that_is_no_longer_taken_fails(full: Served, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "batches"
    model.mkdir()
    with serve(model, folder, keys=KEYS[1:]) as served:
        batch = wait(client_of(served), begin(client_of(served), line("one")), lambda one: one.failed_at is not None)
        assert batch.errors.data[0].code == "invalid_api_key"
        assert not served.engine.generations
