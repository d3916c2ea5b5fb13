"""Clients that send one request after the other while the service is disturbed."""

import threading
from collections.abc import Sequence
from types import TracebackType

from runtime.rpc import new_incarnation
from tests.support.asking import Asking
from tests.support.fault_answers import Truth, prompt_of
from tests.support.fleet import ProcessFleet
from tests.support.live import WAIT_S, wait_until

SHAPES = ((20, 40), (400, 60), (1500, 30), (100, 120))  # prompt and answer tokens


class Load:
    """Use with `with`: on exit every client finishes its last request. `ended` grows meanwhile.

    `pause_s`: a client's pause between an answer and its next request. `addresses`: of the gateways that clients share
    out among themselves, unless it is the fleet's own.
    """

    def __init__(
        self, fleet: ProcessFleet, num_clients: int = 4, pause_s: float = 0.0, addresses: Sequence[str] = ()
    ) -> None:
        self.ended: list[Asking] = []  # all clients append
        self._addresses = addresses or [fleet.grpc_address]
        self._pause_s = pause_s
        self._is_over = threading.Event()
        self._clients = [threading.Thread(target=self._keep_asking, args=(index,)) for index in range(num_clients)]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join()

    def _keep_asking(self, index: int) -> None:
        num_prompt, num_tokens = SHAPES[index % len(SHAPES)]
        while not self._is_over.wait(self._pause_s):
            address = self._addresses[index % len(self._addresses)]
            asking = Asking(address, prompt_of(num_prompt, index), num_tokens, cache_salt=new_incarnation())
            self.ended.append(asking.finish())

    def wait_for(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Until this many more requests are over."""
        before = len(self.ended)
        wait_until(lambda: len(self.ended) >= before + count, timeout_s)

    def check(self, truth: Truth) -> None:
        """Every request succeeded with exactly the undisturbed tokens."""
        for asking in self.ended:
            truth.check(asking)

    def check_clean(self, truth: Truth) -> None:
        """Every request succeeded, or failed cleanly after a prefix of the undisturbed answer."""
        for asking in self.ended:
            truth.check_clean(asking)
