"""Workers take other weights together, or none does; one that could not is left out and asked again. Virtual time."""

from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from gateway.errors import WEIGHTS_GONE, ApiError
from gateway.router.worker_client import POLL_S
from gateway.scaling.weights import RETRY_S, WeightKeeper
from tests.support.fake_workers import FakeWorker
from tests.support.virtual_fleet import VirtualFleet, virtual_fleet, wanted

BROKEN = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no memory", ())


class Kept:
    """Of a virtual fleet whose workers see the same folders."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self.fleet = fleet
        self.keeper = WeightKeeper(fleet.fleet, fleet.loop.time)
        for worker in self.workers():
            worker.folders = {"/w2": "w2", "/w3": "w3"}
        fleet.run(POLL_S)

    def workers(self) -> list[FakeWorker]:
        return [*self.fleet.prefills, *self.fleet.decodes]

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = self.fleet.loop.create_task(work)
        self.fleet.run(3 * POLL_S)
        error = task.exception()
        assert error is None or isinstance(error, ApiError)
        return error or task.result()

    def change(self, path: str, ends: bool = False) -> Any:
        return self.call(self.keeper.change(path, "", ends, 60.0))

    def weights(self) -> list[str]:
        return [worker.peer.layout.weights for worker in self.workers()]

    def troubles(self) -> set[str]:
        return {str(worker.find_trouble()) for worker in self.fleet.fleet.workers() if worker.find_trouble()}


def test_all_look_first_then_pause_take_them_and_go_on() -> None:
    with virtual_fleet(decode=2, prefill=1) as fleet:
        kept = Kept(fleet)
        done = kept.change("/w2", ends=True)
        assert (done["weights"], set(done["still_s"])) == ("w2", {"P1", "D1", "D2"})
        assert all(one.calls == ["Look", "Pause 660 ends", "Set w2", "Pause 0"] for one in kept.workers())
        assert set(kept.weights()) == {"w2"} and not kept.troubles()


@pytest.mark.parametrize(
    ("folders", "status", "said"),
    [
        ({}, 400, "worker D2: no model is there"),
        ({"/w2": "other"}, 400, "/w2 is not the same for all workers: {'w2': 'D1', 'other': 'D2'}"),
    ],
)
def test_where_one_cannot_nothing_changes(folders: dict[str, str], status: int, said: str) -> None:
    with virtual_fleet(decode=2) as fleet:
        kept = Kept(fleet)
        fleet.decodes[1].folders = folders
        error = kept.change("/w2")
        assert (error.status, error.message, error.param) == (status, said, "path")
        assert [one.calls for one in kept.workers()] == [["Look"], ["Look"]] and set(kept.weights()) == {"w"}


def test_one_that_fails_is_named_left_out_and_asked_again() -> None:
    with virtual_fleet(decode=2) as fleet:
        kept, late = Kept(fleet), fleet.decodes[1]
        looked = late.SetWeights

        async def fail(request: Any, context: Any) -> Any:
            late.load_refusal = BROKEN if request.weights else None
            return await looked(request, context)

        late.SetWeights = fail  # type: ignore[method-assign]
        error = kept.change("/w2")
        assert (error.status, error.code) == (503, "weights_incomplete")
        assert "D1 has the new weights; not so worker D2: no memory; those get no new requests" in error.message
        assert kept.weights() == ["w2", "w"]
        assert kept.troubles() == {"has weights that POST /v1/weights replaced, and is to get the new ones"}
        for number in range(3):
            fleet.ask(wanted(f"r{number}"))
        assert len(fleet.decodes[0].sessions) == 3 and not late.sessions
        for session in fleet.decodes[0].sessions:
            session.emit(4, "length")
        late.SetWeights, late.load_refusal = looked, None  # type: ignore[method-assign]
        fleet.run(RETRY_S + 2 * POLL_S)
        assert kept.weights() == ["w2", "w2"] and not kept.troubles()


def test_one_that_comes_back_with_replaced_weights_gets_the_new() -> None:
    with virtual_fleet(decode=2) as fleet:
        kept = Kept(fleet)
        kept.change("/w2")
        kept.change("/w3")
        for before in ("w", "w2"):
            fleet.decodes[0].peer.layout.weights, fleet.decodes[0].peer.incarnation = before, f"again {before}"
            fleet.run(3 * POLL_S)
            assert set(kept.weights()) == {"w3"}
        fleet.decodes[0].peer.layout.weights = "of another rollout"
        fleet.run(3 * RETRY_S)
        assert kept.weights()[0] == "of another rollout"


def test_requests_wait_for_the_end_of_a_pause_beyond_their_patience() -> None:
    with virtual_fleet(decode=1, patience_s=5.0) as fleet:
        kept = Kept(fleet)
        assert kept.call(kept.keeper.pause(90.0)) == {"D1": 0}
        client = fleet.ask(wanted("waits"))
        fleet.run(30.0)
        assert not client.task.done() and not fleet.decodes[0].sessions
        assert fleet.router.readiness() is None
        kept.change("/w2")
        assert fleet.decodes[0].calls[-1].startswith("Pause ") and fleet.decodes[0].status["pause"], "it outlasts that"
        kept.call(kept.keeper.pause(0.0))
        (session,) = fleet.decodes[0].sessions
        session.emit(4, "length")
        fleet.run()
        assert client.finish_reason == "length" and client.parts[0].computes == "w2"


def test_an_answer_that_began_with_replaced_weights_ends_by_name() -> None:
    with virtual_fleet(decode=2, patience_s=50.0) as fleet:
        kept = Kept(fleet)
        client = fleet.ask(wanted("begun"))
        (at,) = [one for one in fleet.decodes if one.sessions]
        at.sessions[0].emit(1)
        fleet.run()
        kept.call(kept.keeper.pause(60.0))
        at.sessions[0].say([], "error", "ended")
        kept.change("/w2")
        kept.call(kept.keeper.pause(0.0))
        fleet.run(5.0)
        assert len(client.tokens) == 1
        assert client.error is not None and client.error.code == WEIGHTS_GONE, client.error


def test_no_attempt_goes_to_another_incarnation_than_was_chosen() -> None:
    """Its stream is opened anew between the choice and the attempt: the tokens would count as the old weights'."""
    with virtual_fleet(decode=1) as fleet:
        worker = fleet.fleet.decode["D1"]
        open_session = worker.open_session

        def open_anew(*given: Any) -> Any:
            worker._stream_incarnation = "D1+1"
            return open_session(*given)

        worker.open_session = open_anew  # type: ignore[method-assign,assignment]
        client = fleet.ask(wanted())
        fleet.run(1.0)
        assert not fleet.decodes[0].sessions
        assert client.error is not None and client.error.code == "not_ready", client.error
