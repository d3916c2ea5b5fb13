"""Clients that send one request after the other while the service is disturbed."""

import threading
from types import TracebackType

from tests.support.asking import Asking
from tests.support.fault_answers import Truth, ask
from tests.support.fleet import ProcessFleet

SHAPES = ((20, 40), (400, 60), (1500, 30), (100, 120))  # prompt and answer tokens


class Load:
    """Use with `with`: on exit every client finishes its last request. `ended` grows meanwhile.

    `pause_s`: a client's pause between an answer and its next request.
    """

    def __init__(self, fleet: ProcessFleet, num_clients: int = 4, pause_s: float = 0.0) -> None:
        self.ended: list[Asking] = []  # all clients append
        self._fleet = fleet
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
            self.ended.append(ask(self._fleet, num_prompt, num_tokens, seed=index).finish())

    def check(self, truth: Truth) -> None:
        """Every request succeeded with exactly the undisturbed tokens."""
        for asking in self.ended:
            truth.check(asking)

    def check_clean(self, truth: Truth) -> None:
        """Every request succeeded, or failed cleanly after a prefix of the undisturbed answer."""
        for asking in self.ended:
            truth.check_clean(asking)
