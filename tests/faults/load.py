"""Clients that ask one request after the other while something is done to the service."""

import threading
from types import TracebackType

from bench.asking import Asking
from bench.fleet import ProcessFleet
from tests.faults.answers import Truth, ask

SHAPES = ((20, 40), (400, 60), (1500, 30), (100, 120))  # tokens of prompt and answer


class Load:
    """Use with `with`: at its end every client has finished its last request. `ended` grows meanwhile.

    `pause_s`: how long a client waits between an answer and its next request.
    """

    def __init__(self, fleet: ProcessFleet, num_clients: int = 4, pause_s: float = 0.0) -> None:
        self.ended: list[Asking] = []  # appended to by all clients
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
        """Every request ended well, with exactly the undisturbed tokens."""
        for asking in self.ended:
            truth.check(asking)

    def check_clean(self, truth: Truth) -> None:
        """Every request ended well, or with a clean error after a beginning of the undisturbed answer."""
        for asking in self.ended:
            truth.check_clean(asking)
