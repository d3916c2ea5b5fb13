"""A gateway with several models: each worker is given to the model that it says it serves."""

import pytest

from gateway.adapters.registry import Adapter
from gateway.errors import ApiError
from gateway.metrics import ModelMetrics, RequestMetrics
from gateway.request.rules import ServedNames
from gateway.router.fleet import Fleet
from tests.support.virtual_fleet import VirtualFleet, virtual_fleet


def name_model(fleet: VirtualFleet, worker: int, model: str) -> None:
    fleet.decodes[worker].peer.model = model


def find_members(fleet: Fleet) -> dict[str, list[str]]:
    return {name: list(part.of_role("decode")) for name, part in fleet.parts.items()}


def test_a_worker_is_where_it_says_and_moves_when_it_says_otherwise() -> None:
    with virtual_fleet(decode=3, is_started=False) as fleet:
        root = fleet.fleet
        root.add_part("a", 0), root.add_part("b", 0)
        for number, model in enumerate(("a", "b", "c")):
            name_model(fleet, number, model)
        fleet.start()
        assert find_members(root) == {"a": ["D1"], "b": ["D2"]}
        assert root.parts["a"].decode["D1"] is root.decode["D1"] and root.decode["D1"].find_trouble() is None
        assert root.decode["D3"].find_trouble() == "serves c, this gateway has a, b"

        fleet.kill(fleet.decodes[0])
        fleet.run(2.0)
        assert find_members(root)["a"] == ["D1"], "it may come back"
        root.decode["D1"].num_mine = 1  # a request's place, as if its end were not noticed yet
        fleet.replace(fleet.decodes[0], "D1").peer.model = "b"
        fleet.run(2.0)
        assert find_members(root) == {"a": ["D1"], "b": ["D2"]}
        assert root.decode["D1"].find_trouble() == "serves b, this gateway has a, b"
        root.decode["D1"].num_mine = 0
        fleet.run(2.0)
        assert find_members(root) == {"a": [], "b": ["D2", "D1"]} and root.decode["D1"].find_trouble() is None

        fleet.loop.run(lambda: root.leave("decode", "D2"))
        assert find_members(root) == {"a": [], "b": ["D1"]}


def test_a_name_belongs_to_one_model_and_any_other_to_the_first_where_it_takes_all() -> None:
    table: list[ServedNames] = []
    adapter = {"tuned": Adapter("tuned", "/x", "d")}
    first, second = ServedNames(["a"], {}, lambda: table), ServedNames(["b"], adapter)
    table += first, second
    assert second.has("b") and second.has("tuned") and not second.has("a") and not first.has("tuned")
    with pytest.raises(ApiError, match="'x' is not served here; this service has 'a', 'b', 'tuned'"):
        first.check("x")
    assert ServedNames(["a", "*"], {}).check("x") == "x"


def test_metrics_of_models_differ_by_a_label() -> None:
    both = ModelMetrics()
    for count, name in enumerate(("a", "b"), start=1):
        RequestMetrics(both.add(name)).prompt_tokens.inc(count)
    families = list(both.collect())
    assert len({family.name for family in families}) == len(families)
    found = next(family for family in families if family.name == "baton:prompt_tokens")
    assert [(one.labels, one.value) for one in found.samples if one.name.endswith("total")] == [
        ({"model": "a"}, 1.0),
        ({"model": "b"}, 2.0),
    ]
