"""Adapters (LoRA): which workers get requests that name one, and what workers are asked to load: in virtual time."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any
from unittest import mock

import grpc
import pytest
from prometheus_client import CollectorRegistry

from gateway.adapters.link import RETRY_S
from gateway.adapters.loader import AdapterLoader
from gateway.errors import ApiError
from gateway.router.engine_client import TokenizedRequest
from gateway.router.request import Request
from gateway.router.worker_client import POLL_S
from runtime import rpc
from tests.support.fake_workers import PAGE_TOKENS, FakeWorker
from tests.support.virtual_fleet import Client, VirtualFleet, virtual_fleet, wanted
from tests.support.worker_views import DECODE
from wire.page_keys import page_keys, root_key

NO_ADAPTER = (grpc.StatusCode.RESOURCE_EXHAUSTED, "not here", ((rpc.REFUSED_FOR, rpc.NO_ADAPTER),))
NO_SLOT = (grpc.StatusCode.RESOURCE_EXHAUSTED, "in use", ((rpc.REFUSED_FOR, rpc.NO_SLOT),))
LONG = tuple(range(2 * PAGE_TOKENS + 8))


class Loads:
    """The loader of a virtual fleet whose workers see the same folders: /a has adapter A, /b has B."""

    def __init__(self, fleet: VirtualFleet) -> None:
        self.fleet = fleet
        self.loader = AdapterLoader(fleet.fleet, fleet.registry)
        for worker in self.workers():
            self.prepare(worker)
        fleet.run(POLL_S)

    def workers(self) -> list[FakeWorker]:
        return [*self.fleet.prefills, *self.fleet.decodes]

    def prepare(self, worker: FakeWorker) -> None:
        worker.max_loras, worker.folders = 2, {"/a": "A", "/b": "B"}

    def call(self, work: Coroutine[Any, Any, None]) -> ApiError | None:
        task = self.fleet.loop.create_task(work)
        self.fleet.run()
        error = task.exception()
        assert error is None or isinstance(error, ApiError)
        return error

    def load(self, name: str, path: str, in_place: bool = False) -> ApiError | None:
        return self.call(self.loader.load(name, path, in_place))

    def unload(self, name: str) -> ApiError | None:
        return self.call(self.loader.unload(name))

    def loaded(self) -> list[set[str]]:
        """What each worker has."""
        return [set(worker.adapters) for worker in self.workers()]


def named(name: str, prompt: tuple[int, ...] = (1, 2, 3)) -> TokenizedRequest:
    return replace(wanted(prompt=prompt), adapter=name)


def finish(fleet: VirtualFleet, client: Client) -> None:
    """Its worker gives the rest of the answer."""
    for worker in fleet.decodes:
        for session in worker.sessions:
            if not session.is_over and session.request.request_id == client.name:
                session.emit(4 - len(client.tokens), "length")
    fleet.run()
    assert client.finish_reason == "length" and len(client.tokens) == 4


def test_requests_name_an_adapter_once_all_workers_have_it() -> None:
    with virtual_fleet(decode=2, prefill=1) as fleet:
        loads = Loads(fleet)
        assert loads.load("one", "/a") is None
        assert loads.loaded() == [{"A"}] * 3
        client = fleet.ask(named("one"))
        (session,) = [one for worker in fleet.decodes for one in worker.sessions]
        assert session.request.adapter == "A"
        finish(fleet, client)
        finish(fleet, fleet.ask(wanted()))
        error = loads.load("one", "/b")
        assert error is not None and error.status == 400 and "'load_inplace' to True" in error.message
        assert loads.unload("one") is None
        fleet.run(POLL_S)
        assert loads.loaded() == [set()] * 3
        assert (found := loads.unload("one")) is not None and found.status == 404
        gone = fleet.ask(named("one")).error
        assert gone is not None and gone.status == 404
        fleet.adapters.check()


def test_running_requests_keep_what_their_name_had() -> None:
    with virtual_fleet() as fleet:
        loads = Loads(fleet)
        loads.load("one", "/a")
        before = fleet.ask(named("one"))
        assert loads.load("one", "/b", in_place=True) is None
        after = fleet.ask(replace(named("one"), request_id="after"))
        fleet.run(POLL_S)
        assert [one.request.adapter for one in fleet.decodes[0].sessions] == ["A", "B"]
        assert loads.loaded() == [{"A", "B"}], "one is in use, the other has the name"
        finish(fleet, before)
        fleet.run(POLL_S)
        assert loads.loaded() == [{"B"}]
        loads.unload("one")
        fleet.run(POLL_S)
        assert loads.loaded() == [{"B"}], "unloaded after its last request"
        after.leave()
        fleet.run(POLL_S)
        assert loads.loaded() == [set()]
        fleet.adapters.check()


def test_an_answer_goes_on_with_the_adapter_that_began_it() -> None:
    """In another gateway, or later: the same name may mean another one by then."""
    with virtual_fleet() as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        loads.load("one", "/a")
        client = fleet.ask(named("one"))
        worker.sessions[0].emit(1)
        fleet.run()
        begun = replace(
            named("one"), emitted=tuple(client.tokens), computes=client.parts[0].computes, request_id="again"
        )
        worker.sessions[0].emit(3, "length")
        fleet.run()
        again = fleet.ask(begun)
        worker.sessions[-1].emit(3, "length")
        fleet.run()
        assert again.finish_reason == "length"
        loads.load("one", "/b", in_place=True)
        error = fleet.ask(replace(begun, request_id="mixed")).error
        assert error is not None and (error.status, error.code) == (409, "adapter_changed")
        assert "'one' is B now" in error.message and "began with A" in error.message


def test_a_worker_that_lacks_the_adapter_is_passed_over_until_its_next_status() -> None:
    with virtual_fleet(decode=2) as fleet:
        loads = Loads(fleet)
        loads.load("one", "/a")
        for worker in fleet.decodes:
            worker.refusals.append(NO_ADAPTER)
        client = fleet.ask(named("one"))
        assert client.error is not None and "adapter 'one' is on no decode worker" in client.error.message
        fleet.run(POLL_S)
        fleet.decodes[0].refusals.append(NO_ADAPTER)
        client = fleet.ask(named("one"))
        assert not fleet.decodes[0].sessions and len(fleet.decodes[1].sessions) == 1
        assert not client.attempts[0].is_failure
        finish(fleet, client)


def test_requests_wait_for_their_adapter_and_hold_up_no_others() -> None:
    with virtual_fleet(patience_s=5.0) as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        loads.load("one", "/a")
        worker.adapters.clear()
        worker.load_refusal = (grpc.StatusCode.INVALID_ARGUMENT, "disk on fire")
        fleet.run(POLL_S)
        client = fleet.ask(named("one"))
        other = fleet.ask(replace(wanted(), request_id="other"))
        finish(fleet, other)
        assert fleet.fleet.decode["D1"].adapters.describe() == {"one": "disk on fire"}
        fleet.run(5.0 + POLL_S)
        assert client.error is not None and client.error.status == 503 and "GET /status" in client.error.message
        client = fleet.ask(named("one"))
        worker.load_refusal = None
        assert worker.calls.count("Load one") == 2, "not again and again"
        fleet.run(RETRY_S - 5.0)
        finish(fleet, client)


def test_a_request_waits_for_the_workers_with_its_adapter_and_leaves_others_the_rest() -> None:
    with virtual_fleet(decode=2, max_running=1) as fleet:
        loads = Loads(fleet)
        fleet.decodes[1].max_loras = 0
        fleet.run(POLL_S)
        loads.load("one", "/a")
        clients = [fleet.ask(replace(named("one"), request_id=name)) for name in ("first", "second")]
        finish(fleet, fleet.ask(replace(wanted(), request_id="base")))
        assert [len(worker.sessions) for worker in fleet.decodes] == [1, 1]
        for client in clients:
            finish(fleet, client)
        assert [len(worker.sessions) for worker in fleet.decodes] == [2, 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_without_a_free_slot_takes_requests_of_the_base(role: str) -> None:
    with virtual_fleet(prefill=1) as fleet:
        loads = Loads(fleet)
        loads.load("one", "/a")
        worker = {"prefill": fleet.prefills[0], "decode": fleet.decodes[0]}[role]
        worker.refusals.append(NO_SLOT)
        client = fleet.ask(named("one", LONG))
        assert not worker.refusals and not client.attempts[0].is_failure
        later = fleet.ask(replace(named("one", LONG[1:]), request_id="later"))
        finish(fleet, fleet.ask(replace(wanted(prompt=LONG), request_id="base")))
        assert [client.attempts[-1].decode, later.attempts[-1].decode] == [None, None], "they wait"
        fleet.run(POLL_S)
        finish(fleet, client)
        finish(fleet, later)


def test_a_status_that_was_asked_for_before_a_change_does_not_take_it_back() -> None:
    with virtual_fleet() as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        status, answer = worker.Status, asyncio.Event()

        async def answer_late(*call: Any) -> Any:
            before = await status(*call)
            await answer.wait()
            return before

        with mock.patch.object(worker, "Status", answer_late):
            fleet.run(POLL_S)
            assert loads.load("one", "/a") is None
        fleet.loop.run(answer.set)
        fleet.run()
        assert fleet.fleet.decode["D1"].adapters.loaded == {"A"}
        assert len(worker.calls) == 1, "it is not asked again"
        worker.adapters.clear()
        fleet.run(2 * POLL_S)
        assert worker.calls == ["Load one"] * 2, "a later status counts"


def test_an_answer_of_the_worker_that_was_there_before_says_nothing_of_the_one_that_is() -> None:
    with virtual_fleet() as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        answer = asyncio.Event()

        def late(load: Any) -> Any:
            async def answer_late(*call: Any) -> Any:
                response = await load(*call)
                await answer.wait()
                return response

            return answer_late

        with mock.patch.object(worker, "LoadAdapter", late(worker.LoadAdapter)):
            fleet.loop.run(lambda: loads.loader.expect({"one": "/a"}))
            fleet.run()
        fleet.kill(worker)
        after = fleet.replace(worker, "D1b")
        loads.prepare(after)
        fleet.run(POLL_S)
        with mock.patch.object(after, "LoadAdapter", late(after.LoadAdapter)):
            fleet.loop.run(answer.set)
            answer.clear()
            fleet.run()
            assert not fleet.fleet.decode["D1"].adapters.loaded and fleet.adapters.pending
            fleet.loop.run(answer.set)
            fleet.run()
        assert after.calls == ["Load one"] and not fleet.adapters.pending


def test_a_restarted_worker_is_not_asked_to_unload_what_its_last_run_was_to() -> None:
    with virtual_fleet() as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        loads.load("one", "/a")
        fleet.kill(worker)
        assert loads.unload("one") is None
        after = fleet.replace(worker, "D1b")
        loads.prepare(after)
        after.adapters = {"A": "another gateway's"}
        fleet.run(4 * POLL_S)
        assert fleet.fleet.decode["D1"].adapters.loaded == {"A"}
        assert not after.calls


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_worker_that_comes_back_gets_the_adapters_and_the_request_goes_on(is_killed: bool) -> None:
    with virtual_fleet(patience_s=30.0) as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        loads.load("one", "/a")
        client = fleet.ask(named("one"))
        worker.sessions[0].emit(2)
        fleet.run()
        if is_killed:
            fleet.kill(worker)
        after = fleet.replace(worker, "D1b")
        loads.prepare(after)
        if not is_killed:
            worker.break_streams()
        fleet.run(4 * POLL_S)
        assert after.adapters == {"A": "one"}
        assert [one.request.adapter for one in after.sessions] == ["A"]
        after.sessions[0].emit(2, "length")
        fleet.run()
        assert len(client.tokens) == 4


def test_a_prompt_without_a_prefill_worker_that_has_its_adapter_is_computed_by_decode() -> None:
    with virtual_fleet(prefill=1) as fleet:
        loads = Loads(fleet)
        fleet.prefills[0].max_loras = 0
        fleet.run(POLL_S)
        loads.load("one", "/a")
        assert loads.loaded() == [set(), {"A"}]
        assert "--max-loras" in fleet.fleet.prefill["P1"].adapters.describe()["one"]
        client = fleet.ask(named("one"))
        assert not fleet.prefills[0].runs
        finish(fleet, client)
        fleet.prefills[0].max_loras = 1
        fleet.run(2 * POLL_S)
        assert loads.loaded() == [{"A"}] * 2, "it catches up"
        fleet.prefills[0].refusals.append(NO_ADAPTER)
        client = fleet.ask(named("one", LONG))
        finish(fleet, client)
        assert len(fleet.prefills[0].runs) == 1 and not client.attempts[0].is_failure


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ((grpc.StatusCode.INVALID_ARGUMENT, "no such folder"), 400, "worker D2: no such folder"),
        ((grpc.StatusCode.UNAVAILABLE, "gone"), 503, "worker D2: gone"),
        (None, 400, "/a has other content for D2 (digest C) than for D1 (A)"),
    ],
)
def test_a_load_that_fails_somewhere_is_undone_everywhere(fault: Any, status: int, said: str) -> None:
    with virtual_fleet(decode=2) as fleet:
        loads = Loads(fleet)
        fleet.decodes[1].load_refusal = fault
        fleet.decodes[1].folders["/a"] = "C"
        error = loads.load("one", "/a")
        assert error is not None and (error.status, said in error.message) == (status, True), error
        fleet.run(POLL_S)
        assert loads.loaded() == [set()] * 2 and not fleet.adapters.named


def test_without_workers_that_take_adapters_the_load_is_refused() -> None:
    with virtual_fleet() as fleet:
        loader = AdapterLoader(fleet.fleet, CollectorRegistry())
        task = fleet.loop.create_task(loader.load("one", "/a"))
        fleet.run()
        error = task.exception()
        assert isinstance(error, ApiError) and error.status == 400 and "--max-loras" in error.message
        fleet.kill(fleet.decodes[0])
        task = fleet.loop.create_task(loader.load("one", "/a"))
        fleet.run()
        error = task.exception()
        assert isinstance(error, ApiError) and error.status == 503


def test_the_gateway_is_ready_once_the_first_adapters_are_loaded() -> None:
    with virtual_fleet(patience_s=15.0) as fleet:
        loads, worker = Loads(fleet), fleet.decodes[0]
        worker.folders.pop("/b")
        fleet.loop.run(lambda: loads.loader.expect({"one": "/a", "two": "/b"}))
        fleet.run()
        reason = fleet.router.readiness()
        assert reason is not None and reason.startswith("adapter two is not loaded yet: worker D1: /b")
        waiting = fleet.ask(named("two"))
        assert waiting.error is None
        worker.folders["/b"] = "B"
        fleet.run(RETRY_S + POLL_S)
        assert fleet.router.readiness() is None
        finish(fleet, waiting)
        assert fleet.registry.get_sample_value("baton:adapters_loaded") == 2


def test_a_request_waits_for_an_adapter_of_the_start_no_longer_than_its_patience() -> None:
    with virtual_fleet(patience_s=5.0) as fleet:
        loads = Loads(fleet)
        fleet.decodes[0].folders.pop("/a")
        fleet.loop.run(lambda: loads.loader.expect({"one": "/a"}))
        client = fleet.ask(named("one"))
        assert client.error is None
        fleet.run(5.0 + POLL_S)
        assert client.error is not None and client.error.status == 503
        assert client.error.message.startswith("adapter 'one' is not loaded yet: worker D1: /a")
        assert loads.unload("one") is None
        fleet.run(RETRY_S + POLL_S)
        assert not fleet.adapters.named and not fleet.adapters.pending


def test_an_adapter_that_cannot_load_holds_up_its_own_requests_only() -> None:
    with virtual_fleet(patience_s=5.0, max_queue=2) as fleet:
        loads = Loads(fleet)
        fleet.decodes[0].folders.pop("/a")
        fleet.loop.run(lambda: loads.loader.expect({"one": "/a"}))
        fleet.run(POLL_S)
        router = fleet.router
        assert "adapter one is not loaded yet: worker D1: /a" in str(router.readiness()) and not router.can_serve("one")
        assert router.can_serve(), "the base model is served"
        hurried = fleet.ask(replace(named("one"), request_id="hurried", deadline_s=1.0))
        waiting = fleet.ask(named("one"))
        refused = fleet.ask(replace(named("one"), request_id="refused"))
        assert refused.error is not None and refused.error.status == 429, "those that wait for an adapter count"
        fleet.run(1.0)
        assert hurried.error is not None and (hurried.error.status, hurried.error.code) == (429, "deadline")
        finish(fleet, fleet.ask(replace(wanted(), request_id="base")))
        fleet.run(4.5)
        assert waiting.error is not None and waiting.error.status == 503
        loads.unload("one")


def test_adapters_share_no_pages() -> None:
    keys = set()
    for digest in ("", "A", "B"):
        one = Request(wanted(prompt=LONG), deadline=1.0, patience_s=0.0, silent_since=0.0, adapter=digest)
        found = one.page_keys(DECODE)
        assert found == list(page_keys(root_key("w", "", digest), one.packed_tokens, PAGE_TOKENS))
        keys |= set(found)
    assert len(keys) == 6
