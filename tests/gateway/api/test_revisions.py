"""GET and POST /v1/revisions."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.api.revisions import REVISIONS_PATH, build_revisions_router
from gateway.policies.rollout import Rollout
from tests.support.api_server import FULL, Served, run_api
from tests.support.worker_views import DECODE, DECODE_2, PREFILL

ADMIN = {"authorization": "Bearer sixteen-characters-of-a-key"}
OLD, NEW = replace(DECODE, revision="old", num_mine=3), replace(DECODE_2, revision="new", is_alive=False)
VIEWS = [replace(PREFILL, revision="old"), OLD, NEW]
ROLLOUT = Rollout()


@pytest.fixture(scope="module")
def revised(full: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`full` starts before and ends after: each restores the logging that it found."""

    def extend(app: Any, served: Any) -> None:
        app.include_router(build_revisions_router(served, ROLLOUT, lambda: VIEWS))

    options = replace(FULL, admin_key=ADMIN["authorization"].split()[1])
    with run_api(tmp_path_factory.mktemp("model"), options, extend=extend) as served:
        yield served


@pytest.fixture
def served(revised: Served) -> Served:
    ROLLOUT.shares = {}
    return revised


def post(served: Served, body: Any, headers: Any = ADMIN) -> Any:
    return served.http.post(REVISIONS_PATH, json=body, headers=headers)


def test_shares_are_changed_shown_and_dropped(served: Served) -> None:
    old = {"share": None, "prefill": 1, "decode": 1, "running": 3}
    new = {"share": 0.25, "prefill": 0, "decode": 0, "running": 0}
    answer = post(served, {"new": 0.25})
    assert (answer.status_code, answer.json()) == (200, {"revisions": {"new": new, "old": old}})
    assert ROLLOUT.shares == {"new": 0.25}
    assert post(served, {"old": 1}).json()["revisions"]["new"]["share"] is None
    assert post(served, {}).status_code == 200 and ROLLOUT.shares == {}
    shown = served.http.get(REVISIONS_PATH, headers=dict(served.metadata))
    assert shown.status_code == 200 and set(shown.json()["revisions"]) == {"new", "old"}


def test_a_revision_that_has_a_share_is_shown_and_changed_without_workers(served: Served) -> None:
    ROLLOUT.shares = {"gone": 1.0}
    shown = served.http.get(REVISIONS_PATH, headers=dict(served.metadata)).json()["revisions"]
    assert shown["gone"] == {"share": 1.0, "prefill": 0, "decode": 0, "running": 0}
    assert post(served, {"gone": 0.5}).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"nwe": 0.1}, "no worker has the revision 'nwe'; there are: new, old"),
        ({"new": 1.5}, "from 0 to 1"),
        ({"new": 0.7, "old": 0.7}, "add up to 1.4"),
        ({"new": "0.1"}, "new"),
        ({"new": True}, "new"),
        ([0.1], "object"),
    ],
)
def test_wrong_shares_are_a_400_that_names_them(served: Served, body: Any, said: str) -> None:
    answer = post(served, body)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert ROLLOUT.shares == {}


def test_only_the_admin_key_changes_shares(served: Served) -> None:
    assert post(served, {"new": 0.1}, dict(served.metadata)).status_code in (401, 403)
    assert post(served, {"new": 0.1}, {}).status_code == 401
    assert served.http.get(REVISIONS_PATH).status_code == 401 and ROLLOUT.shares == {}
