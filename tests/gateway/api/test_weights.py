"""POST /v1/pause, /v1/resume and /v1/weights: what reaches the workers' keeper, and what is refused before."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gateway.api.weights import PAUSE_PATH, RESUME_PATH, WEIGHTS_PATH, build_weights_router
from tests.support.api_server import FULL, Served, run_api

ADMIN = {"authorization": "Bearer sixteen-characters-of-a-key"}


class Keeper:
    """Stands for WeightKeeper."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def pause(self, for_s: float, ends: bool = False) -> dict[str, int]:
        self.calls.append((for_s, ends))
        return {"d:1": 3}

    async def change(self, *given: Any) -> dict[str, Any]:
        self.calls.append(given)
        return {"weights": "w2"}


KEEPER = Keeper()


@pytest.fixture(scope="module")
def kept(full: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`full` starts before and ends after: each restores the logging that it found."""

    def extend(app: Any, served: Any) -> None:
        keepers: Any = {served.models[0].names.listed[0]: KEEPER}
        app.include_router(build_weights_router(served, keepers))

    options = replace(FULL, admin_key=ADMIN["authorization"].split()[1])
    with run_api(tmp_path_factory.mktemp("model"), options, extend=extend) as served:
        yield served


@pytest.fixture
def served(kept: Served) -> Served:
    KEEPER.calls.clear()
    return kept


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        (PAUSE_PATH, {}, (600.0, False)),
        (PAUSE_PATH, {"for_s": 5, "in_flight": "end"}, (5.0, True)),
        (RESUME_PATH, {}, (0.0, False)),
        (WEIGHTS_PATH, {"path": "/w"}, ("/w", "", False, 300.0)),
        (WEIGHTS_PATH, {"path": "/w", "revision": "r", "in_flight": "end", "timeout_s": 9}, ("/w", "r", True, 9.0)),
    ],
)
def test_orders_reach_the_workers_of_the_model(served: Served, path: str, body: Any, call: tuple[Any, ...]) -> None:
    answer = served.http.post(path, json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    assert KEEPER.calls == [call]
    assert answer.json() == ({"weights": "w2"} if path == WEIGHTS_PATH else {"running": {"d:1": 3}})


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (WEIGHTS_PATH, {}, "path"),
        (WEIGHTS_PATH, {"path": "/w", "revision": "a=b"}, "revision must be a name without ="),
        (WEIGHTS_PATH, {"path": "/w", "revision": "a" * 1000}, "revision has 1000 characters"),
        (WEIGHTS_PATH, {"path": "/" * 5000}, "path has 5000 characters"),
        (WEIGHTS_PATH, {"path": "/w", "timeout_s": 0}, "timeout_s is 0; it must be above 0, and at most 3600"),
        (WEIGHTS_PATH, {"path": "/w", "in_flight": "drop"}, "in_flight"),
        (WEIGHTS_PATH, {"path": "/w", "colour": 1}, "colour"),
        (PAUSE_PATH, {"for_s": 3601}, "for_s is 3601"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(served: Served, path: str, body: Any, said: str) -> None:
    answer = served.http.post(path, json=body, headers=ADMIN)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert not KEEPER.calls


@pytest.mark.parametrize("path", [PAUSE_PATH, RESUME_PATH, WEIGHTS_PATH])
def test_another_model_or_key_is_refused(served: Served, path: str) -> None:
    assert served.http.post(path, json={"path": "/w"}, headers=dict(served.metadata)).status_code in (401, 403)
    body = {"model": "unknown"} | ({"path": "/w"} if path == WEIGHTS_PATH else {})
    assert served.http.post(path, json=body, headers=ADMIN).status_code == 404
    assert not KEEPER.calls
