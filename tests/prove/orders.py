"""Start orders of a gateway, a prefill worker and two decode workers, and restarts of each while the others serve."""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import permutations

import grpc

from tests.prove.report import Report
from tests.support.asking import Asking
from tests.support.fault_answers import Truth, prompt_of
from tests.support.fleet import HOST, ProcessFleet, free_ports, run_fleet
from tests.support.live import WAIT_S, wait_until

TITLE = "start order"
NAMES = ("gateway", "prefill-0", "decode-0", "decode-1")
ORDERS = tuple(permutations(NAMES))
FIRST, RESTARTS = "first answer", "answers meanwhile"
NOT_YET = "no decode worker is alive"  # what a gateway that has just started tells clients, with UNAVAILABLE
AGAIN_S = 0.3  # a client's pause before it asks again
NUM_PROMPT, NUM_TOKENS = 100, 24
LANES = 2  # fleets at once
FLAGS = {role: ["--threads=1"] for role in ("prefill", "decode")}
Answers = dict[str, tuple[list[int], bool]]  # which |-> tokens, and whether it was refused before


def ask(fleet: ProcessFleet) -> tuple[list[int], bool]:
    """A client that asks again while it is told that no worker is there yet. Raises AssertionError."""
    for number in range(int(WAIT_S / AGAIN_S)):
        asking = Asking(fleet.grpc_address, prompt_of(NUM_PROMPT), NUM_TOKENS, WAIT_S).finish()
        if asking.code is not grpc.StatusCode.UNAVAILABLE or NOT_YET not in asking.detail:
            return asking.answer(), number > 0
        time.sleep(AGAIN_S)
    raise AssertionError(f"still refused after {WAIT_S:g} s: {asking.detail}")


def is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection((HOST, port)):
        return True
    return False


def start_in_turn(fleet: ProcessFleet, order: Sequence[str], client: ThreadPoolExecutor) -> Answers:
    """Each starts once the one before it serves, or listens if it is the gateway, whose first client comes then."""
    first: Future[tuple[list[int], bool]]
    for name in order:
        fleet[name].start()
        if name == "gateway":
            for port in (fleet.gateway.port, int(fleet.grpc_address.rpartition(":")[2])):
                wait_until(partial(is_listening, port))
            first = client.submit(ask, fleet)
        else:
            fleet[name].wait_ready()
    return {FIRST: first.result()}


def restart(fleet: ProcessFleet, client: ThreadPoolExecutor) -> Answers:
    """Each process is killed and started again; a client asks meanwhile, of the gateway afterwards."""
    answers: Answers = {}
    for name in NAMES:
        fleet[name].kill()
        asked = client.submit(ask, fleet) if name != "gateway" else None
        fleet[name].restart()
        answers[f"{RESTARTS}: {name}"] = asked.result() if asked else ask(fleet)
        fleet.wait_until_whole()
    return answers


def run_order(order: Sequence[str], ports: Sequence[int]) -> Answers:
    """After the last of all orders, with restarts."""
    with (
        run_fleet(1, 2, FLAGS, ports=ports, patience_s=WAIT_S, starts=False) as fleet,
        ThreadPoolExecutor(1) as client,
    ):
        answers = start_in_turn(fleet, order, client)
        fleet.wait_until_whole()
        answers |= restart(fleet, client) if order == ORDERS[-1] else {}
        fleet.wait_until_unused()
        return answers


def prove_orders(report: Report, truth: Truth, orders: Sequence[Sequence[str]] = ORDERS) -> None:
    """Two fleets at a time. Processes end with the thread that starts them, so each fleet has one."""
    wanted = truth.oracle.answer(prompt_of(NUM_PROMPT), NUM_TOKENS)
    ports = [free_ports(2 * len(NAMES) + 1) for _ in orders]
    lanes = ThreadPoolExecutor(LANES)
    try:
        running = [(order, lanes.submit(run_order, order, own)) for order, own in zip(orders, ports, strict=True)]
        for order, answering in running:
            row = " → ".join(name.removesuffix("-0").replace("decode-1", "decode 2") for name in order)
            try:
                answers = answering.result()
            except AssertionError as error:
                report.require(False, f"{row}: {error}")
                report.put(TITLE, row, FIRST, "WRONG: none")
                continue
            for which, (tokens, was_refused) in answers.items():
                is_right = report.answered(tokens == wanted, f"{row}: {which}: tokens {tokens}, not {wanted}")
                report.num_refusals += was_refused
                report.put(TITLE, row, which.partition(":")[0], f"refused: {NOT_YET}" if was_refused else "")
                report.put(TITLE, row, which.partition(":")[0], "right" if is_right else "WRONG")
    finally:
        lanes.shutdown(cancel_futures=True)
