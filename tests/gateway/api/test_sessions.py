"""What names a request's session in each API, and that no key names another's."""

from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.gateway.api.test_keys import PATHS, line, post, serve
from tests.support.api_server import SERVED, Served

HEADER = "x-baton-session"
# path |-> its field for a session
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"prompt_cache_key": "s"},
    "/v1/completions": {"prompt_cache_key": "s"},
    "/v1/responses": {"prompt_cache_key": "s"},
    "/v1/messages": {"metadata": {"user_id": "s", "of": "mine"}},
}


def session(served: Served, path: str, name: str | None = None, **fields: Any) -> str:
    """The name that workers would get. `name`: in the header."""
    headers = dict(served.metadata) | ({} if name is None else {HEADER: name})
    answer = served.http.post(path, json={"model": SERVED, **PATHS[path], **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    sent: str = served.engine.sent[-1]["session"]
    return sent


@pytest.mark.parametrize("path", FIELDS)
def test_the_header_names_it_before_the_apis_own_field(served: Served, path: str) -> None:
    named = session(served, path, "s")
    assert named and session(served, path, **FIELDS[path]) == session(served, path, "s") == named
    assert session(served, path, "t", **FIELDS[path]) not in ("", named)
    assert session(served, path) == session(served, path, "") == ""
    if path != "/v1/messages":
        assert session(served, path, user="me") == "", "a user has many sessions"


def test_grpc_takes_it_as_metadata(served: Served) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(served.channel)
    request = inference_pb2.GenerateRequest(text="hi", max_tokens=1)
    list(stub.Generate(request, metadata=[*served.metadata, (HEADER, "s")]))
    assert served.engine.sent[-1]["session"] == session(served, "/v1/completions", "s")


@pytest.mark.parametrize("path", FIELDS)
def test_one_that_is_too_long_or_no_text_is_refused(served: Served, path: str) -> None:
    (field,) = FIELDS[path]
    name = "metadata.user_id" if field == "metadata" else field
    for value, headers, param in (("x" * 513, {}, name), (7, {}, name), ("s", {HEADER: "x" * 513}, HEADER)):
        fields = {field: {"user_id": value} if field == "metadata" else value}
        body = {"model": SERVED, **PATHS[path], **fields}
        answer = served.http.post(path, json=body, headers=dict(served.metadata) | headers)
        assert answer.status_code == 400 and param in answer.json()["error"]["message"], answer.text


def test_two_keys_have_no_session_in_common(tmp_path: Path) -> None:
    with serve(tmp_path, line("alice"), line("bob")) as served:
        names = []
        for key in ("alice", "bob", "alice"):
            assert post(served, key, prompt_cache_key="s").status_code == 200
            names.append(served.engine.sent[-1]["session"])
    assert names[0] == names[2] != names[1] and "s" not in names
