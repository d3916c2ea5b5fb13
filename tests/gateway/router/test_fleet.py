"""The gateway's log about its workers, and how several gateways share some: in virtual time."""

import pytest
from structlog.testing import capture_logs

from tests.gateway.router.test_requests import answer
from tests.support.virtual_fleet import VirtualFleet, virtual_fleet, wanted


def test_the_end_of_the_last_decode_worker_is_logged_once() -> None:
    with virtual_fleet() as fleet, capture_logs() as logs:
        (decode,) = fleet.decodes
        decode.status = {"draining": True}
        fleet.run(3.0)
        decode.status = {}
        fleet.run(3.0)
    assert [(one["event"], one.get("reason")) for one in logs] == [
        ("no decode worker takes requests: they wait, then get a 503", "D1 is draining"),
        ("decode workers take requests", None),
    ]


@pytest.mark.parametrize("context_tokens", [4096, 8192])
@pytest.mark.parametrize("weights", ["w", "v"])
def test_workers_that_do_not_fit_are_named_once(context_tokens: int, weights: str) -> None:
    expected = []
    if weights != "w":
        expected.append(("workers do not match", "weights differs: 'v' here, 'w' there"))
    if context_tokens > 4096:
        expected.append(("a worker has less context than the gateway", "max_context_tokens here 8192, there 4096"))
    with capture_logs() as logs, virtual_fleet(prefill=1, context_tokens=context_tokens, is_started=False) as fleet:
        fleet.decodes[0].status, fleet.prefills[0].status = {"context_tokens": 4096}, {"context_tokens": 8192}
        fleet.prefills[0].peer.layout.weights = weights
        fleet.start()
        fleet.run(3.0)
    errors = [(one["event"], one["reason"]) for one in logs if one["log_level"] == "error"]
    assert sorted(errors) == sorted(expected)


def test_a_worker_that_leaves_is_a_change_at_once() -> None:
    with virtual_fleet(decode=2) as fleet:
        gone = fleet.loop.create_task(fleet.fleet.changes.until(lambda: "D2" not in fleet.fleet.decode))
        fleet.run()
        worker = fleet.fleet.decode["D2"]
        fleet.loop.run(lambda: fleet.fleet.leave("decode", "D2"))
        fleet.run()
        assert gone.done()
        fleet.loop.create_task(worker.close())


def test_three_gateways_share_two_workers_evenly() -> None:
    """Five requests of each: alone, each gateway gives its first worker three of them."""
    options = {"decode": 2, "max_running": 64, "uses_cache": False, "is_started": False}
    with virtual_fleet(**options) as one, virtual_fleet(**options) as two, virtual_fleet(**options) as three:
        gateways: list[VirtualFleet] = [one, two, three]
        for gateway in gateways:
            gateway.workers.update(one.workers)
            gateway.start()
        clients = []
        for number in range(15):
            clients.append(gateways[number % 3].ask(wanted(f"r{number}")))
            for gateway in gateways:
                gateway.run(1.1)
        assert sorted(len(worker.sessions) for worker in one.decodes) == [7, 8]
        for session in [session for worker in one.decodes for session in worker.sessions]:
            session.emit(4, "length")
        for gateway in gateways:
            gateway.run()
        assert [client.tokens for client in clients] == [answer(4)] * 15
